// Runs the tasks of one handler call on borrowed threads. Nothing here knows where the threads come from.
#ifndef FEF_PARALLEL_H_
#define FEF_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace fef {

// A source of threads. Schedule may run its argument on any thread, at any later time.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void Schedule(std::function<void()> work) = 0;
  // How many threads can be busy at once, the caller included; at least 1.
  virtual int64_t Parallelism() const = 0;
};

// No thread but the caller's.
class CallerAlone : public Executor {
 public:
  void Schedule(std::function<void()>) override {}
  int64_t Parallelism() const override { return 1; }
};

// Runs task(0) ... task(num_tasks - 1), in any order and possibly at once, and returns when all have ended. The
// caller takes tasks too, so that this ends even if the executor never finds a free thread. Tasks must not throw.
void ParallelFor(Executor& executor, int64_t num_tasks, const std::function<void(int64_t)>& task);

}  // namespace fef

#endif  // FEF_PARALLEL_H_
