// What Python and libfef.so call of libfef-ucx.so.
#include <cstring>
#include <memory>
#include <string>

#include "rma.h"

#pragma GCC visibility push(default)
extern "C" {

extern const char fef_source_hash[];
const char fef_source_hash[] = "fef_source_hash=" FEF_SOURCE_HASH;

// Of the library that was found, which need not be that of the headers.
const char* fef_ucx_version() { return ucp_get_version_string(); }

// A fef::OneSided, until fef_ucx_close; null if UCX cannot be opened, with the text in `error`.
void* fef_ucx_open(char* error, int error_bytes) {
  std::unique_ptr<fef::Rma> rma;
  const fef::Status status = fef::Rma::Open(&rma);
  std::strncpy(error, status.message.c_str(), size_t(error_bytes) - 1);
  error[error_bytes - 1] = 0;
  return static_cast<fef::OneSided*>(rma.release());
}

void fef_ucx_close(void* one_sided) { delete static_cast<fef::OneSided*>(one_sided); }

}  // extern "C"
#pragma GCC visibility pop
