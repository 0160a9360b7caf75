// Blocks of other hosts that are here or on their way, for all members of this host: one fetch serves them all.
#ifndef FEF_HOST_CACHE_H_
#define FEF_HOST_CACHE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "status.h"

namespace fef {

// Bounded: what does not stay is fetched again. Not thread-safe.
class HostCache {
 public:
  using Key = std::tuple<uint64_t, int, int>;  // version, layer, expert
  struct Block {
    enum { kAsked, kReady, kFailed } state = kAsked;
    Status status;
    std::unique_ptr<char[]> bytes;
    std::atomic<uint32_t> leases{0};
    int source = -1;          // the host that it comes from
    uint64_t ticket = 0;      // of its fetch; 0 while the source has not said that it has the block
    bool is_awaited = false;  // a member waits for it that has not read it yet
    uint64_t last_read = 0;   // larger when read later

    bool is_unanswered() const { return state == kAsked && ticket == 0; }
  };
  // How long it is until a block is needed, in layers; the largest is given up first.
  using Distance = std::function<int(const Key& key)>;

  HostCache(int64_t block_bytes, int64_t max_bytes) : block_bytes_(block_bytes), max_bytes_(max_bytes) {}

  Block* Find(const Key& key) const;
  // A new block, asked for.
  Block& Add(const Key& key);
  // Whether there is room for one more block, if need be in place of one that is at least `min_distance` away.
  bool MakeRoom(const Distance& distance_of, int min_distance);
  void NoteRead(Block& block);
  // Gives up a block whose fetch has ended.
  void Forget(const Key& key) { Erase(blocks_.find(key)); }
  // Gives up the blocks that nobody reads and for which `is_over` holds.
  void Drop(const std::function<bool(const Key& key)>& is_over);

 private:
  using Blocks = std::map<Key, std::unique_ptr<Block>>;
  static bool IsIdle(const Block& block);
  Blocks::iterator Erase(Blocks::iterator block);

  const int64_t block_bytes_, max_bytes_;
  Blocks blocks_;
  std::vector<std::unique_ptr<char[]>> spare_;  // touched memory, which costs no page faults
  uint64_t reads_ = 0;
};

}  // namespace fef

#endif  // FEF_HOST_CACHE_H_
