#include "pooled_ffn.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "gemm.h"
#include "swiglu.h"

namespace fef {

namespace {

constexpr int64_t kPortions = 8;  // gradients leave in about so many; each is large enough to keep several cores busy

std::unique_ptr<float[]> Scratch(int64_t elems) { return std::unique_ptr<float[]>(new float[elems]); }

// What both passes share: which experts are still to be computed, and the blocks that are here for it.
class FfnTask : public Task {
 public:
  FfnTask(const FfnCall& call, bool is_backward)
      : call_(call), table_(call.domain->shape()), free_at_(call.device.is_modelled() ? Clock::now() : Clock::time_point()) {
    gate_.resize(table_.experts);
    up_.resize(table_.experts);
    down_.resize(table_.experts);
    segments_.resize(table_.experts);
    fault_ = Prepare();
    auto turn = [&](int expert) { return (table_.home[expert] - call_.rank + table_.members) % table_.members; };
    std::stable_sort(pending_.begin(), pending_.end(), [&](int a, int b) {
      const bool a_first = call_.domain->is_home(a) != is_backward, b_first = call_.domain->is_home(b) != is_backward;
      return a_first != b_first ? a_first : turn(a) < turn(b);
    });
    experts_ = pending_;
    call_.domain->Approach(call_.version, call_.layer, is_backward);
  }

  std::optional<Status> Ready() override {
    if (!fault_.ok()) return fault_;
    if (!loans_.empty() || pending_.empty()) return Status::Ok();
    return call_.domain->Read(call_.version, call_.rank, call_.layer, pending_, /*is_all=*/false, &loans_);
  }

  std::string Describe() const override {
    return call_.domain->DescribeUnreadable(call_.version, call_.layer, pending_);
  }

  void Waited(double microseconds) override { CountWait(kWaitPublished, microseconds); }

  Clock::time_point not_before() const override { return free_at_; }

 protected:
  // The next loans to compute with, and their segments; the experts are no longer pending. All that live on this host,
  // or of the others about `most_rows`.
  std::vector<RowSegment> TakePortion(int64_t most_rows, std::vector<Loan>* portion) {
    std::vector<RowSegment> segments;
    const int64_t matrix = call_.d_model * call_.d_expert;
    const bool is_home = !loans_.empty() && call_.domain->is_home(loans_[0].expert);
    size_t taken = 0;
    for (int64_t rows = 0; taken < loans_.size(); ++taken) {
      const int expert = loans_[taken].expert;
      if (call_.domain->is_home(expert) != is_home || (!is_home && rows >= most_rows && taken > 0)) break;
      const float* block = static_cast<const float*>(loans_[taken].lease.block());
      gate_[expert] = block;
      up_[expert] = block + matrix;
      down_[expert] = block + 2 * matrix;
      segments.push_back(segments_[expert]);
      rows += segments_[expert].num_rows;
      pending_.erase(std::find(pending_.begin(), pending_.end(), expert));
    }
    portion->assign(std::make_move_iterator(loans_.begin()), std::make_move_iterator(loans_.begin() + ptrdiff_t(taken)));
    loans_.erase(loans_.begin(), loans_.begin() + ptrdiff_t(taken));
    return segments;
  }

  void CountWait(WaitKind kind, double microseconds) {
    call_.domain->CountWait(call_.version, call_.rank, call_.layer, kind, microseconds);
    if (call_.device.is_modelled()) free_at_ = std::max(free_at_, Clock::now());
  }

  // The device is busy with them from when it is free.
  void Charge(const std::vector<RowSegment>& segments, double flops_per_row) {
    if (!call_.device.is_modelled()) return;
    std::chrono::nanoseconds length{0};
    for (const RowSegment& segment : segments) length += call_.device.Time(segment.num_rows, flops_per_row);
    free_at_ = call_.queue->Add(free_at_, length);
  }

  // Of the stand-in for an expert's matmuls.
  std::vector<float> Means(int expert) const {
    const int64_t d = call_.d_model, f = call_.d_expert;
    std::vector<float> w(d);
    for (int64_t k = 0; k < d; ++k) {
      for (int64_t j = 0; j < f; ++j) w[k] += gate_[expert][k * f + j] + up_[expert][k * f + j];
    }
    for (int64_t j = 0; j < f; ++j) {
      for (int64_t k = 0; k < d; ++k) w[k] += down_[expert][j * d + k];
    }
    for (float& mean : w) mean /= float(f);
    return w;
  }

  void ZeroTail(int64_t width, float* out) const {
    std::fill(out + used_rows_ * width, out + call_.num_rows * width, 0.0f);
  }

  const FfnCall call_;
  const TableShape& table_;
  std::vector<RowSegment> segments_;  // by expert
  std::vector<int> experts_;          // those that have rows
  int64_t used_rows_ = 0;
  std::vector<const float*> gate_, up_, down_;  // by expert

 private:
  Status Prepare() {
    const int64_t block_elems = 3 * call_.d_model * call_.d_expert;
    if (table_.elem_bytes != sizeof(float) || table_.block_elems != block_elems) {
      return Status::Error(Code::kInvalidArgument, "pooled_ffn: table ", table_.name, " holds blocks of ",
                           table_.block_elems, " x ", table_.elem_bytes, " bytes, not the ", block_elems,
                           " floats of this FFN");
    }
    if (call_.num_experts != table_.experts) {
      return Status::Error(Code::kInvalidArgument, "pooled_ffn: rows of ", call_.num_experts, " experts, table ",
                           table_.name, " has ", table_.experts);
    }
    for (int expert = 0; expert < table_.experts; ++expert) {
      const int32_t rows = call_.rows[expert];
      if (rows < 0 || used_rows_ + rows > call_.num_rows) {
        return Status::Error(Code::kInvalidArgument, "pooled_ffn: table ", table_.name, ", expert ", expert, ": ", rows,
                             " rows from row ", used_rows_, " do not fit into ", call_.num_rows);
      }
      segments_[expert] = {int32_t(used_rows_), rows, expert};
      if (rows > 0) pending_.push_back(expert);
      used_rows_ += rows;
    }
    return Status::Ok();
  }

  Status fault_;
  std::vector<int> pending_;
  std::vector<Loan> loans_;  // to be computed next
  Clock::time_point free_at_;

 protected:
  bool is_over() const { return pending_.empty() && loans_.empty(); }
};

class Forward : public FfnTask {
 public:
  Forward(const FfnCall& call, const float* x, float* y, float* g, float* u)
      : FfnTask(call, /*is_backward=*/false), x_(x), y_(y), g_(g), u_(u) {}

  Status Work(Executor& executor, bool* is_done) override {
    if (!is_begun_) Begin();
    const bool was_over = is_over();  // then only the device was still busy
    std::vector<Loan> loans;
    const std::vector<RowSegment> segments = TakePortion(used_rows_, &loans);
    if (call_.device.has_values) Compute(executor, segments);
    else StandIn(executor, segments);
    Charge(segments, 6.0 * call_.d_model * call_.d_expert);
    *is_done = is_over() && (was_over || !call_.device.is_modelled());
    return Status::Ok();
  }

 private:
  void Begin() {
    is_begun_ = true;
    ZeroTail(call_.d_model, y_);
    ZeroTail(call_.d_expert, g_);
    ZeroTail(call_.d_expert, u_);
    h_ = Scratch(used_rows_ * call_.d_expert);
  }

  void Compute(Executor& executor, const std::vector<RowSegment>& segments) {
    const int64_t d = call_.d_model, f = call_.d_expert, n = used_rows_;
    GroupedMatmul(executor, segments, n, x_, d, gate_.data(), false, g_, f, 0.0f);
    GroupedMatmul(executor, segments, n, x_, d, up_.data(), false, u_, f, 0.0f);
    SwiGlu(executor, segments, f, g_, u_, h_.get());
    GroupedMatmul(executor, segments, n, h_.get(), f, down_.data(), false, y_, d, 0.0f);
  }

  void StandIn(Executor& executor, const std::vector<RowSegment>& segments) {
    const int64_t d = call_.d_model;
    ParallelFor(executor, int64_t(segments.size()), [&](int64_t i) {
      const RowSegment& segment = segments[i];
      const std::vector<float> w = Means(segment.expert);
      for (int64_t row = segment.first_row; row < segment.first_row + segment.num_rows; ++row) {
        for (int64_t k = 0; k < d; ++k) y_[row * d + k] = x_[row * d + k] * w[k];
      }
    });
  }

  const float* const x_;
  float *const y_, *const g_, *const u_;
  std::unique_ptr<float[]> h_;
  bool is_begun_ = false;
};

class Backward : public FfnTask {
 public:
  Backward(const FfnCall& call, const float* dy, const float* x, const float* g, const float* u, float* dx)
      : FfnTask(call, /*is_backward=*/true), dy_(dy), x_(x), g_(g), u_(u), dx_(dx) {}

  std::optional<Status> Ready() override {
    if (stage_ >= 0) return FfnTask::Ready();
    return call_.domain->StageAdmitted(call_.version, call_.rank, call_.run, call_.layer, &stage_);
  }

  std::string Describe() const override {
    return is_begun_ ? FfnTask::Describe() : call_.domain->DescribeStages();
  }

  void Waited(double microseconds) override {
    CountWait(is_begun_ ? kWaitPublished : kWaitStage, microseconds);
  }

  Status Work(Executor& executor, bool* is_done) override {
    if (!is_begun_) return Begin(executor, is_done);
    if (Status status = Send(executor); !status.ok()) return status;
    *is_done = is_over();
    std::vector<Loan> loans;
    const std::vector<RowSegment> segments = TakePortion(used_rows_ / kPortions, &loans);
    if (segments.empty()) return Status::Ok();
    if (call_.device.has_values) Compute(executor, segments);
    else StandIn(executor, segments);
    Charge(segments, 12.0 * call_.d_model * call_.d_expert);
    for (const RowSegment& segment : segments) computed_.push_back(segment.expert);
    return Status::Ok();
  }

 private:
  Status Begin(Executor& executor, bool* is_done) {
    std::vector<float*> staged;
    Status status =
        call_.domain->StageGradients(call_.version, call_.rank, call_.layer, stage_, experts_, &staged, executor);
    if (!status.ok()) return status;
    is_begun_ = true;
    const int64_t matrix = call_.d_model * call_.d_expert, hidden = used_rows_ * call_.d_expert;
    for (auto* gradients : {&d_gate_, &d_up_, &d_down_}) gradients->resize(table_.experts);
    for (size_t i = 0; i < staged.size(); ++i) {
      d_gate_[experts_[i]] = staged[i];
      d_up_[experts_[i]] = staged[i] + matrix;
      d_down_[experts_[i]] = staged[i] + 2 * matrix;
    }
    ZeroTail(call_.d_model, dx_);
    for (auto* scratch : {&h_, &dh_, &dg_, &du_}) *scratch = Scratch(hidden);
    *is_done = is_over();
    return Status::Ok();
  }

  // Lets the gradients go that the device has by now.
  Status Send(Executor& executor) {
    if (computed_.empty()) return Status::Ok();
    const std::vector<int> computed = std::move(computed_);
    computed_.clear();
    return call_.domain->SendGradients(call_.version, call_.rank, call_.layer, stage_, computed, executor);
  }

  void Compute(Executor& executor, const std::vector<RowSegment>& segments) {
    const int64_t d = call_.d_model, f = call_.d_expert, n = used_rows_;
    GroupedMatmul(executor, segments, n, dy_, d, down_.data(), true, dh_.get(), f, 0.0f);
    SwiGlu(executor, segments, f, g_, u_, h_.get());
    SwiGluBackward(executor, segments, f, dh_.get(), g_, u_, dg_.get(), du_.get());
    GroupedMatmul(executor, segments, n, dg_.get(), f, gate_.data(), true, dx_, d, 0.0f);
    GroupedMatmul(executor, segments, n, du_.get(), f, up_.data(), true, dx_, d, 1.0f);
    GroupedOuter(executor, segments, n, h_.get(), f, dy_, d, Of(segments, d_down_).data(), table_.experts);
    GroupedOuter(executor, segments, n, x_, d, dg_.get(), f, Of(segments, d_gate_).data(), table_.experts);
    GroupedOuter(executor, segments, n, x_, d, du_.get(), f, Of(segments, d_up_).data(), table_.experts);
  }

  void StandIn(Executor& executor, const std::vector<RowSegment>& segments) {
    const int64_t d = call_.d_model, f = call_.d_expert;
    ParallelFor(executor, int64_t(segments.size()), [&](int64_t i) {
      const RowSegment& segment = segments[i];
      const std::vector<float> w = Means(segment.expert);
      std::vector<float> dw(d);
      for (int64_t row = segment.first_row; row < segment.first_row + segment.num_rows; ++row) {
        for (int64_t k = 0; k < d; ++k) {
          dx_[row * d + k] = dy_[row * d + k] * w[k];
          dw[k] += dy_[row * d + k] * x_[row * d + k];
        }
      }
      for (int64_t k = 0; k < d; ++k) dw[k] /= float(f);
      for (int64_t k = 0; k < d; ++k) {
        std::fill_n(d_gate_[segment.expert] + k * f, f, dw[k]);
        std::fill_n(d_up_[segment.expert] + k * f, f, dw[k]);
      }
      for (int64_t j = 0; j < f; ++j) std::copy(dw.begin(), dw.end(), d_down_[segment.expert] + j * d);
    });
  }

  // Null for the experts of other segments.
  std::vector<float*> Of(const std::vector<RowSegment>& segments, const std::vector<float*>& gradients) const {
    std::vector<float*> chosen(table_.experts);
    for (const RowSegment& segment : segments) chosen[segment.expert] = gradients[segment.expert];
    return chosen;
  }

  const float *const dy_, *const x_, *const g_, *const u_;
  float* const dx_;
  int stage_ = -1;
  bool is_begun_ = false;
  std::vector<float*> d_gate_, d_up_, d_down_;  // by expert
  std::unique_ptr<float[]> h_, dh_, dg_, du_;
  std::vector<int> computed_;  // not yet sent
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
