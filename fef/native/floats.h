// Arrays of floats that are too large to take it for granted that there is memory for them.
#ifndef FEF_FLOATS_H_
#define FEF_FLOATS_H_

#include <cstddef>
#include <memory>
#include <new>
#include <string>

#include "status.h"

namespace fef {

// Not set to anything; null if there is no memory.
inline std::unique_ptr<float[]> Allocate(size_t elems) {
  return std::unique_ptr<float[]>(new (std::nothrow) float[elems]);
}

inline Status NoMemory(const std::string& what, size_t elems) {
  return Status::Error(Code::kResourceExhausted, what, ": no memory for ", elems * sizeof(float), " bytes");
}

}  // namespace fef

#endif  // FEF_FLOATS_H_
