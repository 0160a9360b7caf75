#include "await.h"

#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

namespace fef {

void Await(std::shared_ptr<Pool> pool, Domain& domain, std::function<std::optional<Status>()> poll,
           std::function<std::string()> describe, std::function<void(Status, double waited_us)> done) {
  using Clock = std::chrono::steady_clock;
  std::optional<Status> status;
  {
    std::lock_guard<std::mutex> lock(domain.mutex());
    status = poll();
  }
  if (status) return done(*status, 0.0);
  std::thread([pool = std::move(pool), &domain, poll = std::move(poll), describe = std::move(describe),
               done = std::move(done), start = Clock::now()] {
    std::optional<Status> status;
    {
      std::unique_lock<std::mutex> lock(domain.mutex());
      while (!(status = poll())) {
        const double left_s = domain.deadline_s() - std::chrono::duration<double>(Clock::now() - start).count();
        if (left_s <= 0) {
          status = Status::Error(Code::kDeadlineExceeded, describe(), " within ", domain.deadline_s(), " s");
          break;
        }
        domain.WaitForChange(lock, left_s);
      }
    }
    done(*status, std::chrono::duration<double, std::micro>(Clock::now() - start).count());
  }).detach();
}

}  // namespace fef
