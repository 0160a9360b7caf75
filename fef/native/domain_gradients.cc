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
  if (const int lost = FirstLost(); lost >= 0) {
    return Status::Error(Code::kPeerLost, "accumulate: ", Where(version), ", layer ", layer, ": ", Gone(lost));
  }
  const StageKey key{version.key(), layer, version.microbatch};
  Stage* chosen = nullptr;
  for (Stage& candidate : stages_) {
    const bool awaits_rank = candidate.key == key && candidate.run == run && !(candidate.admitted >> rank & 1);
    if (awaits_rank && (chosen == nullptr || candidate.order < chosen->order)) chosen = &candidate;
  }
  for (Stage& candidate : stages_) {
    if (chosen != nullptr) break;
    // A stage that members of another run have left open is of an execution that failed: the runtime does not overlap
    // executions.
    if (candidate.key && (candidate.run == run || candidate.closed == all_local_)) continue;
    if (candidate.blocks == nullptr) {
      const size_t index = size_t(&candidate - stages_.data());
      Status status = stage_segments_[me_]->Take((index + 1) * stage_elems(me_) * sizeof(float));
      if (!status.ok()) return status;
      candidate.blocks = reinterpret_cast<float*>(stage_segments_[me_]->data()) + index * stage_elems(me_);
    }
    candidate.key = key;
    candidate.use = state->uses[{layer, version.microbatch}]++;
    candidate.run = run;
    candidate.order = stages_opened_++;
    candidate.sent.assign(size_t(shape_.members) * shape_.experts, 0);
    candidate.admitted = candidate.closed = candidate.told = candidate.taken = 0;
    candidate.is_summing = candidate.is_summed = false;
    candidate.num_missing = 0;
    candidate.sums.assign(num_hosts_, std::vector<const float*>(shape_.experts));
    candidate.fetched.clear();
    for (int host : hosts_) {
      const auto early = early_.find({key, candidate.use, host});
      if (early == early_.end()) continue;
      TakeManifest(candidate, host, early->second.first, early->second.second);
      early_.erase(early);
    }
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
    text += " layer " + std::to_string(std::get<1>(*stage.key));
    if (stage.closed != all_local_) {
      text += " waits for rank " + Ranks(all_local_ & ~stage.closed) + ";";
    } else {
      text += " waits for host " + Ranks(all_hosts_ & ~(stage.told & stage.taken)) + ";";
    }
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
    const size_t index = StagedIndex(expert, source_of_rank_[rank], int(local_ranks_.size()));
    blocks->push_back(found->blocks + index * shape_.block_elems);
  }
  return Status::Ok();
}

Status Domain::CloseStage(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                          Executor& executor) {
  Stage* found;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Status status = FindStage(version, rank, layer, stage, &found); !status.ok()) return status;
    VersionState& state = versions_.at(version.key());
    for (int expert : experts) {
      found->sent[size_t(rank) * shape_.experts + expert] = 1;
      const int home = shape_.home[expert];
      if (is_here(home) && home != rank) Count(state, rank, layer, kGradients, expert);
    }
    found->closed |= 1ull << rank;
    if (found->closed != all_local_) return Status::Ok();
  }
  std::vector<int> first_source;
  SumMembers(*found, &first_source, executor);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Tell(*found, first_source);
  }
  SumReady(executor);
  return Status::Ok();
}

// Adds up what this host's members have sent, in rank order, in the block of the first of them.
void Domain::SumMembers(Stage& stage, std::vector<int>* first_source, Executor& executor) {
  const int64_t elems = shape_.block_elems, chunks = (elems + kSumChunk - 1) / kSumChunk;
  const int num_sources = int(local_ranks_.size());
  first_source->assign(shape_.experts, -1);
  for (int expert = 0; expert < shape_.experts; ++expert) {
    for (int source = num_sources - 1; source >= 0; --source) {
      if (stage.sent[size_t(local_ranks_[source]) * shape_.experts + expert]) (*first_source)[expert] = source;
    }
  }
  ParallelFor(executor, int64_t(shape_.experts) * chunks, [&](int64_t task) {
    const int expert = int(task / chunks), first = (*first_source)[expert];
    if (first < 0) return;
    const int64_t begin = int64_t(task % chunks) * kSumChunk, end = std::min(begin + kSumChunk, elems);
    float* sum = stage.blocks + StagedIndex(expert, first, num_sources) * elems;
    for (int source = first + 1; source < num_sources; ++source) {
      if (!stage.sent[size_t(local_ranks_[source]) * shape_.experts + expert]) continue;
      const float* sent = stage.blocks + StagedIndex(expert, source, num_sources) * elems;
      for (int64_t i = begin; i < end; ++i) sum[i] += sent[i];
    }
  });
}

// Tells the homes on every host, this one included, which of their experts get a gradient from here.
void Domain::Tell(Stage& stage, const std::vector<int>& first_source) {
  const auto& [version_key, layer, microbatch] = *stage.key;
  const auto state = versions_.find(version_key);
  for (int host : hosts_) {
    std::string payload;
    for (int expert = 0; expert < shape_.experts; ++expert) {
      if (first_source[expert] < 0 || host_of_expert(expert) != host) continue;
      const ManifestEntry entry{expert, first_source[expert]};
      payload.append(reinterpret_cast<const char*>(&entry), sizeof(entry));
      if (host != me_ && state != versions_.end()) {
        Count(state->second, local_ranks_[first_source[expert]], layer, kGradients, expert);
      }
    }
    const int index = int(&stage - stages_.data());
    if (host == me_) {
      TakeManifest(stage, me_, index, payload);
      continue;
    }
    Message message = About(Kind::kManifest, stage);
    message.stage = index;
    neighbourhood_.fabric->Send(host, message, payload);
  }
}

// Notes where the sums of a host lie, and fetches those that cannot be mapped.
void Domain::TakeManifest(Stage& stage, int host, int stage_there, const std::string& payload) {
  const int layer = std::get<1>(*stage.key);
  const int num_sources = num_members_of(host);
  for (size_t at = 0; at + sizeof(ManifestEntry) <= payload.size(); at += sizeof(ManifestEntry)) {
    ManifestEntry entry;
    std::memcpy(&entry, payload.data() + at, sizeof(entry));
    const bool is_valid = entry.expert >= 0 && entry.expert < shape_.experts && entry.source >= 0 &&
                          entry.source < num_sources && stage_there >= 0 && stage_there < shape_.stages;
    if (!is_valid) {
      failure_ = Status::Error(Code::kInvalidArgument, "collect: table ", shape_.name, ", layer ", layer,
                               ": the manifest of host ", host, " names expert ", entry.expert, ", member ",
                               entry.source, ", stage ", stage_there);
      continue;
    }
    const size_t index = StagedIndex(entry.expert, entry.source, num_sources) * shape_.block_elems;
    if (stage_segments_[host] != nullptr) {
      stage.sums[host][entry.expert] =
          reinterpret_cast<const float*>(stage_segments_[host]->data()) + stage_there * stage_elems(host) + index;
      continue;
    }
    stage.fetched.push_back(Allocate(shape_.block_elems));
    if (stage.fetched.back() == nullptr) {
      failure_ = NoMemory("collect: table " + shape_.name, shape_.block_elems);
      continue;
    }
    stage.sums[host][entry.expert] = stage.fetched.back().get();
    ++stage.num_missing;
    ReadRequest request;
    request.what = About(Kind::kRead, stage);
    request.what.rank = entry.source;
    request.what.expert = entry.expert;
    request.what.stage = stage_there;
    request.destination = reinterpret_cast<char*>(stage.fetched.back().get());
    request.num_bytes = uint64_t(shape_.block_elems) * sizeof(float);
    request.urgency = std::make_shared<std::atomic<int>>(1 + layer);
    request.done = [this, &stage](const Status& status) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!status.ok() && failure_.ok()) {
        failure_ = Status::Error(status.code, "collect: table ", shape_.name, ", layer ", std::get<1>(*stage.key), ": ",
                                 status.message);
      }
      --stage.num_missing;
      if (status.ok() && NextToSum() != nullptr) neighbourhood_.worker->Post([this] { SumReadyAlone(); });
      changed_.notify_all();
    };
    neighbourhood_.fabric->Read(host, std::move(request));
  }
  stage.told |= 1ull << host;
}

// Stages of one layer add to the same sums: one at a time, and in the order in which they were opened, since the order
// of three terms shows in the last bit.
Domain::Stage* Domain::NextToSum() {
  for (Stage& stage : stages_) {
    const bool is_ready =
        stage.key && stage.told == all_hosts_ && stage.num_missing == 0 && !stage.is_summing && !stage.is_summed;
    const bool is_first = std::none_of(stages_.begin(), stages_.end(), [&](const Stage& other) {
      return stage.key && other.key && !other.is_summed && other.order < stage.order &&
             std::get<0>(*other.key) == std::get<0>(*stage.key) && std::get<1>(*other.key) == std::get<1>(*stage.key);
    });
    if (is_ready && is_first && failure_.ok()) return &stage;
  }
  return nullptr;
}

void Domain::SumReady(Executor& executor) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (Stage* stage = NextToSum()) {
    stage->is_summing = true;
    lock.unlock();
    const Status status = SumHosts(*stage, executor);
    lock.lock();
    if (!status.ok()) failure_ = status;
    stage->is_summing = false;
    stage->is_summed = true;
    stage->taken |= 1ull << me_;
    const Message message = About(Kind::kSummed, *stage);
    for (int host : hosts_) {
      if (host != me_) neighbourhood_.fabric->Send(host, message);
    }
    FreeIfDone(*stage);
    changed_.notify_all();
  }
}

void Domain::SumReadyAlone() {
  class Alone : public Executor {
    void Schedule(std::function<void()>) override {}
    int64_t Parallelism() const override { return 1; }
  } executor;
  SumReady(executor);
}

void Domain::FreeIfDone(Stage& stage) {
  if (!stage.is_summed || stage.taken != all_hosts_) return;
  stage.key.reset();
  stage.fetched.clear();
  changed_.notify_all();
}

Domain::Stage* Domain::StageOf(const StageKey& key, int use) {
  for (Stage& stage : stages_) {
    if (stage.key == key && stage.use == use) return &stage;
  }
  return nullptr;
}

Status Domain::PrepareSums(const Stage& stage, std::vector<Gradients*>* sums) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t blocks = size_t(shape_.layers) * shape_.blocks_per_member, elems = blocks * shape_.block_elems;
  sums->assign(shape_.members, nullptr);
  VersionState& state = versions_.at(std::get<0>(*stage.key));  // a staged version is not forgotten
  for (int rank : local_ranks_) {
    Gradients& gradients = state.gradients[rank];
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
    (*sums)[rank] = &gradients;
  }
  return Status::Ok();
}

// Adds up the hosts' sums, in the order of the hosts, for the experts that live here.
Status Domain::SumHosts(const Stage& stage, Executor& executor) {
  std::vector<Gradients*> sums;
  if (Status status = PrepareSums(stage, &sums); !status.ok()) return status;
  const int layer = std::get<1>(*stage.key);
  const int64_t elems = shape_.block_elems, chunks = (elems + kSumChunk - 1) / kSumChunk;
  ParallelFor(executor, int64_t(shape_.experts) * chunks, [&](int64_t task) {
    const int expert = int(task / chunks), home = shape_.home[expert];
    if (!is_here(home)) return;
    const int64_t begin = int64_t(task % chunks) * kSumChunk, end = std::min(begin + kSumChunk, elems);
    const int64_t index = SumIndex(layer, shape_.local[expert]);
    float* sum = sums[home]->sums.get() + index * elems;
    bool is_written = sums[home]->written[index];
    for (int host : hosts_) {
      const float* part = stage.sums[host][expert];
      if (part == nullptr) continue;
      if (is_written) {
        for (int64_t i = begin; i < end; ++i) sum[i] += part[i];
      } else {
        std::memcpy(sum + begin, part + begin, (end - begin) * sizeof(float));
      }
      is_written = true;
    }
  });
  for (int expert = 0; expert < shape_.experts; ++expert) {
    for (int host : hosts_) {
      if (is_here(shape_.home[expert]) && stage.sums[host][expert] != nullptr) {
        sums[shape_.home[expert]]->written[SumIndex(layer, shape_.local[expert])] = 1;
      }
    }
  }
  return Status::Ok();
}

Status Domain::CloseVersion(const Version& version, int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  VersionState* state;
  if (Status status = FindVersion(version, "collect", &state); !status.ok()) return status;
  state->closed |= 1ull << rank;
  Announce(Kind::kClosed, version, rank);
  changed_.notify_all();
  return Status::Ok();
}

std::optional<Status> Domain::AllClosed(const Version& version) {
  VersionState* state;
  if (Status status = FindVersion(version, "collect", &state); !status.ok()) return status;
  if (!failure_.ok()) return failure_;
  const bool is_summed = std::all_of(stages_.begin(), stages_.end(), [&](const Stage& stage) {
    return !stage.key || std::get<0>(*stage.key) != version.key() || stage.is_summed;
  });
  if (state->closed == all_ranks() && is_summed) return Status::Ok();
  const int lost = FirstLost();
  if (lost < 0) return std::nullopt;
  return Status::Error(Code::kPeerLost, DescribeUnclosed(version), ": ", Gone(lost));
}

std::string Domain::DescribeUnclosed(const Version& version) const {
  const auto it = versions_.find(version.key());
  uint64_t missing = it == versions_.end() ? 0 : all_ranks() & ~it->second.closed;
  for (const Stage& stage : stages_) {
    if (stage.key && std::get<0>(*stage.key) == version.key()) missing |= all_local_ & ~stage.closed;
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
