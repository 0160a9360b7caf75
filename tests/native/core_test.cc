// Checks the C++ core without XLA: every check prints what is wrong and makes the exit code 1.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "activation.h"
#include "gemm.h"
#include "parallel.h"

namespace {

std::atomic<int> num_failures{0};

void Check(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED: %s\n", what.c_str());
  num_failures = 1;
}

// A thread for each Schedule; they are joined at the end.
class Threads : public fef::Executor {
 public:
  explicit Threads(int64_t parallelism) : parallelism_(parallelism) {}
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void Schedule(std::function<void()> work) override { threads_.emplace_back(std::move(work)); }
  int64_t Parallelism() const override { return parallelism_; }

 private:
  const int64_t parallelism_;
  std::vector<std::thread> threads_;
};

// A pool that is full for as long as the call lasts; what was scheduled runs afterwards.
class FullPool : public fef::Executor {
 public:
  void Schedule(std::function<void()> work) override { late_.push_back(std::move(work)); }
  int64_t Parallelism() const override { return 4; }
  void RunLate() {
    for (auto& work : late_) work();
  }
  size_t NumLate() const { return late_.size(); }

 private:
  std::vector<std::function<void()>> late_;
};

using Floats = std::vector<float>;

Floats Random(int64_t n, uint32_t seed, float scale = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  Floats values(n);
  for (float& value : values) value = normal(generator);
  return values;
}

float MaxError(const Floats& a, const Floats& b) {
  float error = 0.0f;
  for (size_t i = 0; i < a.size(); ++i) error = std::fmax(error, std::fabs(a[i] - b[i]));
  return error;
}

constexpr int64_t kRows = 700, kInner = 40, kOuter = 130, kExperts = 5;
// Expert 2 has no rows, expert 3 has two segments that are not adjacent, rows 0-9 and 690-699 belong to nobody.
const std::vector<fef::RowSegment> kSegments = {{10, 3, 3}, {13, 500, 0}, {513, 0, 1}, {513, 77, 4}, {590, 100, 3}};

void TestParallelFor() {
  for (int64_t num_tasks : {0, 1, 2, 1000}) {
    Threads threads(4);
    std::vector<int> runs(num_tasks, 0);
    fef::ParallelFor(threads, num_tasks, [&](int64_t i) { ++runs[i]; });
    Check(runs == std::vector<int>(num_tasks, 1), "ParallelFor runs each task once");
  }
  FullPool full;
  {
    std::vector<int> runs(10, 0);
    fef::ParallelFor(full, 10, [&](int64_t i) { ++runs[i]; });
    Check(runs == std::vector<int>(10, 1), "ParallelFor ends without any helper");
  }
  Check(full.NumLate() == 3, "ParallelFor asks for as many helpers as the pool has threads, less the caller");
  full.RunLate();  // a sanitizer would see a touch of the dead vector
}

void TestGroupedMatmul(bool transpose_w, float beta) {
  const Floats x = Random(kRows * kInner, 1), w = Random(kExperts * kInner * kOuter, 2);
  const Floats before = Random(kRows * kOuter, 3);
  Floats wanted = before;
  for (const fef::RowSegment& s : kSegments) {
    const float* w_e = w.data() + s.expert * kInner * kOuter;
    for (int64_t r = s.first_row; r < s.first_row + s.num_rows; ++r) {
      for (int64_t c = 0; c < kOuter; ++c) {
        double sum = beta * wanted[r * kOuter + c];
        for (int64_t k = 0; k < kInner; ++k) {
          sum += x[r * kInner + k] * w_e[transpose_w ? c * kInner + k : k * kOuter + c];
        }
        wanted[r * kOuter + c] = sum;
      }
    }
  }
  std::vector<const float*> weights(kExperts);
  for (int64_t e = 0; e < kExperts; ++e) weights[e] = w.data() + e * kInner * kOuter;
  weights[1] = weights[2] = nullptr;  // experts without rows
  Floats y = before, again = before;
  Threads threads(4);
  const int64_t rows = fef::CountRows(kSegments);
  fef::GroupedMatmul(threads, kSegments, rows, x.data(), kInner, weights.data(), transpose_w, y.data(), kOuter, beta);
  Check(MaxError(y, wanted) < 1e-4f, "GroupedMatmul, transpose " + std::to_string(transpose_w) + ", beta " +
                                         std::to_string(beta) + ": error " + std::to_string(MaxError(y, wanted)));
  for (const fef::RowSegment& s : kSegments) {
    fef::GroupedMatmul(threads, {s}, rows, x.data(), kInner, weights.data(), transpose_w, again.data(), kOuter, beta);
  }
  Check(y == again, "GroupedMatmul gives the same bits segment by segment");
}

void TestGroupedOuter() {
  const Floats a = Random(kRows * kInner, 4), b = Random(kRows * kOuter, 5);
  const int64_t size = kInner * kOuter;
  Floats wanted(kExperts * size, 0.0f);
  for (const fef::RowSegment& s : kSegments) {
    for (int64_t r = s.first_row; r < s.first_row + s.num_rows; ++r) {
      for (int64_t k = 0; k < kInner; ++k) {
        for (int64_t c = 0; c < kOuter; ++c) {
          wanted[s.expert * size + k * kOuter + c] += a[r * kInner + k] * b[r * kOuter + c];
        }
      }
    }
  }
  const float kept = 7.0f;
  Floats result(kExperts * size, kept);
  std::vector<float*> outputs(kExperts);
  for (int64_t e = 0; e < kExperts; ++e) outputs[e] = result.data() + e * size;
  outputs[4] = nullptr;
  for (int64_t i = 0; i < size; ++i) wanted[4 * size + i] = kept;
  Threads threads(4);
  const int64_t rows = fef::CountRows(kSegments);
  fef::GroupedOuter(threads, kSegments, rows, a.data(), kInner, b.data(), kOuter, outputs.data(), kExperts);
  Check(MaxError(result, wanted) < 1e-3f, "GroupedOuter: error " + std::to_string(MaxError(result, wanted)));
  for (int64_t i = size; i < 3 * size; ++i) {
    if (result[i] != 0.0f) return Check(false, "GroupedOuter: an expert without rows is not exactly zero");
  }
}

void TestSegmentChecks() {
  auto fault = [](std::vector<fef::RowSegment> segments) { return fef::CheckSegments(segments, 10, 2); };
  Check(fault({{0, 4, 0}, {6, 4, 1}, {4, 2, 0}, {5, 0, 1}}).empty(), "CheckSegments accepts what is right");
  Check(fault({{8, 3, 0}}).find("outside of the 10 rows") != std::string::npos, "rows past the end");
  Check(fault({{-1, 1, 0}}).find("outside") != std::string::npos, "negative first row");
  Check(fault({{0, -1, 0}}).find("outside") != std::string::npos, "negative number of rows");
  Check(fault({{0, 1, 2}}).find("names none of the 2 experts") != std::string::npos, "unknown expert");
  Check(fault({{3, 3, 0}, {0, 4, 1}}).find("share rows") != std::string::npos, "shared rows");

  Floats y(kRows * 3, 1.0f), wanted(kRows * 3, 1.0f);
  for (int64_t row : {0, 9, 690, 699}) wanted[row * 3] = 0.0f;
  fef::ZeroOtherRows(kSegments, kRows, 3, y.data());
  Check(y[9 * 3 + 2] == 0.0f && y[690 * 3] == 0.0f, "ZeroOtherRows sets rows without segment");
  Check(y[10 * 3] == 1.0f && y[689 * 3 + 2] == 1.0f, "ZeroOtherRows leaves rows of segments");
}

// h, and its derivatives by g and u.
struct Hidden {
  double h, by_g, by_u;
};

Hidden SwiGlu(double g, double u) {
  const double s = 1 / (1 + std::exp(-g));
  return {g * s * u, u * s * (1 + g * (1 - s)), g * s};
}

Hidden Gelu(double, double u) {
  const double root = std::sqrt(2 / M_PI), t = std::tanh(root * (u + 0.044715 * u * u * u));
  return {u / 2 * (1 + t), 0, (1 + t) / 2 + u / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * u * u)};
}

Hidden Relu(double, double u) { return {u > 0 ? u : 0, 0, u > 0 ? 1.0 : 0.0}; }

Hidden ClampedSwiGlu(double g, double u) {
  const bool is_free_g = g < 7, is_free_u = std::fabs(u) < 7;
  g = std::fmin(g, 7), u = std::fmax(std::fmin(u, 7), -7);
  const double s = 1 / (1 + std::exp(-1.702 * g));
  return {(u + 1) * g * s, is_free_g ? (u + 1) * s * (1 + 1.702 * g * (1 - s)) : 0, is_free_u ? g * s : 0};
}

void TestActivation(const std::string& name, Hidden (*wanted)(double, double)) {
  const fef::FfnKind* kind = fef::FindFfnKind(name);
  if (kind == nullptr) return Check(false, "there is no " + name);
  const int64_t n = 40001;  // several blocks and a remainder
  Floats g = Random(n, 6, 4.0f), u = Random(n, 7, kind->has_biases ? 4.0f : 1.0f), dh = Random(n, 8), h(n), dg(n), du(n);
  const std::vector<fef::RowSegment> row = {{0, 1, 0}};
  Floats& gate = kind->has_gate ? g : u;
  gate[0] = 0.0f, gate[1] = 500.0f, gate[2] = -500.0f, gate[3] = 88.5f, gate[4] = -88.5f, gate[5] = 7.0f;
  u[6] = 7.0f, u[7] = -7.0f, u[8] = 7.5f, u[9] = -7.5f;
  Threads threads(4);
  kind->activate(threads, row, n, g.data(), u.data(), h.data());
  kind->backward(threads, row, n, dh.data(), g.data(), u.data(), dg.data(), du.data());
  double error = 0.0;
  for (int64_t i = 0; i < n; ++i) {
    auto compare = [&](double got, double want) { error = std::fmax(error, std::fabs(got - want) / (1 + std::fabs(want))); };
    const Hidden want = wanted(g[i], u[i]);
    compare(h[i], want.h);
    compare(dg[i], dh[i] * want.by_g);
    compare(du[i], dh[i] * want.by_u);
  }
  Check(error < 2e-6, name + ": relative error " + std::to_string(error));
  Floats in_place = dh;
  if (kind->has_gate) {
    kind->backward(threads, row, n, in_place.data(), g.data(), u.data(), in_place.data(), du.data());
    Check(in_place == dg, name + " backward in place");
  } else {
    kind->backward(threads, row, n, in_place.data(), nullptr, u.data(), nullptr, in_place.data());
    Check(in_place == du, name + " backward in place, without arrays for a gate");
  }
  gate[0] = NAN;
  kind->activate(threads, row, n, g.data(), u.data(), h.data());
  Check(std::isnan(h[0]) && !std::isnan(h[1]), name + " keeps NaN");
}

void TestFfnKinds() {
  TestActivation("swiglu", SwiGlu);
  TestActivation("gelu", Gelu);
  TestActivation("relu", Relu);
  TestActivation("clamped_swiglu", ClampedSwiGlu);
  Check(fef::FindFfnKind("swish") == nullptr, "there is no swish");
  Check(fef::FindFfnKind("swiglu")->num_elems(5, 7) == 3 * 35, "elements of swiglu");
  Check(fef::FindFfnKind("relu")->num_elems(5, 7) == 2 * 35, "elements of relu");
  Check(fef::FindFfnKind("clamped_swiglu")->num_elems(5, 7) == 3 * 35 + 2 * 7 + 5, "elements of clamped_swiglu");
  Check(fef::FindFfnKind("gelu")->FlopsPerRow(5, 7) == 140.0, "arithmetic of gelu");
}

// Handlers of several devices run at the same time.
void TestConcurrentCalls() {
  std::vector<std::thread> devices;
  for (int i = 0; i < 4; ++i) {
    devices.emplace_back([] {
      TestGroupedMatmul(false, 0.0f);
      TestGroupedOuter();
    });
  }
  for (std::thread& device : devices) device.join();
}

}  // namespace

int main() {
  TestParallelFor();
  for (bool transpose_w : {false, true}) {
    for (float beta : {0.0f, 1.0f}) TestGroupedMatmul(transpose_w, beta);
  }
  TestGroupedOuter();
  TestSegmentChecks();
  TestFfnKinds();
  TestConcurrentCalls();
  std::puts(num_failures == 0 ? "all passed" : "some failed");
  return num_failures;
}
