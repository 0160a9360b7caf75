// What the files of XLA's custom calls share; none but them includes XLA's header.
//
// Every pool operation begins with two operands that say where it acts, both run-time values so that a compiled program
// serves any pool: version (4,) = table, incarnation, counter, microbatch; member (2,) = data-parallel group, rank.
// Tokens are () float32 without a value: they only carry order.
#ifndef FEF_HANDLERS_H_
#define FEF_HANDLERS_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "parallel.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace fef {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::BufferR1<ffi::S32>;
using Vector = ffi::BufferR1<ffi::F32>;
using Token = ffi::BufferR0<ffi::F32>;
using Scalar = ffi::BufferR0<ffi::S32>;

// The threads of XLA's CPU backend. With virtual devices that pool has more threads than there are cores; a helper
// without a core of its own only takes cache from the others.
class XlaExecutor : public Executor {
 public:
  explicit XlaExecutor(ffi::ThreadPool pool) : pool_(pool) {}

  void Schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

  int64_t Parallelism() const override {
    static const int64_t num_cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
    return std::min(num_cores, pool_.num_threads() + 1);
  }

 private:
  ffi::ThreadPool pool_;
};

// The text begins with the Python type of the error (fef/pool/errors.py): XLA does not hand on the code in every case.
inline ffi::Error ToError(const Status& status) {
  auto error = [&](ffi::ErrorCode code, const char* type) {
    return ffi::Error(code, std::string(type) + ": " + status.message);
  };
  switch (status.code) {
    case Code::kOk: return ffi::Error::Success();
    case Code::kInvalidArgument: return error(ffi::ErrorCode::kInvalidArgument, "PoolError");
    case Code::kStaleVersion: return error(ffi::ErrorCode::kNotFound, "StaleVersionError");
    case Code::kDeadlineExceeded: return error(ffi::ErrorCode::kDeadlineExceeded, "PoolTimeoutError");
    case Code::kResourceExhausted: return error(ffi::ErrorCode::kResourceExhausted, "PoolExhaustedError");
    case Code::kPoolClosed: return error(ffi::ErrorCode::kFailedPrecondition, "PoolClosedError");
    case Code::kPeerLost: {
      ReportPeerLoss();
      return error(ffi::ErrorCode::kUnavailable, "PeerLostError");
    }
  }
  return ffi::Error(ffi::ErrorCode::kInternal, status.message);
}

// The operands every operation begins with, resolved.
struct Place {
  std::shared_ptr<Pool> pool;
  Domain* domain = nullptr;
  Version version;
  int rank = 0;

  Status Resolve(const Ints& version_bits, const Ints& member) {
    if (version_bits.element_count() != 4 || member.element_count() != 2) {
      return Status::Error(Code::kInvalidArgument, "the pool: a version has 4 entries, not ",
                           version_bits.element_count());
    }
    const int32_t* bits = version_bits.typed_data();
    version = {bits[1], bits[2], bits[3]};
    rank = member.typed_data()[1];
    pool = FindPool(version.incarnation);
    if (pool == nullptr) {
      return Status::Error(Code::kPoolClosed, "the pool of version ", version.text(),
                           " was closed; open one and publish again");
    }
    domain = pool->domain(bits[0], member.typed_data()[0]);
    if (domain == nullptr || rank < 0 || rank >= domain->shape().members) {
      return Status::Error(Code::kInvalidArgument, "table ", bits[0], " has no group ", member.typed_data()[0],
                           ", rank ", rank);
    }
    domain->Chaos();
    return Status::Ok();
  }
};

XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_renewal);
XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_renew);
XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_fill);
XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_begin_update);
XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_gradient_of);
XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_contents_of);
XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_write_next);
XLA_FFI_DECLARE_HANDLER_SYMBOL(fef_commit);

}  // namespace fef

#endif  // FEF_HANDLERS_H_
