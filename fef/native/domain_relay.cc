// The leaf relay: what crosses from one leaf of the network to another does so once for all hosts of a leaf.
//
// For each expert that lives in another leaf, one host of this leaf is the relay. The others ask it for the expert's
// blocks; it fetches them from the home, as far as its cache has room, and tells those who have asked, who then read
// them there. Where it cannot help, they read them at the home. Gradients go the other way: the relay adds up those of
// its leaf, in host order, in its own stage, and sends the home one block.
//
// Nothing here waits: what is not there yet is remembered, and answered when it comes.
#include <algorithm>
#include <utility>

#include "domain.h"

namespace fef {

// Who relays what, and in which order a home adds up: the hosts of its own leaf, in their order, then the other leaves,
// in that of their first hosts. Of each of those one host sends.
void Domain::FindLeaf() {
  const auto leaf_of = [&](int host) {
    return neighbourhood_.leaf_of_host.empty() ? host : neighbourhood_.leaf_of_host[host];
  };
  relays_.assign(shape_.experts, -1);
  std::vector<int> leaves, mine;
  for (int host : hosts_) {
    if (leaf_of(host) == leaf_of(me_)) mine.push_back(host);
    if (std::find(leaves.begin(), leaves.end(), leaf_of(host)) == leaves.end()) leaves.push_back(leaf_of(host));
  }
  leaf_ = leaf_ranks_ = 0;
  for (int host : mine) {
    leaf_ |= 1ull << host;
    leaf_ranks_ |= ranks_of(host);
  }
  if (neighbourhood_.leaf_of_host.empty()) {
    sum_order_ = hosts_;
    return;
  }
  sum_order_ = mine;
  for (int leaf : leaves) {
    for (int host : hosts_) {
      if (leaf == leaf_of(host) && leaf != leaf_of(me_)) sum_order_.push_back(host);
    }
  }
  if (mine.size() < 2) return;
  for (int expert = 0; expert < shape_.experts; ++expert) {  // fef/pool/ledger.py knows this rule
    const int home = shape_.home[expert];
    if (leaf_of(host_of_rank_[home]) == leaf_of(me_)) continue;
    const auto others = std::count_if(host_of_rank_.begin(), host_of_rank_.begin() + home,
                                      [&](int host) { return leaf_of(host) != leaf_of(me_); });
    relays_[expert] = mine[(size_t(others) + shape_.local[expert]) % mine.size()];
  }
}

// --- Weights ---------------------------------------------------------------------------------------------------------

void Domain::AskRelay(const HostCache::Key& key, HostCache::Block& block) {
  block.source = relays_[std::get<2>(key)];
  Message message = About(Kind::kWant, key);
  message.is_hint = !block.is_awaited;
  neighbourhood_.fabric->Send(block.source, message);
}

void Domain::TakeWant(const Message& message) {
  const bool is_valid = message.layer >= 0 && message.layer < shape_.layers && message.expert >= 0 &&
                        message.expert < shape_.experts && (leaf_ >> message.host & 1) &&
                        relays_[message.expert] == me_;
  if (!is_valid) {
    failure_ = Status::Error(Code::kInvalidArgument, "get: table ", shape_.name, ": host ", message.host,
                             " wants layer ", message.layer, ", expert ", message.expert, " by way of host ", me_);
    return;
  }
  const HostCache::Key key{Version{message.incarnation, message.counter, 0}.key(), message.layer, message.expert};
  if (message.kind == Kind::kWant) {
    wants_[key][message.host].is_awaited = !message.is_hint;
  } else {
    const auto wants = wants_.find(key);
    if (wants == wants_.end() || wants->second.count(message.host) == 0) return;  // it has been answered
    wants->second[message.host].is_awaited = true;
  }
  Relay(key);
}

// Brings a block nearer to those who want it: fetches it, hurries its fetch, or answers them.
void Domain::Relay(const HostCache::Key& key) {
  const auto wanted = wants_.find(key);
  if (wanted == wants_.end() || !is_open_) return;
  const auto& [version_key, layer, expert] = key;
  if (cache_.Find(key) == nullptr && lost_[host_of_expert(expert)].empty()) {
    const auto state = versions_.find(version_key);
    const bool is_known = state != versions_.end();
    if (is_known ? !(state->second.published >> shape_.home[expert] & 1) : version_key > last_forgotten_) return;
    if (is_known) FetchIfRoom(state->second, VersionOf(version_key), layer, expert);
  }
  const HostCache::Block* block = cache_.Find(key);
  if (block == nullptr || block->state != HostCache::Block::kAsked) return Answer(key);
  const bool is_awaited = std::any_of(wanted->second.begin(), wanted->second.end(),
                                      [](const auto& want) { return want.second.is_awaited; });
  if (is_awaited) Hurry(key, *block);
}

// Tells those who want a block that it can be read here or, if it is not, at its home only.
void Domain::Answer(const HostCache::Key& key) {
  const auto wanted = wants_.find(key);
  if (wanted == wants_.end()) return;
  const auto& [version_key, layer, expert] = key;
  HostCache::Block* block = cache_.Find(key);
  const bool is_here = block != nullptr && block->state == HostCache::Block::kReady;
  Message message = About(Kind::kHave, key);
  if (!is_here) message.code = int(Code::kResourceExhausted);
  for (auto& [host, want] : wanted->second) {
    if (want.lease.block() != nullptr) continue;
    neighbourhood_.fabric->Send(host, message);
    if (!is_here) continue;
    block->leases.fetch_add(1, std::memory_order_relaxed);
    want.lease.count_ = &block->leases;
    want.lease.block_ = block->bytes.get();
    const auto state = versions_.find(version_key);
    if (state != versions_.end()) state->second.was_relayed[size_t(layer) * shape_.experts + expert] = 1;
  }
  if (!is_here) wants_.erase(wanted);
}

// A version has been published by one more member: what was wanted of it before can be had.
void Domain::RelayPublished(uint64_t version_key) {
  std::vector<HostCache::Key> keys;
  for (const auto& [key, wants] : wants_) {
    if (std::get<0>(key) == version_key) keys.push_back(key);
  }
  for (const HostCache::Key& key : keys) Relay(key);
}

// Of a host that is gone. What the others want from there cannot be had any more.
void Domain::ForgetWants(int host) {
  std::vector<HostCache::Key> keys;
  for (auto& [key, wants] : wants_) {
    wants.erase(host);
    keys.push_back(key);
  }
  for (const HostCache::Key& key : keys) Relay(key);
}

// The answer to AskRelay.
void Domain::TakeHave(const Message& message) {
  const HostCache::Key key{Version{message.incarnation, message.counter, 0}.key(), message.layer, message.expert};
  HostCache::Block* block = cache_.Find(key);
  if (block == nullptr || !block->is_unanswered() || block->source != message.host) return;
  FetchFrom(message.code == 0 ? message.host : host_of_expert(message.expert), key, *block);
}

// The relay has refused the read.
void Domain::FetchFromHomeAfterAll(const HostCache::Key& key, HostCache::Block& block) {
  const auto& [version_key, layer, expert] = key;
  const auto state = versions_.find(version_key);
  if (state != versions_.end()) Count(state->second, local_ranks_[0], layer, kRelayed, expert, -1);
  FetchFrom(host_of_expert(expert), key, block);
}

// False when the host has not been told that it may read this, or has read it.
bool Domain::ReadRelayed(const Message& read, std::string* bytes) {
  const HostCache::Key key{Version{read.incarnation, read.counter, 0}.key(), read.layer, read.expert};
  const auto wants = wants_.find(key);
  if (wants == wants_.end()) return false;
  const auto want = wants->second.find(read.host);
  if (want == wants->second.end() || want->second.lease.block() == nullptr) return false;
  bytes->assign(static_cast<const char*>(want->second.lease.block()) + read.offset, read.length);
  if (read.offset + read.length < uint64_t(shape_.block_bytes())) return true;
  wants->second.erase(want);  // chunks are asked for in their order: this was the last one
  if (wants->second.empty()) wants_.erase(wants);
  return true;
}

// --- Gradients -------------------------------------------------------------------------------------------------------

// Tells the homes in other leaves of which experts they will get this leaf's sum from here, once all hosts of the leaf
// have said what they will send.
void Domain::TellLeaves(Stage& stage) {
  if (!has_relays() || (stage.told & leaf_) != leaf_ || std::exchange(stage.has_told_leaves, true)) return;
  const auto& [version_key, layer, microbatch] = *stage.key;
  const auto state = versions_.find(version_key);
  for (int host : hosts_) {
    if (leaf_ >> host & 1) continue;
    std::string payload;
    for (int32_t expert = 0; expert < shape_.experts; ++expert) {
      if (stage.gathering[expert].senders == 0 || host_of_expert(expert) != host) continue;
      payload.append(reinterpret_cast<const char*>(&expert), sizeof(expert));
      const int rank = local_ranks_[GatheredSource(stage, expert)];
      if (state != versions_.end()) Count(state->second, rank, layer, kGradients, expert);
    }
    neighbourhood_.fabric->Send(host, About(Kind::kManifest, stage), payload);
  }
}

// The place in this host's stage where it adds up its leaf's gradients: its own, if its members have any.
int Domain::GatheredSource(const Stage& stage, int expert) const {
  const uint64_t senders = stage.outgoing[expert].senders;
  return senders == 0 ? 0 : source_of_rank_[__builtin_ctzll(senders)];
}

bool Domain::CanGather(const Stage& stage, int expert) const {
  const Stage::Gathering& gathering = stage.gathering[expert];
  const bool is_here = gathering.senders != 0 && gathering.here == gathering.senders;
  return stage.has_told_leaves && is_here && !gathering.is_summing;
}

bool Domain::IsGathered(const Stage& stage) const {
  return !has_relays() || (stage.has_told_leaves &&
         std::all_of(stage.gathering.begin(), stage.gathering.end(),
                     [](const Stage::Gathering& gathering) { return gathering.senders == 0 || gathering.is_sent; }));
}

// Adds up and sends on what has all come in, stage by stage.
void Domain::GatherReady(std::unique_lock<std::mutex>& lock, Executor& executor) {
  for (Stage& stage : stages_) {
    std::vector<int> experts;
    for (int expert = 0; stage.key && failure_.ok() && expert < shape_.experts; ++expert) {
      if (CanGather(stage, expert)) experts.push_back(expert);
    }
    if (experts.empty()) continue;
    for (int expert : experts) stage.gathering[expert].is_summing = true;
    lock.unlock();
    SumLeaf(stage, experts, executor);
    lock.lock();
    for (int expert : experts) {
      stage.gathering[expert].is_sent = stage.outgoing[expert].is_sent = true;
      Message message = About(Kind::kGradient, stage);
      message.expert = expert;
      message.rank = GatheredSource(stage, expert);
      message.stage = int(&stage - stages_.data());
      neighbourhood_.fabric->Send(host_of_expert(expert), message);
    }
    Finish(stage);
  }
}

// In host order, into this host's own place.
void Domain::SumLeaf(Stage& stage, const std::vector<int>& experts, Executor& executor) {
  const int64_t elems = shape_.block_elems, chunks = (elems + kSumChunk - 1) / kSumChunk;
  ParallelFor(executor, int64_t(experts.size()) * chunks, [&](int64_t task) {
    const int expert = experts[task / chunks];
    const int64_t begin = (task % chunks) * kSumChunk, end = std::min(begin + kSumChunk, elems);
    std::vector<const float*> parts;
    for (int host : hosts_) {
      if (stage.gathering[expert].senders >> host & 1) parts.push_back(stage.sums[host][expert]);
    }
    float* sum = stage.blocks + StagedIndex(expert, GatheredSource(stage, expert), int(local_ranks_.size())) * elems;
    for (int64_t i = begin; i < end; ++i) {  // the sum's place may be that of any of the parts
      float total = parts[0][i];
      for (size_t part = 1; part < parts.size(); ++part) total += parts[part][i];
      sum[i] = total;
    }
  });
}

}  // namespace fef
