#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace fef {
namespace {

// Shared with helpers that may start after the call has returned: they find no task left and must not touch `task`.
struct Progress {
  explicit Progress(int64_t num_tasks, const std::function<void(int64_t)>* task) : num_tasks(num_tasks), task(task) {}

  const int64_t num_tasks;
  const std::function<void(int64_t)>* const task;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable all_done;
  int64_t num_done = 0;

  void Work() {
    int64_t done_here = 0;
    for (int64_t i = next.fetch_add(1); i < num_tasks; i = next.fetch_add(1)) {
      (*task)(i);
      ++done_here;
    }
    if (done_here == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    num_done += done_here;
    if (num_done == num_tasks) all_done.notify_all();
  }
};

}  // namespace

void ParallelFor(Executor& executor, int64_t num_tasks, const std::function<void(int64_t)>& task) {
  const int64_t num_helpers = std::min(executor.Parallelism(), num_tasks) - 1;
  if (num_helpers <= 0) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  auto progress = std::make_shared<Progress>(num_tasks, &task);
  for (int64_t i = 0; i < num_helpers; ++i) executor.Schedule([progress] { progress->Work(); });
  progress->Work();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->all_done.wait(lock, [&] { return progress->num_done == num_tasks; });
}

}  // namespace fef
