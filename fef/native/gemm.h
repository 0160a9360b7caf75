// Matrix products of groups of rows with the weights of their experts, float32, row-major, over OpenBLAS.
//
// Letters: N rows, K inner width, M outer width, E experts. A segment is a run of rows that belong to one expert; an
// expert may have any number of segments, adjacent or not. Segments must not share a row (see CheckSegments). Every
// result is bit-deterministic for given arguments and a given executor parallelism.
#ifndef FEF_GEMM_H_
#define FEF_GEMM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "parallel.h"

namespace fef {

struct RowSegment {
  int32_t first_row;
  int32_t num_rows;
  int32_t expert;
};

// Returns what is wrong with the segments (rows out of [0, num_rows), expert out of [0, num_experts), shared rows),
// or an empty string.
std::string CheckSegments(const std::vector<RowSegment>& segments, int64_t num_rows, int64_t num_experts);

// Sets the rows of y (num_rows, width) that are in no segment to zero.
void ZeroOtherRows(const std::vector<RowSegment>& segments, int64_t num_rows, int64_t width, float* y);

// y[rows] = x[rows] W_e + beta y[rows] for each segment; other rows of y are left as they are.
//   x: (N, K); y: (N, M); weights[e]: (K, M), or (M, K) if transpose_w, in which case W_e is its transpose.
// Pointers of experts without rows are not looked at. The segments may be a part of all, which have `total_rows`: what
// they give is the same in every part, bit for bit.
void GroupedMatmul(Executor& executor, const std::vector<RowSegment>& segments, int64_t total_rows, const float* x,
                   int64_t inner, const float* const* weights, bool transpose_w, float* y, int64_t outer, float beta);

// outputs[e] = sum over the segments of expert e, in their order, of a[rows]^T b[rows]; exactly zero without rows.
//   a: (N, K); b: (N, M); outputs[e]: (K, M), or null to skip the expert. total_rows as above.
void GroupedOuter(Executor& executor, const std::vector<RowSegment>& segments, int64_t total_rows, const float* a,
                  int64_t inner, const float* b, int64_t outer, float* const* outputs, int64_t num_experts);

int64_t CountRows(const std::vector<RowSegment>& segments);

}  // namespace fef

#endif  // FEF_GEMM_H_
