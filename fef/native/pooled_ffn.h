// The expert FFN of one member and layer, y = (silu(x W_gate) * x W_up) W_down, against weights that lie in the pool.
//
// Rows are sorted by expert: rows_E[e] rows of expert e, from the front; rows beyond their sum are unused and come out
// as zeros. A block is W_gate (D, F), W_up (D, F), W_down (F, D), float32, contiguous.
#ifndef FEF_POOLED_FFN_H_
#define FEF_POOLED_FFN_H_

#include "domain.h"

namespace fef {

struct FfnRows {
  int64_t num_rows = 0;   // N
  int64_t d_model = 0;    // D
  int64_t d_expert = 0;   // F
  int64_t num_experts = 0;        // E
  const int32_t* rows = nullptr;  // (E,)
};

// x: (N, D) -> y: (N, D), and g = x W_gate, u = x W_up: (N, F) for the backward pass.
Status PooledFfn(Domain& domain, Executor& executor, const Version& version, int rank, int layer, const FfnRows& shape,
                 const float* x, float* y, float* g, float* u);

// dy, x: (N, D), g, u: (N, F) -> dx: (N, D). The weights' gradients are written straight into the staging of their
// homes, and the stage, to which the rank was admitted, is closed.
Status PooledFfnBackward(Domain& domain, Executor& executor, const Version& version, int rank, int layer, int stage,
                         const FfnRows& shape, const float* dy, const float* x, const float* g, const float* u,
                         float* dx);

}  // namespace fef

#endif  // FEF_POOLED_FFN_H_
