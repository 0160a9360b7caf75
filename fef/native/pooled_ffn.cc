#include "pooled_ffn.h"

#include <algorithm>
#include <vector>

namespace fef {

namespace {

bool Always(int) { return true; }

void ZeroTail(const FfnCall& call, int64_t used_rows, int64_t width, float* out) {
  std::fill(out + used_rows * width, out + call.num_rows * width, 0.0f);
}

class Forward : public FfnForward {
 public:
  Forward(const FfnCall& call, const float* x, float* y, float* g, float* u) : FfnForward(call, Always, x, y, g, u) {}

  Status Work(Executor& executor, bool* is_done) override {
    if (!is_begun_) {
      is_begun_ = true;
      ZeroTail(call_, used_rows_, call_.d_model, y_);
      if (call_.kind->has_gate) ZeroTail(call_, used_rows_, call_.d_expert, g_);
      ZeroTail(call_, used_rows_, call_.d_expert, u_);
    }
    const bool was_over = is_over();  // then only the device was still busy
    ComputeNext(executor, used_rows_, used_rows_);
    *is_done = is_over() && (was_over || !call_.device.is_modelled());
    return Status::Ok();
  }

 private:
  bool is_begun_ = false;
};

class Backward : public FfnBackward {
 public:
  Backward(const FfnCall& call, const float* dy, const float* x, const float* g, const float* u, float* dx)
      : FfnBackward(call, Always, dy, x, g, u, dx) {}

  std::optional<Status> Ready() override { return is_begun_ ? FfnTask::Ready() : Admitted(); }

  std::string Describe() const override {
    return is_begun_ ? FfnTask::Describe() : call_.domain->DescribeStages();
  }

  void Waited(double microseconds) override {
    CountWait(is_begun_ ? kWaitPublished : kWaitStage, microseconds);
  }

  Status Work(Executor& executor, bool* is_done) override {
    if (!is_begun_) {
      is_begun_ = true;
      ZeroTail(call_, used_rows_, call_.d_model, dx_);
      const Status status = Stage(pending_, used_rows_, executor);
      *is_done = is_over();
      return status;
    }
    if (Status status = SendComputed(executor); !status.ok()) return status;
    *is_done = is_over();
    ComputeNext(executor);
    return Status::Ok();
  }

 private:
  bool is_begun_ = false;
};

}  // namespace

std::shared_ptr<Task> PooledFfn(const FfnCall& call, const float* x, float* y, float* g, float* u) {
  return std::make_shared<Forward>(call, x, y, g, u);
}

std::shared_ptr<Task> PooledFfnBackward(const FfnCall& call, const float* dy, const float* x, const float* g,
                                        const float* u, float* dx) {
  return std::make_shared<Backward>(call, dy, x, g, u, dx);
}

}  // namespace fef
