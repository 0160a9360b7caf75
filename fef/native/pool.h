// The pool within one process: versions, slots, leases, gradient staging and the ledger of one table.
//
// Life of a version: every member publishes its blocks into free slots under it; members read them, each read under a
// lease; gradients of one (layer, microbatch) are staged, and summed in rank order once every member has closed that
// stage; a member closes the version when it has nothing more to send; when all have, the slots may be refilled.
#ifndef FEF_POOL_H_
#define FEF_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "memory_segment.h"
#include "status.h"

namespace fef {

struct TableShape {
  std::string name;
  int layers = 0;
  int experts = 0;
  int members = 0;              // R
  std::vector<int> home;        // expert -> rank
  std::vector<int> local;       // expert -> index among its home's blocks
  int blocks_per_member = 0;    // places per member and layer, P / R
  int64_t block_elems = 0;
  int elem_bytes = 4;
  int slots = 2;
  int stages = 2;

  int64_t block_bytes() const { return block_elems * elem_bytes; }
};

struct Version {
  int32_t incarnation = 0;
  int32_t counter = 0;
  int32_t microbatch = 0;

  uint64_t key() const { return (static_cast<uint64_t>(static_cast<uint32_t>(incarnation)) << 32) | uint32_t(counter); }
  std::string text() const { return "(" + std::to_string(incarnation) + "," + std::to_string(counter) + ")"; }
};

// Columns of the ledger, in the order of fef/pool/ledger.py.
enum Purpose { kWeights, kRefetch, kGradients, kTokens, kMetadata, kNumPurposes };
enum WaitKind { kWaitPublished, kWaitStage, kWaitClosed, kNumWaitKinds };

class Domain;

// Holds a block readable: its slot is not refilled while a lease is out.
class Lease {
 public:
  Lease() = default;
  Lease(Lease&& other) noexcept { *this = std::move(other); }
  Lease& operator=(Lease&& other) noexcept {
    std::swap(count_, other.count_);
    std::swap(block_, other.block_);
    return *this;
  }
  ~Lease() {
    if (count_ != nullptr) count_->fetch_sub(1, std::memory_order_release);
  }
  const void* block() const { return block_; }

 private:
  friend class Domain;
  std::atomic<uint32_t>* count_ = nullptr;
  const void* block_ = nullptr;
};

// The R members of one data-parallel group and their share of one table. Thread-safe.
class Domain {
 public:
  Domain(TableShape shape, int32_t incarnation, double deadline_s, std::optional<uint64_t> chaos_seed);

  Status Open(int group);
  void Close();  // every pending and later operation fails with kPoolClosed

  const TableShape& shape() const { return shape_; }
  double deadline_s() const { return deadline_s_; }

  // Copies `rank`'s blocks of all layers into free slots and makes them readable. `copy_block(layer, local, dst)`
  // writes one block. `run` identifies the execution of the program, so that versions which an earlier execution
  // left open (a forward pass without release) can be recognised as dead.
  Status Publish(const Version& version, int rank, int64_t run,
                 const std::function<void(int layer, int local, char* dst)>& copy_block, Executor& executor);

  // Gives a readable block, counted as moved when it comes from another member.
  Status Read(const Version& version, int rank, int layer, int expert, Lease* lease);

  // A hint that these blocks will be read; blocks that are not there (yet) are skipped.
  Status Prefetch(const Version& version, int layer, const std::vector<int>& experts);

  // Pollable conditions: nullopt while the condition does not hold yet.
  std::optional<Status> Published(const Version& version, const std::vector<int>& experts);
  std::optional<Status> StageAdmitted(const Version& version, int rank, int layer);
  std::optional<Status> AllClosed(const Version& version);

  // What a wait is waiting for, for the text of its deadline.
  std::string DescribeUnpublished(const Version& version) const;
  std::string DescribeStages() const;
  std::string DescribeUnclosed(const Version& version) const;

  // Where `rank` writes its gradient of `expert` (block_elems floats); the stage must have been admitted.
  float* StagedGradient(const Version& version, int rank, int layer, int expert);
  // The manifest: these experts got a gradient from `rank`. The last member to close sums the stage.
  Status CloseStage(const Version& version, int rank, int layer, const std::vector<int>& experts, Executor& executor);

  // `rank` sends nothing more under this version and reads it no more.
  void CloseVersion(const Version& version, int rank);
  // The sum of a local block's gradients, or null when nobody sent one. Valid once AllClosed.
  const float* CollectedGradient(const Version& version, int rank, int layer, int local);
  // The caller is done with its collected gradients.
  void ReleaseGradients(const Version& version, int rank);

  void CountWait(const Version& version, int rank, int layer, WaitKind kind, double microseconds);
  // counts: [layers, kNumPurposes, experts] blocks; waits_us: [layers, kNumWaitKinds].
  Status ReadLedger(const Version& version, int rank, int32_t* counts, float* waits_us);

  // Notified on every change of a condition.
  void WaitForChange(std::unique_lock<std::mutex>& lock, double seconds);
  std::mutex& mutex() { return mutex_; }

  // FEF_CHAOS: a random delay, so that tests see other interleavings.
  void Chaos();

 private:
  struct SlotHeader {  // in the segment, so that other processes can map it
    std::atomic<uint64_t> version;
    std::atomic<uint32_t> leases;
    uint32_t padding;
  };
  struct Gradients {  // sums of one home under one version
    std::unique_ptr<float[]> sums;
    std::vector<char> written;  // [layers * blocks_per_member]
  };
  struct VersionState {
    int64_t run = 0;
    uint64_t published = 0, closed = 0, released = 0;  // bit per rank
    std::vector<Gradients> gradients;                  // per home
    std::map<std::pair<int, int>, std::vector<int>> ordinal;  // (layer, microbatch) -> accumulates so far, per rank
    std::vector<int32_t> counts;                       // [rank][layer][purpose][expert]
    std::vector<char> was_read;                        // [rank][layer][expert]
    std::vector<double> waits_us;                      // [rank][layer][kind]
  };
  using StageKey = std::tuple<uint64_t, int, int, int>;  // version, layer, microbatch, ordinal
  struct Stage {
    std::optional<StageKey> key;
    std::unique_ptr<float[]> blocks;  // [home][source][local][block_elems]
    std::vector<char> sent;           // [source][expert]
    uint64_t closed = 0;
  };

  SlotHeader* header(int rank, int slot, int layer) const;
  char* block(int rank, int slot, int layer, int local) const;
  int64_t SumIndex(int layer, int local) const { return int64_t{layer} * shape_.blocks_per_member + local; }
  uint64_t all_ranks() const { return shape_.members == 64 ? ~0ull : (1ull << shape_.members) - 1; }
  Status CheckVersion(const Version& version, const char* op) const;
  VersionState* Find(const Version& version);
  VersionState& FindOrCreate(const Version& version);
  Stage* FindStage(const Version& version, int rank, int layer);
  Status ChooseSlots(const Version& version, int rank, int64_t run, std::vector<int>* slots);
  void SumStage(Stage& stage, Executor& executor);
  std::string Where(const Version& version) const;
  std::string Ranks(uint64_t missing) const;

  const TableShape shape_;
  const int32_t incarnation_;
  const double deadline_s_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  std::vector<std::unique_ptr<MemorySegment>> segments_;  // one per member
  std::map<uint64_t, VersionState> versions_;
  int64_t latest_run_ = 0;
  std::vector<Stage> stages_;
  std::vector<Gradients> spare_gradients_;
  std::optional<std::mt19937_64> chaos_;
};

// All domains of one `fef.Pool`: a domain per (table, data-parallel group).
class Pool {
 public:
  Pool(int groups, int32_t incarnation, double deadline_s, std::optional<uint64_t> chaos_seed)
      : groups_(groups), incarnation_(incarnation), deadline_s_(deadline_s), chaos_seed_(chaos_seed) {}

  Status AddTable(const TableShape& shape, int* table);
  void Close();
  Domain* domain(int table, int group);
  int NextVersion(int table);
  int32_t incarnation() const { return incarnation_; }

 private:
  const int groups_;
  const int32_t incarnation_;
  const double deadline_s_;
  const std::optional<uint64_t> chaos_seed_;
  std::mutex mutex_;
  std::vector<std::vector<std::unique_ptr<Domain>>> tables_;
  std::vector<int> counters_;
};

// Open pools by incarnation; a handler finds its pool by the incarnation in the version bits.
std::shared_ptr<Pool> FindPool(int32_t incarnation);
std::shared_ptr<Pool> OpenPool(int groups, double deadline_s, std::optional<uint64_t> chaos_seed);
void ClosePool(int32_t incarnation);

}  // namespace fef

#endif  // FEF_POOL_H_
