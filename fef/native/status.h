// The outcome of a native operation. handlers.cc maps the codes to XLA's; Python maps the first word of the text to an
// exception type (fef/pool/errors.py).
#ifndef FEF_STATUS_H_
#define FEF_STATUS_H_

#include <string>
#include <utility>

namespace fef {

enum class Code {
  kOk,
  kInvalidArgument,    // a caller's mistake: out of range, wrong shape
  kStaleVersion,       // the block has been refilled, or belongs to another incarnation of the pool
  kDeadlineExceeded,   // a wait ran out; the text names what it waited for
  kResourceExhausted,  // no slot or no memory
  kPoolClosed,
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status Ok() { return {}; }
  static Status Error(Code code, std::string message) { return {code, std::move(message)}; }
};

}  // namespace fef

#endif  // FEF_STATUS_H_
