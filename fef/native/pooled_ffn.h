// The expert FFN of one member and layer, y = (silu(x W_gate) * x W_up) W_down, against weights that lie in the pool.
//
// Rows are sorted by expert: rows_E[e] rows of expert e, from the front; rows beyond their sum are unused and come out
// as zeros. A block is W_gate (D, F), W_up (D, F), W_down (F, D), float32, contiguous.
//
// Each expert is computed as soon as its block can be read, and its gradient sent as soon as it is computed. Forward
// this host's experts come first and backward last: meanwhile the others' blocks come, and their gradients go.
//
// A device that is modelled without values computes y = x w and its gradient, with w (D,) the sum of the means of W_gate,
// W_up and W_down over F.
#ifndef FEF_POOLED_FFN_H_
#define FEF_POOLED_FFN_H_

#include <memory>

#include "device.h"
#include "task.h"

namespace fef {

struct FfnCall {
  Domain* domain = nullptr;
  Version version;
  int64_t run = 0;  // the execution of the program
  int rank = 0;
  int layer = 0;
  Device device;
  DeviceQueue* queue = nullptr;
  int64_t num_rows = 0;           // N
  int64_t d_model = 0;            // D
  int64_t d_expert = 0;           // F
  int64_t num_experts = 0;        // E
  const int32_t* rows = nullptr;  // (E,), read at once
};

// x: (N, D) -> y: (N, D), and g = x W_gate, u = x W_up: (N, F) for the backward pass.
std::shared_ptr<Task> PooledFfn(const FfnCall& call, const float* x, float* y, float* g, float* u);

// dy, x: (N, D), g, u: (N, F) -> dx: (N, D). The weights' gradients are written straight into the staging.
std::shared_ptr<Task> PooledFfnBackward(const FfnCall& call, const float* dy, const float* x, const float* g,
                                        const float* u, float* dx);

}  // namespace fef

#endif  // FEF_POOLED_FFN_H_
