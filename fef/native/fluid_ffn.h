// The expert FFN of one member and layer where, expert by expert, the weights come to the tokens or the tokens go to the
// weights: y_t = sum over the assignments of token t of weight * FFN_expert(x_t).
//
// Assignments are sorted by expert, from the front. Those of experts that are visited go there, as rows of x, and come
// back as sums; the others are computed here, as are the rows of other members that visit this one's experts. Arrays of M
// rows hold the member's own assignments in the first N, and its visitors', by expert and member, after them.
#ifndef FEF_FLUID_FFN_H_
#define FEF_FLUID_FFN_H_

#include <memory>

#include "ffn_task.h"
#include "flight.h"

namespace fef {

struct FluidCall {
  FfnCall ffn;
  Assignments assignments;
  int64_t room = 0;  // M - N; 0: nobody visits anybody
  bool is_deduplicated = true;
};

// What the forward pass keeps for the backward pass.
template <typename Float>
struct FluidArrays {
  Float *x = nullptr, *y = nullptr;  // (M, D)
  Float *g = nullptr, *u = nullptr;  // (M, F); without a gate nothing is at g
};

// x: (T, D) -> y: (T, D).
std::shared_ptr<Task> FluidFfn(const FluidCall& call, const float* x, float* y, const FluidArrays<float>& kept);

// dy: (T, D) -> dx: (T, D), dweight: (N,).
std::shared_ptr<Task> FluidFfnBackward(const FluidCall& call, const float* dy, const FluidArrays<const float>& kept,
                                       float* dx, float* dweight);

}  // namespace fef

#endif  // FEF_FLUID_FFN_H_
