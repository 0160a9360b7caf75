// Work that may have to wait, without holding XLA's thread.
//
// A handler that blocked would keep the thread on which other operations of its device are waiting to start, among
// them the collective another device blocks in: a deadlock, seen with 2, 4 and 8 virtual devices. So an operation
// that has to wait returns at once, and what depends on it goes on from a thread of its own.
#ifndef FEF_TASK_H_
#define FEF_TASK_H_

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "parallel.h"
#include "pool.h"

namespace fef {

class Task {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Task() = default;
  // Whether the next piece can be done now: nothing if it has to wait, else OK, or why it never can. Called under the
  // domain's mutex.
  virtual std::optional<Status> Ready() = 0;
  // What Ready waits for. Called under the domain's mutex.
  virtual std::string Describe() const = 0;
  // Does the next piece; *is_done is set with the last one.
  virtual Status Work(Executor& executor, bool* is_done) = 0;
  // Ready has had to wait.
  virtual void Waited(double microseconds) = 0;
  // Nothing more is done before this time.
  virtual Clock::time_point not_before() const { return {}; }
};

// Does the task, piece by piece: on the calling thread with `here`, and, once something must be waited for, on a new
// thread with threads of its own. Calls `done` once, after a wait of more than the pool's deadline with
// kDeadlineExceeded and what the task describes. `pool` is kept alive until then.
void Run(std::shared_ptr<Pool> pool, Domain& domain, std::shared_ptr<Task> task, Executor& here,
         std::function<void(const Status&)> done);

// A task that only waits.
class Condition : public Task {
 public:
  Condition(std::function<std::optional<Status>()> poll, std::function<std::string()> describe,
            std::function<void(double)> waited)
      : poll_(std::move(poll)), describe_(std::move(describe)), waited_(std::move(waited)) {}

  std::optional<Status> Ready() override { return poll_(); }
  std::string Describe() const override { return describe_(); }
  Status Work(Executor&, bool* is_done) override {
    *is_done = true;
    return Status::Ok();
  }
  void Waited(double microseconds) override { waited_(microseconds); }

 private:
  const std::function<std::optional<Status>()> poll_;
  const std::function<std::string()> describe_;
  const std::function<void(double)> waited_;
};

}  // namespace fef

#endif  // FEF_TASK_H_
