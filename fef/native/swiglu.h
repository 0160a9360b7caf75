// The SwiGLU activation h = silu(g) u, silu(g) = g sigmoid(g), over n floats, and its backward pass.
// An output may be the same array as an input (element for element).
// Source: N. Shazeer, "GLU Variants Improve Transformer", 2020, section 2.
#ifndef FEF_SWIGLU_H_
#define FEF_SWIGLU_H_

#include <cstdint>

#include "gemm.h"
#include "parallel.h"

namespace fef {

// Over the rows of the segments, all arrays (N, width).
void SwiGlu(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* g, const float* u,
            float* h);

// From dh, the gradient with respect to h: dg = dh u silu'(g), du = dh silu(g).
void SwiGluBackward(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* dh,
                    const float* g, const float* u, float* dg, float* du);

}  // namespace fef

#endif  // FEF_SWIGLU_H_
