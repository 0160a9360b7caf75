#include "liveness.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace fef {

namespace {

constexpr std::chrono::milliseconds kUnreported{1500}, kReported{10000}, kStep{50};

std::atomic<bool> has_lost_host{false};
struct sigaction action_before;

// JAX aborts this process when host 0, with its coordination service, is gone: at once, before the pool may have seen
// the death itself. The thread that aborts waits here, so that the pool can name the dead.
void OnAbort(int signal) {
  timespec step{0, std::chrono::nanoseconds(kStep).count()};
  for (auto waited = kStep; waited < (has_lost_host ? kReported : kUnreported); waited += kStep) {
    nanosleep(&step, nullptr);
  }
  sigaction(signal, &action_before, nullptr);
  raise(signal);
}

}  // namespace

void Liveness::HoldAborts() {
  struct sigaction action{}, now;
  action.sa_handler = OnAbort;
  action.sa_flags = SA_NODEFER;  // OnAbort hands it on by raising it again
  sigaction(SIGABRT, nullptr, &now);
  if (now.sa_handler == OnAbort) return;
  action_before = now;
  sigaction(SIGABRT, &action, nullptr);
}

void Liveness::OnDeath(const std::string& who) {
  has_lost_host = true;
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
