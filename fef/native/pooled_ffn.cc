#include "pooled_ffn.h"

#include <algorithm>
#include <memory>

#include "gemm.h"
#include "swiglu.h"

namespace fef {

namespace {

// The rows of each expert that has some, this member's own experts first: they need no other member's memory.
struct Groups {
  std::vector<RowSegment> segments;
  std::vector<int> experts;
  int64_t used_rows = 0;
};

Status MakeGroups(const TableShape& table, int rank, const FfnRows& shape, Groups* groups) {
  if (shape.num_experts != table.experts) {
    return Status::Error(Code::kInvalidArgument, "pooled_ffn: rows of ", shape.num_experts, " experts, table ",
                         table.name, " has ", table.experts);
  }
  int64_t first = 0;
  for (int expert = 0; expert < table.experts; ++expert) {
    const int32_t rows = shape.rows[expert];
    if (rows < 0 || first + rows > shape.num_rows) {
      return Status::Error(Code::kInvalidArgument, "pooled_ffn: table ", table.name, ", expert ", expert, ": ", rows,
                           " rows from row ", first, " do not fit into ", shape.num_rows);
    }
    if (rows > 0) groups->segments.push_back({int32_t(first), rows, expert});
    first += rows;
  }
  groups->used_rows = first;
  std::stable_partition(groups->segments.begin(), groups->segments.end(),
                        [&](const RowSegment& segment) { return table.home[segment.expert] == rank; });
  for (const RowSegment& segment : groups->segments) groups->experts.push_back(segment.expert);
  return Status::Ok();
}

// The three matrices of each expert in use, and the leases that keep them readable.
struct Weights {
  std::vector<Lease> leases;
  std::vector<const float*> gate, up, down;
};

Status ReadWeights(Domain& domain, const Version& version, int rank, int layer, const FfnRows& shape,
                   const std::vector<int>& experts, Weights* weights) {
  const TableShape& table = domain.shape();
  const int64_t matrix = shape.d_model * shape.d_expert;
  if (table.elem_bytes != sizeof(float) || table.block_elems != 3 * matrix) {
    return Status::Error(Code::kInvalidArgument, "pooled_ffn: table ", table.name, " holds blocks of ",
                         table.block_elems, " x ", table.elem_bytes, " bytes, not the ", 3 * matrix,
                         " floats of this FFN");
  }
  weights->leases.resize(experts.size());
  weights->gate.resize(table.experts);
  weights->up.resize(table.experts);
  weights->down.resize(table.experts);
  for (size_t i = 0; i < experts.size(); ++i) {
    const int expert = experts[i];
    if (Status status = domain.Read(version, rank, layer, expert, &weights->leases[i]); !status.ok()) return status;
    const float* block = static_cast<const float*>(weights->leases[i].block());
    weights->gate[expert] = block;
    weights->up[expert] = block + matrix;
    weights->down[expert] = block + 2 * matrix;
  }
  return Status::Ok();
}

std::unique_ptr<float[]> Scratch(int64_t elems) { return std::unique_ptr<float[]>(new float[elems]); }

void ZeroTail(const Groups& groups, int64_t num_rows, int64_t width, float* out) {
  std::fill(out + groups.used_rows * width, out + num_rows * width, 0.0f);
}

}  // namespace

Status PooledFfn(Domain& domain, Executor& executor, const Version& version, int rank, int layer, const FfnRows& shape,
                 const float* x, float* y, float* g, float* u) {
  Groups groups;
  Weights weights;
  if (Status status = MakeGroups(domain.shape(), rank, shape, &groups); !status.ok()) return status;
  if (Status status = ReadWeights(domain, version, rank, layer, shape, groups.experts, &weights); !status.ok()) {
    return status;
  }
  const int64_t d = shape.d_model, f = shape.d_expert;
  ZeroTail(groups, shape.num_rows, d, y);
  ZeroTail(groups, shape.num_rows, f, g);
  ZeroTail(groups, shape.num_rows, f, u);
  const auto h = Scratch(groups.used_rows * f);
  GroupedMatmul(executor, groups.segments, x, d, weights.gate.data(), false, g, f, 0.0f);
  GroupedMatmul(executor, groups.segments, x, d, weights.up.data(), false, u, f, 0.0f);
  SwiGlu(executor, groups.used_rows * f, g, u, h.get());
  GroupedMatmul(executor, groups.segments, h.get(), f, weights.down.data(), false, y, d, 0.0f);
  return Status::Ok();
}

Status PooledFfnBackward(Domain& domain, Executor& executor, const Version& version, int rank, int layer, int stage,
                         const FfnRows& shape, const float* dy, const float* x, const float* g, const float* u,
                         float* dx) {
  Groups groups;
  Weights weights;
  const TableShape& table = domain.shape();
  if (Status status = MakeGroups(table, rank, shape, &groups); !status.ok()) return status;
  if (Status status = ReadWeights(domain, version, rank, layer, shape, groups.experts, &weights); !status.ok()) {
    return status;
  }
  const int64_t d = shape.d_model, f = shape.d_expert, matrix = d * f;
  std::vector<float*> staged, d_gate(table.experts), d_up(table.experts), d_down(table.experts);
  if (Status status = domain.StagedGradients(version, rank, layer, stage, groups.experts, &staged); !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < staged.size(); ++i) {
    const int expert = groups.experts[i];
    d_gate[expert] = staged[i];
    d_up[expert] = staged[i] + matrix;
    d_down[expert] = staged[i] + 2 * matrix;
  }
  const int64_t hidden = groups.used_rows * f;
  const auto h = Scratch(hidden), dh = Scratch(hidden), dg = Scratch(hidden), du = Scratch(hidden);
  ZeroTail(groups, shape.num_rows, d, dx);
  GroupedMatmul(executor, groups.segments, dy, d, weights.down.data(), true, dh.get(), f, 0.0f);
  SwiGlu(executor, hidden, g, u, h.get());
  SwiGluBackward(executor, hidden, dh.get(), g, u, dg.get(), du.get());
  GroupedMatmul(executor, groups.segments, dg.get(), f, weights.gate.data(), true, dx, d, 0.0f);
  GroupedMatmul(executor, groups.segments, du.get(), f, weights.up.data(), true, dx, d, 1.0f);
  GroupedOuter(executor, groups.segments, h.get(), f, dy, d, d_down.data(), table.experts);
  GroupedOuter(executor, groups.segments, x, d, dg.get(), f, d_gate.data(), table.experts);
  GroupedOuter(executor, groups.segments, x, d, du.get(), f, d_up.data(), table.experts);
  return domain.CloseStage(version, rank, layer, stage, groups.experts, executor);
}

}  // namespace fef
