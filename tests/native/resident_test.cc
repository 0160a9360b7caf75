// Checks the tables whose contents stay in the pool, with one thread for each member; see pool_test.cc.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "domain.h"
#include "pool_checks.h"

namespace {

using namespace fef_test;
using fef::ResidentBlock;

constexpr int32_t kIncarnation = 6;
constexpr int kMembers = 2, kExperts = 3, kLayers = 2;
constexpr int64_t kElems = 37, kOwn = 5;

Version At(int counter) { return {kIncarnation, counter, 0}; }

fef::TableShape ResidentShape(int64_t own_elems) {
  fef::TableShape shape = Shape(kMembers, kExperts, kLayers, kElems, fef::kResidentSlots, /*stages=*/2);
  shape.is_resident = true;
  shape.own_elems = own_elems;
  return shape;
}

void ForBlocks(const std::function<void(int layer, int local)>& body) {
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int local = 0; local < (kExperts + kMembers - 1) / kMembers; ++local) body(layer, local);
  }
}

ResidentBlock Find(Domain& domain, int counter, int rank, int layer, int local, bool is_next) {
  ResidentBlock found;
  CheckOk(domain.FindResident(At(counter), rank, layer, local, is_next, &found), "FindResident");
  return found;
}

// Contents that tell which they are, beside them the home's own floats.
void Write(Domain& domain, int counter, int rank, int contents, bool is_next) {
  ForBlocks([&](int layer, int local) {
    const ResidentBlock found = Find(domain, counter, rank, layer, local, is_next);
    std::fill_n(reinterpret_cast<float*>(found.block), kElems, BlockValue(contents, layer, local, rank));
    if (found.own != nullptr) std::fill_n(found.own, kOwn, -BlockValue(contents, layer, local, rank));
  });
}

void CheckContents(Domain& domain, int counter, int reader, int contents) {
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int expert = 0; expert < kExperts; ++expert) {
      Lease lease;
      CheckOk(Read(domain, At(counter), reader, layer, expert, &lease), "Read");
      const float wanted = BlockValue(contents, layer, expert / kMembers, expert % kMembers);
      Check(lease.block() != nullptr && HoldsOnly(lease, kElems, wanted),
            "version " + std::to_string(counter) + " has contents " + std::to_string(contents));
    }
  }
  ForBlocks([&](int layer, int local) {
    const ResidentBlock found = Find(domain, counter, reader, layer, local, /*is_next=*/false);
    const float wanted = -BlockValue(contents, layer, local, reader);
    Check(found.own == nullptr || std::count(found.own, found.own + kOwn, wanted) == kOwn, "the home's own floats");
  });
}

void CheckGradients(Domain& domain, int counter, int rank) {
  ForBlocks([&](int layer, int local) {
    const int expert = local * kMembers + rank;
    const ResidentBlock found = Find(domain, counter, rank, layer, local, /*is_next=*/false);
    std::vector<float> wanted;
    for (int source = 0; source < kMembers && expert < kExperts; ++source) {
      if (!Sends(counter, layer, expert, source)) continue;
      const bool is_first = wanted.empty();
      wanted.resize(kElems);
      for (int64_t i = 0; i < kElems; ++i) {
        const float g = Gradient(counter, layer, expert, source, i);
        wanted[i] = is_first ? g : wanted[i] + g;
      }
    }
    if (found.gradient == nullptr || wanted.empty()) {
      return Check(found.gradient == nullptr && wanted.empty(), "the gradient of nothing is null");
    }
    Check(std::memcmp(found.gradient, wanted.data(), kElems * sizeof(float)) == 0, "gradients in rank order");
  });
}

void Close(Domain& domain, int counter, int rank) {
  CheckOk(domain.CloseVersion(At(counter), rank), "CloseVersion");
  CheckOk(Wait(domain, [&] { return domain.AllClosed(At(counter)); }), "AllClosed");
}

// Steps of training, each with its renewal, or the version of the commit before it. Every third step is not finite and
// keeps what was there; before every second one somebody looks at the contents without training.
void TestTrainingSteps(int64_t own_elems) {
  Domain domain(ResidentShape(own_elems), kIncarnation, kDeadline, std::nullopt);
  CheckOk(domain.Open(), "Open");
  Barrier barrier(kMembers);
  InParallel(kMembers, [&](int rank) {
    Threads executor;
    Write(domain, /*counter=*/1, rank, /*contents=*/0, /*is_next=*/false);
    int counter = 0, contents = 0;
    for (int step = 0; step < 12; ++step) {
      barrier.Wait();
      const int32_t committed = domain.Unrenewed();
      Check(committed == (step == 0 ? 0 : counter), "a commit waits for its renewal");
      barrier.Wait();
      if (committed == 0) ++counter;
      if (step % 2 == 1) {
        CheckOk(domain.Renew(At(counter), rank, /*run=*/10 * step, step), "Renew to look");
        barrier.Wait();
        CheckContents(domain, counter, rank, contents);
        CheckOk(domain.Release(At(counter), rank), "Release");
        CheckOk(Wait(domain, [&] { return domain.AllClosed(At(counter)); }), "AllClosed");
        barrier.Wait();
        ++counter;
      }
      CheckOk(domain.Renew(At(counter), rank, /*run=*/10 * step + 1, step), "Renew");
      barrier.Wait();
      CheckContents(domain, counter, rank, contents);
      for (int layer = kLayers - 1; layer >= 0; --layer) SendGradients(domain, At(counter), rank, 10 * step + 1, layer);
      Close(domain, counter, rank);
      CheckGradients(domain, counter, rank);
      CheckOk(domain.BeginUpdate(At(counter + 1), rank), "BeginUpdate");
      Write(domain, counter + 1, rank, /*contents=*/step + 1, /*is_next=*/true);
      const bool is_kept = step % 3 == 2;
      CheckOk(domain.Commit(At(counter + 1), rank, is_kept, executor), "Commit");
      ++counter;
      if (!is_kept) contents = step + 1;
    }
  });
  domain.Close();
}

void TestRefusals() {
  Domain domain(ResidentShape(kOwn), kIncarnation, kDeadline, std::nullopt);
  CheckOk(domain.Open(), "Open");
  CheckError(domain.Renew(At(1), 0, 1, 3), Code::kStaleVersion, "the state is that after 3 updates", "another state");
  for (int rank = 0; rank < kMembers; ++rank) CheckOk(domain.Renew(At(1), rank, 1, 0), "Renew");
  CheckError(domain.Renew(At(2), 0, 2, 0), Code::kInvalidArgument, "wait for its result", "two programs at once");
  ResidentBlock found;
  CheckError(domain.FindResident(At(1), 0, kLayers, 0, false, &found), Code::kInvalidArgument, "there is no block 0",
             "a layer that is not there");
  char* blocks = nullptr;
  float* own = nullptr;
  CheckOk(domain.Contents(1, &blocks, &own), "Contents");
  Check(blocks == Find(domain, 1, 1, 0, 0, false).block && own == Find(domain, 1, 1, 0, 0, false).own,
        "the contents begin with their first block");
  domain.Close();
  CheckError(domain.Renew(At(2), 0, 2, 0), Code::kPoolClosed, "closed", "after Close");

  Domain published(Shape(kMembers, kExperts, kLayers, kElems, 2, 2), kIncarnation, kDeadline, std::nullopt);
  CheckOk(published.Open(), "Open");
  CheckError(published.Renew(At(1), 0, 1, 0), Code::kInvalidArgument, "has no contents here", "not resident");
  CheckError(published.Contents(0, &blocks, &own), Code::kInvalidArgument, "has no contents here", "not resident");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  TestTrainingSteps(kOwn);
  TestTrainingSteps(/*own_elems=*/0);
  TestRefusals();
  std::puts(num_failures == 0 ? "all passed" : "some failed");
  return num_failures;
}
