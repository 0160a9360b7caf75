// Checks the pool's core without XLA, with one thread for each member: every check prints what is wrong and makes the
// exit code 1. Meant to be run under a sanitizer: most of what can go wrong here is a race.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "task.h"
#include "domain.h"
#include "pool.h"
#include "pool_checks.h"

namespace {

using namespace fef_test;

constexpr int32_t kIncarnation = 5;

fef::PoolOptions Options(double deadline_s) {
  fef::PoolOptions options;
  options.deadline_s = deadline_s;
  options.membership.incarnation = fef::NextIncarnation();
  return options;
}

Version At(int counter, int microbatch = 0) { return {kIncarnation, counter, microbatch}; }

struct Opened {
  explicit Opened(const fef::TableShape& shape, double deadline_s = kDeadline)
      : domain(shape, kIncarnation, deadline_s, std::nullopt) {
    CheckOk(domain.Open(), "Open");
  }
  Domain domain;
};

Status Publish(Domain& domain, int counter, int rank, int64_t run) { return fef_test::Publish(domain, At(counter), rank, run); }

// A whole training step of one member: read, send gradients of all layers in reverse, collect, and check every number.
// Every stage that all members send is added `times` times.
void CollectAndCheck(Domain& domain, int counter, int rank, int times) {
  const fef::TableShape& shape = domain.shape();
  CheckOk(domain.CloseVersion(At(counter), rank), "CloseVersion");
  CheckOk(Wait(domain, [&] { return domain.AllClosed(At(counter)); }), "AllClosed");
  Threads executor;
  std::atomic<int> num_taken{0};
  CheckOk(domain.Collect(
              At(counter), rank,
              [&](int layer, int local, const float* sum) {
                ++num_taken;
                const int expert = local * shape.members + rank;
                std::vector<float> wanted;
                for (int source = 0; source < shape.members && expert < shape.experts; ++source) {
                  if (!Sends(counter, layer, expert, source)) continue;
                  const bool is_first = wanted.empty();
                  wanted.resize(shape.block_elems);
                  for (int64_t i = 0; i < shape.block_elems; ++i) {
                    const float g = Gradient(counter, layer, expert, source, i);
                    wanted[i] = is_first ? g : wanted[i] + g;
                  }
                }
                if (sum == nullptr || wanted.empty()) return Check(sum == nullptr && wanted.empty(),
                                                                   "a sum of nothing is null");
                const std::vector<float> once = wanted;
                for (int again = 1; again < times; ++again) {
                  for (int64_t i = 0; i < shape.block_elems; ++i) wanted[i] += once[i];
                }
                Check(std::memcmp(sum, wanted.data(), wanted.size() * sizeof(float)) == 0,
                      "sums are in rank order, bit for bit: version " + std::to_string(counter) + ", expert " +
                          std::to_string(expert));
              },
              executor),
          "Collect");
  Check(num_taken == shape.layers * shape.blocks_per_member, "Collect names every place");
}

void TestTrainingSteps(int members, int experts, int64_t block_elems, int steps) {
  const int layers = 4;
  Opened opened(Shape(members, experts, layers, block_elems, /*slots=*/2, /*stages=*/2));
  Domain& domain = opened.domain;
  Barrier barrier(members);
  InParallel(members, [&](int rank) {
    std::mt19937 random(rank);
    for (int counter = 1; counter <= steps; ++counter) {
      barrier.Wait();  // the collective that agrees on the version
      MaybePause(random);
      CheckOk(Publish(domain, counter, rank, /*run=*/counter), "Publish");
      for (int layer = 0; layer < layers; ++layer) {
        std::vector<int> all(experts);
        for (int expert = 0; expert < experts; ++expert) all[expert] = expert;
        CheckOk(Wait(domain, [&] { return PollAll(domain, At(counter), rank, layer, all); }), "PollAll");
        for (int expert : all) {
          Lease lease;
          CheckOk(Read(domain, At(counter), rank, layer, expert, &lease), "Read");
          const int home = expert % members;
          Check(HoldsOnly(lease, block_elems, BlockValue(counter, layer, expert / members, home)),
                "a block has its publisher's contents");
        }
      }
      for (int layer = layers - 1; layer >= 0; --layer) {
        MaybePause(random);
        SendGradients(domain, At(counter), rank, counter, layer);
      }
      CollectAndCheck(domain, counter, rank, /*times=*/1);
    }
  });
}

// One layer is used twice by branches that do not depend on each other, so that both wait, write and sum at once.
void TestLayerUsedTwice() {
  const int members = 3;
  Opened opened(Shape(members, 3, 2, 20000, /*slots=*/2, /*stages=*/2));
  Domain& domain = opened.domain;
  for (int counter = 1; counter <= 10; ++counter) {
    InParallel(members, [&](int rank) {
      CheckOk(Publish(domain, counter, rank, counter), "Publish");
      InParallel(2, [&](int branch) {
        std::mt19937 random(rank * 100 + counter * 2 + branch);
        MaybePause(random);
        SendGradients(domain, At(counter), rank, counter, 1);
        SendGradients(domain, At(counter), rank, counter, 0);
      });
      CollectAndCheck(domain, counter, rank, /*times=*/2);
    });
  }
}

// A member may be a whole use of a layer ahead of another: first uses are summed with first uses.
void TestUsesMeetInTheirOrder() {
  Opened opened(Shape(/*members=*/2, /*experts=*/1, /*layers=*/1, /*block_elems=*/1, /*slots=*/2, /*stages=*/2));
  Domain& domain = opened.domain;
  for (int rank : {0, 1}) CheckOk(Publish(domain, 1, rank, 1), "Publish");
  const float gradients[2][2] = {{1e8f, 1.0f}, {-1e8f, 1.0f}};  // [rank][use]; any other order loses the ones
  Threads executor;
  for (int rank : {0, 1}) {
    for (int use : {0, 1}) {
      int stage = -1;
      CheckOk(Wait(domain, [&] { return domain.StageAdmitted(At(1), rank, 1, 0, &stage); }), "StageAdmitted");
      std::vector<float*> blocks;
      CheckOk(domain.StageGradients(At(1), rank, 0, stage, {0}, &blocks, executor), "StageGradients");
      *blocks.at(0) = gradients[rank][use];
      CheckOk(domain.SendGradients(At(1), rank, 0, stage, {0}, executor), "SendGradients");
    }
    CheckOk(domain.CloseVersion(At(1), rank), "CloseVersion");
  }
  CheckOk(Wait(domain, [&] { return domain.AllClosed(At(1)); }), "AllClosed");
  CheckOk(domain.Collect(
              At(1), 0, [&](int, int, const float* sum) { Check(*sum == 2.0f, "sum " + std::to_string(*sum)); },
              executor),
          "Collect");
}

// Readers with old addresses get what they asked for or a refusal, and what they hold does not change.
void TestStaleReaders() {
  const int64_t elems = 4000;
  Opened opened(Shape(/*members=*/2, /*experts=*/2, /*layers=*/1, elems, /*slots=*/2, /*stages=*/2));
  Domain& domain = opened.domain;
  std::atomic<int> newest{0}, num_read{0}, num_refused{0};
  std::atomic<bool> is_done{false};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&, reader] {
      std::mt19937 random(reader);
      while (!is_done) {
        if (newest == 0) continue;
        const int counter = std::max(1, newest - int(random() % 4));
        Lease lease;
        const Status status = Read(domain, At(counter), 1, 0, 0, &lease);
        if (!status.ok()) {
          Check(status.code == Code::kStaleVersion, "a reader is refused as stale: " + status.message);
          ++num_refused;
          continue;
        }
        for (int look = 0; look < 2; ++look) {
          Check(HoldsOnly(lease, elems, BlockValue(counter, 0, 0, 0)), "a leased block keeps its contents");
          if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        ++num_read;
      }
    });
  }
  for (int counter = 1; counter <= 400; ++counter) {
    for (int rank : {0, 1}) CheckOk(Publish(domain, counter, rank, /*run=*/counter), "Publish");
    newest = counter;
    for (int rank : {0, 1}) CheckOk(domain.Release(At(counter), rank), "Release");
  }
  while (num_read == 0 || num_refused == 0) std::this_thread::yield();  // versions 399 and 400 stay
  is_done = true;
  for (std::thread& reader : readers) reader.join();
}

// Two versions of one program are published at the same time by the same member.
void TestPublishTwoAtOnce() {
  const int64_t elems = 50000;
  Opened opened(Shape(1, 2, 2, elems, /*slots=*/2, /*stages=*/2));
  Domain& domain = opened.domain;
  for (int counter = 1; counter < 40; counter += 2) {
    InParallel(2, [&](int i) { CheckOk(Publish(domain, counter + i, 0, /*run=*/counter), "Publish"); });
    for (int i : {0, 1}) {
      for (int layer : {0, 1}) {
        Lease lease;
        CheckOk(Read(domain, At(counter + i), 0, layer, 1, &lease), "Read");
        Check(lease.block() != nullptr && HoldsOnly(lease, elems, BlockValue(counter + i, layer, 1, 0)),
              "two versions do not share a slot");
      }
    }
    CheckError(Publish(domain, 1000 + counter, 0, /*run=*/counter), Code::kResourceExhausted,
               "all 2 slots hold versions that are still open", "a third open version in one execution");
  }
}

// A slot that is being read is taken last, and written to only when the reader is done.
void TestLeases() {
  Opened opened(Shape(1, 1, 1, 10, /*slots=*/2, /*stages=*/2), /*deadline_s=*/0.05);
  Domain& domain = opened.domain;
  {
    Lease leases[2];
    for (int counter : {1, 2}) {
      CheckOk(Publish(domain, counter, 0, counter), "Publish beside a leased slot");
      CheckOk(Read(domain, At(counter), 0, 0, 0, &leases[counter - 1]), "Read");
      CheckOk(domain.Release(At(counter), 0), "Release");
    }
    CheckError(Publish(domain, 3, 0, 3), Code::kDeadlineExceeded,
               "publish: table moe, version (5,3), rank 0, layer 0: a reader still holds",
               "leases that are never dropped");
    for (int counter : {1, 2}) Check(HoldsOnly(leases[counter - 1], 10, BlockValue(counter, 0, 0, 0)),
                                     "a leased block was not written to");
    Lease late;
    CheckError(Read(domain, At(1), 0, 0, 0, &late), Code::kStaleVersion, "no slot holds this version",
               "a version whose slot was taken away");
  }
  CheckOk(Publish(domain, 4, 0, 4), "Publish after the leases were dropped");
  Lease lease;
  CheckOk(Read(domain, At(4), 0, 0, 0, &lease), "Read");
}

// A failed execution leaves stages that nobody will close; the next execution takes them over.
void TestAbandonedStages() {
  Opened opened(Shape(2, 2, 3, 10, 2, 2));
  Domain& domain = opened.domain;
  int stage = -1;
  for (int rank : {0, 1}) CheckOk(Publish(domain, 1, rank, 1), "Publish");
  for (int layer : {2, 1}) CheckOk(Wait(domain, [&] { return domain.StageAdmitted(At(1), 0, 1, layer, &stage); }),
                                   "StageAdmitted");
  {
    std::lock_guard<std::mutex> lock(domain.mutex());
    Check(!domain.StageAdmitted(At(1), 0, 1, 0, &stage), "no third stage within the execution");
    Check(domain.DescribeStages() == "accumulate: table moe: every stage is taken: layer 2 waits for rank 0,1; "
                                     "layer 1 waits for rank 0,1;",
          domain.DescribeStages());
  }
  for (int run : {2, 3}) {  // the same version's gradients once more, then a new version
    const int counter = run - 1;
    InParallel(2, [&](int rank) {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // rank 1 must not join what 0 left
      if (counter == 2) CheckOk(Publish(domain, counter, rank, run), "Publish");
      for (int layer : {2, 1, 0}) SendGradients(domain, At(counter), rank, run, layer);
      CollectAndCheck(domain, counter, rank, 1);
    });
    CheckOk(Wait(domain, [&] { return domain.StageAdmitted(At(counter), 0, run, 0, &stage); }), "StageAdmitted");
  }
  std::vector<float*> blocks;
  Threads executor;
  CheckError(domain.StageGradients(At(1), 0, 1, 1, {0}, &blocks, executor), Code::kInvalidArgument,
             "rank 0 was not admitted to a stage", "the old admission");
}

// A backward pass may run again, when everybody has closed the version already: it still waits for all gradients.
void TestBackwardTwice() {
  Opened opened(Shape(2, 2, 2, 10, 2, 2));
  Domain& domain = opened.domain;
  for (int rank : {0, 1}) CheckOk(Publish(domain, 1, rank, 1), "Publish");
  for (int run : {2, 3, 4}) {
    InParallel(2, [&](int rank) {
      if (rank == run % 2) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (int layer : {1, 0}) SendGradients(domain, At(1), rank, run, layer);
      CollectAndCheck(domain, 1, rank, 1);
    });
  }
}

// A version whose gradients are on their way is not forgotten, however many come after it.
void TestVersionWithStagesIsKept() {
  Opened opened(Shape(2, 2, 1, 10, 2, 2));
  Domain& domain = opened.domain;
  for (int rank : {0, 1}) CheckOk(Publish(domain, 1, rank, 1), "Publish");
  SendGradients(domain, At(1), 0, 1, 0);
  for (int counter = 2; counter <= 40; ++counter) CheckOk(Publish(domain, counter, 0, counter), "Publish");
  InParallel(2, [&](int rank) {
    if (rank == 1) SendGradients(domain, At(1), 1, 1, 0);
    CollectAndCheck(domain, 1, rank, 1);
  });
}

void TestRefusals() {
  Opened opened(Shape(2, 2, 1, 10, 2, 2));
  Domain& domain = opened.domain;
  for (int counter = 1; counter <= 40; ++counter) {
    for (int rank : {0, 1}) CheckOk(Publish(domain, counter, rank, counter), "Publish");  // never released
  }
  Lease lease;
  auto published = [&](const Version& version) {
    std::lock_guard<std::mutex> lock(domain.mutex());
    return PollAll(domain, version, 0, 0, {0, 1});
  };
  Check(!published(At(41)), "a version that may still come is waited for");
  Check(published(At(40))->ok(), "the newest version is there");
  CheckError(*published(At(1)), Code::kStaleVersion, "version (5,1) is no longer remembered",
             "an old version is not waited for");
  CheckError(*published({kIncarnation + 1, 40, 0}), Code::kStaleVersion, "belongs to another incarnation",
             "another incarnation");
  CheckError(Read(domain, At(38), 0, 0, 1, &lease), Code::kStaleVersion,
             "expert 1, home rank 1: no slot holds this version", "a refilled slot");
  CheckError(Read(domain, At(40), 0, 1, 0, &lease), Code::kInvalidArgument, "layer 1, expert 0 is out of range",
             "layer out of range");
  CheckError(Read(domain, At(40), 0, 0, 2, &lease), Code::kInvalidArgument, "expert 2 is out of range",
             "expert out of range");
  CheckError(domain.CloseVersion(At(1), 0), Code::kStaleVersion, "collect: table moe, version (5,1)",
             "closing an old version");
  CheckOk(domain.Release(At(1), 0), "releasing an old version");
  int stage = -1;
  CheckOk(Wait(domain, [&] { return domain.StageAdmitted(At(40), 0, 40, 0, &stage); }), "StageAdmitted");
  std::vector<float*> blocks;
  Threads executor;
  CheckError(domain.StageGradients(At(40), 0, 0, stage, {0, 2}, &blocks, executor), Code::kInvalidArgument,
             "expert 2 is out of range", "gradient out of range");
  CheckError(domain.SendGradients(At(40), 1, 0, stage, {}, executor), Code::kInvalidArgument, "rank 1 was not admitted",
             "a rank without admission");
  CheckError(Domain(Shape(65, 65, 1, 1, 2, 2), 1, 1.0, std::nullopt).Open(), Code::kInvalidArgument, "at most 64",
             "65 members");
  CheckError(Domain(Shape(1, 1, 1, int64_t{1} << 38, 2, 2), 1, 1.0, std::nullopt).Open(), Code::kResourceExhausted,
             "Cannot allocate memory", "more memory than there is");
  for (int layer : {-1, 0, 1}) domain.CountWait(At(40), 0, layer, fef::kWaitPublished, 2.0);
  std::vector<int32_t> counts(fef::kNumPurposes * 2);
  std::vector<float> waits_us(fef::kNumWaitKinds);
  CheckOk(domain.ReadLedger(At(40), 0, counts.data(), waits_us.data()), "ReadLedger");
  Check(waits_us == std::vector<float>{2.0f, 0.0f, 0.0f, 0.0f}, "waits are counted where they belong");
  domain.Close();
  CheckError(Read(domain, At(40), 0, 0, 0, &lease), Code::kPoolClosed, "closed", "Read after Close");
  CheckError(Publish(domain, 41, 0, 41), Code::kPoolClosed, "closed", "Publish after Close");
}

int NumSegments() {
  std::ifstream maps("/proc/self/maps");
  int num = 0;
  for (std::string line; std::getline(maps, line);) num += line.find("memfd:fef-") != std::string::npos;
  return num;
}

// Waits of every kind end when the pool is closed, each is answered once, and the last one frees the memory.
void TestCloseEndsWaits() {
  auto pool = fef::OpenPool(Options(kDeadline));
  int32_t table = -1;
  CheckOk(pool->AddTable(Shape(2, 2, 1, 1000, 2, 2), &table), "AddTable");
  Check(NumSegments() == 3, "a segment for each member, and one for the stages");
  Domain& domain = *pool->domain(table, 0);
  const Version version{pool->incarnation(), 1, 0}, never{pool->incarnation(), 2, 0};
  Threads executor;
  for (int rank : {0, 1}) CheckOk(domain.Publish(version, rank, 1, [](int, int, char*) {}, executor), "Publish");
  CheckOk(domain.CloseVersion(version, 0), "CloseVersion");
  int stage = -1;
  for (int use : {0, 1}) CheckOk(Wait(domain, [&] { return domain.StageAdmitted(version, 0, 1, 0, &stage); }),
                                 "StageAdmitted " + std::to_string(use));

  std::mutex mutex;
  std::condition_variable changed;
  int num_answers = 0;
  auto done = [&](const Status& status) {
    CheckError(status, Code::kPoolClosed, "the pool was closed", "a wait when the pool is closed");
    std::lock_guard<std::mutex> lock(mutex);
    ++num_answers;
    changed.notify_all();
  };
  auto await = [&](std::function<std::optional<Status>()> poll) {
    auto task = std::make_shared<fef::Condition>(std::move(poll), [] { return std::string("unused"); }, [](double) {});
    fef::Run(pool, domain, std::move(task), executor, done);
  };
  for (int i = 0; i < 4; ++i) {
    await([&domain, never] { return PollAll(domain, never, 0, 0, {0}); });
    await([&domain, version] { return domain.AllClosed(version); });
    await([&domain, version, stage]() mutable { return domain.StageAdmitted(version, 0, 1, 0, &stage); });
  }
  fef::ClosePool(pool->incarnation());
  await([&domain, version] { return domain.AllClosed(version); });  // answered at once
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return num_answers == 13; });
  lock.unlock();
  Check(fef::FindPool(pool->incarnation()) == nullptr, "a closed pool is not found");
  const std::weak_ptr<fef::Pool> watch = pool;
  pool.reset();
  while (!watch.expired()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the waits' threads end
  for (int i = 0; i < 5000 && NumSegments() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Check(NumSegments() == 0, "no segment is left");
}

void TestDeadline() {
  auto pool = fef::OpenPool(Options(/*deadline_s=*/0.02));
  int32_t table = -1;
  CheckOk(pool->AddTable(Shape(2, 2, 1, 10, 2, 2), &table), "AddTable");
  Domain& domain = *pool->domain(table, 0);
  const Version version{pool->incarnation(), 1, 0};
  Threads executor;
  CheckOk(domain.Publish(version, 1, 1, [](int, int, char*) {}, executor), "Publish");
  std::atomic<bool> is_done{false};
    auto task = std::make_shared<fef::Condition>(
      [&] { return PollAll(domain, version, 1, 0, {0, 1}); },
      [&] { return domain.DescribeUnreadable(version, 0, {0, 1}); }, [](double) {});
  fef::Run(pool, domain, task, executor, [&](const Status& status) {
    CheckError(status, Code::kDeadlineExceeded,
               "get: table moe, version " + version.text() + ": rank 0 has not published it within 0.02",
               "the deadline's text");
    is_done = true;
  });
  while (!is_done) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  fef::ClosePool(pool->incarnation());
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  TestTrainingSteps(/*members=*/4, /*experts=*/6, /*block_elems=*/37, /*steps=*/25);
  TestTrainingSteps(/*members=*/2, /*experts=*/3, /*block_elems=*/40000, /*steps=*/4);
  TestLayerUsedTwice();
  TestUsesMeetInTheirOrder();
  TestStaleReaders();
  TestPublishTwoAtOnce();
  TestLeases();
  TestAbandonedStages();
  TestBackwardTwice();
  TestVersionWithStagesIsKept();
  TestRefusals();
  TestCloseEndsWaits();
  TestDeadline();
  std::puts(num_failures == 0 ? "all passed" : "some failed");
  return num_failures;
}
