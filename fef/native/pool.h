// The pools of this process and their tables.
#ifndef FEF_POOL_H_
#define FEF_POOL_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "domain.h"
#include "fabric.h"
#include "liveness.h"
#include "status.h"
#include "worker.h"

namespace fef {

// A pool's part on this host.
struct PoolOptions {
  int groups = 1;
  double deadline_s = 0;
  std::optional<uint64_t> chaos_seed;
  Membership membership;
  std::vector<int> host_of_member;  // [group][rank]; empty: all members are here
  std::vector<int> leaf_of_host;    // empty: nothing is relayed within leaves
  Window window;
  std::string folder;  // where segments are files; empty: they are memory alone
  std::shared_ptr<OneSided> one_sided;  // reads the hosts that are not mapped; null: requests over TCP do
};

// All domains of one `fef.Pool`: a domain per (table, data-parallel group).
class Pool {
 public:
  explicit Pool(PoolOptions options);

  // With several hosts: others may connect after Listen; all must have listened before any connects.
  Status Listen(const std::string& address, Endpoint* endpoint);
  Status Connect(const std::vector<Endpoint>& endpoints, const std::vector<bool>& is_mapped);
  // The same tables, in the same order, on every host.
  Status AddTable(const TableShape& shape, int32_t* table);
  void Close();
  Domain* domain(int table, int group);
  int32_t NextVersion(int table);
  int32_t incarnation() const { return options_.membership.incarnation; }
  Liveness& liveness() { return liveness_; }
  // What was refused here: by the server, and by this host's own members' reads.
  int64_t num_refused();
  // The host that died first, and why; empty while none has.
  std::string dead() {
    std::lock_guard<std::mutex> lock(messages_mutex_);
    return dead_;
  }

 private:
  struct Waiting {
    Message message;
    std::string payload;
    Descriptor fd;
  };
  void OnMessage(const Message& message, const std::string& payload, Descriptor fd);
  Status OnRead(const Message& read, std::string* bytes);
  void OnLost(int host, const std::string& why, bool is_orderly);

  const PoolOptions options_;
  std::mutex mutex_;
  std::vector<std::vector<std::unique_ptr<Domain>>> tables_;
  std::vector<int32_t> counters_;
  std::mutex messages_mutex_;        // messages reach a domain in their order, those that came before the table first
  std::deque<Waiting> early_;        // for tables that this host has not made yet
  std::map<int, std::string> lost_;  // hosts, and why
  std::string dead_;
  Liveness liveness_;
  Worker worker_;
  std::unique_ptr<Fabric> fabric_;   // ends first: its threads use all the above
};

// Open pools by incarnation; a handler finds its pool by the incarnation in the version bits.
std::shared_ptr<Pool> FindPool(int32_t incarnation);
// The lowest incarnation that no pool of this process has had.
int32_t NextIncarnation();
std::shared_ptr<Pool> OpenPool(PoolOptions options);
void ClosePool(int32_t incarnation);
// An operation has failed for the loss of a host, and tells whoever waits for it.
void ReportPeerLoss();

}  // namespace fef

#endif  // FEF_POOL_H_
