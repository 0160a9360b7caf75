// Waiting without holding XLA's thread.
//
// A handler that blocked would keep the thread on which other operations of its device are waiting to start, among
// them the collective another device blocks in: a deadlock, seen with 2, 4 and 8 virtual devices. So an operation
// that has to wait returns at once, and what depends on it goes on from a thread of its own.
#ifndef FEF_AWAIT_H_
#define FEF_AWAIT_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "pool.h"

namespace fef {

// Calls `done` once: at once if `poll` (called under the domain's mutex) already has an answer, else from a new thread
// when it has, or with kDeadlineExceeded and `describe()` when the pool's deadline has passed. `waited_us` is the time
// spent. `pool` is kept alive until then.
void Await(std::shared_ptr<Pool> pool, Domain& domain, std::function<std::optional<Status>()> poll,
           std::function<std::string()> describe, std::function<void(Status, double waited_us)> done);

}  // namespace fef

#endif  // FEF_AWAIT_H_
