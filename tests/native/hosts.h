// Several hosts of a pool within one process, for the tests of the pool's core: each host is a Pool, with real sockets
// and mappings between them.
#ifndef FEF_HOSTS_H_
#define FEF_HOSTS_H_

#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "one_sided.h"
#include "pool.h"
#include "pool_checks.h"
#include "worker.h"

namespace fef_test {

// How hosts read each other.
enum class Way { kTcp, kMapped, kOneSided };

// One-sided reads within this process: a thread copies, as hardware would, without asking whose memory it is.
class Copies : public fef::OneSided {
 public:
  explicit Copies(int me) : address_("host " + std::to_string(me)) {}
  ~Copies() override { Close(); }

  const std::string& address() const override { return address_; }
  Status Register(char* data, uint64_t num_bytes, fef::SegmentKey* key) override {
    *key = {reinterpret_cast<uint64_t>(data), num_bytes, "a key"};
    return Status::Ok();
  }
  Status Connect(int host, const std::string& address) override {
    Check(address == "host " + std::to_string(host), "a host is found at its own address: " + address);
    return Status::Ok();
  }
  Status Import(int host, const fef::SegmentKey& key, int* segment) override {
    Check(key.packed == "a key", "a key arrives as it was sent: " + key.packed);
    std::lock_guard<std::mutex> lock(mutex_);
    *segment = int(keys_[host].size());
    keys_[host].push_back(key);
    return Status::Ok();
  }
  void Get(int host, int segment, uint64_t offset, uint64_t num_bytes, char* destination, double,
           Done done) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::vector<fef::SegmentKey>& keys = keys_[host];
    const bool is_there = segment >= 0 && segment < int(keys.size()) && offset + num_bytes <= keys[segment].num_bytes;
    Check(is_there, "what is read was registered");
    if (!is_there) return worker_.Post([=] { done(Status::Error(Code::kInvalidArgument, "not registered")); });
    worker_.Post([=, from = reinterpret_cast<const char*>(keys[segment].address) + offset] {
      if (num_bytes != sizeof(uint64_t) && before_block) before_block();
      Copy(from, num_bytes, destination);
      done(Status::Ok());
    });
  }
  void Close() override { worker_.Stop(); }

  std::function<void()> before_block;  // runs when all has been asked for, and nothing was copied

 private:
  // Nobody is told, neither the owner nor the thread sanitizer: that the owner may be writing there is the point.
  __attribute__((no_sanitize("thread"))) static void Copy(const volatile char* from, uint64_t num_bytes, char* to) {
    if (num_bytes == sizeof(uint64_t)) {  // a version is read as a whole
      *reinterpret_cast<uint64_t*>(to) = *reinterpret_cast<const volatile uint64_t*>(from);
      return;
    }
    for (uint64_t i = 0; i < num_bytes; ++i) to[i] = from[i];
  }

  const std::string address_;
  std::mutex mutex_;
  std::map<int, std::vector<fef::SegmentKey>> keys_;
  fef::Worker worker_;
};

// Some hosts, connected; members are dealt out to them in blocks.
struct Job {
  Job(int num_hosts, int num_members, Way way, const std::vector<int>& leaf_of_host = {})
      : num_members(num_members) {
    static int last_token = 0;
    token = "job" + std::to_string(getpid()) + "." + std::to_string(++last_token);
    std::vector<fef::Endpoint> endpoints(num_hosts);
    for (int rank = 0; rank < num_members; ++rank) host_of_rank.push_back(rank * num_hosts / num_members);
    for (int host = 0; host < num_hosts; ++host) {
      fef::PoolOptions options;
      options.deadline_s = kDeadline;
      options.membership = {host, num_hosts, 7, token};
      options.host_of_member = host_of_rank;
      options.leaf_of_host = leaf_of_host;
      options.window = {32 << 10, 48 << 10};
      if (way == Way::kOneSided) networks.push_back(std::make_shared<Copies>(host));
      if (way == Way::kOneSided) options.one_sided = networks.back();
      hosts.push_back(std::make_shared<fef::Pool>(options));
      CheckOk(hosts[host]->Listen("127.0.0.1", &endpoints[host]), "Listen");
    }
    ports = endpoints;
    InParallel(num_hosts, [&](int host) {
      CheckOk(hosts[host]->Connect(endpoints, std::vector<bool>(num_hosts, way == Way::kMapped)), "Connect");
    });
  }
  ~Job() {
    InParallel(int(hosts.size()), [&](int host) {
      if (hosts[host] != nullptr) hosts[host]->Close();
    });
  }

  void AddTable(const fef::TableShape& shape) {
    int32_t table = -1;
    for (auto& host : hosts) CheckOk(host->AddTable(shape, &table), "AddTable");
    for (auto& host : hosts) domains.push_back(host->domain(table, 0));
  }
  Domain& of(int rank) { return *domains[host_of_rank[rank]]; }

  const int num_members;
  std::string token;
  std::vector<int> host_of_rank;
  std::vector<std::shared_ptr<Copies>> networks;
  std::vector<std::shared_ptr<fef::Pool>> hosts;
  std::vector<fef::Endpoint> ports;
  std::vector<Domain*> domains;
};

inline Version At(int counter, int microbatch = 0) { return {7, counter, microbatch}; }

}  // namespace fef_test

#endif  // FEF_HOSTS_H_
