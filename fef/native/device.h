// Modelled device time: how long an accelerator would take for the expert matmuls that this CPU stands in for.
#ifndef FEF_DEVICE_H_
#define FEF_DEVICE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>

namespace fef {

struct Device {
  double flops = 0;       // a large GEMM's, per second; 0: nothing is modelled
  double half_rows = 0;   // rows at which a GEMM has half of that rate
  bool has_values = true; // whether the matmuls are computed, or a cheap stand-in for them

  bool is_modelled() const { return flops > 0; }
  // Of a GEMM over so many rows; each GEMM pays for half_rows more than it has.
  std::chrono::nanoseconds Time(int64_t rows, double flops_per_row) const {
    const double seconds = rows == 0 || !is_modelled() ? 0 : (double(rows) + half_rows) * flops_per_row / flops;
    return std::chrono::nanoseconds(int64_t(seconds * 1e9));
  }
};

// One device does one thing at a time.
class DeviceQueue {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // When work is done that could begin at `ready`.
  Time Add(Time ready, std::chrono::nanoseconds length) {
    std::lock_guard<std::mutex> lock(mutex_);
    return free_at_ = std::max(free_at_, ready) + length;
  }

 private:
  std::mutex mutex_;
  Time free_at_;
};

// Of a device of this process.
DeviceQueue& QueueOf(int32_t device_ordinal);

}  // namespace fef

#endif  // FEF_DEVICE_H_
