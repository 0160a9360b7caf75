#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace fef {

namespace {

constexpr int kVersionsRemembered = 16;  // for late ledger reads and for telling "stale" from "never published"
constexpr int64_t kSumChunk = 16384;     // floats per summing task: fits the L1/L2 caches of source and destination

size_t RoundUp(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

Domain::Domain(TableShape shape, int32_t incarnation, double deadline_s, std::optional<uint64_t> chaos_seed)
    : shape_(std::move(shape)), incarnation_(incarnation), deadline_s_(deadline_s), stages_(shape_.stages) {
  if (chaos_seed) chaos_.emplace(*chaos_seed);
}

Status Domain::Open(int group) {
  const size_t headers = RoundUp(sizeof(SlotHeader) * shape_.slots * shape_.layers, 4096);
  const size_t blocks = size_t(shape_.slots) * shape_.layers * shape_.blocks_per_member * shape_.block_bytes();
  for (int rank = 0; rank < shape_.members; ++rank) {
    auto segment = std::make_unique<MemorySegment>();
    const std::string name = "fef-" + shape_.name + "-g" + std::to_string(group) + "-r" + std::to_string(rank);
    if (Status status = segment->Create(name, headers + blocks); !status.ok()) return status;
    segments_.push_back(std::move(segment));
  }
  open_ = true;
  return Status::Ok();
}

void Domain::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  open_ = false;
  changed_.notify_all();
}

Domain::SlotHeader* Domain::header(int rank, int slot, int layer) const {
  return reinterpret_cast<SlotHeader*>(segments_[rank]->data()) + slot * shape_.layers + layer;
}

char* Domain::block(int rank, int slot, int layer, int local) const {
  const size_t headers = RoundUp(sizeof(SlotHeader) * shape_.slots * shape_.layers, 4096);
  const size_t index = (size_t(slot) * shape_.layers + layer) * shape_.blocks_per_member + local;
  return segments_[rank]->data() + headers + index * shape_.block_bytes();
}

std::string Domain::Where(const Version& version) const {
  return "table " + shape_.name + ", version " + version.text();
}

std::string Domain::Ranks(uint64_t bits) const {
  std::string text;
  for (int rank = 0; rank < shape_.members; ++rank) {
    if (bits >> rank & 1) text += (text.empty() ? "" : ",") + std::to_string(rank);
  }
  return text;
}

Status Domain::CheckVersion(const Version& version, const char* op) const {
  if (!open_) return Status::Error(Code::kPoolClosed, std::string(op) + ": the pool was closed");
  if (version.incarnation != incarnation_) {
    return Status::Error(Code::kStaleVersion, std::string(op) + ": " + Where(version) +
                                                  " belongs to another incarnation, this pool is " +
                                                  std::to_string(incarnation_) + "; publish again");
  }
  return Status::Ok();
}

Domain::VersionState* Domain::Find(const Version& version) {
  auto it = versions_.find(version.key());
  return it == versions_.end() ? nullptr : &it->second;
}

Domain::VersionState& Domain::FindOrCreate(const Version& version) {
  auto [it, is_new] = versions_.try_emplace(version.key());
  VersionState& state = it->second;
  if (is_new) {
    state.gradients.resize(shape_.members);
    state.counts.resize(size_t(shape_.members) * shape_.layers * kNumPurposes * shape_.experts);
    state.was_read.resize(size_t(shape_.members) * shape_.layers * shape_.experts);
    state.waits_us.resize(size_t(shape_.members) * shape_.layers * kNumWaitKinds);
    while (versions_.size() > kVersionsRemembered) {
      const VersionState& oldest = versions_.begin()->second;
      if (oldest.released != all_ranks() && oldest.run == latest_run_) break;
      versions_.erase(versions_.begin());
    }
  }
  return state;
}

Status Domain::ChooseSlots(const Version& version, int rank, int64_t run, std::vector<int>* slots) {
  // Order of preference: a slot whose version everybody has closed, an empty one, the oldest one left open by an
  // earlier execution. Executions that publish are serialised by the collective that agrees on the version.
  slots->assign(shape_.layers, -1);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    int best_class = 3;
    uint64_t best_key = ~0ull;
    bool leased = false;
    for (int slot = 0; slot < shape_.slots; ++slot) {
      SlotHeader* head = header(rank, slot, layer);
      const uint64_t key = head->version.load(std::memory_order_acquire);
      const auto it = versions_.find(key);
      int order = 3;
      if (key == 0) order = 1;
      else if (it == versions_.end() || it->second.closed == all_ranks()) order = 0;
      else if (it->second.run != run) order = 2;
      if (order == 3) continue;
      if (head->leases.load(std::memory_order_acquire) != 0) {
        leased = true;
        continue;
      }
      if (order < best_class || (order == best_class && key < best_key)) {
        best_class = order;
        best_key = key;
        (*slots)[layer] = slot;
      }
    }
    if ((*slots)[layer] < 0) {
      const std::string where = "publish: " + Where(version) + ", rank " + std::to_string(rank) + ", layer " + std::to_string(layer);
      if (leased) return Status::Error(Code::kDeadlineExceeded, where + ": a reader still holds its lease");
      return Status::Error(Code::kResourceExhausted,
                           where + ": all " + std::to_string(shape_.slots) +
                               " slots hold versions that are still open; raise config.pool.slots or release() a version");
    }
  }
  return Status::Ok();
}

Status Domain::Publish(const Version& version, int rank, int64_t run,
                       const std::function<void(int, int, char*)>& copy_block, Executor& executor) {
  std::vector<int> slots;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (Status status = CheckVersion(version, "publish"); !status.ok()) return status;
    VersionState& state = FindOrCreate(version);
    state.run = latest_run_ = run;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(deadline_s_);
    Status status = ChooseSlots(version, rank, run, &slots);
    while (status.code == Code::kDeadlineExceeded && std::chrono::steady_clock::now() < deadline) {
      // Leases are dropped without a notification (they live in shared memory), hence the short period.
      changed_.wait_for(lock, std::chrono::milliseconds(1));
      status = ChooseSlots(version, rank, run, &slots);
    }
    if (!status.ok()) return status;
    for (int layer = 0; layer < shape_.layers; ++layer) {
      header(rank, slots[layer], layer)->version.store(0, std::memory_order_release);
    }
  }
  const int per_layer = shape_.blocks_per_member;
  ParallelFor(executor, int64_t(shape_.layers) * per_layer, [&](int64_t task) {
    const int layer = int(task) / per_layer, local = int(task) % per_layer;
    copy_block(layer, local, block(rank, slots[layer], layer, local));
  });
  std::lock_guard<std::mutex> lock(mutex_);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    header(rank, slots[layer], layer)->version.store(version.key(), std::memory_order_release);
  }
  FindOrCreate(version).published |= 1ull << rank;
  changed_.notify_all();
  return Status::Ok();
}

Status Domain::Read(const Version& version, int rank, int layer, int expert, Lease* lease) {
  const std::string where = "get: " + Where(version) + ", layer " + std::to_string(layer) + ", expert " + std::to_string(expert);
  if (layer < 0 || layer >= shape_.layers || expert < 0 || expert >= shape_.experts) {
    return Status::Error(Code::kInvalidArgument, where + " is out of range: the table has " + std::to_string(shape_.layers) +
                                                     " layers of " + std::to_string(shape_.experts) + " experts");
  }
  const int home = shape_.home[expert];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Status status = CheckVersion(version, "get"); !status.ok()) return status;
  }
  for (int slot = 0; slot < shape_.slots; ++slot) {
    SlotHeader* head = header(home, slot, layer);
    head->leases.fetch_add(1, std::memory_order_acq_rel);
    if (head->version.load(std::memory_order_acquire) != version.key()) {
      head->leases.fetch_sub(1, std::memory_order_release);
      continue;
    }
    lease->count_ = &head->leases;
    lease->block_ = block(home, slot, layer, shape_.local[expert]);
    if (home == rank) return Status::Ok();
    std::lock_guard<std::mutex> lock(mutex_);
    VersionState& state = FindOrCreate(version);
    char& was_read = state.was_read[(size_t(rank) * shape_.layers + layer) * shape_.experts + expert];
    const Purpose purpose = was_read ? kRefetch : kWeights;
    was_read = 1;
    ++state.counts[((size_t(rank) * shape_.layers + layer) * kNumPurposes + purpose) * shape_.experts + expert];
    return Status::Ok();
  }
  return Status::Error(Code::kStaleVersion, where + ", home rank " + std::to_string(home) +
                                                ": no slot holds this version; it was refilled or never published");
}

Status Domain::Prefetch(const Version& version, int layer, const std::vector<int>& experts) {
  for (int expert : experts) {
    if (layer < 0 || layer >= shape_.layers || expert >= shape_.experts) continue;  // a hint is dropped, never refused
    const int home = shape_.home[expert];
    for (int slot = 0; slot < shape_.slots; ++slot) {
      if (header(home, slot, layer)->version.load(std::memory_order_acquire) != version.key()) continue;
      const uintptr_t page = 4096, begin = reinterpret_cast<uintptr_t>(block(home, slot, layer, shape_.local[expert]));
      madvise(reinterpret_cast<void*>(begin / page * page), shape_.block_bytes() + begin % page, MADV_WILLNEED);
    }
  }
  return Status::Ok();
}

std::optional<Status> Domain::Published(const Version& version, const std::vector<int>& experts) {
  if (Status status = CheckVersion(version, "get"); !status.ok()) return status;
  const VersionState* state = Find(version);
  for (int expert : experts) {
    if (state == nullptr || !(state->published >> shape_.home[expert] & 1)) return std::nullopt;
  }
  return Status::Ok();
}

std::string Domain::DescribeUnpublished(const Version& version) const {
  const auto it = versions_.find(version.key());
  const uint64_t published = it == versions_.end() ? 0 : it->second.published;
  return "get: " + Where(version) + ": rank " + Ranks(all_ranks() & ~published) + " has not published it";
}

Domain::Stage* Domain::FindStage(const Version& version, int rank, int layer) {
  std::vector<int>& ordinal = FindOrCreate(version).ordinal[{layer, version.microbatch}];
  ordinal.resize(shape_.members);
  const StageKey key{version.key(), layer, version.microbatch, ordinal[rank]};
  for (Stage& stage : stages_) {
    if (stage.key == key) return &stage;
  }
  return nullptr;
}

std::optional<Status> Domain::StageAdmitted(const Version& version, int rank, int layer) {
  if (Status status = CheckVersion(version, "accumulate"); !status.ok()) return status;
  if (layer < 0 || layer >= shape_.layers) {
    return Status::Error(Code::kInvalidArgument, "accumulate: " + Where(version) + ", layer " + std::to_string(layer) +
                                                     " is out of range: the table has " + std::to_string(shape_.layers));
  }
  if (FindStage(version, rank, layer) != nullptr) return Status::Ok();
  for (Stage& stage : stages_) {
    if (stage.key) continue;
    stage.key = StageKey{version.key(), layer, version.microbatch,
                         FindOrCreate(version).ordinal[{layer, version.microbatch}][rank]};
    const size_t sources = size_t(shape_.members) * shape_.members * shape_.blocks_per_member;
    if (stage.blocks == nullptr) stage.blocks.reset(new float[sources * shape_.block_elems]);
    stage.sent.assign(size_t(shape_.members) * shape_.experts, 0);
    stage.closed = 0;
    return Status::Ok();
  }
  return std::nullopt;
}

std::string Domain::DescribeStages() const {
  std::string text = "accumulate: table " + shape_.name + ": every stage is taken:";
  for (const Stage& stage : stages_) {
    if (!stage.key) continue;
    text += " layer " + std::to_string(std::get<1>(*stage.key)) + " waits for rank " + Ranks(all_ranks() & ~stage.closed) + ";";
  }
  return text;
}

float* Domain::StagedGradient(const Version& version, int rank, int layer, int expert) {
  std::lock_guard<std::mutex> lock(mutex_);
  Stage* stage = FindStage(version, rank, layer);
  if (stage == nullptr) return nullptr;
  const size_t index = (size_t(shape_.home[expert]) * shape_.members + rank) * shape_.blocks_per_member + shape_.local[expert];
  return stage->blocks.get() + index * shape_.block_elems;
}

Status Domain::CloseStage(const Version& version, int rank, int layer, const std::vector<int>& experts, Executor& executor) {
  Stage* stage = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Status status = CheckVersion(version, "accumulate"); !status.ok()) return status;
    stage = FindStage(version, rank, layer);
    if (stage == nullptr) {
      return Status::Error(Code::kInvalidArgument, "accumulate: " + Where(version) + ", layer " + std::to_string(layer) + ": no stage was admitted");
    }
    VersionState& state = FindOrCreate(version);
    for (int expert : experts) {
      stage->sent[size_t(rank) * shape_.experts + expert] = 1;
      if (shape_.home[expert] == rank) continue;
      ++state.counts[((size_t(rank) * shape_.layers + layer) * kNumPurposes + kGradients) * shape_.experts + expert];
    }
    ++state.ordinal[{layer, version.microbatch}][rank];
    stage->closed |= 1ull << rank;
    if (stage->closed != all_ranks()) return Status::Ok();
  }
  SumStage(*stage, executor);
  std::lock_guard<std::mutex> lock(mutex_);
  stage->key.reset();
  changed_.notify_all();
  return Status::Ok();
}

void Domain::SumStage(Stage& stage, Executor& executor) {
  const auto& [key, layer, microbatch, ordinal] = *stage.key;
  std::vector<Gradients*> sums(shape_.members);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    VersionState& state = versions_.at(key);
    for (int home = 0; home < shape_.members; ++home) {
      Gradients& gradients = state.gradients[home];
      if (gradients.sums == nullptr) {
        if (spare_gradients_.empty()) {
          gradients.sums.reset(new float[size_t(shape_.layers) * shape_.blocks_per_member * shape_.block_elems]);
        } else {
          gradients = std::move(spare_gradients_.back());
          spare_gradients_.pop_back();
        }
        gradients.written.assign(size_t(shape_.layers) * shape_.blocks_per_member, 0);
      }
      sums[home] = &gradients;
    }
  }
  const int64_t elems = shape_.block_elems, chunks = (elems + kSumChunk - 1) / kSumChunk;
  ParallelFor(executor, int64_t(shape_.experts) * chunks, [&](int64_t task) {
    const int expert = int(task / chunks), home = shape_.home[expert], local = shape_.local[expert];
    const int64_t begin = int64_t(task % chunks) * kSumChunk, end = std::min(begin + kSumChunk, elems);
    float* first = nullptr;
    for (int source = 0; source < shape_.members; ++source) {
      if (!stage.sent[size_t(source) * shape_.experts + expert]) continue;
      float* sent = stage.blocks.get() + ((size_t(home) * shape_.members + source) * shape_.blocks_per_member + local) * elems;
      if (first == nullptr) {
        first = sent;
      } else {
        for (int64_t i = begin; i < end; ++i) first[i] += sent[i];
      }
    }
    if (first == nullptr) return;
    float* sum = sums[home]->sums.get() + SumIndex(layer, local) * elems;
    if (sums[home]->written[SumIndex(layer, local)]) {
      for (int64_t i = begin; i < end; ++i) sum[i] += first[i];
    } else {
      std::memcpy(sum + begin, first + begin, (end - begin) * sizeof(float));
    }
  });
  for (int expert = 0; expert < shape_.experts; ++expert) {
    for (int source = 0; source < shape_.members; ++source) {
      if (!stage.sent[size_t(source) * shape_.experts + expert]) continue;
      sums[shape_.home[expert]]->written[SumIndex(layer, shape_.local[expert])] = 1;
    }
  }
}

void Domain::CloseVersion(const Version& version, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  FindOrCreate(version).closed |= 1ull << rank;
  changed_.notify_all();
}

std::optional<Status> Domain::AllClosed(const Version& version) {
  if (Status status = CheckVersion(version, "collect"); !status.ok()) return status;
  const VersionState* state = Find(version);
  if (state == nullptr || state->closed != all_ranks()) return std::nullopt;
  for (const Stage& stage : stages_) {
    if (stage.key && std::get<0>(*stage.key) == version.key()) return std::nullopt;
  }
  return Status::Ok();
}

std::string Domain::DescribeUnclosed(const Version& version) const {
  const auto it = versions_.find(version.key());
  const uint64_t closed = it == versions_.end() ? 0 : it->second.closed;
  return "collect: " + Where(version) + ": rank " + Ranks(all_ranks() & ~closed) + " has not sent all its gradients";
}

const float* Domain::CollectedGradient(const Version& version, int rank, int layer, int local) {
  std::lock_guard<std::mutex> lock(mutex_);
  const VersionState* state = Find(version);
  if (state == nullptr || state->gradients[rank].sums == nullptr) return nullptr;
  const Gradients& gradients = state->gradients[rank];
  const int64_t index = SumIndex(layer, local);
  return gradients.written[index] ? gradients.sums.get() + index * shape_.block_elems : nullptr;
}

void Domain::ReleaseGradients(const Version& version, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  VersionState& state = FindOrCreate(version);
  state.released |= 1ull << rank;
  if (state.gradients[rank].sums != nullptr) spare_gradients_.push_back(std::move(state.gradients[rank]));
}

void Domain::CountWait(const Version& version, int rank, int layer, WaitKind kind, double microseconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  FindOrCreate(version).waits_us[(size_t(rank) * shape_.layers + layer) * kNumWaitKinds + kind] += microseconds;
}

Status Domain::ReadLedger(const Version& version, int rank, int32_t* counts, float* waits_us) {
  std::lock_guard<std::mutex> lock(mutex_);
  const VersionState* state = Find(version);
  if (state == nullptr) {
    return Status::Error(Code::kStaleVersion, "ledger: " + Where(version) + " is no longer remembered");
  }
  const size_t num_counts = size_t(shape_.layers) * kNumPurposes * shape_.experts;
  std::memcpy(counts, state->counts.data() + rank * num_counts, num_counts * sizeof(int32_t));
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

Status Pool::AddTable(const TableShape& shape, int* table) {
  std::vector<std::unique_ptr<Domain>> domains;
  for (int group = 0; group < groups_; ++group) {
    std::optional<uint64_t> seed;
    if (chaos_seed_) seed = *chaos_seed_ + group;
    auto domain = std::make_unique<Domain>(shape, incarnation_, deadline_s_, seed);
    if (Status status = domain->Open(group); !status.ok()) return status;
    domains.push_back(std::move(domain));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  *table = int(tables_.size());
  tables_.push_back(std::move(domains));
  counters_.push_back(0);
  return Status::Ok();
}

void Pool::Close() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& domains : tables_) {
    for (auto& domain : domains) domain->Close();
  }
}

Domain* Pool::domain(int table, int group) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (table < 0 || table >= int(tables_.size()) || group < 0 || group >= int(tables_[table].size())) return nullptr;
  return tables_[table][group].get();
}

int Pool::NextVersion(int table) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ++counters_.at(table);
}

namespace {

std::mutex pools_mutex;
std::map<int32_t, std::shared_ptr<Pool>>& Pools() {
  static auto* pools = new std::map<int32_t, std::shared_ptr<Pool>>();  // never destroyed: waits may outlive main()
  return *pools;
}
int32_t last_incarnation = 0;

}  // namespace

std::shared_ptr<Pool> OpenPool(int groups, double deadline_s, std::optional<uint64_t> chaos_seed) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  auto pool = std::make_shared<Pool>(groups, ++last_incarnation, deadline_s, chaos_seed);
  Pools()[last_incarnation] = pool;
  return pool;
}

std::shared_ptr<Pool> FindPool(int32_t incarnation) {
  std::lock_guard<std::mutex> lock(pools_mutex);
  auto it = Pools().find(incarnation);
  return it == Pools().end() ? nullptr : it->second;
}

void ClosePool(int32_t incarnation) {
  std::shared_ptr<Pool> pool;
  {
    std::lock_guard<std::mutex> lock(pools_mutex);
    auto it = Pools().find(incarnation);
    if (it == Pools().end()) return;
    pool = std::move(it->second);
    Pools().erase(it);
  }
  pool->Close();
}

}  // namespace fef
