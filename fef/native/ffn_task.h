// What every expert FFN over the pool is made of: y = hidden(x W_gate + b_gate, x W_up + b_up) W_down + b_down for rows
// of a member, against weights that lie in the pool, forward and backward, expert by expert.
//
// A block is W_gate (D, F), W_up (D, F), W_down (F, D), b_gate (F,), b_up (F,), b_down (D,), of these what the kind of
// FFN has, float32, contiguous. Each expert is computed as soon as its block can be read, and its gradient sent as soon
// as it is computed. Forward this host's experts come first and backward last: meanwhile the others' blocks come, and
// their gradients go.
//
// A device that is modelled without values computes y = x w and its gradient, with w (D,) the sum of the means of W_gate,
// W_up and W_down over F; biases have no part in it.
#ifndef FEF_FFN_TASK_H_
#define FEF_FFN_TASK_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "activation.h"
#include "device.h"
#include "floats.h"
#include "gemm.h"
#include "task.h"

namespace fef {

constexpr int64_t kPortions = 8;  // gradients leave in about so many; each is large enough to keep several cores busy

struct FfnCall {
  Domain* domain = nullptr;
  Version version;
  int64_t run = 0;  // the execution of the program
  int rank = 0;
  int layer = 0;
  std::string ffn;  // name of the kind
  const FfnKind* kind = nullptr;
  Device device;
  DeviceQueue* queue = nullptr;
  int64_t num_rows = 0;           // N, assignments of the member
  int64_t d_model = 0;            // D
  int64_t d_expert = 0;           // F
  int64_t num_experts = 0;        // E
  const int32_t* rows = nullptr;  // (E,), read at once
};

// Where the parts of the experts' blocks, or of their gradients, lie; by expert.
template <typename Float>
struct BlockParts {
  std::vector<Float*> w_gate, w_up, w_down, b_gate, b_up, b_down;

  void Set(size_t num_experts, int expert, Float* block, const FfnCall& call) {
    auto take = [&](std::vector<Float*>& part, int64_t elems) {
      part.resize(num_experts);
      part[expert] = block;
      block += elems;
    };
    const int64_t matrix = call.d_model * call.d_expert;
    if (call.kind->has_gate) take(w_gate, matrix);
    take(w_up, matrix);
    take(w_down, matrix);
    if (!call.kind->has_biases) return;
    if (call.kind->has_gate) take(b_gate, call.d_expert);
    take(b_up, call.d_expert);
    take(b_down, call.d_model);
  }
};

// Which experts are still to be computed, on which rows, and the blocks that are here for it.
class FfnTask : public Task {
 public:
  std::optional<Status> Ready() override;
  std::string Describe() const override;
  void Waited(double microseconds) override { CountWait(kWaitPublished, microseconds); }
  Clock::time_point not_before() const override { return free_at_; }

 protected:
  // Of the member's own rows, sorted by expert from the front, those of the experts for which is_computed holds.
  FfnTask(const FfnCall& call, bool is_backward, const std::function<bool(int)>& is_computed);

  // The next loans to compute with, and their segments; the experts are no longer pending. All that live on this host,
  // or of the others about `most_rows`.
  std::vector<RowSegment> TakePortion(int64_t most_rows, std::vector<Loan>* portion);
  void CountWait(WaitKind kind, double microseconds);
  // The device is busy with them from when it is free; an expert's segments are one GEMM.
  void Charge(const std::vector<RowSegment>& segments, double flops_per_row);
  // Of the stand-in for an expert's matmuls.
  std::vector<float> Means(int expert) const;
  // Before anything is computed on arrays of so many rows.
  void SetOnes(int64_t num_rows);
  bool is_over() const { return pending_.empty() && loans_.empty(); }

  const FfnCall call_;
  const TableShape& table_;
  std::vector<std::vector<RowSegment>> segments_;  // by expert
  std::vector<int> pending_;                       // experts, in the order in which they are wanted
  int64_t used_rows_ = 0;                          // of the member's own
  BlockParts<const float> weights_;
  FloatArray ones_;  // (N,), where there are biases: a bias is a matmul with it, and its gradient too
  Status fault_;

 private:
  Status Check() const;

  std::vector<Loan> loans_;  // to be computed next
  Clock::time_point free_at_;
};

// x -> y, and g = x W_gate + b_gate, u = x W_up + b_up for the backward pass.
class FfnForward : public FfnTask {
 public:
  FfnForward(const FfnCall& call, const std::function<bool(int)>& is_computed, const float* x, float* y, float* g,
             float* u)
      : FfnTask(call, /*is_backward=*/false, is_computed), x_(x), y_(y), g_(g), u_(u) {}

 protected:
  // The next experts, about `most_rows`; the arrays have `num_rows`.
  void ComputeNext(Executor& executor, int64_t most_rows, int64_t num_rows);

  const float* const x_;
  float *const y_, *const g_, *const u_;

 private:
  void Compute(Executor& executor, const std::vector<RowSegment>& segments);
  // out = in W + b.
  void Linear(Executor& executor, const std::vector<RowSegment>& segments, const float* in, int64_t inner,
              const std::vector<const float*>& w, const std::vector<const float*>& b, float* out, int64_t outer);
  void StandIn(Executor& executor, const std::vector<RowSegment>& segments);

  FloatArray h_;
};

// dy, x, g, u -> dx. The weights' gradients are written straight into the staging.
class FfnBackward : public FfnTask {
 public:
  FfnBackward(const FfnCall& call, const std::function<bool(int)>& is_computed, const float* dy, const float* x,
              const float* g, const float* u, float* dx)
      : FfnTask(call, /*is_backward=*/true, is_computed), dy_(dy), x_(x), g_(g), u_(u), dx_(dx) {}

 protected:
  std::optional<Status> Admitted();
  // Says of which experts gradients will come.
  Status Stage(const std::vector<int>& experts, int64_t num_rows, Executor& executor);
  // Computes the next experts; their gradients go with the next SendComputed, when the device has them.
  void ComputeNext(Executor& executor);
  bool HasUnsent() const { return !computed_.empty(); }
  Status SendComputed(Executor& executor);
  // An expert that was staged, and has no rows.
  void SetZero(int expert);

  const float *dy_, *const x_, *const g_, *const u_;
  float* dx_;

 private:
  void Compute(Executor& executor, const std::vector<RowSegment>& segments);
  void StandIn(Executor& executor, const std::vector<RowSegment>& segments);
  // The gradients of W and b, from those of in W + b.
  void LinearGradients(Executor& executor, const std::vector<RowSegment>& segments, const float* in, int64_t inner,
                       const float* d_out, int64_t outer, const std::vector<float*>& d_w, const std::vector<float*>& d_b);
  std::vector<float*> Of(const std::vector<RowSegment>& segments, const std::vector<float*>& gradients) const;

  int stage_ = -1;
  BlockParts<float> gradients_;
  FloatArray h_, dh_, dg_, du_;
  std::vector<int> computed_;  // not yet sent
};

}  // namespace fef

#endif  // FEF_FFN_TASK_H_
