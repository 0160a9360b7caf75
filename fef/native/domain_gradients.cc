// The way of gradients through a domain: admitted to a stage, written there, summed when all are in, collected.
#include <algorithm>
#include <cstring>
#include <new>

#include "domain.h"

namespace fef {

namespace {

constexpr int64_t kSumChunk = 16384;  // floats per summing task: fits the L1/L2 caches of source and destination

std::unique_ptr<float[]> Allocate(size_t elems) { return std::unique_ptr<float[]>(new (std::nothrow) float[elems]); }

Status NoMemory(const std::string& what, size_t elems) {
  return Status::Error(Code::kResourceExhausted, what, ": no memory for ", elems * sizeof(float), " bytes");
}

}  // namespace

std::optional<Status> Domain::StageAdmitted(const Version& version, int rank, int64_t run, int layer, int* stage) {
  VersionState* state;
  if (Status status = FindVersion(version, "accumulate", &state); !status.ok()) return status;
  if (layer < 0 || layer >= shape_.layers) {
    return Status::Error(Code::kInvalidArgument, "accumulate: ", Where(version), ", layer ", layer,
                         " is out of range: the table has ", shape_.layers);
  }
  const StageKey key{version.key(), layer, version.microbatch};
  Stage* chosen = nullptr;
  for (Stage& candidate : stages_) {
    const bool awaits_rank = candidate.key == key && candidate.run == run && !(candidate.admitted >> rank & 1);
    if (awaits_rank && (chosen == nullptr || candidate.order < chosen->order)) chosen = &candidate;
  }
  for (Stage& candidate : stages_) {
    if (chosen != nullptr) break;
    // A stage of another run was left by an execution that failed: the runtime does not overlap executions.
    if (candidate.key && candidate.run == run) continue;
    const size_t elems = size_t(shape_.members) * shape_.members * shape_.blocks_per_member * shape_.block_elems;
    if (candidate.blocks == nullptr) candidate.blocks = Allocate(elems);
    if (candidate.blocks == nullptr) return NoMemory("accumulate: table " + shape_.name, elems);
    candidate.key = key;
    candidate.run = run;
    candidate.order = stages_opened_++;
    candidate.sent.assign(size_t(shape_.members) * shape_.experts, 0);
    candidate.admitted = candidate.closed = 0;
    chosen = &candidate;
  }
  if (chosen == nullptr) return std::nullopt;
  chosen->admitted |= 1ull << rank;
  *stage = int(chosen - stages_.data());
  return Status::Ok();
}

std::string Domain::DescribeStages() const {
  std::string text = "accumulate: table " + shape_.name + ": every stage is taken:";
  for (const Stage& stage : stages_) {
    if (!stage.key) continue;
    text += " layer " + std::to_string(std::get<1>(*stage.key)) + " waits for rank ";
    text += Ranks(all_ranks() & ~stage.closed) + ";";
  }
  return text;
}

Status Domain::FindStage(const Version& version, int rank, int layer, int stage, Stage** found) {
  VersionState* state;
  if (Status status = FindVersion(version, "accumulate", &state); !status.ok()) return status;
  const StageKey key{version.key(), layer, version.microbatch};
  if (stage >= 0 && stage < int(stages_.size())) {
    *found = &stages_[stage];
    const bool is_admitted = (*found)->key == key && ((*found)->admitted & ~(*found)->closed) >> rank & 1;
    if (is_admitted) return Status::Ok();
  }
  return Status::Error(Code::kInvalidArgument, "accumulate: ", Where(version), ", layer ", layer, ", rank ", rank,
                       " was not admitted to a stage");
}

Status Domain::StagedGradients(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                               std::vector<float*>* blocks) {
  std::lock_guard<std::mutex> lock(mutex_);
  Stage* found;
  if (Status status = FindStage(version, rank, layer, stage, &found); !status.ok()) return status;
  for (int expert : experts) {
    if (expert < 0 || expert >= shape_.experts) {
      return Status::Error(Code::kInvalidArgument, "accumulate: ", Where(version), ", layer ", layer, ", expert ",
                           expert, " is out of range: the table has ", shape_.experts, " experts");
    }
    blocks->push_back(found->blocks.get() + StagedIndex(expert, rank) * shape_.block_elems);
  }
  return Status::Ok();
}

Status Domain::CloseStage(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                          Executor& executor) {
  Stage* found;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (Status status = FindStage(version, rank, layer, stage, &found); !status.ok()) return status;
    VersionState& state = versions_.at(version.key());
    for (int expert : experts) {
      found->sent[size_t(rank) * shape_.experts + expert] = 1;
      if (shape_.home[expert] != rank) Count(state, rank, layer, kGradients, expert);
    }
    found->closed |= 1ull << rank;
    if (found->closed != all_ranks()) return Status::Ok();
    changed_.wait(lock, [&] { return MaySum(*found); });  // for stages that are being summed: they wait for nobody
    found->is_summing = true;
  }
  const Status status = SumStage(*found, executor);
  std::lock_guard<std::mutex> lock(mutex_);
  found->is_summing = false;
  found->key.reset();
  changed_.notify_all();
  return status;
}

// Stages of one layer add to the same sums: one at a time, and in the order in which they were opened, since the order
// of three terms shows in the last bit.
bool Domain::MaySum(const Stage& stage) const {
  return std::none_of(stages_.begin(), stages_.end(), [&](const Stage& other) {
    if (&other == &stage || !other.key || other.closed != all_ranks()) return false;
    const bool is_same_layer =
        std::get<0>(*other.key) == std::get<0>(*stage.key) && std::get<1>(*other.key) == std::get<1>(*stage.key);
    return is_same_layer && (other.is_summing || other.order < stage.order);
  });
}

Status Domain::PrepareSums(const Stage& stage, std::vector<Gradients*>* sums) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t blocks = size_t(shape_.layers) * shape_.blocks_per_member, elems = blocks * shape_.block_elems;
  for (Gradients& gradients : versions_.at(std::get<0>(*stage.key)).gradients) {  // a staged version is not forgotten
    if (gradients.sums == nullptr) {
      if (spare_gradients_.empty()) {
        gradients.sums = Allocate(elems);
        if (gradients.sums == nullptr) return NoMemory("accumulate: table " + shape_.name, elems);
      } else {
        gradients = std::move(spare_gradients_.back());
        spare_gradients_.pop_back();
      }
      gradients.written.assign(blocks, 0);
    }
    sums->push_back(&gradients);
  }
  return Status::Ok();
}

Status Domain::SumStage(const Stage& stage, Executor& executor) {
  std::vector<Gradients*> sums;
  if (Status status = PrepareSums(stage, &sums); !status.ok()) return status;
  const int layer = std::get<1>(*stage.key);
  const int64_t elems = shape_.block_elems, chunks = (elems + kSumChunk - 1) / kSumChunk;
  ParallelFor(executor, int64_t(shape_.experts) * chunks, [&](int64_t task) {
    const int expert = int(task / chunks), home = shape_.home[expert];
    const int64_t begin = int64_t(task % chunks) * kSumChunk, end = std::min(begin + kSumChunk, elems);
    float* first = nullptr;
    for (int source = 0; source < shape_.members; ++source) {
      if (!stage.sent[size_t(source) * shape_.experts + expert]) continue;
      float* sent = stage.blocks.get() + StagedIndex(expert, source) * elems;
      if (first == nullptr) {
        first = sent;
      } else {
        for (int64_t i = begin; i < end; ++i) first[i] += sent[i];
      }
    }
    if (first == nullptr) return;
    const int64_t index = SumIndex(layer, shape_.local[expert]);
    float* sum = sums[home]->sums.get() + index * elems;
    if (sums[home]->written[index]) {
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
  return Status::Ok();
}

Status Domain::CloseVersion(const Version& version, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  VersionState* state;
  if (Status status = FindVersion(version, "collect", &state); !status.ok()) return status;
  state->closed |= 1ull << rank;
  changed_.notify_all();
  return Status::Ok();
}

std::optional<Status> Domain::AllClosed(const Version& version) {
  VersionState* state;
  if (Status status = FindVersion(version, "collect", &state); !status.ok()) return status;
  if (state->closed != all_ranks() || IsStaged(version.key())) return std::nullopt;
  return Status::Ok();
}

std::string Domain::DescribeUnclosed(const Version& version) const {
  const auto it = versions_.find(version.key());
  uint64_t missing = it == versions_.end() ? 0 : all_ranks() & ~it->second.closed;
  for (const Stage& stage : stages_) {
    if (stage.key && std::get<0>(*stage.key) == version.key()) missing |= all_ranks() & ~stage.closed;
  }
  return "collect: " + Where(version) + ": rank " + Ranks(missing) + " has not sent all its gradients";
}

Status Domain::Collect(const Version& version, int rank,
                       const std::function<void(int layer, int local, const float* sum)>& take_sum,
                       Executor& executor) {
  Gradients mine;
  VersionState* state;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Status status = FindVersion(version, "collect", &state); !status.ok()) return status;
    std::swap(mine, state->gradients[rank]);
    state->released |= 1ull << rank;
  }
  ParallelFor(executor, int64_t{shape_.layers} * shape_.blocks_per_member, [&](int64_t task) {
    const int layer = int(task / shape_.blocks_per_member), local = int(task % shape_.blocks_per_member);
    const bool is_written = mine.sums != nullptr && mine.written[task];
    take_sum(layer, local, is_written ? mine.sums.get() + task * shape_.block_elems : nullptr);
  });
  if (mine.sums == nullptr) return Status::Ok();
  std::lock_guard<std::mutex> lock(mutex_);
  spare_gradients_.push_back(std::move(mine));
  return Status::Ok();
}

}  // namespace fef
