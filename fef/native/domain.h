// One table of the pool in one data-parallel group: versions, slots, leases, gradient staging and the ledger.
//
// The group's members may live on several hosts (processes). Each host keeps a Domain: the slots of its own members, and
// what the others have told of theirs. Blocks of a mapped host are read in its memory; blocks of any other are fetched
// once for all members of this host and kept, as far as pool.cache_bytes goes, while their version is in use. A fetch
// is a request that the home checks, or, where the fabric has OneSided, a read of its memory of which it knows nothing.
//
// Life of a version: every member publishes its blocks into free slots under it; members read them, each read under a
// lease; gradients of one (layer, microbatch) are staged, and go to their homes one by one as they are made; these sum
// them in a fixed order once the stage is complete: members of a host by rank, then hosts, then leaves; a member closes
// the version when it has nothing more to send; when all have, the slots may be refilled.
#ifndef FEF_DOMAIN_H_
#define FEF_DOMAIN_H_

#include <algorithm>
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

#include "floats.h"
#include "fabric.h"
#include "flight.h"
#include "host_cache.h"
#include "memory_segment.h"
#include "parallel.h"
#include "status.h"
#include "worker.h"

namespace fef {

constexpr int64_t kSumChunk = 16384;  // floats per summing task: fits the L1/L2 caches of source and destination
constexpr int kMaxMembers = 64;  // sets of ranks, and of hosts, are the bits of a uint64_t
constexpr int kResidentSlots = 2;  // the contents, and the next ones
constexpr uint64_t kBeingWritten = ~0ull;  // in SlotHeader::version; no version has this key

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
  int64_t cache_bytes = INT64_MAX;  // of other hosts' blocks
  bool is_fetched_ahead = true;     // what was used last time, as soon as it can be had
  bool is_resident = false;         // its contents stay from version to version; see domain_resident.cc
  int64_t own_elems = 0;            // of a resident table: floats that the home keeps beside each block

  int64_t block_bytes() const { return block_elems * elem_bytes; }
};

// Where a domain's members live. The default: all of them here.
struct Neighbourhood {
  Fabric* fabric = nullptr;
  Worker* worker = nullptr;
  int table = 0, group = 0;       // names of this domain in messages
  std::vector<int> host_of_rank;  // empty: all on this host
  std::vector<int> leaf_of_host;  // empty: nothing is relayed within leaves
  std::string folder;             // where segments are files; empty: they are memory alone
};

struct Version {
  int32_t incarnation = 0;
  int32_t counter = 0;
  int32_t microbatch = 0;

  uint64_t key() const { return (static_cast<uint64_t>(static_cast<uint32_t>(incarnation)) << 32) | uint32_t(counter); }
  std::string text() const { return "(" + std::to_string(incarnation) + "," + std::to_string(counter) + ")"; }
};

// Columns of the ledger, in the order of fef/pool/ledger.py.
enum Purpose { kWeights, kRefetch, kGradients, kTokens, kMetadata, kMissed, kRelayed, kGathered, kNumPurposes };
enum WaitKind { kWaitPublished, kWaitStage, kWaitClosed, kWaitTokens, kNumWaitKinds };

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

struct Loan {
  int expert;
  Lease lease;
};

// A home's block of a resident table.
struct ResidentBlock {
  char* block = nullptr;
  float* own = nullptr;             // null if the table has none
  const float* gradient = nullptr;  // the sum under the version asked for; null if nobody sent one
};

// The R members of one data-parallel group and their share of one table. Thread-safe.
class Domain {
 public:
  Domain(TableShape shape, int32_t incarnation, double deadline_s, std::optional<uint64_t> chaos_seed,
         Neighbourhood neighbourhood = {});

  Status Open();
  void Close();  // every pending and later operation fails with kPoolClosed

  const TableShape& shape() const { return shape_; }
  double deadline_s() const { return deadline_s_; }
  bool is_home(int expert) const { return is_here(shape_.home[expert]); }  // of this host
  std::vector<int> ExpertsOf(int rank) const;  // that live there, ascending
  int64_t num_refused() const { return num_refused_; }  // reads by this host's members, refused here

  // Copies `rank`'s blocks of all layers into free slots and makes them readable. `copy_block(layer, local, dst)`
  // writes one block. `run` identifies the execution of the program, so that versions which an earlier execution
  // left open (a forward pass without release) can be recognised as dead.
  Status Publish(const Version& version, int rank, int64_t run,
                 const std::function<void(int layer, int local, char* dst)>& copy_block, Executor& executor);

  // `rank` will read from `layer` next, and from the layers after it, or before it in a backward pass.
  void Approach(const Version& version, int layer, bool is_backward);

  // A hint that these blocks will be read; blocks that are not there (yet) are skipped.
  Status Prefetch(const Version& version, int layer, const std::vector<int>& experts);

  // What other hosts say and ask. From the fabric's threads; nothing here takes long.
  void OnMessage(const Message& message, const std::string& payload, Descriptor fd);
  Status OnRead(const Message& read, std::string* bytes);
  void OnLost(int host, const std::string& why);

  // Pollable conditions, called under mutex(): nullopt while the condition does not hold yet.
  // Lends those of `experts` that can be read now, at least one; or none of them before all can (is_all). Those that
  // must be fetched are asked for by this, in their order, as far as the cache has room. A block is counted as moved
  // when it comes from another member; one of another host was counted when it was fetched.
  std::optional<Status> Read(const Version& version, int rank, int layer, const std::vector<int>& experts, bool is_all,
                             std::vector<Loan>* loans);
  std::optional<Status> AllClosed(const Version& version);
  // Admits `rank` to a stage for its gradients of (layer, microbatch), *stage. When a layer is used several times, the
  // members' n-th admissions meet in one stage. `run` as in Publish.
  std::optional<Status> StageAdmitted(const Version& version, int rank, int64_t run, int layer, int* stage);

  // What a wait is waiting for, for the text of its deadline.
  std::string DescribeUnreadable(const Version& version, int layer, const std::vector<int>& experts) const;
  std::string DescribeStages() const;
  std::string DescribeUnclosed(const Version& version) const;

  // An admitted `rank` says, once, of which experts it will send gradients; *blocks is where it writes them,
  // block_elems floats each.
  Status StageGradients(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                        std::vector<float*>* blocks, Executor& executor);
  // These gradients are written. Of each expert the host's last member to write adds up those of its members and lets
  // them go home; a home adds up the hosts' when all of the stage have come.
  Status SendGradients(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                       Executor& executor);

  // `rank` takes part in a flight of its layer, as all members do, and sends its rows, of `width` floats at `rows`,
  // which stay there until it leaves. The pool's results for a layer's n-th flight of a kind are of all members' n-th.
  Status Depart(const Version& version, int rank, int layer, bool is_backward, const Assignments& assignments,
                bool is_deduplicated, const float* rows, int64_t width, Executor& executor,
                std::shared_ptr<Flight>* flight);
  // Pollable, as above: whether all rows are here that visit `rank`; whether what it has sent is back, and its own
  // visitors have what they came for.
  std::optional<Status> Arrived(const Flight& flight, int rank) const;
  std::optional<Status> Returned(const Flight& flight, int rank) const;
  std::string DescribeFlight(const Flight& flight, int rank) const;
  // `rank` has computed its visitors' rows; what `service` points to stays until it leaves.
  void Serve(const std::shared_ptr<Flight>& flight, int rank, Flight::Service service, Executor& executor);
  void LeaveFlight(const std::shared_ptr<Flight>& flight, int rank);

  // `rank` sends nothing more under this version and reads it no more.
  Status CloseVersion(const Version& version, int rank);
  // Hands over the sums of all of `rank`'s blocks, null where nobody sent one. Once, after AllClosed.
  Status Collect(const Version& version, int rank,
                 const std::function<void(int layer, int local, const float* sum)>& take_sum, Executor& executor);
  // Closes the version for `rank` without collecting. Does nothing when it is no longer remembered.
  Status Release(const Version& version, int rank);

  // Of resident tables. The version of contents that were committed and that no program has renewed yet; 0: none.
  int32_t Unrenewed();
  // Makes `rank`'s contents readable under the version, if they are those after so many updates.
  Status Renew(const Version& version, int rank, int64_t run, int64_t contents);
  // Once all readers of the contents before are gone, the next ones may be written.
  Status BeginUpdate(const Version& next, int rank);
  // Where a block of the contents lies, with its gradient under the version; is_next: of the contents being written.
  Status FindResident(const Version& version, int rank, int layer, int local, bool is_next, ResidentBlock* found);
  // What was written is the contents, readable under the version; is_kept: with the bytes that were there before.
  Status Commit(const Version& next, int rank, bool is_kept, Executor& executor);
  // The first block and its home's own floats, [layer][local] each, to be filled or looked at between programs.
  Status Contents(int rank, char** blocks, float** own_floats);

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
    std::atomic<uint32_t> leases[kMaxMembers];  // by host, so that those of a dead one can be left out
  };
  struct Gradients {  // sums of one home under one version
    FloatArray sums;
    float* resident_sums = nullptr;  // of a resident table, in place of `sums`
    std::vector<char> written;       // [layers * blocks_per_member]
    float* data() const { return resident_sums != nullptr ? resident_sums : sums.get(); }
  };
  struct Residence {  // of a member of this host in a resident table
    std::unique_ptr<MemorySegment> own, sums;  // [slot][layer][local][own_elems]; [layer][local][block_elems]
    int slot = 0;                              // holds the contents
    int64_t contents = 0;                      // updates that they have had
    uint64_t version = 0;                      // under which they are readable
  };
  struct VersionState {
    int64_t run = 0;
    uint64_t published = 0, closed = 0, released = 0;  // bit per rank
    std::vector<Gradients> gradients;                  // per home
    std::vector<int32_t> counts;                       // [rank][layer][purpose][expert]
    std::vector<char> was_read;                        // [rank][layer][expert]
    std::vector<double> waits_us;                      // [rank][layer][kind]
    std::map<std::pair<int, int>, int> uses;           // (layer, microbatch) -> stages opened here
    std::map<std::tuple<int, int, bool, int>, int> flights;  // (layer, microbatch, is_backward, rank) -> flights begun
    std::vector<char> was_fetched;                     // [layer][expert], from its home on another host
    std::vector<char> was_relayed;                     // [layer][expert], to another host of this leaf
    std::map<int, std::vector<int32_t>> slots;         // by rank of a host that is read one-sided: its slots [layer]
    int at_layer = 0;                                  // where this host's members are
    bool is_backward = false;
  };
  struct Piece {  // of another host's segment: what was registered at once
    uint64_t begin = 0, end = 0;  // in the segment
    int segment = -1;             // OneSided's number
  };
  using StageKey = std::tuple<uint64_t, int, int>;  // version, layer, microbatch
  struct Stage {
    std::optional<StageKey> key;
    int use = 0;                        // number among the stages of one key
    int64_t run = 0;                    // the execution that opened it
    uint64_t order = 0;                 // lower when opened earlier
    float* blocks = nullptr;            // [home][local source][local][block_elems], in stage_segment_
    uint64_t admitted = 0, declared = 0, closed = 0;  // bit per rank of this host: has said what it sends; has sent it
    struct Outgoing {                   // an expert's gradients on this host
      uint64_t senders = 0, written = 0;  // bit per rank of this host
      bool is_sent = false;
    };
    std::vector<Outgoing> outgoing;     // [expert]
    struct Gathering {                  // of another leaf's expert, of which this host adds up its leaf's gradients
      uint64_t senders = 0, here = 0;     // bit per host
      bool is_summing = false, is_sent = false;
    };
    std::vector<Gathering> gathering;   // [expert]
    bool has_told_leaves = false;       // the other leaves' homes, what they will get from here
    bool is_summing = false, is_summed = false;  // what this host is home of
    uint64_t told = 0, taken = 0;       // bit per host: has said what it sends; has taken what it needs
    // Of each host, for each expert that is summed here: the sum of its gradients there, null when there is none.
    std::vector<std::vector<const float*>> sums;
    std::vector<FloatArray> fetched;  // what could not be mapped
    int num_missing = 0;                // blocks, of experts that live here, that are announced and not here
  };
  struct Want {       // of a host of this leaf, for a block that it gets by way of this one
    bool is_awaited = false;
    Lease lease;      // from when it was told that the block is here until it has read it
  };
  using ManifestKey = std::tuple<StageKey, int>;  // stage, use

  SlotHeader* header(int rank, int slot, int layer) const;
  char* block(int rank, int slot, int layer, int local) const;
  size_t HeaderOffset(int slot, int layer) const { return sizeof(SlotHeader) * (size_t(slot) * shape_.layers + layer); }
  size_t BlockOffset(int slot, int layer, int local) const {
    const size_t index = (size_t(slot) * shape_.layers + layer) * shape_.blocks_per_member + local;
    return headers_bytes() + index * shape_.block_bytes();
  }
  int64_t SumIndex(int layer, int local) const { return int64_t{layer} * shape_.blocks_per_member + local; }
  // Of a block in a stage; `source` counts this host's members.
  size_t StagedIndex(int expert, int source, int num_sources) const {
    return (size_t(shape_.home[expert]) * num_sources + source) * shape_.blocks_per_member + shape_.local[expert];
  }
  uint64_t all_ranks() const { return ~0ull >> (kMaxMembers - shape_.members); }
  int host_of_expert(int expert) const { return host_of_rank_[shape_.home[expert]]; }
  bool is_here(int rank) const { return host_of_rank_[rank] == me_; }
  bool is_member(int rank, int host) const {
    return rank >= 0 && rank < shape_.members && host_of_rank_[rank] == host;
  }
  bool is_direct(int rank) const { return is_here(rank) || neighbourhood_.fabric->is_mapped(host_of_rank_[rank]); }
  bool is_one_sided() const {
    return neighbourhood_.fabric != nullptr && neighbourhood_.fabric->one_sided() != nullptr;
  }
  int num_members_of(int host) const { return int(std::count(host_of_rank_.begin(), host_of_rank_.end(), host)); }
  uint64_t stage_elems(int host) const {
    return uint64_t(shape_.members) * num_members_of(host) * shape_.blocks_per_member * shape_.block_elems;
  }
  Status CheckOpen(const Version& version, const char* op) const;
  Status OpenResident(int rank, const std::string& name);
  Status CheckResident(const Version& version, int rank, const char* op) const;
  void Show(const Version& version, int rank);
  float* own(int rank, int slot, int layer, int local) const;
  Status Refused(Status status);
  Status Forgotten(const Version& version, const char* op) const;
  Status FindVersion(const Version& version, const char* op, VersionState** state);
  VersionState& CreateVersion(const Version& version);
  void Count(VersionState& state, int rank, int layer, Purpose purpose, int expert, int units = 1) const;
  bool IsStaged(uint64_t key) const;
  size_t headers_bytes() const;
  Status TakeSlots(int rank, int num_slots);
  Status ChooseSlots(const Version& version, int rank, int64_t run, std::vector<int>* slots);
  Status EmptySlots(const Version& version, int rank, const std::vector<int>& slots,
                    std::unique_lock<std::mutex>& lock);
  Status AwaitReaders(const Version& version, int rank, const std::vector<int>& slots,
                      std::unique_lock<std::mutex>& lock);
  void SetSlots(int rank, const std::vector<int>& slots, uint64_t key);
  void FillSlots(const Version& version, int rank, const std::vector<int>& slots);
  Status FindStage(const Version& version, int rank, int layer, int stage, Stage** found);
  void Tell(Stage& stage);
  void LetGo(Stage& stage, std::unique_lock<std::mutex>& lock, Executor& executor);
  void SumMembers(const Stage& stage, const std::vector<int>& experts, Executor& executor);
  void Take(Stage& stage, const Message& message, const std::string& payload);
  void TakeManifest(Stage& stage, int host, const std::string& payload);
  void TakeGradient(Stage& stage, const Message& message);
  Stage* NextToSum();
  void SumReady(Executor& executor);
  void SumReadyAlone();
  Status PrepareSums(const Stage& stage, std::vector<Gradients*>* sums);
  Status SumHosts(const Stage& stage, Executor& executor);
  void NoteGradient(Stage& stage, int host, int expert);
  void Finish(Stage& stage);
  void FreeIfDone(Stage& stage);
  int DestinationOf(int expert) const { return relays_[expert] >= 0 ? relays_[expert] : host_of_expert(expert); }
  int GatheredSource(const Stage& stage, int expert) const;
  void TellLeaves(Stage& stage);
  bool CanGather(const Stage& stage, int expert) const;
  bool has_relays() const { return (leaf_ & (leaf_ - 1)) != 0 && leaf_ != all_hosts_; }
  bool IsGathered(const Stage& stage) const;
  bool HasSums();
  void GatherReady(std::unique_lock<std::mutex>& lock, Executor& executor);
  void SumLeaf(Stage& stage, const std::vector<int>& experts, Executor& executor);
  Stage* StageOf(const StageKey& key, int use);
  uint32_t LeasesOn(const SlotHeader& head) const;
  Message About(Kind kind, const Version& version) const;
  Message About(Kind kind, const Stage& stage) const;
  Message About(Kind kind, const HostCache::Key& key) const;
  Version VersionOf(uint64_t key) const { return {incarnation_, int32_t(uint32_t(key)), 0}; }
  std::string Gone(int host) const;
  int FirstLost() const;
  void Announce(Kind kind, const Version& version, int rank, const std::string& payload = {});
  void SendSegment(int rank, const MemorySegment& segment);
  Status Offer(int rank, const MemorySegment& segment, size_t begin, size_t end);
  void TakeKey(const Message& message, const std::string& payload);
  static std::pair<int, uint64_t> Find(const std::vector<Piece>& pieces, uint64_t offset, uint64_t num_bytes);
  Spot SpotOfBlock(const VersionState& state, const Version& version, int layer, int expert) const;
  Spot SpotOfGradient(int host, uint64_t index) const;
  std::string DescribeUnpublished(const Version& version) const;
  bool LeaseSlot(const Version& version, int layer, int expert, Lease* lease);
  int Distance(const HostCache::Key& key) const;
  int Urgency(const Version& version, int layer, int expert, bool is_awaited) const;
  Message About(Kind kind, const FlightKey& key) const;
  std::string WhereOf(const FlightKey& key) const;
  std::shared_ptr<Flight> FlightOf(const FlightKey& key);
  void Welcome(Flight::Guest& guest, int rank, const Parcel& parcel) const;
  Status Absent(const Flight& flight, int host) const;
  void ForgetFlights(uint64_t version_key);
  void CountSending(VersionState& state, int rank, const FlightKey& key, int host, const Parcel& parcel,
                    size_t parcel_bytes) const;
  void OnFlight(const Message& message, const std::string& payload);
  void TakeParcel(const std::shared_ptr<Flight>& flight, const Message& message, const std::string& payload);
  void TakeServed(const std::shared_ptr<Flight>& flight, const Message& message, const std::string& payload);
  void ReadRows(const std::shared_ptr<Flight>& flight, int host, int rank, Region region, int64_t num_rows, float* to,
                std::function<void()> done);
  Status ReadFlight(const Message& read, std::string* bytes) const;
  Status SumResults(Flight& flight, int rank, Executor& executor) const;
  std::optional<Status> FlightFailure(const Flight& flight) const;
  void EraseIfOver(const std::shared_ptr<Flight>& flight);
  void Fetch(const Version& version, int layer, int expert, bool is_awaited);
  void FetchFrom(int source, const HostCache::Key& key, HostCache::Block& block);
  bool is_relayed(int expert) const { return relays_[expert] >= 0 && relays_[expert] != me_; }
  int FetchedFrom(int expert) const { return is_relayed(expert) ? relays_[expert] : host_of_expert(expert); }
  void FetchFromHomeAfterAll(const HostCache::Key& key, HostCache::Block& block);
  void CountFetch(VersionState& state, int layer, int expert, bool is_from_home) const;
  void FindLeaf();
  void AskRelay(const HostCache::Key& key, HostCache::Block& block);
  void Hurry(const HostCache::Key& key, const HostCache::Block& block);
  void TakeWant(const Message& message);
  void TakeHave(const Message& message);
  void Relay(const HostCache::Key& key);
  void Answer(const HostCache::Key& key);
  void RelayPublished(uint64_t version_key);
  void ForgetWants(int host);
  bool ReadRelayed(const Message& read, std::string* bytes);
  bool MakeRoom(int min_distance);
  bool FetchIfRoom(VersionState& state, const Version& version, int layer, int expert);
  void FetchAhead(VersionState& state, const Version& version);
  void RememberUse(const VersionState& state);
  void CountMissed(const VersionState& state, int32_t* counts) const;
  void DropUnused();
  std::string Where(const Version& version) const;
  std::string Ranks(uint64_t bits) const;
  uint64_t ranks_of(int host) const;
  std::string Place(int host) const;

  const TableShape shape_;
  const int32_t incarnation_;
  const double deadline_s_;
  const Neighbourhood neighbourhood_;
  int me_ = 0, num_hosts_ = 1;
  std::vector<int> host_of_rank_;
  std::vector<int> hosts_;  // of this group, ascending
  uint64_t all_hosts_ = 0, all_local_ = 0;  // bit per host, bit per rank of this host
  uint64_t leaf_ = 0, leaf_ranks_ = 0;      // likewise, of the hosts of this leaf; of this one if nothing is relayed
  std::vector<int> relays_;     // expert -> the host of this leaf by way of which its blocks go, -1 if they go directly
  std::vector<int> sum_order_;  // the hosts, as a home adds up what they send
  std::vector<int> local_ranks_;
  std::vector<int> source_of_rank_;  // index in local_ranks_, -1 for members of other hosts
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  std::vector<std::unique_ptr<MemorySegment>> segments_;  // one per member; null if it can neither be owned nor mapped
  std::vector<std::unique_ptr<MemorySegment>> stage_segments_;  // one per host, likewise
  std::vector<std::vector<Piece>> pieces_, stage_pieces_;  // per member and per host, of those that are read one-sided
  std::vector<std::string> lost_;                         // why a host is gone, empty while it is there
  std::atomic<int64_t> num_refused_{0};
  Status failure_;                                        // what went wrong where nobody could be told
  std::vector<int> slots_taken_;                          // per member
  std::map<int, Residence> residences_;                   // by rank; empty unless the table is resident
  int32_t committed_ = 0;                                 // see Unrenewed
  std::map<uint64_t, VersionState> versions_;
  uint64_t last_forgotten_ = 0;  // versions up to here that are not in versions_ have been there
  int64_t latest_run_ = 0;
  std::vector<Stage> stages_;
  std::map<ManifestKey, std::vector<std::pair<Message, std::string>>> early_;  // for stages not yet opened here
  std::map<FlightKey, std::shared_ptr<Flight>> flights_;
  HostCache cache_;
  std::map<HostCache::Key, std::map<int, Want>> wants_;  // by host; with leases on blocks of cache_
  std::vector<char> last_used_;  // [layer][expert] of other hosts, by the version that was closed last
  uint64_t stages_opened_ = 0;
  std::vector<Gradients> spare_gradients_;
  std::optional<std::mt19937_64> chaos_;
};

}  // namespace fef

#endif  // FEF_DOMAIN_H_
