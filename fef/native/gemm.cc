#include "gemm.h"

#include <algorithm>
#include <cstring>

#include "cblas.h"

namespace fef {
namespace {

// A rectangle of one product; the unit of work of a thread.
struct Tile {
  int32_t index;  // segment (GroupedMatmul) or expert (GroupedOuter)
  int64_t first_row, num_rows, first_col, num_cols;
};

// Tiles smaller than this lose more to packing and to the thread pool than they win in balance.
constexpr int64_t kMinRows = 64;
constexpr int64_t kMinCols = 64;
constexpr int64_t kTilesPerThread = 8;

// Cuts (num_rows, num_cols) into at most `parts` nearly equal tiles, rows first.
void Cut(int32_t index, int64_t num_rows, int64_t num_cols, int64_t parts, std::vector<Tile>& tiles) {
  const int64_t row_parts = std::clamp<int64_t>(num_rows / kMinRows, 1, std::max<int64_t>(parts, 1));
  const int64_t col_parts = std::clamp<int64_t>(num_cols / kMinCols, 1, std::max<int64_t>(parts / row_parts, 1));
  for (int64_t r = 0; r < row_parts; ++r) {
    const int64_t row = num_rows * r / row_parts, row_end = num_rows * (r + 1) / row_parts;
    for (int64_t c = 0; c < col_parts; ++c) {
      const int64_t col = num_cols * c / col_parts, col_end = num_cols * (c + 1) / col_parts;
      tiles.push_back({index, row, row_end - row, col, col_end - col});
    }
  }
}

// The number of tiles for a share of the work, so that all work makes about kTilesPerThread tiles per thread.
int64_t NumParts(int64_t share, int64_t total, int64_t parallelism) {
  if (parallelism == 1 || total == 0) return 1;
  return (share * kTilesPerThread * parallelism + total / 2) / total;
}

std::vector<RowSegment> SortedByRow(const std::vector<RowSegment>& segments) {
  std::vector<RowSegment> sorted;
  for (const RowSegment& s : segments) {
    if (s.num_rows > 0) sorted.push_back(s);
  }
  std::sort(sorted.begin(), sorted.end(), [](const RowSegment& a, const RowSegment& b) { return a.first_row < b.first_row; });
  return sorted;
}

std::string Describe(const RowSegment& s) {
  return "segment (first row " + std::to_string(s.first_row) + ", rows " + std::to_string(s.num_rows) + ", expert " +
         std::to_string(s.expert) + ")";
}

}  // namespace

std::string CheckSegments(const std::vector<RowSegment>& segments, int64_t num_rows, int64_t num_experts) {
  for (const RowSegment& s : segments) {
    if (s.num_rows < 0 || s.first_row < 0 || int64_t{s.first_row} + s.num_rows > num_rows) {
      return Describe(s) + " is outside of the " + std::to_string(num_rows) + " rows";
    }
    if (s.expert < 0 || s.expert >= num_experts) {
      return Describe(s) + " names none of the " + std::to_string(num_experts) + " experts";
    }
  }
  const std::vector<RowSegment> sorted = SortedByRow(segments);
  for (size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i - 1].first_row + sorted[i - 1].num_rows > sorted[i].first_row) {
      return Describe(sorted[i - 1]) + " and " + Describe(sorted[i]) + " share rows";
    }
  }
  return "";
}

void ZeroOtherRows(const std::vector<RowSegment>& segments, int64_t num_rows, int64_t width, float* y) {
  int64_t row = 0;
  auto zero_until = [&](int64_t end) {
    if (end > row) std::memset(y + row * width, 0, (end - row) * width * sizeof(float));
  };
  for (const RowSegment& s : SortedByRow(segments)) {
    zero_until(s.first_row);
    row = int64_t{s.first_row} + s.num_rows;
  }
  zero_until(num_rows);
}

int64_t CountRows(const std::vector<RowSegment>& segments) {
  int64_t rows = 0;
  for (const RowSegment& s : segments) rows += s.num_rows;
  return rows;
}

void GroupedMatmul(Executor& executor, const std::vector<RowSegment>& segments, int64_t total_rows, const float* x,
                   int64_t inner, const float* const* weights, bool transpose_w, float* y, int64_t outer, float beta) {
  std::vector<Tile> tiles;
  for (size_t i = 0; i < segments.size(); ++i) {
    const int64_t rows = segments[i].num_rows;
    if (rows > 0) Cut(i, rows, outer, NumParts(rows, total_rows, executor.Parallelism()), tiles);
  }
  ParallelFor(executor, tiles.size(), [&](int64_t i) {
    const Tile& tile = tiles[i];
    const RowSegment& segment = segments[tile.index];
    const int64_t row = segment.first_row + tile.first_row;
    const float* w = weights[segment.expert] + tile.first_col * (transpose_w ? inner : 1);
    scipy_cblas_sgemm(CblasRowMajor, CblasNoTrans, transpose_w ? CblasTrans : CblasNoTrans, tile.num_rows,
                      tile.num_cols, inner, 1.0f, x + row * inner, inner, w, transpose_w ? inner : outer, beta,
                      y + row * outer + tile.first_col, outer);
  });
}

void GroupedOuter(Executor& executor, const std::vector<RowSegment>& segments, int64_t total_rows, const float* a,
                  int64_t inner, const float* b, int64_t outer, float* const* outputs, int64_t num_experts) {
  std::vector<std::vector<RowSegment>> of_expert(num_experts);
  std::vector<int64_t> rows_of_expert(num_experts, 0);
  for (const RowSegment& s : segments) {
    if (s.num_rows == 0 || outputs[s.expert] == nullptr) continue;
    of_expert[s.expert].push_back(s);
    rows_of_expert[s.expert] += s.num_rows;
  }
  std::vector<Tile> tiles;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (outputs[e] == nullptr) continue;
    Cut(e, inner, outer, NumParts(rows_of_expert[e], total_rows, executor.Parallelism()), tiles);
  }
  ParallelFor(executor, tiles.size(), [&](int64_t i) {
    const Tile& tile = tiles[i];
    float* output = outputs[tile.index] + tile.first_row * outer + tile.first_col;
    if (of_expert[tile.index].empty()) {
      for (int64_t r = 0; r < tile.num_rows; ++r) std::memset(output + r * outer, 0, tile.num_cols * sizeof(float));
    }
    float beta = 0.0f;
    for (const RowSegment& s : of_expert[tile.index]) {
      scipy_cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, tile.num_rows, tile.num_cols, s.num_rows, 1.0f,
                        a + s.first_row * inner + tile.first_row, inner, b + s.first_row * outer + tile.first_col,
                        outer, beta, output, outer);
      beta = 1.0f;
    }
  });
}

}  // namespace fef
