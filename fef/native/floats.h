// Arrays of floats that are too large to take it for granted that there is memory for them.
#ifndef FEF_FLOATS_H_
#define FEF_FLOATS_H_

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>

#include "status.h"

namespace fef {

struct FreeFloats {
  void operator()(float* floats) const { std::free(floats); }
};
// Begins at a cache line: where an array lies must not show in the last bit of what is computed with it.
using FloatArray = std::unique_ptr<float[], FreeFloats>;

// Not set to anything; null if there is no memory.
inline FloatArray Allocate(size_t elems) {
  constexpr size_t kLine = 64;
  return FloatArray(static_cast<float*>(std::aligned_alloc(kLine, (elems * sizeof(float) / kLine + 1) * kLine)));
}

inline Status NoMemory(const std::string& what, size_t elems) {
  return Status::Error(Code::kResourceExhausted, what, ": no memory for ", elems * sizeof(float), " bytes");
}

}  // namespace fef

#endif  // FEF_FLOATS_H_
