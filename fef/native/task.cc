#include "task.h"

#include <mutex>
#include <thread>

namespace fef {

namespace {

// For work after its handler has returned: XLA's threads are no longer its to use. The same parallelism, so that the
// work is cut, and rounded, in the same way.
class NewThreads : public Executor {
 public:
  explicit NewThreads(int64_t parallelism) : parallelism_(parallelism) {}

  void Schedule(std::function<void()> work) override { std::thread(std::move(work)).detach(); }
  int64_t Parallelism() const override { return parallelism_; }

 private:
  const int64_t parallelism_;
};

std::optional<Status> ReadyNow(Domain& domain, Task& task) {
  std::lock_guard<std::mutex> lock(domain.mutex());
  return task.Ready();
}

Status WaitUntilReady(Domain& domain, Task& task) {
  const auto start = Task::Clock::now();
  auto waited_s = [&] { return std::chrono::duration<double>(Task::Clock::now() - start).count(); };
  std::optional<Status> status;
  {
    std::unique_lock<std::mutex> lock(domain.mutex());
    if ((status = task.Ready())) return *status;
    while (!(status = task.Ready())) {
      const double left_s = domain.deadline_s() - waited_s();
      if (left_s <= 0) {
        return Status::Error(Code::kDeadlineExceeded, task.Describe(), " within ", domain.deadline_s(), " s");
      }
      domain.WaitForChange(lock, left_s);
    }
  }
  task.Waited(waited_s() * 1e6);
  return *status;
}

Status RunToEnd(Domain& domain, Task& task, Executor& executor) {
  for (bool is_done = false; !is_done;) {
    std::this_thread::sleep_until(task.not_before());
    if (Status status = WaitUntilReady(domain, task); !status.ok()) return status;
    if (Status status = task.Work(executor, &is_done); !status.ok()) return status;
  }
  return Status::Ok();
}

}  // namespace

void Run(std::shared_ptr<Pool> pool, Domain& domain, std::shared_ptr<Task> task, Executor& here,
         std::function<void(const Status&)> done) {
  while (task->not_before() <= Task::Clock::now()) {
    const std::optional<Status> ready = ReadyNow(domain, *task);
    if (!ready) break;
    bool is_done = false;
    const Status status = ready->ok() ? task->Work(here, &is_done) : *ready;
    if (is_done || !status.ok()) return done(status);
  }
  std::thread([pool = std::move(pool), &domain, task = std::move(task), threads = NewThreads(here.Parallelism()),
               done = std::move(done)]() mutable { done(RunToEnd(domain, *task, threads)); })
      .detach();
}

}  // namespace fef
