// The way of gradients through a domain: admitted to a stage, written there, summed when all are in, collected.
#include <algorithm>
#include <cstring>

#include "domain.h"
#include "floats.h"

namespace fef {

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
      const size_t stage_bytes = stage_elems(me_) * sizeof(float), begin = index * stage_bytes;
      Status status = stage_segments_[me_]->Take(begin + stage_bytes);
      if (status.ok()) status = Offer(-1, *stage_segments_[me_], begin, begin + stage_bytes);
      if (!status.ok()) return status;
      candidate.blocks = reinterpret_cast<float*>(stage_segments_[me_]->data()) + index * stage_elems(me_);
    }
    candidate.key = key;
    candidate.use = state->uses[{layer, version.microbatch}]++;
    candidate.run = run;
    candidate.order = stages_opened_++;
    candidate.outgoing.assign(shape_.experts, {});
    candidate.admitted = candidate.declared = candidate.closed = candidate.told = candidate.taken = 0;
    candidate.gathering.assign(shape_.experts, {});
    candidate.has_told_leaves = candidate.is_summing = candidate.is_summed = false;
    candidate.num_missing = 0;
    candidate.sums.assign(num_hosts_, std::vector<const float*>(shape_.experts));
    candidate.fetched.clear();
    if (const auto early = early_.find({key, candidate.use}); early != early_.end()) {
      for (const auto& [message, payload] : early->second) Take(candidate, message, payload);
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

Status Domain::StageGradients(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                              std::vector<float*>* blocks, Executor& executor) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    Stage* found;
    if (Status status = FindStage(version, rank, layer, stage, &found); !status.ok()) return status;
    for (int expert : experts) {
      if (expert < 0 || expert >= shape_.experts) {
        return Status::Error(Code::kInvalidArgument, "accumulate: ", Where(version), ", layer ", layer, ", expert ",
                             expert, " is out of range: the table has ", shape_.experts, " experts");
      }
    }
    VersionState& state = versions_.at(version.key());
    for (int expert : experts) {
      found->outgoing[expert].senders |= 1ull << rank;
      const int home = shape_.home[expert];
      if (is_here(home) && home != rank) Count(state, rank, layer, kGradients, expert);
      const size_t index = StagedIndex(expert, source_of_rank_[rank], int(local_ranks_.size()));
      blocks->push_back(found->blocks + index * shape_.block_elems);
    }
    found->declared |= 1ull << rank;
    if (experts.empty()) found->closed |= 1ull << rank;
    if (found->declared == all_local_) Tell(*found);
    LetGo(*found, lock, executor);
  }
  SumReady(executor);
  return Status::Ok();
}

Status Domain::SendGradients(const Version& version, int rank, int layer, int stage, const std::vector<int>& experts,
                             Executor& executor) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    Stage* found;
    if (Status status = FindStage(version, rank, layer, stage, &found); !status.ok()) return status;
    for (int expert : experts) found->outgoing[expert].written |= 1ull << rank;
    const bool is_over = std::none_of(found->outgoing.begin(), found->outgoing.end(), [&](const Stage::Outgoing& out) {
      return (out.senders & ~out.written) >> rank & 1;
    });
    if (is_over) found->closed |= 1ull << rank;
    LetGo(*found, lock, executor);
  }
  SumReady(executor);
  return Status::Ok();
}

// Tells the hosts to which this one sends its gradients, itself included, which they will get: the homes, and for those
// in other leaves the relays of this one.
void Domain::Tell(Stage& stage) {
  for (int host : hosts_) {
    if (has_relays() && !(leaf_ >> host & 1)) continue;  // TellLeaves does
    std::string payload;
    for (int32_t expert = 0; expert < shape_.experts; ++expert) {
      if (stage.outgoing[expert].senders == 0 || DestinationOf(expert) != host) continue;
      payload.append(reinterpret_cast<const char*>(&expert), sizeof(expert));
    }
    if (host == me_) TakeManifest(stage, me_, payload);
    else neighbourhood_.fabric->Send(host, About(Kind::kManifest, stage), payload);
  }
}

// Sends the gradients on their way that all members of this host who have one have written. Gives the lock back for
// the sums.
void Domain::LetGo(Stage& stage, std::unique_lock<std::mutex>& lock, Executor& executor) {
  if (stage.declared != all_local_) return;
  std::vector<int> experts;
  for (int expert = 0; expert < shape_.experts; ++expert) {
    Stage::Outgoing& outgoing = stage.outgoing[expert];
    if (outgoing.senders == 0 || outgoing.senders != outgoing.written || outgoing.is_sent) continue;
    outgoing.is_sent = true;
    experts.push_back(expert);
  }
  if (experts.empty()) return;
  lock.unlock();
  SumMembers(stage, experts, executor);
  lock.lock();
  const auto& [version_key, layer, microbatch] = *stage.key;
  const auto state = versions_.find(version_key);
  for (int expert : experts) {
    const int first_rank = __builtin_ctzll(stage.outgoing[expert].senders), host = DestinationOf(expert);
    Message message = About(Kind::kGradient, stage);
    message.host = me_;
    message.expert = expert;
    message.rank = source_of_rank_[first_rank];
    message.stage = int(&stage - stages_.data());
    if (host == me_) {
      TakeGradient(stage, message);
      continue;
    }
    const Purpose purpose = relays_[expert] < 0 ? kGradients : kGathered;
    if (state != versions_.end()) Count(state->second, first_rank, layer, purpose, expert);
    neighbourhood_.fabric->Send(host, message);
  }
}

// Adds up what this host's members have written, in rank order, in the block of the first of them.
void Domain::SumMembers(const Stage& stage, const std::vector<int>& experts, Executor& executor) {
  const int64_t elems = shape_.block_elems, chunks = (elems + kSumChunk - 1) / kSumChunk;
  const int num_sources = int(local_ranks_.size());
  ParallelFor(executor, int64_t(experts.size()) * chunks, [&](int64_t task) {
    const int expert = experts[task / chunks];
    const int64_t begin = (task % chunks) * kSumChunk, end = std::min(begin + kSumChunk, elems);
    float* sum = nullptr;
    for (int source = 0; source < num_sources; ++source) {
      if (!(stage.outgoing[expert].senders >> local_ranks_[source] & 1)) continue;
      float* sent = stage.blocks + StagedIndex(expert, source, num_sources) * elems;
      if (sum == nullptr) {
        sum = sent;
        continue;
      }
      for (int64_t i = begin; i < end; ++i) sum[i] += sent[i];
    }
  });
}

void Domain::Take(Stage& stage, const Message& message, const std::string& payload) {
  if (message.kind == Kind::kManifest) TakeManifest(stage, message.host, payload);
  else TakeGradient(stage, message);
}

void Domain::TakeManifest(Stage& stage, int host, const std::string& payload) {
  for (size_t at = 0; at + sizeof(int32_t) <= payload.size(); at += sizeof(int32_t)) {
    int32_t expert;
    std::memcpy(&expert, payload.data() + at, sizeof(expert));
    if (expert < 0 || expert >= shape_.experts) {
      failure_ = Status::Error(Code::kInvalidArgument, "collect: table ", shape_.name, ": host ", host,
                               " speaks of expert ", expert);
    } else if (is_home(expert)) {
      ++stage.num_missing;
    } else {
      stage.gathering[expert].senders |= 1ull << host;
    }
  }
  stage.told |= 1ull << host;
  TellLeaves(stage);
}

// A host's sum is here.
void Domain::NoteGradient(Stage& stage, int host, int expert) {
  if (is_home(expert)) --stage.num_missing;
  else stage.gathering[expert].here |= 1ull << host;
}

// Notes where a host's sum lies, or fetches it if it cannot be mapped.
void Domain::TakeGradient(Stage& stage, const Message& message) {
  const int layer = std::get<1>(*stage.key), host = message.host, expert = message.expert, source = message.rank;
  const int num_sources = num_members_of(host);
  const bool is_valid = expert >= 0 && expert < shape_.experts && source >= 0 && source < num_sources &&
                        message.stage >= 0 && message.stage < shape_.stages;
  if (!is_valid) {
    failure_ = Status::Error(Code::kInvalidArgument, "collect: table ", shape_.name, ", layer ", layer, ": host ", host,
                             " speaks of expert ", expert, ", member ", source, ", stage ", message.stage);
    return;
  }
  const size_t index =
      message.stage * stage_elems(host) + StagedIndex(expert, source, num_sources) * shape_.block_elems;
  if (stage_segments_[host] != nullptr) {
    stage.sums[host][expert] = reinterpret_cast<const float*>(stage_segments_[host]->data()) + index;
    NoteGradient(stage, host, expert);
    return;
  }
  stage.fetched.push_back(Allocate(shape_.block_elems));
  if (stage.fetched.back() == nullptr) {
    failure_ = NoMemory("collect: table " + shape_.name, shape_.block_elems);
    return;
  }
  stage.sums[host][expert] = stage.fetched.back().get();
  ReadRequest request;
  request.what = About(Kind::kRead, stage);
  request.what.rank = source;
  request.what.expert = expert;
  request.what.region = Region::kGradient;
  request.what.stage = message.stage;
  if (is_one_sided()) request.spot = SpotOfGradient(host, index);
  request.destination = reinterpret_cast<char*>(stage.fetched.back().get());
  request.num_bytes = uint64_t(shape_.block_elems) * sizeof(float);
  const int turn = (host - me_ + num_hosts_) % num_hosts_;
  request.urgency = (2 * layer + 1) * shape_.members + turn;
  request.done = [this, &stage, host, expert](const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status.ok() && failure_.ok()) {
      failure_ = Status::Error(status.code, "collect: table ", shape_.name, ", layer ", std::get<1>(*stage.key), ": ",
                               status.message);
    }
    NoteGradient(stage, host, expert);
    if (status.ok() && HasSums()) neighbourhood_.worker->Post([this] { SumReadyAlone(); });
    changed_.notify_all();
  };
  neighbourhood_.fabric->Read(host, std::move(request));
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

bool Domain::HasSums() {
  const auto can_gather = [&](const Stage& stage) {
    for (int expert = 0; stage.key && expert < shape_.experts; ++expert) {
      if (CanGather(stage, expert)) return true;
    }
    return false;
  };
  return NextToSum() != nullptr || std::any_of(stages_.begin(), stages_.end(), can_gather);
}

void Domain::SumReady(Executor& executor) {
  std::unique_lock<std::mutex> lock(mutex_);
  GatherReady(lock, executor);
  while (Stage* stage = NextToSum()) {
    stage->is_summing = true;
    lock.unlock();
    const Status status = SumHosts(*stage, executor);
    lock.lock();
    if (!status.ok()) failure_ = status;
    stage->is_summing = false;
    stage->is_summed = true;
    Finish(*stage);
    changed_.notify_all();
  }
}

void Domain::SumReadyAlone() {
  CallerAlone executor;
  SumReady(executor);
}

// Says so when this host needs nothing more from the others' stages.
void Domain::Finish(Stage& stage) {
  if (!stage.is_summed || !IsGathered(stage)) return;
  stage.taken |= 1ull << me_;
  const Message message = About(Kind::kSummed, stage);
  for (int host : hosts_) {
    if (host != me_) neighbourhood_.fabric->Send(host, message);
  }
  FreeIfDone(stage);
}

void Domain::FreeIfDone(Stage& stage) {
  if (stage.taken != all_hosts_) return;
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
    if (gradients.data() == nullptr) {
      if (shape_.is_resident) {
        gradients.resident_sums = reinterpret_cast<float*>(residences_.at(rank).sums->data());
      } else if (spare_gradients_.empty()) {
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

// Adds up the hosts' sums, in sum_order_, for the experts that live here.
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
    float* sum = sums[home]->data() + index * elems;
    bool is_written = sums[home]->written[index];
    for (int host : sum_order_) {
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
  RememberUse(*state);
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
    if (!stage.key || std::get<0>(*stage.key) != version.key()) continue;
    missing |= all_local_ & ~stage.closed;
    for (int host : hosts_) {
      if (!(stage.told >> host & 1)) missing |= ranks_of(host);
    }
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
