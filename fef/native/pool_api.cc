// The C functions that Python calls by ctypes (fef/pool/pool.py). What can fail returns its Code, 0 when it did not,
// with the text in `error`.
#include <algorithm>
#include <cstring>
#include <string>

#include "pool.h"

namespace {

int ToCode(const fef::Status& status, char* error, int error_bytes) {
  std::strncpy(error, status.message.c_str(), error_bytes - 1);
  error[error_bytes - 1] = 0;
  return int(status.code);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int32_t fef_pool_open(int groups, double deadline_s, int64_t chaos_seed) {
  std::optional<uint64_t> seed;
  if (chaos_seed >= 0) seed = uint64_t(chaos_seed);
  return fef::OpenPool(groups, deadline_s, seed)->incarnation();
}

void fef_pool_close(int32_t incarnation) { fef::ClosePool(incarnation); }

// home, local: one entry per expert. *table receives the table's number.
int fef_pool_add_table(int32_t incarnation, const char* name, int layers, int experts, int members,
                       const int32_t* home, const int32_t* local, int blocks_per_member, int64_t block_elems,
                       int elem_bytes, int slots, int stages, int32_t* table, char* error, int error_bytes) {
  const auto pool = fef::FindPool(incarnation);
  if (pool == nullptr) {
    const auto status = fef::Status::Error(fef::Code::kPoolClosed, "table ", name, ": the pool was closed");
    return ToCode(status, error, error_bytes);
  }
  fef::TableShape shape;
  shape.name = name;
  shape.layers = layers;
  shape.experts = experts;
  shape.members = members;
  shape.home.assign(home, home + experts);
  shape.local.assign(local, local + experts);
  shape.blocks_per_member = blocks_per_member;
  shape.block_elems = block_elems;
  shape.elem_bytes = elem_bytes;
  shape.slots = slots;
  shape.stages = stages;
  return ToCode(pool->AddTable(shape, table), error, error_bytes);
}

}  // extern "C"
#pragma GCC visibility pop
