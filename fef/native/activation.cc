#include "activation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

namespace fef {
namespace {

constexpr int64_t kBlock = 16384;  // floats per task: a few arrays of it stay in the second-level cache
constexpr float kGelu = 1.59576912f, kGeluCube = 0.044715f;  // 2 sqrt(2/pi), and the factor of u^3
constexpr float kLimit = 7.0f, kSlope = 1.702f;              // of clamped_swiglu

// exp(x) to 2 units in the last place, in a form that compilers turn into vector code (std::exp is a call for each
// float). x is clamped to the range whose result is a normal float. NaN stays NaN.
// Method: x = n ln 2 + r with integer n, a polynomial in r, and 2^n put into the exponent bits. The polynomial is
// that of expf in S. Moshier's Cephes library.
inline float Exp(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float rounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
  const float shifted = x * 1.44269504f + rounder;
  const float n = shifted - rounder;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts, so that r keeps all its bits
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof(bits));
  bits = (bits << 23) + 0x3f800000u;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return p * power;
}

inline float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

inline float Clip(float x, float low, float high) {
  x = x >= high ? high : x;
  return x <= low ? low : x;
}

// Cuts at segments, so that a segment comes out the same in whatever company it is computed.
template <typename Body>
void OverBlocks(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const Body& body) {
  std::vector<std::pair<int64_t, int64_t>> blocks;
  for (const RowSegment& segment : segments) {
    const int64_t begin = segment.first_row * width, end = begin + segment.num_rows * width;
    for (int64_t at = begin; at < end; at += kBlock) blocks.emplace_back(at, std::min(end, at + kBlock));
  }
  ParallelFor(executor, int64_t(blocks.size()), [&](int64_t i) { body(blocks[i].first, blocks[i].second); });
}

void SwiGlu(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* g, const float* u,
            float* h) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) h[i] = g[i] * Sigmoid(g[i]) * u[i];
  });
}

void SwiGluBackward(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* dh,
                    const float* g, const float* u, float* dg, float* du) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float dh_i = dh[i], g_i = g[i], u_i = u[i];
      const float s = Sigmoid(g_i);
      du[i] = dh_i * g_i * s;
      dg[i] = dh_i * u_i * s * (1.0f + g_i * (1.0f - s));
    }
  });
}

// s of u s, which is gelu(u): (1 + tanh z) / 2 = sigmoid(2 z).
inline float GeluShare(float u) { return Sigmoid(kGelu * (u + kGeluCube * u * u * u)); }

void Gelu(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float*, const float* u,
          float* h) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) h[i] = u[i] * GeluShare(u[i]);
  });
}

void GeluBackward(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* dh,
                  const float*, const float* u, float*, float* du) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float u_i = u[i], s = GeluShare(u_i);
      du[i] = dh[i] * s * (1.0f + u_i * (1.0f - s) * kGelu * (1.0f + 3.0f * kGeluCube * u_i * u_i));
    }
  });
}

// NaN stays NaN.
void Relu(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float*, const float* u,
          float* h) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) h[i] = u[i] <= 0.0f ? 0.0f : u[i];
  });
}

void ReluBackward(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* dh,
                  const float*, const float* u, float*, float* du) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float dh_i = dh[i];  // read whether or not it counts, for the sake of vector code
      du[i] = u[i] <= 0.0f ? 0.0f : dh_i;
    }
  });
}

void ClampedSwiGlu(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* g,
                   const float* u, float* h) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float g_i = g[i] >= kLimit ? kLimit : g[i];
      h[i] = (Clip(u[i], -kLimit, kLimit) + 1.0f) * g_i * Sigmoid(kSlope * g_i);
    }
  });
}

void ClampedSwiGluBackward(Executor& executor, const std::vector<RowSegment>& segments, int64_t width, const float* dh,
                           const float* g, const float* u, float* dg, float* du) {
  OverBlocks(executor, segments, width, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float dh_i = dh[i], g_i = g[i] >= kLimit ? kLimit : g[i], u_i = Clip(u[i], -kLimit, kLimit);
      const float s = Sigmoid(kSlope * g_i);
      const float du_i = dh_i * g_i * s, dg_i = dh_i * (u_i + 1.0f) * s * (1.0f + kSlope * g_i * (1.0f - s));
      du[i] = std::fabs(u_i) >= kLimit ? 0.0f : du_i;
      dg[i] = g_i >= kLimit ? 0.0f : dg_i;
    }
  });
}

constexpr FfnKind kKinds[] = {
    {"swiglu", true, false, SwiGlu, SwiGluBackward},
    {"gelu", false, false, Gelu, GeluBackward},
    {"relu", false, false, Relu, ReluBackward},
    {"clamped_swiglu", true, true, ClampedSwiGlu, ClampedSwiGluBackward},
};

}  // namespace

const FfnKind* FindFfnKind(std::string_view name) {
  for (const FfnKind& kind : kKinds) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

}  // namespace fef
