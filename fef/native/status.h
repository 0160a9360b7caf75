// The outcome of a native operation. handlers.cc maps the codes to XLA's; Python maps the first word of the text to an
// exception type (fef/pool/errors.py).
#ifndef FEF_STATUS_H_
#define FEF_STATUS_H_

#include <sstream>
#include <string>

namespace fef {

enum class Code {
  kOk,
  kInvalidArgument,    // a caller's mistake: out of range, wrong shape
  kStaleVersion,       // the block has been refilled, or belongs to another incarnation of the pool
  kDeadlineExceeded,   // a wait ran out; the text names what it waited for
  kResourceExhausted,  // no slot or no memory
  kPoolClosed,
  kPeerLost,           // another host is gone, or cannot be reached
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status Ok() { return {}; }
  // The message is its parts, strings and numbers, one after the other.
  template <typename... Parts>
  static Status Error(Code code, const Parts&... parts) {
    std::ostringstream message;
    (message << ... << parts);
    return {code, message.str()};
  }
};

}  // namespace fef

#endif  // FEF_STATUS_H_
