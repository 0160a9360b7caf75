// The side of a domain that other hosts see: what they say and ask, and what is fetched from them.
#include <cstring>
#include <utility>

#include "domain.h"

namespace fef {

Message Domain::About(Kind kind, const Version& version) const {
  Message message;
  message.kind = kind;
  message.table = neighbourhood_.table;
  message.group = neighbourhood_.group;
  message.incarnation = version.incarnation;
  message.counter = version.counter;
  message.microbatch = version.microbatch;
  return message;
}

Message Domain::About(Kind kind, const Stage& stage) const {
  const auto& [version_key, layer, microbatch] = *stage.key;
  Message message = About(kind, Version{incarnation_, int32_t(uint32_t(version_key)), microbatch});
  message.layer = layer;
  message.use = stage.use;
  return message;
}

Message Domain::About(Kind kind, const HostCache::Key& key) const {
  const auto& [version_key, layer, expert] = key;
  Message message = About(kind, VersionOf(version_key));
  message.layer = layer;
  message.expert = expert;
  return message;
}

void Domain::Announce(Kind kind, const Version& version, int rank, const std::string& payload) {
  Message message = About(kind, version);
  message.rank = rank;
  for (int host : hosts_) {
    if (host != me_) neighbourhood_.fabric->Send(host, message, payload);
  }
}

void Domain::SendSegment(int rank, const MemorySegment& segment) {
  Message message = About(Kind::kSegment, Version{incarnation_, 0, 0});
  message.rank = rank;
  for (int host : hosts_) {
    if (host != me_ && neighbourhood_.fabric->is_mapped(host)) {
      neighbourhood_.fabric->Send(host, message, {}, segment.fd());
    }
  }
}

uint64_t Domain::ranks_of(int host) const {
  uint64_t ranks = 0;
  for (int rank = 0; rank < shape_.members; ++rank) ranks |= uint64_t(host_of_rank_[rank] == host) << rank;
  return ranks;
}

std::string Domain::Place(int host) const {
  return "host " + std::to_string(host) + " (rank " + Ranks(ranks_of(host)) + ")";
}

std::string Domain::Gone(int host) const { return Place(host) + " is gone: " + lost_[host]; }

// A host of this group that is gone, or -1.
int Domain::FirstLost() const {
  const auto found = std::find_if(hosts_.begin(), hosts_.end(), [&](int host) { return !lost_[host].empty(); });
  return found == hosts_.end() ? -1 : *found;
}

void Domain::OnLost(int host, const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  lost_[host] = why;
  ForgetWants(host);
  changed_.notify_all();
}

void Domain::OnMessage(const Message& message, const std::string& payload, Descriptor fd) {
  if (message.kind == Kind::kKey) return TakeKey(message, payload);
  std::lock_guard<std::mutex> lock(mutex_);
  const Version version{message.incarnation, message.counter, message.microbatch};
  const bool is_from_member = is_member(message.rank, message.host);
  if (message.kind == Kind::kSegment) {
    auto segment = std::make_unique<MemorySegment>();
    const Status status = segment->Map("fef-" + shape_.name + " of " + Place(message.host), fd.Release());
    if (!status.ok()) failure_ = status;
    if (status.ok() && message.rank < 0) stage_segments_[message.host] = std::move(segment);
    if (status.ok() && is_from_member) segments_[message.rank] = std::move(segment);
  } else if (message.kind == Kind::kWant || message.kind == Kind::kHurry) {
    TakeWant(message);
  } else if (message.kind == Kind::kHave) {
    TakeHave(message);
  } else if (version.key() <= last_forgotten_) {
    return;
  } else if (message.kind == Kind::kPublished && is_from_member) {
    VersionState& state = CreateVersion(version);
    state.published |= 1ull << message.rank;
    if (payload.size() == shape_.layers * sizeof(int32_t)) {
      std::vector<int32_t>& slots = state.slots[message.rank];
      slots.resize(shape_.layers);
      std::memcpy(slots.data(), payload.data(), payload.size());
    }
    FetchAhead(state, version);
    RelayPublished(version.key());
  } else if (message.kind == Kind::kClosed && is_from_member) {
    VersionState& state = CreateVersion(version);
    state.closed |= 1ull << message.rank;
    state.released |= 1ull << message.rank;
  } else if (message.kind == Kind::kManifest || message.kind == Kind::kGradient) {
    const StageKey key{version.key(), message.layer, version.microbatch};
    if (Stage* stage = StageOf(key, message.use)) {
      Take(*stage, message, payload);
      if (HasSums()) neighbourhood_.worker->Post([this] { SumReadyAlone(); });
    } else {
      early_[{key, message.use}].emplace_back(message, payload);
    }
  } else if (message.kind == Kind::kSummed) {
    Stage* stage = StageOf({version.key(), message.layer, version.microbatch}, message.use);
    if (stage == nullptr) return;
    stage->taken |= 1ull << message.host;
    FreeIfDone(*stage);
  } else if (message.kind == Kind::kTokens || message.kind == Kind::kServed || message.kind == Kind::kReceived) {
    OnFlight(message, payload);
  }
  changed_.notify_all();
}

Status Domain::OnRead(const Message& read, std::string* bytes) {
  const Version version{read.incarnation, read.counter, read.microbatch};
  auto refuse = [&](Code code, const auto&... what) {
    return Status::Error(code, "get: ", Where(version), ", layer ", read.layer, ", expert ", read.expert, " at ",
                         Place(me_), what...);
  };
  std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = CheckOpen(version, "get"); !status.ok()) return status;
  if (read.region == Region::kRows || read.region == Region::kResults) return ReadFlight(read, bytes);
  const uint64_t block_bytes = read.region == Region::kGradient ? uint64_t(shape_.block_elems) * sizeof(float)
                                                                : uint64_t(shape_.block_bytes());
  if (read.layer < 0 || read.layer >= shape_.layers || read.expert < 0 || read.expert >= shape_.experts) {
    return refuse(Code::kInvalidArgument, " is out of range: the table has ", shape_.layers, " layers of ",
                  shape_.experts, " experts");
  }
  if (read.length == 0 || read.length > kChunkBytes || read.offset > block_bytes ||
      read.length > block_bytes - read.offset) {
    return refuse(Code::kInvalidArgument, ": ", read.length, " bytes at ", read.offset, " are not in a block of ",
                  block_bytes);
  }
  if (read.region == Region::kGradient) {
    const bool is_there = read.stage >= 0 && read.stage < int(stages_.size()) && read.rank >= 0 && read.rank < int(local_ranks_.size());
    const Stage* stage = is_there ? &stages_[read.stage] : nullptr;
    const StageKey key{version.key(), read.layer, version.microbatch};
    if (stage == nullptr || stage->key != key || stage->use != read.use || !stage->outgoing[read.expert].is_sent) {
      return refuse(Code::kStaleVersion, ": its gradient is not staged there");
    }
    const size_t index = StagedIndex(read.expert, read.rank, int(local_ranks_.size())) * shape_.block_elems;
    bytes->assign(reinterpret_cast<const char*>(stage->blocks + index) + read.offset, read.length);
    return Status::Ok();
  }
  if (read.region == Region::kRelayed) {
    if (ReadRelayed(read, bytes)) return Status::Ok();
    return refuse(Code::kStaleVersion, ": it is not kept for ", Place(read.host));
  }
  const int home = shape_.home[read.expert];
  if (!is_here(home)) return refuse(Code::kInvalidArgument, ": its home is rank ", home, ", on another host");
  for (int slot = 0; slot < shape_.slots; ++slot) {
    // Slots are taken and given away under the mutex.
    if (header(home, slot, read.layer)->version.load(std::memory_order_acquire) != version.key()) continue;
    bytes->assign(block(home, slot, read.layer, shape_.local[read.expert]) + read.offset, read.length);
    return Status::Ok();
  }
  return refuse(Code::kStaleVersion, ": no slot holds this version; it was refilled or never published");
}

// How many layers this host's members have to go to the block's: forward to the last one, and back.
int Domain::Distance(const HostCache::Key& key) const {
  const auto& [version_key, layer, expert] = key;
  const auto it = versions_.find(version_key);
  if (it == versions_.end()) return 3 * shape_.layers;
  const int at = it->second.at_layer;
  if (it->second.is_backward) return layer <= at ? at - layer : at + layer + 1;
  return layer >= at ? layer - at : 2 * shape_.layers - 1 - at - layer;
}

// The order of fetches: by distance, what is awaited first, and each host beginning with another home, so that not all
// ask the same one at the same time.
int Domain::Urgency(const Version& version, int layer, int expert, bool is_awaited) const {
  const int turn = (shape_.home[expert] - local_ranks_[0] + shape_.members) % shape_.members;
  return (2 * Distance({version.key(), layer, expert}) + !is_awaited) * shape_.members + turn;
}

void Domain::Fetch(const Version& version, int layer, int expert, bool is_awaited) {
  const HostCache::Key key{version.key(), layer, expert};
  HostCache::Block& block = cache_.Add(key);
  block.is_awaited = is_awaited;
  if (is_relayed(expert)) AskRelay(key, block);
  else FetchFrom(host_of_expert(expert), key, block);
}

// From the block's home, or from its relay, which has it.
void Domain::FetchFrom(int source, const HostCache::Key& key, HostCache::Block& block) {
  const auto& [version_key, layer, expert] = key;
  const Version version = VersionOf(version_key);
  const bool is_home = source == host_of_expert(expert), is_awaited = block.is_awaited;
  const auto state = versions_.find(version_key);
  if (state != versions_.end()) CountFetch(state->second, layer, expert, is_home);
  ReadRequest request;
  request.what = About(Kind::kRead, key);
  request.what.region = is_home ? Region::kBlock : Region::kRelayed;
  request.what.is_hint = !is_awaited;
  if (is_one_sided()) request.spot = SpotOfBlock(state->second, version, layer, expert);
  request.destination = block.bytes.get();
  request.num_bytes = uint64_t(shape_.block_bytes());
  request.urgency = Urgency(version, layer, expert, is_awaited);
  request.done = [this, &block, key, version, source, is_home, is_awaited](const Status& status) {
    const auto& [version_key, layer, expert] = key;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_home && !status.ok() && status.code != Code::kPeerLost) return FetchFromHomeAfterAll(key, block);
    if (!status.ok() && status.code != Code::kPeerLost && !is_awaited) {  // who has come to want it asks again
      cache_.Forget(key);
      Answer(key);
      changed_.notify_all();
      return;
    }
    block.status = status;
    if (is_one_sided() && !status.ok()) {  // the network does not know what it reads
      block.status = Refused(Status::Error(status.code, "get: ", Where(version), ", layer ", layer, ", expert ", expert,
                                           " at ", Place(source), ": ", status.message));
    }
    // The connection's end may be known here before the host's is: whoever waits for the block hears what it was.
    if (status.code == Code::kPeerLost) {
      block.status = Status::Error(Code::kPeerLost, "get: ", Where(version), ", layer ", layer, ", expert ", expert, ": ",
                                   status.message, "; its ", shape_.block_bytes(), " bytes are missing");
    }
    block.state = status.ok() ? HostCache::Block::kReady : HostCache::Block::kFailed;
    Answer(key);
    changed_.notify_all();
  };
  block.source = source;
  block.ticket = neighbourhood_.fabric->Read(source, std::move(request));
}

void Domain::CountFetch(VersionState& state, int layer, int expert, bool is_from_home) const {
  if (!is_from_home) return Count(state, local_ranks_[0], layer, kRelayed, expert);
  char& was_fetched = state.was_fetched[size_t(layer) * shape_.experts + expert];
  Count(state, local_ranks_[0], layer, was_fetched ? kRefetch : kWeights, expert);
  was_fetched = 1;
}

// Somebody waits for a block that was only hinted at.
void Domain::Hurry(const HostCache::Key& key, const HostCache::Block& block) {
  const auto& [version_key, layer, expert] = key;
  if (block.is_unanswered()) neighbourhood_.fabric->Send(block.source, About(Kind::kHurry, key));
  else neighbourhood_.fabric->Hurry(block.source, block.ticket, Urgency(VersionOf(version_key), layer, expert, true));
}

bool Domain::MakeRoom(int min_distance) {
  return cache_.MakeRoom([this](const HostCache::Key& key) { return Distance(key); }, min_distance);
}

// Asks for a block of another host for which nobody waits yet, if it can be had and is not here. False when there is no
// room for it.
bool Domain::FetchIfRoom(VersionState& state, const Version& version, int layer, int expert) {
  const int home = shape_.home[expert];
  const HostCache::Key key{version.key(), layer, expert};
  const bool is_wanted = !is_direct(home) && (state.published >> home & 1) && lost_[host_of_rank_[home]].empty() &&
                         lost_[FetchedFrom(expert)].empty() && cache_.Find(key) == nullptr;
  if (!is_wanted) return true;
  if (!MakeRoom(Distance(key) + 1)) return false;
  Fetch(version, layer, expert, /*is_awaited=*/false);
  return true;
}

// Asks for what this host's members used last time, in the order in which they will come to it, as far as there is room.
void Domain::FetchAhead(VersionState& state, const Version& version) {
  if (local_ranks_.empty() || !is_open_ || !shape_.is_fetched_ahead) return;
  const int step = state.is_backward ? -1 : 1;
  for (int layer = state.at_layer; layer >= 0 && layer < shape_.layers; layer += step) {
    for (int expert = 0; expert < shape_.experts; ++expert) {
      if (!last_used_[size_t(layer) * shape_.experts + expert]) continue;
      if (!FetchIfRoom(state, version, layer, expert)) return;
    }
  }
}

// What is fetched ahead under later versions, once this host's members have all done with this one.
void Domain::RememberUse(const VersionState& state) {
  if (local_ranks_.empty() || (state.closed & all_local_) != all_local_) return;
  std::fill(last_used_.begin(), last_used_.end(), 0);
  for (int rank : local_ranks_) {
    for (size_t i = 0; i < last_used_.size(); ++i) last_used_[i] |= state.was_read[rank * last_used_.size() + i];
  }
}

// What was fetched from its home and neither read here nor relayed was no use, as far as this host's members have done.
void Domain::CountMissed(const VersionState& state, int32_t* counts) const {
  if ((state.closed & all_local_) != all_local_) return;
  for (size_t i = 0; i < state.was_fetched.size(); ++i) {
    const bool is_read = std::any_of(local_ranks_.begin(), local_ranks_.end(), [&](int rank) {
      return state.was_read[rank * state.was_fetched.size() + i];
    });
    if (!state.was_fetched[i] || is_read || state.was_relayed[i]) continue;
    int32_t* of_layer = counts + i / shape_.experts * kNumPurposes * shape_.experts + i % shape_.experts;
    --of_layer[kWeights * shape_.experts];
    ++of_layer[kMissed * shape_.experts];
  }
}

// Gives the memory of blocks back whose version no member of this host uses any more, or of its leaf if it relays them.
void Domain::DropUnused() {
  cache_.Drop([this](const HostCache::Key& key) {
    const auto& [version_key, layer, expert] = key;
    const auto state = versions_.find(version_key);
    const uint64_t users = relays_[expert] == me_ ? leaf_ranks_ : all_local_;
    return state == versions_.end() || (state->second.closed & users) == users;
  });
}

}  // namespace fef
