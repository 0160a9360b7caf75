// Several hosts of a pool within one process, for the tests of the pool's core: each host is a Pool, with real sockets
// and mappings between them.
#ifndef FEF_HOSTS_H_
#define FEF_HOSTS_H_

#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
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

// What the members of one host send for an expert, in rank order; empty when none does.
inline std::vector<float> HostSum(const Job& job, const fef::TableShape& shape, int counter, int layer, int expert,
                                  int host) {
  std::vector<float> sum;
  for (int rank = 0; rank < shape.members; ++rank) {
    if (job.host_of_rank[rank] != host || !Sends(counter, layer, expert, rank)) continue;
    const bool is_first = sum.empty();
    sum.resize(shape.block_elems);
    for (int64_t i = 0; i < shape.block_elems; ++i) {
      const float g = Gradient(counter, layer, expert, rank, i);
      sum[i] = is_first ? g : sum[i] + g;
    }
  }
  return sum;
}

inline void Add(std::vector<float>* total, const std::vector<float>& part) {
  if (total->empty()) *total = part;
  else
    for (size_t i = 0; i < part.size(); ++i) (*total)[i] += part[i];
}

// One training step of a member, which reads every block, checks it, and checks the sums of its own experts' gradients
// against wanted_sum(layer, expert), empty where nobody sends any. Returns what its ledger counts.
inline std::vector<int32_t> TrainingStep(Job& job, int rank, int counter, int num_microbatches, std::mt19937& random,
                                         const std::function<std::vector<float>(int, int)>& wanted_sum) {
  Domain& domain = job.of(rank);
  const fef::TableShape& shape = domain.shape();
  MaybePause(random);
  const int64_t run = counter * 100 + job.host_of_rank[rank];  // a number of the host's own
  CheckOk(Publish(domain, At(counter), rank, run), "Publish");
  for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
    const Version version = At(counter, microbatch);
    for (int layer = 0; layer < shape.layers; ++layer) {
      domain.Approach(version, layer, /*is_backward=*/false);
      std::vector<int> pending(shape.experts);
      std::iota(pending.begin(), pending.end(), 0);
      while (!pending.empty()) {
        std::vector<fef::Loan> loans;
        CheckOk(Wait(domain, [&] { return domain.Read(version, rank, layer, pending, false, &loans); }), "Read");
        for (const fef::Loan& loan : loans) {
          const float wanted = BlockValue(counter, layer, shape.local[loan.expert], shape.home[loan.expert]);
          Check(HoldsOnly(loan.lease, shape.block_elems, wanted), "a block has its publisher's contents");
          pending.erase(std::find(pending.begin(), pending.end(), loan.expert));
        }
      }
    }
    for (int layer = shape.layers - 1; layer >= 0; --layer) {
      MaybePause(random);
      SendGradients(domain, version, rank, run, layer);
    }
  }
  CheckOk(domain.CloseVersion(At(counter), rank), "CloseVersion");
  CheckOk(Wait(domain, [&] { return domain.AllClosed(At(counter)); }), "AllClosed");
  Threads executor;
  const auto check_sum = [&](int layer, int local, const float* sum) {
    const int expert = local * shape.members + rank;
    std::vector<float> wanted;
    if (expert < shape.experts) wanted = wanted_sum(layer, expert);
    const bool is_right = sum == nullptr ? wanted.empty()
                                         : std::memcmp(sum, wanted.data(), wanted.size() * sizeof(float)) == 0;
    Check(is_right, "sums are in order, bit for bit: version " + std::to_string(counter) + ", layer " +
                        std::to_string(layer) + ", expert " + std::to_string(expert));
  };
  CheckOk(domain.Collect(At(counter), rank, check_sum, executor), "Collect");
  std::vector<int32_t> counts(size_t(shape.layers) * fef::kNumPurposes * shape.experts);
  std::vector<float> waits_us(size_t(shape.layers) * fef::kNumWaitKinds);
  CheckOk(domain.ReadLedger(At(counter), rank, counts.data(), waits_us.data()), "ReadLedger");
  return counts;
}

}  // namespace fef_test

#endif  // FEF_HOSTS_H_
