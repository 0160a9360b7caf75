#include "host_cache.h"

#include <utility>

namespace fef {

HostCache::Block* HostCache::Find(const Key& key) const {
  const auto found = blocks_.find(key);
  return found == blocks_.end() ? nullptr : found->second.get();
}

HostCache::Block& HostCache::Add(const Key& key) {
  auto& block = blocks_[key];
  block = std::make_unique<Block>();
  if (spare_.empty()) {
    block->bytes.reset(new char[block_bytes_]);
  } else {
    block->bytes = std::move(spare_.back());
    spare_.pop_back();
  }
  return *block;
}

// The fetch of a block that was asked for writes to its memory.
bool HostCache::IsIdle(const Block& block) {
  return block.state != Block::kAsked && block.leases.load(std::memory_order_acquire) == 0;
}

HostCache::Blocks::iterator HostCache::Erase(Blocks::iterator block) {
  spare_.push_back(std::move(block->second->bytes));
  return blocks_.erase(block);
}

// Of equally distant blocks the one that was read last goes: the others of its layer are still to be read in this pass.
bool HostCache::MakeRoom(const Distance& distance_of, int min_distance) {
  if (int64_t(blocks_.size() + 1) * block_bytes_ <= max_bytes_) return true;
  auto victim = blocks_.end();
  std::pair<int, uint64_t> worst{min_distance, 0};
  for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
    const Block& block = *it->second;
    if (!IsIdle(block) || block.is_awaited) continue;
    const std::pair<int, uint64_t> rank{distance_of(it->first), block.last_read};
    if (rank < worst) continue;
    worst = rank;
    victim = it;
  }
  if (victim == blocks_.end()) return false;
  Erase(victim);
  return int64_t(blocks_.size() + 1) * block_bytes_ <= max_bytes_;
}

void HostCache::NoteRead(Block& block) {
  block.is_awaited = false;
  block.last_read = ++reads_;
}

void HostCache::Drop(const std::function<bool(const Key& key)>& is_over) {
  for (auto it = blocks_.begin(); it != blocks_.end();) it = IsIdle(*it->second) && is_over(it->first) ? Erase(it) : ++it;
}

}  // namespace fef
