// What the tests of the pool's core share: checks, threads as members, and the numbers that members exchange.
#ifndef FEF_POOL_CHECKS_H_
#define FEF_POOL_CHECKS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "domain.h"

namespace fef_test {

using fef::Code;
using fef::Domain;
using fef::Lease;
using fef::Status;
using fef::Version;

inline std::atomic<int> num_failures{0};

inline void Check(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED: %s\n", what.c_str());
  num_failures = 1;
}

inline void CheckOk(const Status& status, const std::string& what) { Check(status.ok(), what + ": " + status.message); }

inline void CheckError(const Status& status, Code code, const std::string& text, const std::string& what) {
  Check(status.code == code && status.message.find(text) != std::string::npos,
        what + ": code " + std::to_string(int(status.code)) + ", " + status.message);
}

// Every task on a thread of its own, so that the core's own parallel loops race as much as they can.
class Threads : public fef::Executor {
 public:
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  void Schedule(std::function<void()> work) override { threads_.emplace_back(std::move(work)); }
  int64_t Parallelism() const override { return 2; }

 private:
  std::vector<std::thread> threads_;
};

inline void InParallel(int num_threads, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

// What a collective is to the members: nobody goes on before all have come.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
  }

 private:
  const int size_;
  int arrived_ = 0, round_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
};

// Gives the other threads a chance at a place that the seed chooses.
inline void MaybePause(std::mt19937& random) {
  if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

inline fef::TableShape Shape(int members, int experts, int layers, int64_t block_elems, int slots, int stages) {
  fef::TableShape shape;
  shape.name = "moe";
  shape.layers = layers;
  shape.experts = experts;
  shape.members = members;
  shape.blocks_per_member = (experts + members - 1) / members;
  for (int expert = 0; expert < experts; ++expert) {
    shape.home.push_back(expert % members);
    shape.local.push_back(expert / members);
  }
  shape.block_elems = block_elems;
  shape.slots = slots;
  shape.stages = stages;
  return shape;
}

constexpr double kDeadline = 60.0;

inline Status Wait(Domain& domain, const std::function<std::optional<Status>()>& poll) {
  std::unique_lock<std::mutex> lock(domain.mutex());
  for (;;) {
    if (const std::optional<Status> status = poll()) return *status;
    domain.WaitForChange(lock, kDeadline);
  }
}

inline float BlockValue(int counter, int layer, int local, int rank) {
  return counter + 1000.0f * layer + 0.25f * local + 0.001f * rank;
}

inline bool HoldsOnly(const Lease& lease, int64_t elems, float value) {
  const float* block = static_cast<const float*>(lease.block());
  return std::all_of(block, block + elems, [&](float x) { return x == value; });
}

inline float Gradient(int counter, int layer, int expert, int source, int64_t i) {
  return 0.1f * counter + 0.37f * layer + 0.011f * expert + 1.7f * source + 1e-3f * i;
}

inline bool Sends(int counter, int layer, int expert, int source) {
  return (counter + 3 * layer + 5 * expert + 7 * source) % 3 != 0;
}

inline Status Publish(Domain& domain, const Version& version, int rank, int64_t run) {
  Threads executor;
  const int64_t elems = domain.shape().block_elems;
  return domain.Publish(
      version, rank, run,
      [&](int layer, int local, char* block) {
        float* out = reinterpret_cast<float*>(block);
        std::fill(out, out + elems, BlockValue(version.counter, layer, local, rank));
      },
      executor);
}

// One block, which must be there.
inline Status Read(Domain& domain, const Version& version, int rank, int layer, int expert, Lease* lease) {
  std::lock_guard<std::mutex> lock(domain.mutex());
  std::vector<fef::Loan> loans;
  const std::optional<Status> status = domain.Read(version, rank, layer, {expert}, /*is_all=*/true, &loans);
  if (!status) return Status::Error(Code::kDeadlineExceeded, "it would have to wait");
  if (status->ok()) *lease = std::move(loans[0].lease);
  return *status;
}

// All of the blocks, waited for and looked at by no one.
inline std::optional<Status> PollAll(Domain& domain, const Version& version, int rank, int layer,
                                     const std::vector<int>& experts) {
  std::vector<fef::Loan> loans;
  return domain.Read(version, rank, layer, experts, /*is_all=*/true, &loans);
}

inline void SendGradients(Domain& domain, const Version& version, int rank, int64_t run, int layer) {
  const fef::TableShape& shape = domain.shape();
  int stage = -1;
  CheckOk(Wait(domain, [&] { return domain.StageAdmitted(version, rank, run, layer, &stage); }), "StageAdmitted");
  std::vector<int> experts;
  for (int expert = 0; expert < shape.experts; ++expert) {
    if (Sends(version.counter, layer, expert, rank)) experts.push_back(expert);
  }
  std::vector<float*> blocks;
  Threads executor;
  CheckOk(domain.StageGradients(version, rank, layer, stage, experts, &blocks, executor), "StageGradients");
  for (size_t k = 0; k < blocks.size(); ++k) {  // one by one, the last first
    const size_t at = blocks.size() - 1 - k;
    for (int64_t i = 0; i < shape.block_elems; ++i) {
      blocks[at][i] = Gradient(version.counter, layer, experts[at], rank, i);
    }
    CheckOk(domain.SendGradients(version, rank, layer, stage, {experts[at]}, executor), "SendGradients");
  }
}

}  // namespace fef_test

#endif  // FEF_POOL_CHECKS_H_
