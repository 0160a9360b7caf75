// The expert FFN of one member and layer against the pool, tokens staying where they are.
//
// Rows are sorted by expert: rows_E[e] rows of expert e, from the front; rows beyond their sum are unused and come out
// as zeros.
#ifndef FEF_POOLED_FFN_H_
#define FEF_POOLED_FFN_H_

#include <memory>

#include "ffn_task.h"

namespace fef {

// x: (N, D) -> y: (N, D), and g, u: (N, F) for the backward pass; without a gate nothing is at g.
std::shared_ptr<Task> PooledFfn(const FfnCall& call, const float* x, float* y, float* g, float* u);

// dy, x: (N, D), g, u: (N, F) -> dx: (N, D).
std::shared_ptr<Task> PooledFfnBackward(const FfnCall& call, const float* dy, const float* x, const float* g,
                                        const float* u, float* dx);

}  // namespace fef

#endif  // FEF_POOLED_FFN_H_
