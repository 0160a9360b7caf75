// Checks the leaf relay without XLA: the hosts of tests/native/hosts.h stand on leaves. Sums are in their documented
// order, bit for bit, and what crosses from leaf to leaf does so once.
#include <cstring>
#include <string>
#include <vector>

#include "hosts.h"
#include "pool_checks.h"
#include "wire.h"

namespace {

using namespace fef_test;

using Leaves = std::vector<int>;

// The hosts of the home's leaf, in their order, then the sums of the other leaves, in the order of their first hosts;
// and so again for each further microbatch.
std::vector<float> WantedSum(const Job& job, const Leaves& leaves, const fef::TableShape& shape, int counter, int layer,
                             int expert, int num_microbatches) {
  const int num_hosts = int(job.hosts.size()), home_leaf = leaves[job.host_of_rank[shape.home[expert]]];
  std::vector<float> total;
  for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
    for (int host = 0; host < num_hosts; ++host) {
      if (leaves[host] == home_leaf) Add(&total, HostSum(job, shape, counter, layer, expert, host));
    }
    Leaves done{home_leaf};
    for (int first = 0; first < num_hosts; ++first) {
      if (std::count(done.begin(), done.end(), leaves[first])) continue;
      done.push_back(leaves[first]);
      std::vector<float> of_leaf;
      for (int host = first; host < num_hosts; ++host) {
        if (leaves[host] == leaves[first]) Add(&of_leaf, HostSum(job, shape, counter, layer, expert, host));
      }
      Add(&total, of_leaf);
    }
  }
  return total;
}

// The host of a leaf that relays an expert of another one: each in turn, from member to member and expert to expert.
int RelayOf(const Job& job, const Leaves& leaves, const fef::TableShape& shape, int leaf, int expert) {
  std::vector<int> hosts;
  for (int host = 0; host < int(leaves.size()); ++host) {
    if (leaves[host] == leaf) hosts.push_back(host);
  }
  int turn = shape.local[expert];
  for (int rank = 0; rank < shape.home[expert]; ++rank) turn += leaves[job.host_of_rank[rank]] != leaf;
  return hosts[turn % hosts.size()];
}

// Of one expert and layer in one step, how much the ledgers of a leaf's members say has moved.
struct Moved {
  int fetched = 0, relayed = 0, gradients = 0, gathered = 0;
};

void CheckMoved(const Job& job, const Leaves& leaves, const fef::TableShape& shape, int counter, int num_microbatches,
                bool is_all_kept, const std::vector<std::vector<int32_t>>& counts_of_rank) {
  const int num_hosts = int(job.hosts.size());
  for (int first = 0; first < num_hosts; ++first) {
    const int leaf = leaves[first];
    if (std::find(leaves.begin(), leaves.begin() + first, leaf) != leaves.begin() + first) continue;
    const int size = int(std::count(leaves.begin(), leaves.end(), leaf));
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int expert = 0; expert < shape.experts; ++expert) {
        if (leaves[job.host_of_rank[shape.home[expert]]] == leaf) continue;
        Moved moved;
        int num_senders = 0, num_gathered = 0;
        for (int host = first; host < num_hosts; ++host) {
          if (leaves[host] != leaf || HostSum(job, shape, counter, layer, expert, host).empty()) continue;
          ++num_senders;
          num_gathered += host != RelayOf(job, leaves, shape, leaf, expert);
        }
        for (int rank = 0; rank < shape.members; ++rank) {
          if (leaves[job.host_of_rank[rank]] != leaf) continue;
          const auto count = [&](fef::Purpose purpose) {
            return counts_of_rank[rank][(layer * fef::kNumPurposes + purpose) * shape.experts + expert];
          };
          moved.fetched += count(fef::kWeights) + count(fef::kRefetch) + count(fef::kMissed);
          moved.relayed += count(fef::kRelayed);
          moved.gradients += count(fef::kGradients);
          moved.gathered += count(fef::kGathered);
        }
        const std::string where = "leaf " + std::to_string(leaf) + ", layer " + std::to_string(layer) + ", expert " +
                                  std::to_string(expert) + ": ";
        if (is_all_kept) {
          Check(moved.fetched == 1, where + "a block crosses once, not " + std::to_string(moved.fetched));
          Check(moved.relayed == size - 1, where + std::to_string(moved.relayed) + " blocks were relayed");
        }
        const int crossing = num_senders > 0 ? num_microbatches : 0;
        Check(moved.gradients == crossing, where + std::to_string(moved.gradients) + " gradients have crossed");
        Check(moved.gathered == num_gathered * num_microbatches,
              where + std::to_string(moved.gathered) + " gradients were gathered");
      }
    }
  }
}

void TestTrainingSteps(const Leaves& leaves, int members, int experts, int64_t block_elems, int steps,
                       int num_microbatches, int64_t cache_bytes = INT64_MAX) {
  const int layers = 3;
  Job job(int(leaves.size()), members, Way::kTcp, leaves);
  fef::TableShape shape = Shape(members, experts, layers, block_elems, /*slots=*/2, /*stages=*/2);
  shape.cache_bytes = cache_bytes;
  job.AddTable(shape);
  Barrier barrier(members);
  std::vector<std::vector<int32_t>> counts_of_rank(members);
  InParallel(members, [&](int rank) {
    std::mt19937 random(rank);
    for (int counter = 1; counter <= steps; ++counter) {
      barrier.Wait();
      const auto wanted_sum = [&](int layer, int expert) {
        return WantedSum(job, leaves, shape, counter, layer, expert, num_microbatches);
      };
      counts_of_rank[rank] = TrainingStep(job, rank, counter, num_microbatches, random, wanted_sum);
      barrier.Wait();
      if (rank == 0) {
        CheckMoved(job, leaves, shape, counter, num_microbatches, cache_bytes == INT64_MAX, counts_of_rank);
      }
      barrier.Wait();
    }
  });
  for (auto& host : job.hosts) Check(host->num_refused() == 0, "nothing is refused");
}

// Hosts 0 and 1 in one leaf, 2 and 3 in the other. Host 0 relays for host 1 what lives on host 2, a block to each host.
const Leaves kTwoLeaves{0, 0, 1, 1};

// What is wanted before it is published is had when it is, by those who have asked, once.
void TestWantsBeforeTheirTime() {
  Job job(4, 4, Way::kTcp, kTwoLeaves);
  fef::TableShape shape = Shape(4, 4, 1, 1000, 2, 2);
  shape.is_fetched_ahead = false;
  job.AddTable(shape);
  Domain& relay = job.of(0);
  fef::Message want;
  want.kind = fef::Kind::kWant;
  want.host = 1;
  want.incarnation = 7;
  want.counter = 1;
  want.layer = 0;
  want.expert = 2;
  relay.OnMessage(want, {}, {});
  fef::Message read = want;
  read.kind = fef::Kind::kRead;
  read.region = fef::Region::kRelayed;
  read.length = 4000;
  std::string bytes;
  CheckError(relay.OnRead(read, &bytes), Code::kStaleVersion, "at host 0 (rank 0): it is not kept for host 1 (rank 1)",
             "a block that is not there yet");
  CheckOk(Publish(job.of(2), At(1), 2, 1), "Publish");
  CheckOk(Wait(relay, [&] { return PollAll(relay, At(1), 0, 0, {2}); }), "Read");
  read.host = 3;
  CheckError(relay.OnRead(read, &bytes), Code::kStaleVersion, "it is not kept for host 3", "a host of another leaf");
  read.host = 1;
  CheckOk(relay.OnRead(read, &bytes), "a block that was wanted");
  float value;
  std::memcpy(&value, bytes.data() + 3996, sizeof(value));
  Check(value == BlockValue(1, 0, 0, 2), "the bytes of the version");
  CheckError(relay.OnRead(read, &bytes), Code::kStaleVersion, "it is not kept for host 1", "a block that was read");
  want.kind = fef::Kind::kHurry;  // comes too late, and means nothing any more
  relay.OnMessage(want, {}, {});
  CheckError(relay.OnRead(read, &bytes), Code::kStaleVersion, "it is not kept for host 1", "a block that was read");
}

// A relay that does not answer is waited for by name; one that dies ends the wait.
void TestRelayIsLost() {
  Job job(4, 4, Way::kTcp, kTwoLeaves);
  const fef::TableShape shape = Shape(4, 4, 1, 100, 2, 2);
  int32_t table = -1;
  // Host 0 has not come so far yet: what it is asked waits.
  for (int host : {1, 2, 3}) CheckOk(job.hosts[host]->AddTable(shape, &table), "AddTable");
  Domain &reader = *job.hosts[1]->domain(0, 0), &home = *job.hosts[2]->domain(0, 0);
  CheckOk(Publish(home, At(1), 2, 1), "Publish");
  std::thread wait([&] {
    CheckError(Wait(reader, [&] { return PollAll(reader, At(1), 1, 0, {2}); }), Code::kPeerLost,
               "layer 0, expert 2: host 0 (rank 0) is gone: it has closed its pool; its 400 bytes are missing",
               "a relay that goes away");
  });
  for (std::string text; text.find("host 0 (rank 0), which relays for host 2 (rank 2), has not sent its 400 bytes") ==
                         std::string::npos;) {
    std::unique_lock<std::mutex> lock(reader.mutex());
    reader.WaitForChange(lock, 0.01);
    text = reader.DescribeUnreadable(At(1), 0, {2});
  }
  job.hosts[0]->Close();
  wait.join();
  CheckError(Wait(reader, [&] { return PollAll(reader, At(1), 1, 0, {2}); }), Code::kPeerLost,
             "host 0 (rank 0) is gone", "a relay that is gone");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  TestTrainingSteps(kTwoLeaves, /*members=*/4, /*experts=*/8, /*block_elems=*/20000, /*steps=*/6, 2);
  TestTrainingSteps(kTwoLeaves, /*members=*/8, /*experts=*/12, /*block_elems=*/9000, /*steps=*/4, 2);
  TestTrainingSteps({0, 1, 0, 1}, /*members=*/4, /*experts=*/3, /*block_elems=*/37, /*steps=*/6, 1);
  TestTrainingSteps({0, 0, 0, 1}, /*members=*/4, /*experts=*/8, /*block_elems=*/9000, /*steps=*/4, 2);
  TestTrainingSteps({2, 0, 0, 1}, /*members=*/8, /*experts=*/6, /*block_elems=*/9000, /*steps=*/4, 1);
  for (int64_t blocks : {0, 1, 5}) {
    TestTrainingSteps(kTwoLeaves, /*members=*/4, /*experts=*/8, 9000, /*steps=*/4, 2, blocks * 9000 * 4);
  }
  TestWantsBeforeTheirTime();
  TestRelayIsLost();
  std::puts(num_failures == 0 ? "all passed" : "some failed");
  return num_failures;
}
