// Blocks of other hosts that are read one-sided: in which order, how many at once, and whether what came is the block.
#ifndef FEF_ONE_SIDED_READS_H_
#define FEF_ONE_SIDED_READS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "client.h"
#include "one_sided.h"
#include "status.h"

namespace fef {

// From each host the most urgent block first, and the next one when less than the window is on its way. Thread-safe.
class OneSidedReads {
 public:
  // A read that takes longer than deadline_s takes its host with it, as OneSided has it.
  OneSidedReads(OneSided* network, uint64_t window_bytes, double deadline_s)
      : network_(network), window_bytes_(window_bytes), deadline_s_(deadline_s) {}

  // A ticket, for Hurry.
  uint64_t Add(int host, ReadRequest request);
  // Changes a read's urgency, if it has not begun.
  void Hurry(int host, uint64_t ticket, int urgency);

 private:
  using Read = std::shared_ptr<ReadRequest>;
  struct Peer {
    std::map<uint64_t, Read> waiting;          // by ticket
    std::set<std::pair<int, uint64_t>> queue;  // their urgencies and tickets
    uint64_t in_flight = 0;                    // bytes
  };
  void Pump(int host);
  void Begin(int host, const Read& read);
  void CheckVersion(int host, const Read& read, const std::function<void()>& then);
  void End(int host, const Read& read, const Status& status);

  OneSided* const network_;
  const uint64_t window_bytes_;
  const double deadline_s_;
  std::mutex mutex_;
  std::map<int, Peer> peers_;
  uint64_t last_ticket_ = 0;
};

}  // namespace fef

#endif  // FEF_ONE_SIDED_READS_H_
