// One table of the pool in one data-parallel group: versions, slots, leases, gradient staging and the ledger.
//
// Life of a version: every member publishes its blocks into free slots under it; members read them, each read under a
// lease; gradients of one (layer, microbatch) are staged, and summed in rank order once every member has closed that
// stage; a member closes the version when it has nothing more to send; when all have, the slots may be refilled.
#ifndef FEF_DOMAIN_H_
#define FEF_DOMAIN_H_

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
#include <utility>
#include <vector>

#include "memory_segment.h"
#include "parallel.h"
#include "status.h"

namespace fef {

constexpr int kMaxMembers = 64;  // sets of ranks are the bits of a uint64_t

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
  int slots = 2;                // at most; memory is taken when one is first needed
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

  // Pollable conditions, called under mutex(): nullopt while the condition does not hold yet.
  std::optional<Status> Published(const Version& version, const std::vector<int>& experts);
  std::optional<Status> AllClosed(const Version& version);
  // Admits `rank` to a stage for its gradients of (layer, microbatch), *stage; CloseStage ends that. When a layer is
  // used several times, the members' n-th admissions meet in one stage. `run` as in Publish.
  std::optional<Status> StageAdmitted(const Version& version, int rank, int64_t run, int layer, int* stage);

  // What a wait is waiting for, for the text of its deadline.
  std::string DescribeUnpublished(const Version& version) const;
  std::string DescribeStages() const;
  std::string DescribeUnclosed(const Version& version) const;

  // Where an admitted `rank` writes its gradients of `experts`, block_elems floats each.
  Status StagedGradients(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                         std::vector<float*>* blocks);
  // The manifest: these experts got a gradient from `rank`. The last member to close sums the stage.
  Status CloseStage(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                    Executor& executor);

  // `rank` sends nothing more under this version and reads it no more.
  Status CloseVersion(const Version& version, int rank);
  // Hands over the sums of all of `rank`'s blocks, null where nobody sent one. Once, after AllClosed.
  Status Collect(const Version& version, int rank,
                 const std::function<void(int layer, int local, const float* sum)>& take_sum, Executor& executor);
  // Closes the version for `rank` without collecting. Does nothing when it is no longer remembered.
  Status Release(const Version& version, int rank);

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
    std::atomic<uint64_t> version;  // Version::key(), 0 when empty, kBeingWritten while a block is copied
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
    std::vector<int32_t> counts;                       // [rank][layer][purpose][expert]
    std::vector<char> was_read;                        // [rank][layer][expert]
    std::vector<double> waits_us;                      // [rank][layer][kind]
  };
  using StageKey = std::tuple<uint64_t, int, int>;  // version, layer, microbatch
  struct Stage {
    std::optional<StageKey> key;
    int64_t run = 0;                  // the execution that opened it
    uint64_t order = 0;               // lower when opened earlier
    std::unique_ptr<float[]> blocks;  // [home][source][local][block_elems]
    std::vector<char> sent;           // [source][expert]
    uint64_t admitted = 0, closed = 0;  // bit per rank
    bool is_summing = false;
  };

  SlotHeader* header(int rank, int slot, int layer) const;
  char* block(int rank, int slot, int layer, int local) const;
  int64_t SumIndex(int layer, int local) const { return int64_t{layer} * shape_.blocks_per_member + local; }
  size_t StagedIndex(int expert, int source) const {
    return (size_t(shape_.home[expert]) * shape_.members + source) * shape_.blocks_per_member + shape_.local[expert];
  }
  uint64_t all_ranks() const { return ~0ull >> (kMaxMembers - shape_.members); }
  Status CheckOpen(const Version& version, const char* op) const;
  Status Forgotten(const Version& version, const char* op) const;
  Status FindVersion(const Version& version, const char* op, VersionState** state);
  VersionState& CreateVersion(const Version& version);
  void Count(VersionState& state, int rank, int layer, Purpose purpose, int expert) const;
  bool IsStaged(uint64_t key) const;
  size_t headers_bytes() const;
  Status TakeSlots(int rank, int num_slots);
  Status ChooseSlots(const Version& version, int rank, int64_t run, std::vector<int>* slots);
  Status AwaitReaders(const Version& version, int rank, const std::vector<int>& slots,
                      std::unique_lock<std::mutex>& lock);
  void SetSlots(int rank, const std::vector<int>& slots, uint64_t key);
  Status FindStage(const Version& version, int rank, int layer, int stage, Stage** found);
  bool MaySum(const Stage& stage) const;
  Status PrepareSums(const Stage& stage, std::vector<Gradients*>* sums);
  Status SumStage(const Stage& stage, Executor& executor);
  std::string Where(const Version& version) const;
  std::string Ranks(uint64_t bits) const;

  const TableShape shape_;
  const int32_t incarnation_;
  const double deadline_s_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  std::vector<std::unique_ptr<MemorySegment>> segments_;  // one per member
  std::vector<int> slots_taken_;                          // per member
  std::map<uint64_t, VersionState> versions_;
  uint64_t last_forgotten_ = 0;  // versions up to here that are not in versions_ have been there
  int64_t latest_run_ = 0;
  std::vector<Stage> stages_;
  uint64_t stages_opened_ = 0;
  std::vector<Gradients> spare_gradients_;
  std::optional<std::mt19937_64> chaos_;
};

}  // namespace fef

#endif  // FEF_DOMAIN_H_
