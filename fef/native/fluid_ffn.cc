#include "fluid_ffn.h"

#include <algorithm>
#include <vector>

#include "floats.h"

namespace fef {

namespace {

// The visitors' side of a pass, for both passes: who comes, whether they were served, what has come back.
class Visitors {
 public:
  Visitors(const FluidCall& call, bool is_backward) : call_(call), is_backward_(is_backward) {}

  bool is_open() const { return call_.room > 0; }
  bool is_own(int expert) const { return domain().shape().home[expert] == call_.ffn.rank; }
  bool is_sent(int expert) const { return call_.assignments.is_visiting[expert] != 0; }

  // A visit is no matter of one's own experts, and needs room everywhere.
  Status Check() const {
    for (int expert = 0; expert < domain().shape().experts; ++expert) {
      if (!is_sent(expert) || (is_open() && !is_own(expert))) continue;
      return Status::Error(Code::kInvalidArgument, "fluid_ffn: expert ", expert, " cannot be visited: ",
                           is_own(expert) ? "it is the member's own" : "there is no room for visitors");
    }
    return Status::Ok();
  }

  Status Depart(const float* rows, Executor& executor) {
    if (!is_open()) return Status::Ok();
    return domain().Depart(call_.ffn.version, call_.ffn.rank, call_.ffn.layer, is_backward_, call_.assignments,
                           call_.is_deduplicated, rows, call_.ffn.d_model, executor, &flight_);
  }
  std::optional<Status> Arrived() const {
    return flight_ == nullptr ? Status::Ok() : domain().Arrived(*flight_, call_.ffn.rank);
  }
  std::optional<Status> Returned() const {
    return flight_ == nullptr ? Status::Ok() : domain().Returned(*flight_, call_.ffn.rank);
  }
  std::string Describe() const { return domain().DescribeFlight(*flight_, call_.ffn.rank); }

  // After Arrived; fills the rows after the first N of `array`.
  Status Take(float* array, Executor& executor) {
    if (flight_ == nullptr) return Status::Ok();
    const int64_t first_row = call_.ffn.num_rows;
    visits_ = VisitsOf(*flight_, domain().ExpertsOf(call_.ffn.rank), call_.ffn.rank, first_row);
    int64_t num_rows = 0;
    for (const Visit& visit : visits_) num_rows += visit.num_assignments;
    if (num_rows > call_.room) {
      return Status::Error(Code::kInvalidArgument, "fluid_ffn: layer ", call_.ffn.layer, ", rank ", call_.ffn.rank,
                           ": ", num_rows, " rows come to visit, there is room for ", call_.room);
    }
    std::vector<RowCopy> copies;
    for (const Visit& visit : visits_) AppendCopies(*flight_, visit, array, /*is_weighted=*/is_backward_, &copies);
    CopyRows(executor, copies, call_.ffn.d_model);
    return Status::Ok();
  }
  const std::vector<Visit>& visits() const { return visits_; }

  // dots[row] of each visiting row: of what has come, without its weight, and of the row of y.
  void Dot(const float* y, float* dots, Executor& executor) const {
    std::vector<DotProduct> products;
    for (const Visit& visit : visits_) {
      for (int64_t i = 0; i < visit.num_assignments; ++i) {
        const int64_t row = visit.first_row + i;
        products.push_back({VisitingRow(*flight_, visit, i), y + row * call_.ffn.d_model, dots + row});
      }
    }
    DotProducts(executor, products, call_.ffn.d_model);
  }

  void Serve(const float* rows, const float* dots, Executor& executor) {
    if (flight_ == nullptr) return;
    domain().Serve(flight_, call_.ffn.rank, {false, visits_, rows, dots, /*is_weighted=*/!is_backward_},
                   executor);
  }

  // After Returned: what has come back for the member's tokens, host by host.
  void AppendReturns(std::vector<Term>* terms, float* dweight) const {
    if (flight_ == nullptr) return;
    for (const auto& [rank_and_host, trip] : flight_->trips) {
      const auto& [rank, host] = rank_and_host;
      if (rank != call_.ffn.rank) continue;
      const Flight::Guest& self = flight_->guests[rank];
      if (trip.sending.parcel.num_rows == 0) continue;
      const bool is_here = trip.results == nullptr;  // on the member's own host
      const float* rows = is_here ? self.results.get() : trip.results.get();
      for (size_t i = 0; i < trip.sending.token_of.size(); ++i) {
        terms->push_back({trip.sending.token_of[i], 1.0f, rows + int64_t(i) * call_.ffn.d_model});
      }
      if (dweight == nullptr) continue;
      const std::vector<float>& dots = is_here ? self.dots : trip.dots;
      for (size_t i = 0; i < dots.size(); ++i) dweight[trip.sending.assignment_of[i]] = dots[i];
    }
  }

  void Leave() {
    if (flight_ != nullptr) domain().LeaveFlight(flight_, call_.ffn.rank);
  }

  // Calls with each assignment that is computed here, and its row.
  template <typename F>
  void ForOwn(const F& call) const {
    int64_t row = 0;
    for (int expert = 0; expert < domain().shape().experts; ++expert) {
      for (const int64_t end = row + call_.assignments.counts[expert]; row < end; ++row) {
        if (!is_sent(expert)) call(row, int64_t{call_.assignments.token[row]}, call_.assignments.weight[row]);
      }
    }
  }

 private:
  Domain& domain() const { return *call_.ffn.domain; }

  const FluidCall& call_;
  const bool is_backward_;
  std::shared_ptr<Flight> flight_;
  std::vector<Visit> visits_;
};

// The order of both passes: send the rows; compute what is read, and, as soon as they have come, the visitors' rows with
// the member's own experts; let the visitors go home; take in one's own.
template <typename Ffn>
class FluidTask : public Ffn {
 public:
  std::optional<Status> Ready() override {
    if (!this->fault_.ok()) return this->fault_;
    if (!has_departed_) return Status::Ok();
    if (!this->is_staged_) return this->Admitted();
    if (IsServing() || this->HasUnsent()) return Status::Ok();
    if (!has_visitors_) {
      if (const auto arrived = visitors_.Arrived()) {
        have_arrived_ = true;
        return arrived;
      }
    }
    if (!this->is_over()) return Ffn::Ready();
    return has_visitors_ ? visitors_.Returned() : std::nullopt;
  }

  std::string Describe() const override {
    if (!this->is_staged_) return this->call_.domain->DescribeStages();
    return this->is_over() ? visitors_.Describe() : Ffn::Describe();
  }

  void Waited(double microseconds) override {
    this->CountWait(!this->is_staged_ ? kWaitStage : this->is_over() ? kWaitTokens : kWaitPublished, microseconds);
  }

 protected:
  template <typename... Arrays>
  FluidTask(const FluidCall& call, bool is_backward, Arrays... arrays)
      : Ffn(call.ffn, [&](int expert) { return call.assignments.is_visiting[expert] == 0; }, arrays...),
        fluid_(call),
        visitors_(fluid_, is_backward),
        is_backward_(is_backward) {
    if (this->fault_.ok()) this->fault_ = visitors_.Check();
    if (!visitors_.is_open()) return;
    // The member's own experts wait for the visitors' rows: one GEMM for all.
    const auto own = std::stable_partition(this->pending_.begin(), this->pending_.end(),
                                           [&](int expert) { return !visitors_.is_own(expert); });
    held_.assign(own, this->pending_.end());
    this->pending_.erase(own, this->pending_.end());
  }

  // The member's own experts that are visited are what comes next, for their visitors wait. Of the others a forward pass
  // computes them before what is read, while that comes, and a backward pass after it, while its gradients go.
  void Admit() {
    has_visitors_ = true;
    for (const Visit& visit : visitors_.visits()) {
      this->segments_[visit.expert].push_back(
          {int32_t(visit.first_row), int32_t(visit.num_assignments), int32_t(visit.expert)});
      if (visited_.empty() || visited_.back() != visit.expert) visited_.push_back(visit.expert);
    }
    held_.erase(std::remove_if(held_.begin(), held_.end(), [&](int expert) { return IsVisited(expert); }), held_.end());
    std::vector<int>& pending = this->pending_;
    pending.insert(is_backward_ ? pending.end() : pending.begin(), held_.begin(), held_.end());
    pending.insert(pending.begin(), visited_.begin(), visited_.end());
  }

  // Whether the visitors' rows are computed, and not yet on their way.
  bool IsServing() const {
    return has_visitors_ && !has_served_ &&
           std::none_of(this->pending_.begin(), this->pending_.end(), [&](int expert) { return IsVisited(expert); });
  }

  bool IsVisited(int expert) const { return std::find(visited_.begin(), visited_.end(), expert) != visited_.end(); }

  const FluidCall fluid_;
  Visitors visitors_;
  const bool is_backward_;
  std::vector<int> held_, visited_;  // the member's own experts with rows: its own only, visitors' too
  bool has_departed_ = false, have_arrived_ = false, has_visitors_ = false, has_served_ = false;
};

class ForwardBase : public FfnForward {
 protected:
  using FfnForward::FfnForward;
  static constexpr bool is_staged_ = true;  // a forward pass has no gradients
  std::optional<Status> Admitted() const { return Status::Ok(); }
  bool HasUnsent() const { return false; }
};

class Forward : public FluidTask<ForwardBase> {
 public:
  Forward(const FluidCall& call, const float* x, float* y, const FluidArrays<float>& kept)
      : FluidTask(call, /*is_backward=*/false, kept.x, kept.y, kept.g, kept.u), tokens_(x), out_(y), rows_(kept.x) {}

  Status Work(Executor& executor, bool* is_done) override {
    if (!has_departed_) {
      has_departed_ = true;
      return Begin(executor);
    }
    if (have_arrived_ && !has_visitors_) {
      const Status status = visitors_.Take(rows_, executor);
      Admit();
      return status;
    }
    if (IsServing()) {
      has_served_ = true;
      visitors_.Serve(y_, nullptr, executor);
      return Status::Ok();
    }
    if (!is_over()) {
      ComputeNext(executor, used_rows_ / kPortions, call_.num_rows + fluid_.room);
      return Status::Ok();
    }
    *is_done = true;
    const int64_t d = call_.d_model;
    std::vector<Term> terms;
    visitors_.ForOwn([&](int64_t row, int64_t token, float weight) {
      terms.push_back({int32_t(token), weight, y_ + row * d});
    });
    visitors_.AppendReturns(&terms, nullptr);
    SumTerms(executor, terms, fluid_.assignments.num_tokens, d, out_);
    visitors_.Leave();
    return Status::Ok();
  }

 private:
  Status Begin(Executor& executor) {
    if (Status status = visitors_.Depart(tokens_, executor); !status.ok()) return status;
    std::vector<RowCopy> copies;
    const int64_t d = call_.d_model;
    visitors_.ForOwn([&](int64_t row, int64_t token, float) {
      copies.push_back({tokens_ + token * d, rows_ + row * d, 1.0f});
    });
    CopyRows(executor, copies, d);
    return Status::Ok();
  }

  const float* const tokens_;
  float *const out_, *const rows_;
};

class BackwardBase : public FfnBackward {
 protected:
  using FfnBackward::FfnBackward;
  bool is_staged_ = false;
};

class Backward : public FluidTask<BackwardBase> {
 public:
  Backward(const FluidCall& call, const float* dy, const FluidArrays<const float>& kept, float* dx, float* dweight)
      : FluidTask(call, /*is_backward=*/true, nullptr, kept.x, kept.g, kept.u, nullptr),
        tokens_(dy),
        kept_y_(kept.y),
        out_(dx),
        dweight_(dweight) {
    const int64_t num_rows = call.ffn.num_rows + call.room;
    rows_ = Allocate(num_rows * call.ffn.d_model);
    results_ = Allocate(num_rows * call.ffn.d_model);
    dots_.resize(num_rows);
    dy_ = rows_.get();
    dx_ = results_.get();
    if (fault_.ok() && (rows_ == nullptr || results_ == nullptr)) {
      fault_ = NoMemory("fluid_ffn", num_rows * call.ffn.d_model);
    }
  }

  Status Work(Executor& executor, bool* is_done) override {
    if (!has_departed_) {
      has_departed_ = true;
      return Begin(executor);
    }
    if (!is_staged_) {
      is_staged_ = true;
      return Stage(Contributed(), call_.num_rows + fluid_.room, executor);
    }
    if (HasUnsent()) return SendComputed(executor);
    if (have_arrived_ && !has_visitors_) return TakeVisitors(executor);
    if (IsServing()) {
      has_served_ = true;
      visitors_.Serve(dx_, dots_.data(), executor);
      return Status::Ok();
    }
    if (!is_over()) {
      ComputeNext(executor);
      return Status::Ok();
    }
    *is_done = true;
    std::vector<Term> terms;
    visitors_.ForOwn([&](int64_t row, int64_t token, float) {
      terms.push_back({int32_t(token), 1.0f, dx_ + row * call_.d_model});
    });
    visitors_.AppendReturns(&terms, dweight_);
    SumTerms(executor, terms, fluid_.assignments.num_tokens, call_.d_model, out_);
    visitors_.Leave();
    return Status::Ok();
  }

 private:
  Status Begin(Executor& executor) {
    if (Status status = visitors_.Depart(tokens_, executor); !status.ok()) return status;
    const int64_t d = call_.d_model;
    std::vector<RowCopy> copies;
    std::vector<DotProduct> products;
    std::fill_n(dweight_, call_.num_rows, 0.0f);
    visitors_.ForOwn([&](int64_t row, int64_t token, float weight) {
      copies.push_back({tokens_ + token * d, rows_.get() + row * d, weight});
      products.push_back({tokens_ + token * d, kept_y_ + row * d, dweight_ + row});
    });
    CopyRows(executor, copies, d);
    DotProducts(executor, products, d);
    return Status::Ok();
  }

  // Experts that get a gradient from here; whether the member's own ones do is not known before the visitors are.
  std::vector<int> Contributed() const {
    std::vector<int> experts = pending_;
    if (!visitors_.is_open()) return experts;
    const std::vector<int> own = call_.domain->ExpertsOf(call_.rank);
    experts.insert(experts.end(), own.begin(), own.end());
    return experts;
  }

  Status TakeVisitors(Executor& executor) {
    if (Status status = visitors_.Take(rows_.get(), executor); !status.ok()) return status;
    visitors_.Dot(kept_y_, dots_.data(), executor);
    Admit();
    if (!visitors_.is_open()) return Status::Ok();
    for (int expert : call_.domain->ExpertsOf(call_.rank)) {
      if (segments_[expert].empty()) SetZero(expert);
    }
    return Status::Ok();
  }

  const float *const tokens_, *const kept_y_;
  float *const out_, *const dweight_;
  FloatArray rows_, results_;  // (M, D): of dy, weighted, and of dx
  std::vector<float> dots_;                  // (M,)
};

}  // namespace

std::shared_ptr<Task> FluidFfn(const FluidCall& call, const float* x, float* y, const FluidArrays<float>& kept) {
  return std::make_shared<Forward>(call, x, y, kept);
}

std::shared_ptr<Task> FluidFfnBackward(const FluidCall& call, const float* dy, const FluidArrays<const float>& kept,
                                       float* dx, float* dweight) {
  return std::make_shared<Backward>(call, dy, kept, dx, dweight);
}

}  // namespace fef
