// The side of a domain that other hosts see: what they say and ask, and what is fetched from them.
#include <cstring>
#include <utility>

#include "domain.h"

namespace fef {

namespace {

constexpr int kWanted = 0;  // urgency of what somebody waits for; prefetched and gradients come after it, by layer

}  // namespace

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
  Message message = About(kind, {incarnation_, int32_t(uint32_t(version_key)), microbatch});
  message.layer = layer;
  message.use = stage.use;
  return message;
}

void Domain::Announce(Kind kind, const Version& version, int rank) {
  Message message = About(kind, version);
  message.rank = rank;
  for (int host : hosts_) {
    if (host != me_) neighbourhood_.fabric->Send(host, message);
  }
}

void Domain::SendSegment(int rank, const MemorySegment& segment) {
  Message message = About(Kind::kSegment, {incarnation_, 0, 0});
  message.rank = rank;
  for (int host : hosts_) {
    if (host != me_ && neighbourhood_.fabric->is_mapped(host)) {
      neighbourhood_.fabric->Send(host, message, {}, segment.fd());
    }
  }
}

std::string Domain::Place(int host) const {
  uint64_t ranks = 0;
  for (int rank = 0; rank < shape_.members; ++rank) ranks |= uint64_t(host_of_rank_[rank] == host) << rank;
  return "host " + std::to_string(host) + " (rank " + Ranks(ranks) + ")";
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
  changed_.notify_all();
}

void Domain::OnMessage(const Message& message, const std::string& payload, Descriptor fd) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Version version{message.incarnation, message.counter, message.microbatch};
  const bool is_member = message.rank >= 0 && message.rank < shape_.members && host_of_rank_[message.rank] == message.host;
  if (message.kind == Kind::kSegment) {
    auto segment = std::make_unique<MemorySegment>();
    const Status status = segment->Map("fef-" + shape_.name + " of " + Place(message.host), fd.Release());
    if (!status.ok()) failure_ = status;
    if (status.ok() && message.rank < 0) stage_segments_[message.host] = std::move(segment);
    if (status.ok() && is_member) segments_[message.rank] = std::move(segment);
  } else if (version.key() <= last_forgotten_) {
    return;
  } else if (message.kind == Kind::kPublished && is_member) {
    CreateVersion(version).published |= 1ull << message.rank;
    FetchAhead(version, message.rank);
  } else if (message.kind == Kind::kClosed && is_member) {
    VersionState& state = CreateVersion(version);
    state.closed |= 1ull << message.rank;
    state.released |= 1ull << message.rank;
  } else if (message.kind == Kind::kManifest) {
    const StageKey key{version.key(), message.layer, version.microbatch};
    if (Stage* stage = StageOf(key, message.use)) {
      TakeManifest(*stage, message.host, message.stage, payload);
      if (NextToSum() != nullptr) neighbourhood_.worker->Post([this] { SumReadyAlone(); });
    } else {
      early_[{key, message.use, message.host}] = {message.stage, payload};
    }
  } else if (message.kind == Kind::kSummed) {
    Stage* stage = StageOf({version.key(), message.layer, version.microbatch}, message.use);
    if (stage == nullptr) return;
    stage->taken |= 1ull << message.host;
    FreeIfDone(*stage);
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
  const uint64_t block_bytes =
      read.stage < 0 ? uint64_t(shape_.block_bytes()) : uint64_t(shape_.block_elems) * sizeof(float);
  if (read.layer < 0 || read.layer >= shape_.layers || read.expert < 0 || read.expert >= shape_.experts) {
    return refuse(Code::kInvalidArgument, " is out of range: the table has ", shape_.layers, " layers of ",
                  shape_.experts, " experts");
  }
  if (read.length == 0 || read.length > kChunkBytes || read.offset > block_bytes ||
      read.length > block_bytes - read.offset) {
    return refuse(Code::kInvalidArgument, ": ", read.length, " bytes at ", read.offset, " are not in a block of ",
                  block_bytes);
  }
  if (read.stage >= 0) {
    const bool is_there = read.stage < int(stages_.size()) && read.rank >= 0 && read.rank < int(local_ranks_.size());
    const Stage* stage = is_there ? &stages_[read.stage] : nullptr;
    const StageKey key{version.key(), read.layer, version.microbatch};
    if (stage == nullptr || stage->key != key || stage->use != read.use || !(stage->told >> me_ & 1)) {
      return refuse(Code::kStaleVersion, ": its gradient is not staged there");
    }
    const size_t index = StagedIndex(read.expert, read.rank, int(local_ranks_.size())) * shape_.block_elems;
    bytes->assign(reinterpret_cast<const char*>(stage->blocks + index) + read.offset, read.length);
    return Status::Ok();
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

std::optional<Status> Domain::Readable(const Version& version, int layer, const std::vector<int>& experts) {
  if (auto published = Published(version, experts); !published || !published->ok()) return published;
  if (layer < 0 || layer >= shape_.layers) return Status::Ok();  // refused by the read
  VersionState& state = versions_.at(version.key());
  bool is_complete = true;
  for (int expert : experts) {
    if (is_direct(shape_.home[expert])) continue;
    const CacheKey key{version.key(), layer, expert};
    if (const int host = host_of_expert(expert); !lost_[host].empty()) {
      return Status::Error(Code::kPeerLost, "get: ", Where(version), ", layer ", layer, ", expert ", expert, ": ",
                           Gone(host), "; its ", shape_.block_bytes(), " bytes are missing");
    }
    if (cache_.find(key) == cache_.end()) Fetch(state, version, layer, expert, kWanted);
    const Cached& cached = *cache_.at(key);
    if (cached.state == Cached::kFailed) return cached.status;
    cached.urgency->store(kWanted, std::memory_order_relaxed);
    is_complete &= cached.state == Cached::kReady;
  }
  if (!is_complete) return std::nullopt;
  return Status::Ok();
}

void Domain::Fetch(VersionState& state, const Version& version, int layer, int expert, int urgency) {
  auto& cached = cache_[{version.key(), layer, expert}];
  cached = std::make_unique<Cached>();
  if (spare_blocks_.empty()) {
    cached->bytes.reset(new char[shape_.block_bytes()]);
  } else {
    cached->bytes = std::move(spare_blocks_.back());
    spare_blocks_.pop_back();
  }
  cached->urgency = std::make_shared<std::atomic<int>>(urgency);
  char& was_fetched = state.was_fetched[size_t(layer) * shape_.experts + expert];
  Count(state, local_ranks_[0], layer, was_fetched ? kRefetch : kWeights, expert);
  was_fetched = 1;
  ReadRequest request;
  request.what = About(Kind::kRead, version);
  request.what.layer = layer;
  request.what.expert = expert;
  request.destination = cached->bytes.get();
  request.num_bytes = uint64_t(shape_.block_bytes());
  request.urgency = cached->urgency;
  const bool is_hint = urgency != kWanted;
  request.done = [this, entry = cached.get(), version, layer, expert, is_hint](const Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status.ok() && status.code != Code::kPeerLost && is_hint) {  // who has come to want it asks again
      cache_.erase({version.key(), layer, expert});
      changed_.notify_all();
      return;
    }
    entry->status = status;
    // The connection's end may be known here before the host's is: whoever waits for the block hears what it was.
    if (status.code == Code::kPeerLost) {
      entry->status = Status::Error(Code::kPeerLost, "get: ", Where(version), ", layer ", layer, ", expert ", expert, ": ",
                                    status.message, "; its ", shape_.block_bytes(), " bytes are missing");
    }
    entry->state = status.ok() ? Cached::kReady : Cached::kFailed;
    changed_.notify_all();
  };
  neighbourhood_.fabric->Read(host_of_expert(expert), std::move(request));
}

// Asks at once for what this host's members used of the member last time, the layers in the order of their need.
void Domain::FetchAhead(const Version& version, int rank) {
  if (local_ranks_.empty() || is_direct(rank)) return;
  VersionState& state = versions_.at(version.key());
  for (int layer = 0; layer < shape_.layers; ++layer) {
    for (int expert = 0; expert < shape_.experts; ++expert) {
      const bool is_wanted = shape_.home[expert] == rank && last_used_[size_t(layer) * shape_.experts + expert];
      if (!is_wanted || cache_.count({version.key(), layer, expert})) continue;
      Fetch(state, version, layer, expert, 1 + layer);
    }
  }
}

// Gives the memory of blocks back whose version no member of this host uses any more.
void Domain::DropUnused() {
  for (auto it = cache_.begin(); it != cache_.end();) {
    const auto& [version_key, layer, expert] = it->first;
    const auto state = versions_.find(version_key);
    const bool is_used = state != versions_.end() && (state->second.closed & all_local_) != all_local_;
    Cached& cached = *it->second;
    if (is_used || cached.state == Cached::kAsked || cached.leases.load(std::memory_order_acquire) != 0) {
      ++it;
      continue;
    }
    if (state != versions_.end()) {
      char& last_used = last_used_[size_t(layer) * shape_.experts + expert];
      last_used = 0;
      for (int rank : local_ranks_) {
        last_used |= state->second.was_read[(size_t(rank) * shape_.layers + layer) * shape_.experts + expert];
      }
    }
    spare_blocks_.push_back(std::move(cached.bytes));
    it = cache_.erase(it);
  }
}

}  // namespace fef
