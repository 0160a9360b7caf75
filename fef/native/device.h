// Modelled device time: how long an accelerator would take for the expert matmuls that this CPU stands in for.
#ifndef FEF_DEVICE_H_
#define FEF_DEVICE_H_

#include <chrono>
#include <cstdint>

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

}  // namespace fef

#endif  // FEF_DEVICE_H_
