// A thread for work that must not hold up the thread that found it: the network's threads only move bytes.
#ifndef FEF_WORKER_H_
#define FEF_WORKER_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace fef {

class Worker {
 public:
  Worker() : thread_([this] { Run(); }) {}
  ~Worker() { Stop(); }

  void Post(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
  }

  // Ends after the work that was posted before.
  void Stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_stopping_ = true;
      changed_.notify_one();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return is_stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace fef

#endif  // FEF_WORKER_H_
