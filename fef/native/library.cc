// What happens when the library is loaded, and what it says about itself.
#include "cblas.h"

// Found in the file by fef/native/build.py, which compares it with the sources on disk.
extern "C" [[gnu::visibility("default")]] const char fef_source_hash[] = "fef_source_hash=" FEF_SOURCE_HASH;

namespace {

// The threads are XLA's; OpenBLAS inside of them must not start its own.
[[gnu::constructor]] void UseOneBlasThread() { scipy_openblas_set_num_threads(1); }

}  // namespace
