// The kinds of FFN, as in fef/ffn.py: what is in a block, and the activation h = hidden(g, u) with its backward pass.
//   swiglu: silu(g) u, with silu(g) = g sigmoid(g);  relu: max(u, 0)
//   gelu: u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3)))
//   clamped_swiglu: (u + 1) g sigmoid(1.702 g), g clipped at 7 from above, u at -7 and 7; no gradient from the limit on
// An output may be the same array as an input (element for element).
// Sources: as there.
#ifndef FEF_ACTIVATION_H_
#define FEF_ACTIVATION_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "gemm.h"
#include "parallel.h"

namespace fef {

// Over the rows of the segments, all arrays (N, width). A kind without a gate leaves g and dg alone.
struct FfnKind {
  const char* name;
  bool has_gate;
  bool has_biases;
  void (*activate)(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* g,
                   const float* u, float* h);
  // From dh, the gradient with respect to h.
  void (*backward)(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* dh,
                   const float* g, const float* u, float* dg, float* du);

  int num_matrices() const { return has_gate ? 3 : 2; }
  // Of a block: W_gate (D, F), W_up (D, F), W_down (F, D), b_gate (F,), b_up (F,), b_down (D,), of what the kind has.
  int64_t num_elems(int64_t d_model, int64_t d_expert) const {
    return num_matrices() * d_model * d_expert + (has_biases ? (num_matrices() - 1) * d_expert + d_model : 0);
  }
  // Of the matmuls of a forward pass; the backward pass has twice as many.
  double FlopsPerRow(int64_t d_model, int64_t d_expert) const { return 2.0 * num_matrices() * d_model * d_expert; }
};

// Null if there is none of that name.
const FfnKind* FindFfnKind(std::string_view name);

}  // namespace fef

#endif  // FEF_ACTIVATION_H_
