// What becomes of this process when another host dies.
//
// An operation of the pool that needs the dead host fails, and Python is told. But a program may be inside a collective
// of XLA, where nothing can be raised: then this process ends, with one line that names the dead. JAX's own abort, which
// names nobody, is held back for as long as that takes.
#ifndef FEF_LIVENESS_H_
#define FEF_LIVENESS_H_

#include <atomic>
#include <memory>
#include <string>

namespace fef {

constexpr int kExitPeerLost = 75;  // EX_TEMPFAIL of sysexits.h: start the job again

class Liveness {
 public:
  // From now on an abort waits for the death of a host to be known and told, at most 1.5 s when none is.
  static void HoldAborts();
  // Ends the process soon unless a pool operation reports the loss and Disarm() follows.
  void OnDeath(const std::string& who);
  // A pool operation has failed for the loss of a host: the program has some more time to end.
  void OnReport() { state_->is_reported = true; }
  // Python has the error in hand, or closes the pool.
  void Disarm() { state_->is_disarmed = true; }

 private:
  struct State {
    std::atomic<bool> is_reported{false}, is_disarmed{false}, is_running{false};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace fef

#endif  // FEF_LIVENESS_H_
