#include "liveness.h"

#include <unistd.h>

#include <chrono>
#include <thread>

namespace fef {

namespace {

constexpr std::chrono::milliseconds kUnreported{1500}, kReported{10000}, kStep{50};

}  // namespace

void Liveness::OnDeath(const std::string& who) {
  if (state_->is_disarmed || state_->is_running.exchange(true)) return;
  std::thread([state = state_, who] {
    for (auto waited = kStep; waited < (state->is_reported ? kReported : kUnreported); waited += kStep) {
      std::this_thread::sleep_for(kStep);
      if (state->is_disarmed) return;
    }
    const std::string text = "fef: " + who + "; this process cannot go on and ends with status " +
                             std::to_string(kExitPeerLost) + "\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    _exit(kExitPeerLost);
  }).detach();
}

}  // namespace fef
