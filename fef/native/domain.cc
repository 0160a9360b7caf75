#include "domain.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace fef {

namespace {

constexpr int kVersionsRemembered = 16;  // for late ledger reads and for telling "stale" from "never published"

size_t RoundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

Domain::Domain(TableShape shape, int32_t incarnation, double deadline_s, std::optional<uint64_t> chaos_seed,
               Neighbourhood neighbourhood)
    : shape_(std::move(shape)),
      incarnation_(incarnation),
      deadline_s_(deadline_s),
      neighbourhood_(std::move(neighbourhood)),
      host_of_rank_(neighbourhood_.host_of_rank),
      stages_(shape_.stages),
      cache_(shape_.block_bytes(), shape_.cache_bytes) {
  if (chaos_seed) chaos_.emplace(*chaos_seed);
  if (neighbourhood_.fabric != nullptr) {
    me_ = neighbourhood_.fabric->me();
    num_hosts_ = neighbourhood_.fabric->num_hosts();
  }
  if (host_of_rank_.empty()) host_of_rank_.assign(shape_.members, me_);
  lost_.resize(num_hosts_);
  last_used_.assign(size_t(shape_.layers) * shape_.experts, 1);
}

Status Domain::Open() {
  if (shape_.members > kMaxMembers || num_hosts_ > kMaxMembers) {
    return Status::Error(Code::kInvalidArgument, "table ", shape_.name, ": ", shape_.members, " members on ",
                         num_hosts_, " hosts, a pool holds at most ", kMaxMembers, " of each");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  source_of_rank_.assign(shape_.members, -1);
  for (int rank = 0; rank < shape_.members; ++rank) {
    all_hosts_ |= 1ull << host_of_rank_[rank];
    if (!is_here(rank)) continue;
    all_local_ |= 1ull << rank;
    source_of_rank_[rank] = int(local_ranks_.size());
    local_ranks_.push_back(rank);
  }
  for (int host = 0; host < num_hosts_; ++host) {
    if (all_hosts_ >> host & 1) hosts_.push_back(host);
  }
  FindLeaf();
  slots_taken_.resize(shape_.members);
  segments_.resize(shape_.members);
  stage_segments_.resize(num_hosts_);
  pieces_.resize(shape_.members);
  stage_pieces_.resize(num_hosts_);
  if (local_ranks_.empty()) return Status::Ok();
  const size_t blocks = size_t(shape_.slots) * shape_.layers * shape_.blocks_per_member * shape_.block_bytes();
  const std::string name = "fef-" + shape_.name + "-g" + std::to_string(neighbourhood_.group);
  for (int rank : local_ranks_) {
    segments_[rank] = std::make_unique<MemorySegment>();
    const std::string of_rank = name + "-r" + std::to_string(rank);
    Status status = segments_[rank]->Create(of_rank, headers_bytes() + blocks, neighbourhood_.folder);
    if (!status.ok()) return status;
    // A model that cannot fit is refused now.
    status = shape_.is_resident ? OpenResident(rank, of_rank) : TakeSlots(rank, 1);
    if (!status.ok()) return status;
    SendSegment(rank, *segments_[rank]);
  }
  stage_segments_[me_] = std::make_unique<MemorySegment>();
  Status status = stage_segments_[me_]->Create(name + "-stages", shape_.stages * stage_elems(me_) * sizeof(float),
                                               neighbourhood_.folder);
  if (!status.ok()) return status;
  SendSegment(-1, *stage_segments_[me_]);
  is_open_ = true;
  return Status::Ok();
}

void Domain::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_open_ = false;
  changed_.notify_all();
}

size_t Domain::headers_bytes() const { return RoundUp(sizeof(SlotHeader) * shape_.slots * shape_.layers, 4096); }

Status Domain::TakeSlots(int rank, int num_slots) {
  const size_t blocks = size_t(num_slots) * shape_.layers * shape_.blocks_per_member * shape_.block_bytes();
  if (Status status = segments_[rank]->Take(headers_bytes() + blocks); !status.ok()) return status;
  const int taken = slots_taken_[rank];
  if (num_slots <= taken) return Status::Ok();
  const size_t begin = taken == 0 ? 0 : BlockOffset(taken, 0, 0);
  if (Status status = Offer(rank, *segments_[rank], begin, headers_bytes() + blocks); !status.ok()) return status;
  slots_taken_[rank] = num_slots;
  return Status::Ok();
}

Domain::SlotHeader* Domain::header(int rank, int slot, int layer) const {
  return reinterpret_cast<SlotHeader*>(segments_[rank]->data() + HeaderOffset(slot, layer));
}

char* Domain::block(int rank, int slot, int layer, int local) const {
  return segments_[rank]->data() + BlockOffset(slot, layer, local);
}

std::string Domain::Where(const Version& version) const {
  return "table " + shape_.name + ", version " + version.text();
}

uint32_t Domain::LeasesOn(const SlotHeader& head) const {
  uint32_t leases = 0;
  for (int host : hosts_) {
    if (lost_[host].empty()) leases += head.leases[host].load(std::memory_order_seq_cst);
  }
  return leases;
}

std::string Domain::Ranks(uint64_t bits) const {
  std::string text;
  for (int rank = 0; rank < shape_.members; ++rank) {
    if (bits >> rank & 1) text += (text.empty() ? "" : ",") + std::to_string(rank);
  }
  return text;
}

Status Domain::CheckOpen(const Version& version, const char* op) const {
  if (!is_open_) return Status::Error(Code::kPoolClosed, op, ": the pool was closed");
  if (version.incarnation != incarnation_) {
    return Status::Error(Code::kStaleVersion, op, ": ", Where(version),
                         " belongs to another incarnation, this pool is ", incarnation_, "; publish again");
  }
  return Status::Ok();
}

// Counts a read that asked for what is not there.
Status Domain::Refused(Status status) {
  if (status.code == Code::kStaleVersion || status.code == Code::kInvalidArgument) ++num_refused_;
  return status;
}

Status Domain::Forgotten(const Version& version, const char* op) const {
  return Status::Error(Code::kStaleVersion, op, ": ", Where(version), " is no longer remembered; publish again");
}

Status Domain::FindVersion(const Version& version, const char* op, VersionState** state) {
  if (Status status = CheckOpen(version, op); !status.ok()) return status;
  const auto it = versions_.find(version.key());
  if (it == versions_.end()) return Forgotten(version, op);
  *state = &it->second;
  return Status::Ok();
}

void Domain::Count(VersionState& state, int rank, int layer, Purpose purpose, int expert, int units) const {
  state.counts[((size_t(rank) * shape_.layers + layer) * kNumPurposes + purpose) * shape_.experts + expert] += units;
}

bool Domain::IsStaged(uint64_t key) const {
  return std::any_of(stages_.begin(), stages_.end(),
                     [&](const Stage& stage) { return stage.key && std::get<0>(*stage.key) == key; });
}

Domain::VersionState& Domain::CreateVersion(const Version& version) {
  const auto [created, is_new] = versions_.try_emplace(version.key());
  if (is_new) {
    VersionState& state = created->second;
    state.gradients.resize(shape_.members);
    state.counts.resize(size_t(shape_.members) * shape_.layers * kNumPurposes * shape_.experts);
    state.was_read.resize(size_t(shape_.members) * shape_.layers * shape_.experts);
    state.waits_us.resize(size_t(shape_.members) * shape_.layers * kNumWaitKinds);
    state.was_fetched.resize(size_t(shape_.layers) * shape_.experts);
    state.was_relayed.resize(size_t(shape_.layers) * shape_.experts);
    for (auto old = versions_.begin(); versions_.size() > kVersionsRemembered && old != created;) {
      const bool is_over = old->second.released == all_ranks() || old->second.run != latest_run_;
      if (is_over && !IsStaged(old->first)) {
        last_forgotten_ = std::max(last_forgotten_, old->first);
        ForgetFlights(old->first);
        old = versions_.erase(old);
      } else {
        ++old;
      }
    }
  }
  return created->second;
}

// Prefers a slot whose version everybody has closed, then an empty one, then the oldest one left open by an earlier
// execution, then one that takes new memory. The runtime does not overlap executions over several devices, but it may
// on one device: hence the last version of another execution is touched only when nothing else is left. A slot that is
// being read comes last.
Status Domain::ChooseSlots(const Version& version, int rank, int64_t run, std::vector<int>* slots) {
  slots->assign(shape_.layers, -1);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    enum { kClosed, kEmpty, kOlder, kNew, kLast, kOpen };
    constexpr int kIsLeased = 10;
    int best_order = kOpen + kIsLeased;
    uint64_t best_key = ~0ull;
    for (int slot = 0; slot < shape_.slots; ++slot) {
      const uint64_t key = header(rank, slot, layer)->version.load(std::memory_order_acquire);
      const auto it = versions_.find(key);
      int order = kOpen;
      if (key == 0) order = slot < slots_taken_[rank] ? kEmpty : kNew;
      else if (it == versions_.end() || it->second.closed == all_ranks()) order = kClosed;
      else if (it->second.run != run) order = key + 1 < version.key() ? kOlder : kLast;
      if (key == kBeingWritten || order == kOpen) continue;
      if (LeasesOn(*header(rank, slot, layer)) != 0) order += kIsLeased;
      if (order < best_order || (order == best_order && key < best_key)) {
        best_order = order;
        best_key = key;
        (*slots)[layer] = slot;
      }
    }
    if ((*slots)[layer] < 0) {
      return Status::Error(Code::kResourceExhausted, "publish: ", Where(version), ", rank ", rank, ", layer ", layer,
                           ": all ", shape_.slots,
                           " slots hold versions that are still open; raise config.pool.slots or release() a version");
    }
  }
  return Status::Ok();
}

// Takes the slots' versions away, to write there, and waits for readers that took their lease before. The loads of
// leases keep all that is written to the slots behind this, for one-sided readers have no lease.
Status Domain::EmptySlots(const Version& version, int rank, const std::vector<int>& slots,
                          std::unique_lock<std::mutex>& lock) {
  SetSlots(rank, slots, kBeingWritten);
  Status status = AwaitReaders(version, rank, slots, lock);
  if (!status.ok()) SetSlots(rank, slots, 0);
  return status;
}

Status Domain::AwaitReaders(const Version& version, int rank, const std::vector<int>& slots,
                            std::unique_lock<std::mutex>& lock) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(deadline_s_);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    while (LeasesOn(*header(rank, slots[layer], layer)) != 0) {
      if (Status status = CheckOpen(version, "publish"); !status.ok()) return status;
      if (std::chrono::steady_clock::now() > deadline) {
        return Status::Error(Code::kDeadlineExceeded, "publish: ", Where(version), ", rank ", rank, ", layer ", layer,
                             ": a reader still holds its lease after ", deadline_s_, " s");
      }
      // Leases are dropped without a notification (they live in shared memory), hence the short period.
      changed_.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
  return Status::Ok();
}

void Domain::SetSlots(int rank, const std::vector<int>& slots, uint64_t key) {
  for (int layer = 0; layer < shape_.layers; ++layer) {
    header(rank, slots[layer], layer)->version.store(key, std::memory_order_seq_cst);
  }
}

Status Domain::Publish(const Version& version, int rank, int64_t run,
                       const std::function<void(int, int, char*)>& copy_block, Executor& executor) {
  std::vector<int> slots;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (Status status = CheckOpen(version, "publish"); !status.ok()) return status;
    DropUnused();
    latest_run_ = run;
    CreateVersion(version).run = run;
    if (Status status = ChooseSlots(version, rank, run, &slots); !status.ok()) return status;
    const int highest = *std::max_element(slots.begin(), slots.end());
    if (Status status = TakeSlots(rank, highest + 1); !status.ok()) return status;
    if (Status status = EmptySlots(version, rank, slots, lock); !status.ok()) return status;
  }
  const int per_layer = shape_.blocks_per_member;
  ParallelFor(executor, int64_t(shape_.layers) * per_layer, [&](int64_t task) {
    const int layer = int(task) / per_layer, local = int(task) % per_layer;
    copy_block(layer, local, block(rank, slots[layer], layer, local));
  });
  std::lock_guard<std::mutex> lock(mutex_);
  FillSlots(version, rank, slots);
  return Status::Ok();
}

// What the slots hold is readable under the version.
void Domain::FillSlots(const Version& version, int rank, const std::vector<int>& slots) {
  SetSlots(rank, slots, version.key());
  CreateVersion(version).published |= 1ull << rank;
  std::string payload;
  if (is_one_sided()) payload.assign(reinterpret_cast<const char*>(slots.data()), slots.size() * sizeof(slots[0]));
  Announce(Kind::kPublished, version, rank, payload);
  changed_.notify_all();
}

void Domain::Approach(const Version& version, int layer, bool is_backward) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = versions_.find(version.key());
  if (it == versions_.end()) return;
  it->second.at_layer = layer;
  it->second.is_backward = is_backward;
  FetchAhead(it->second, version);
}

// First the lease, then the look at the version: a publisher takes the version away and then looks for leases.
bool Domain::LeaseSlot(const Version& version, int layer, int expert, Lease* lease) {
  const int home = shape_.home[expert];
  for (int slot = 0; slot < shape_.slots; ++slot) {
    SlotHeader* head = header(home, slot, layer);
    if (head->version.load(std::memory_order_acquire) != version.key()) continue;
    head->leases[me_].fetch_add(1, std::memory_order_seq_cst);
    if (head->version.load(std::memory_order_seq_cst) == version.key()) {
      lease->count_ = &head->leases[me_];
      lease->block_ = block(home, slot, layer, shape_.local[expert]);
      return true;
    }
    head->leases[me_].fetch_sub(1, std::memory_order_release);
  }
  return false;
}

std::optional<Status> Domain::Read(const Version& version, int rank, int layer, const std::vector<int>& experts,
                                   bool is_all, std::vector<Loan>* loans) {
  if (Status status = CheckOpen(version, "get"); !status.ok()) return Refused(status);
  const auto it = versions_.find(version.key());
  if (it == versions_.end()) {
    if (version.key() > last_forgotten_) return std::nullopt;
    return Refused(Forgotten(version, "get"));
  }
  VersionState& state = it->second;
  std::vector<Loan> lent;
  std::vector<HostCache::Block*> cached;  // of the loans, null if it was read in its home's memory
  std::vector<int> missing;
  int num_awaited = 0;
  for (int expert : experts) {
    auto refuse = [&](Code code, const auto&... what) {
      return Refused(Status::Error(code, "get: ", Where(version), ", layer ", layer, ", expert ", expert, what...));
    };
    if (layer < 0 || layer >= shape_.layers || expert < 0 || expert >= shape_.experts) {
      return refuse(Code::kInvalidArgument, " is out of range: the table has ", shape_.layers, " layers of ",
                    shape_.experts, " experts");
    }
    const int home = shape_.home[expert], host = host_of_rank_[home];
    const bool is_published = state.published >> home & 1;
    if (!lost_[host].empty()) {
      if (is_published) {
        return refuse(Code::kPeerLost, ": ", Gone(host), "; its ", shape_.block_bytes(), " bytes are missing");
      }
      return Status::Error(Code::kPeerLost, DescribeUnpublished(version), ": ", Gone(host));
    }
    if (!is_published) continue;
    Loan loan{expert, {}};
    HostCache::Block* block = nullptr;
    if (is_direct(home)) {
      if (!LeaseSlot(version, layer, expert, &loan.lease)) {
        return refuse(Code::kStaleVersion, ", home rank ", home,
                      ": no slot holds this version; it was refilled or never published");
      }
    } else {
      const HostCache::Key key{version.key(), layer, expert};
      block = cache_.Find(key);
      const int source = FetchedFrom(expert);
      if ((block == nullptr || block->is_unanswered()) && !lost_[source].empty()) {
        return refuse(Code::kPeerLost, ": ", Gone(source), "; its ", shape_.block_bytes(), " bytes are missing");
      }
      if (block == nullptr) {
        missing.push_back(expert);
        continue;
      }
      if (block->state == HostCache::Block::kFailed) return block->status;
      if (block->state == HostCache::Block::kAsked) {
        if (!std::exchange(block->is_awaited, true)) Hurry(key, *block);
        ++num_awaited;
        continue;
      }
      block->leases.fetch_add(1, std::memory_order_relaxed);
      loan.lease.count_ = &block->leases;
      loan.lease.block_ = block->bytes.get();
    }
    lent.push_back(std::move(loan));
    cached.push_back(block);
  }
  for (int expert : missing) {
    const bool may_wait = !is_all && (!lent.empty() || num_awaited > 0);
    if (!MakeRoom(0) && may_wait) break;
    Fetch(version, layer, expert, /*is_awaited=*/true);
    ++num_awaited;
  }
  if (is_all ? lent.size() < experts.size() : lent.empty() && !experts.empty()) return std::nullopt;
  for (size_t i = 0; i < lent.size(); ++i) {
    const int expert = lent[i].expert;
    char& was_read = state.was_read[(size_t(rank) * shape_.layers + layer) * shape_.experts + expert];
    if (cached[i] != nullptr) cache_.NoteRead(*cached[i]);
    else if (shape_.home[expert] != rank) Count(state, rank, layer, was_read ? kRefetch : kWeights, expert);
    was_read = 1;
    loans->push_back(std::move(lent[i]));
  }
  return Status::Ok();
}

Status Domain::Prefetch(const Version& version, int layer, const std::vector<int>& experts) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto state = versions_.find(version.key());
  for (int expert : experts) {
    if (layer < 0 || layer >= shape_.layers || expert >= shape_.experts) continue;  // a hint is dropped, never refused
    const int home = shape_.home[expert];
    if (!is_direct(home) && is_open_ && state != versions_.end()) FetchIfRoom(state->second, version, layer, expert);
    if (!is_here(home)) continue;  // its pages are its home's to bring in
    for (int slot = 0; slot < shape_.slots; ++slot) {
      if (header(home, slot, layer)->version.load(std::memory_order_acquire) != version.key()) continue;
      const uintptr_t page = 4096, begin = reinterpret_cast<uintptr_t>(block(home, slot, layer, shape_.local[expert]));
      madvise(reinterpret_cast<void*>(begin / page * page), shape_.block_bytes() + begin % page, MADV_WILLNEED);
    }
  }
  return Status::Ok();
}

std::string Domain::DescribeUnpublished(const Version& version) const {
  const auto it = versions_.find(version.key());
  const uint64_t published = it == versions_.end() ? 0 : it->second.published;
  return "get: " + Where(version) + ": rank " + Ranks(all_ranks() & ~published) + " has not published it";
}

std::string Domain::DescribeUnreadable(const Version& version, int layer, const std::vector<int>& experts) const {
  const auto it = versions_.find(version.key());
  const uint64_t published = it == versions_.end() ? 0 : it->second.published;
  for (int expert : experts) {
    if (!(published >> shape_.home[expert] & 1)) return DescribeUnpublished(version);
  }
  for (int expert : experts) {
    const HostCache::Block* block = cache_.Find({version.key(), layer, expert});
    if (block == nullptr || block->state != HostCache::Block::kAsked) continue;
    const bool is_relay = block->source != host_of_expert(expert);
    return "get: " + Where(version) + ", layer " + std::to_string(layer) + ", expert " + std::to_string(expert) +
           ": " + Place(block->source) + (is_relay ? ", which relays for " + Place(host_of_expert(expert)) + "," : "") +
           " has not sent its " + std::to_string(shape_.block_bytes()) + " bytes";
  }
  return "get: " + Where(version) + ", layer " + std::to_string(layer);
}

Status Domain::Release(const Version& version, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = CheckOpen(version, "release"); !status.ok()) return status;
  const auto it = versions_.find(version.key());
  if (it == versions_.end()) return Status::Ok();
  it->second.closed |= 1ull << rank;
  it->second.released |= 1ull << rank;
  RememberUse(it->second);
  Announce(Kind::kClosed, version, rank);
  changed_.notify_all();
  return Status::Ok();
}

void Domain::CountWait(const Version& version, int rank, int layer, WaitKind kind, double microseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = versions_.find(version.key());
  if (it == versions_.end() || layer < 0 || layer >= shape_.layers) return;
  it->second.waits_us[(size_t(rank) * shape_.layers + layer) * kNumWaitKinds + kind] += microseconds;
}

Status Domain::ReadLedger(const Version& version, int rank, int32_t* counts, float* waits_us) {
  std::lock_guard<std::mutex> lock(mutex_);
  VersionState* state;
  if (Status status = FindVersion(version, "ledger", &state); !status.ok()) return status;
  const size_t num_counts = size_t(shape_.layers) * kNumPurposes * shape_.experts;
  std::memcpy(counts, state->counts.data() + rank * num_counts, num_counts * sizeof(int32_t));
  if (rank == local_ranks_[0]) CountMissed(*state, counts);
  const size_t num_waits = size_t(shape_.layers) * kNumWaitKinds;
  for (size_t i = 0; i < num_waits; ++i) waits_us[i] = float(state->waits_us[rank * num_waits + i]);
  return Status::Ok();
}

void Domain::WaitForChange(std::unique_lock<std::mutex>& lock, double seconds) {
  changed_.wait_for(lock, std::chrono::duration<double>(seconds));
}

void Domain::Chaos() {
  if (!chaos_) return;
  int64_t delay_us;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    delay_us = std::uniform_int_distribution<int64_t>(0, 3000)(*chaos_);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
}

}  // namespace fef
