#include "ffn_task.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace fef {

FfnTask::FfnTask(const FfnCall& call, bool is_backward, const std::function<bool(int)>& is_computed)
    : call_(call),
      table_(call.domain->shape()),
      segments_(table_.experts),
      fault_(Check()),
      free_at_(call.device.is_modelled() ? Clock::now() : Clock::time_point()) {
  if (!fault_.ok()) return;
  for (int expert = 0; expert < table_.experts; ++expert) {
    const int32_t rows = call_.rows[expert];
    if (rows > 0 && is_computed(expert)) {
      segments_[expert].push_back({int32_t(used_rows_), rows, expert});
      pending_.push_back(expert);
    }
    used_rows_ += rows;
  }
  auto turn = [&](int expert) { return (table_.home[expert] - call_.rank + table_.members) % table_.members; };
  // Backward a popular expert comes before the rest: all its readers' gradients go to one home. Counts that differ by
  // less than about a factor of two are no reason to leave the turn, which spreads the members over the homes.
  auto popularity = [&](int expert) { return is_backward ? std::ilogb(double(call_.rows[expert])) : 0; };
  std::stable_sort(pending_.begin(), pending_.end(), [&](int a, int b) {
    const bool a_first = call_.domain->is_home(a) != is_backward, b_first = call_.domain->is_home(b) != is_backward;
    if (a_first != b_first) return a_first;
    return std::make_pair(-popularity(a), turn(a)) < std::make_pair(-popularity(b), turn(b));
  });
  call_.domain->Approach(call_.version, call_.layer, is_backward);
}

Status FfnTask::Check() const {
  if (call_.kind == nullptr) {
    return Status::Error(Code::kInvalidArgument, "pooled_ffn: no native code for the FFN ", call_.ffn,
                         "; config.dispatch.matmul=jax does without");
  }
  const int64_t block_elems = call_.kind->num_elems(call_.d_model, call_.d_expert);
  if (table_.elem_bytes != sizeof(float) || table_.block_elems != block_elems) {
    return Status::Error(Code::kInvalidArgument, "pooled_ffn: table ", table_.name, " holds blocks of ",
                         table_.block_elems, " x ", table_.elem_bytes, " bytes, not the ", block_elems,
                         " floats of this FFN");
  }
  if (call_.num_experts != table_.experts) {
    return Status::Error(Code::kInvalidArgument, "pooled_ffn: rows of ", call_.num_experts, " experts, table ",
                         table_.name, " has ", table_.experts);
  }
  int64_t first_row = 0;
  for (int expert = 0; expert < table_.experts; ++expert) {
    const int32_t rows = call_.rows[expert];
    if (rows < 0 || first_row + rows > call_.num_rows) {
      return Status::Error(Code::kInvalidArgument, "pooled_ffn: table ", table_.name, ", expert ", expert, ": ", rows,
                           " rows from row ", first_row, " do not fit into ", call_.num_rows);
    }
    first_row += rows;
  }
  return Status::Ok();
}

std::optional<Status> FfnTask::Ready() {
  if (!fault_.ok()) return fault_;
  if (!loans_.empty() || pending_.empty()) return Status::Ok();
  return call_.domain->Read(call_.version, call_.rank, call_.layer, pending_, /*is_all=*/false, &loans_);
}

std::string FfnTask::Describe() const {
  return call_.domain->DescribeUnreadable(call_.version, call_.layer, pending_);
}

std::vector<RowSegment> FfnTask::TakePortion(int64_t most_rows, std::vector<Loan>* portion) {
  std::vector<RowSegment> segments;
  const bool is_home = !loans_.empty() && call_.domain->is_home(loans_[0].expert);
  size_t taken = 0;
  for (int64_t rows = 0; taken < loans_.size(); ++taken) {
    const int expert = loans_[taken].expert;
    if (call_.domain->is_home(expert) != is_home || (!is_home && rows >= most_rows && taken > 0)) break;
    weights_.Set(table_.experts, expert, static_cast<const float*>(loans_[taken].lease.block()), call_);
    segments.insert(segments.end(), segments_[expert].begin(), segments_[expert].end());
    rows += CountRows(segments_[expert]);
    pending_.erase(std::find(pending_.begin(), pending_.end(), expert));
  }
  portion->assign(std::make_move_iterator(loans_.begin()), std::make_move_iterator(loans_.begin() + ptrdiff_t(taken)));
  loans_.erase(loans_.begin(), loans_.begin() + ptrdiff_t(taken));
  return segments;
}

void FfnTask::CountWait(WaitKind kind, double microseconds) {
  call_.domain->CountWait(call_.version, call_.rank, call_.layer, kind, microseconds);
  if (call_.device.is_modelled()) free_at_ = std::max(free_at_, Clock::now());
}

void FfnTask::Charge(const std::vector<RowSegment>& segments, double flops_per_row) {
  if (!call_.device.is_modelled()) return;
  std::chrono::nanoseconds length{0};
  for (size_t i = 0; i < segments.size();) {
    const int32_t expert = segments[i].expert;
    int64_t rows = 0;
    for (; i < segments.size() && segments[i].expert == expert; ++i) rows += segments[i].num_rows;
    length += call_.device.Time(rows, flops_per_row);
  }
  free_at_ = call_.queue->Add(free_at_, length);
}

std::vector<float> FfnTask::Means(int expert) const {
  const int64_t d = call_.d_model, f = call_.d_expert;
  std::vector<float> w(d);
  const float* const gate = call_.kind->has_gate ? weights_.w_gate[expert] : nullptr;
  const float *const up = weights_.w_up[expert], *const down = weights_.w_down[expert];
  for (int64_t k = 0; k < d; ++k) {
    for (int64_t j = 0; j < f; ++j) w[k] += gate == nullptr ? up[k * f + j] : gate[k * f + j] + up[k * f + j];
  }
  for (int64_t j = 0; j < f; ++j) {
    for (int64_t k = 0; k < d; ++k) w[k] += down[j * d + k];
  }
  for (float& mean : w) mean /= float(f);
  return w;
}

void FfnTask::SetOnes(int64_t num_rows) {
  if (!call_.kind->has_biases) return;
  ones_ = Allocate(num_rows);
  std::fill_n(ones_.get(), num_rows, 1.0f);
}

void FfnForward::ComputeNext(Executor& executor, int64_t most_rows, int64_t num_rows) {
  if (h_ == nullptr) {
    h_ = Allocate(num_rows * call_.d_expert);
    SetOnes(num_rows);
  }
  std::vector<Loan> loans;
  const std::vector<RowSegment> segments = TakePortion(most_rows, &loans);
  if (call_.device.has_values) Compute(executor, segments);
  else StandIn(executor, segments);
  Charge(segments, call_.kind->FlopsPerRow(call_.d_model, call_.d_expert));
}

void FfnForward::Compute(Executor& executor, const std::vector<RowSegment>& segments) {
  const int64_t d = call_.d_model, f = call_.d_expert;
  if (call_.kind->has_gate) Linear(executor, segments, x_, d, weights_.w_gate, weights_.b_gate, g_, f);
  Linear(executor, segments, x_, d, weights_.w_up, weights_.b_up, u_, f);
  call_.kind->activate(executor, segments, f, g_, u_, h_.get());
  Linear(executor, segments, h_.get(), f, weights_.w_down, weights_.b_down, y_, d);
}

void FfnForward::Linear(Executor& executor, const std::vector<RowSegment>& segments, const float* in, int64_t inner,
                        const std::vector<const float*>& w, const std::vector<const float*>& b, float* out,
                        int64_t outer) {
  GroupedMatmul(executor, segments, used_rows_, in, inner, w.data(), false, out, outer, 0.0f);
  if (b.empty()) return;
  GroupedMatmul(executor, segments, used_rows_, ones_.get(), 1, b.data(), false, out, outer, 1.0f);
}

void FfnForward::StandIn(Executor& executor, const std::vector<RowSegment>& segments) {
  const int64_t d = call_.d_model;
  ParallelFor(executor, int64_t(segments.size()), [&](int64_t i) {
    const RowSegment& segment = segments[i];
    const std::vector<float> w = Means(segment.expert);
    for (int64_t row = segment.first_row; row < segment.first_row + segment.num_rows; ++row) {
      for (int64_t k = 0; k < d; ++k) y_[row * d + k] = x_[row * d + k] * w[k];
    }
  });
}

std::optional<Status> FfnBackward::Admitted() {
  if (!fault_.ok()) return fault_;
  if (stage_ >= 0) return Status::Ok();
  return call_.domain->StageAdmitted(call_.version, call_.rank, call_.run, call_.layer, &stage_);
}

Status FfnBackward::Stage(const std::vector<int>& experts, int64_t num_rows, Executor& executor) {
  std::vector<float*> staged;
  Status status = call_.domain->StageGradients(call_.version, call_.rank, call_.layer, stage_, experts, &staged, executor);
  if (!status.ok()) return status;
  for (size_t i = 0; i < staged.size(); ++i) gradients_.Set(table_.experts, experts[i], staged[i], call_);
  for (auto* scratch : {&h_, &dh_, &du_}) *scratch = Allocate(num_rows * call_.d_expert);
  if (call_.kind->has_gate) dg_ = Allocate(num_rows * call_.d_expert);
  SetOnes(num_rows);
  return Status::Ok();
}

void FfnBackward::ComputeNext(Executor& executor) {
  std::vector<Loan> loans;
  const std::vector<RowSegment> segments = TakePortion(used_rows_ / kPortions, &loans);
  if (segments.empty()) return;
  if (call_.device.has_values) Compute(executor, segments);
  else StandIn(executor, segments);
  Charge(segments, 2 * call_.kind->FlopsPerRow(call_.d_model, call_.d_expert));
  for (const RowSegment& segment : segments) {
    if (computed_.empty() || computed_.back() != segment.expert) computed_.push_back(segment.expert);
  }
}

Status FfnBackward::SendComputed(Executor& executor) {
  if (computed_.empty()) return Status::Ok();
  const std::vector<int> computed = std::move(computed_);
  computed_.clear();
  return call_.domain->SendGradients(call_.version, call_.rank, call_.layer, stage_, computed, executor);
}

void FfnBackward::SetZero(int expert) {
  float* const first = call_.kind->has_gate ? gradients_.w_gate[expert] : gradients_.w_up[expert];
  std::fill_n(first, table_.block_elems, 0.0f);
  computed_.push_back(expert);
}

void FfnBackward::Compute(Executor& executor, const std::vector<RowSegment>& segments) {
  const int64_t d = call_.d_model, f = call_.d_expert, n = used_rows_;
  const bool has_gate = call_.kind->has_gate;
  GroupedMatmul(executor, segments, n, dy_, d, weights_.w_down.data(), true, dh_.get(), f, 0.0f);
  call_.kind->activate(executor, segments, f, g_, u_, h_.get());
  call_.kind->backward(executor, segments, f, dh_.get(), g_, u_, dg_.get(), du_.get());
  if (has_gate) GroupedMatmul(executor, segments, n, dg_.get(), f, weights_.w_gate.data(), true, dx_, d, 0.0f);
  GroupedMatmul(executor, segments, n, du_.get(), f, weights_.w_up.data(), true, dx_, d, has_gate ? 1.0f : 0.0f);
  LinearGradients(executor, segments, h_.get(), f, dy_, d, gradients_.w_down, gradients_.b_down);
  if (has_gate) LinearGradients(executor, segments, x_, d, dg_.get(), f, gradients_.w_gate, gradients_.b_gate);
  LinearGradients(executor, segments, x_, d, du_.get(), f, gradients_.w_up, gradients_.b_up);
}

void FfnBackward::LinearGradients(Executor& executor, const std::vector<RowSegment>& segments, const float* in,
                                  int64_t inner, const float* d_out, int64_t outer, const std::vector<float*>& d_w,
                                  const std::vector<float*>& d_b) {
  const int64_t n = used_rows_;
  GroupedOuter(executor, segments, n, in, inner, d_out, outer, Of(segments, d_w).data(), table_.experts);
  if (d_b.empty()) return;
  GroupedOuter(executor, segments, n, ones_.get(), 1, d_out, outer, Of(segments, d_b).data(), table_.experts);
}

void FfnBackward::StandIn(Executor& executor, const std::vector<RowSegment>& segments) {
  const int64_t d = call_.d_model, f = call_.d_expert;
  std::vector<int> experts;
  for (const RowSegment& segment : segments) {
    if (experts.empty() || experts.back() != segment.expert) experts.push_back(segment.expert);
  }
  ParallelFor(executor, int64_t(experts.size()), [&](int64_t i) {
    const int expert = experts[i];
    const std::vector<float> w = Means(expert);
    std::vector<float> dw(d);
    for (const RowSegment& segment : segments_[expert]) {
      for (int64_t row = segment.first_row; row < segment.first_row + segment.num_rows; ++row) {
        for (int64_t k = 0; k < d; ++k) {
          dx_[row * d + k] = dy_[row * d + k] * w[k];
          dw[k] += dy_[row * d + k] * x_[row * d + k];
        }
      }
    }
    for (int64_t k = 0; k < d; ++k) dw[k] /= float(f);
    for (int64_t k = 0; k < d; ++k) {
      if (call_.kind->has_gate) std::fill_n(gradients_.w_gate[expert] + k * f, f, dw[k]);
      std::fill_n(gradients_.w_up[expert] + k * f, f, dw[k]);
    }
    for (int64_t j = 0; j < f; ++j) std::copy(dw.begin(), dw.end(), gradients_.w_down[expert] + j * d);
    if (!call_.kind->has_biases) return;
    if (call_.kind->has_gate) std::fill_n(gradients_.b_gate[expert], f, 0.0f);
    std::fill_n(gradients_.b_up[expert], f, 0.0f);
    std::fill_n(gradients_.b_down[expert], d, 0.0f);
  });
}

// Null for the experts of other segments.
std::vector<float*> FfnBackward::Of(const std::vector<RowSegment>& segments,
                                    const std::vector<float*>& gradients) const {
  std::vector<float*> chosen(table_.experts);
  for (const RowSegment& segment : segments) chosen[segment.expert] = gradients[segment.expert];
  return chosen;
}

}  // namespace fef
