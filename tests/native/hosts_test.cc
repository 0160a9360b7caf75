// Checks a pool over several hosts without XLA: each host is a Pool of this process, with real sockets and mappings
// between them, each member a thread. Every check prints what is wrong and makes the exit code 1.
#include <sys/socket.h>

#include <cstring>
#include <string>
#include <vector>

#include "hosts.h"
#include "pool_checks.h"
#include "socket.h"
#include "wire.h"

namespace {

using namespace fef_test;

// Hosts first, in rank order within each, then over the hosts; and so again for each further microbatch.
std::vector<float> WantedSum(const Job& job, const fef::TableShape& shape, int counter, int layer, int expert,
                             int num_microbatches) {
  std::vector<float> total;
  for (int microbatch = 0; microbatch < num_microbatches; ++microbatch) {
    for (int host = 0; host < int(job.hosts.size()); ++host) {
      Add(&total, HostSum(job, shape, counter, layer, expert, host));
    }
  }
  return total;
}

void TestTrainingSteps(int num_hosts, int members, int experts, int64_t block_elems, int steps, Way way,
                       int num_microbatches, int64_t cache_bytes = INT64_MAX) {
  const int layers = 3;
  Job job(num_hosts, members, way);
  fef::TableShape shape = Shape(members, experts, layers, block_elems, /*slots=*/2, /*stages=*/2);
  shape.cache_bytes = cache_bytes;
  job.AddTable(shape);
  Barrier barrier(members);
  std::atomic<int> num_refetched{0};
  InParallel(members, [&](int rank) {
    std::mt19937 random(rank);
    for (int counter = 1; counter <= steps; ++counter) {
      barrier.Wait();  // the collective that agrees on the version
      const auto wanted_sum = [&](int layer, int expert) {
        return WantedSum(job, shape, counter, layer, expert, num_microbatches);
      };
      const std::vector<int32_t> counts = TrainingStep(job, rank, counter, num_microbatches, random, wanted_sum);
      for (int i = 0; i < layers * experts; ++i) {
        if (job.host_of_rank[i % experts % members] == job.host_of_rank[rank]) continue;
        num_refetched += counts[(i / experts * fef::kNumPurposes + fef::kRefetch) * experts + i % experts];
      }
    }
  });
  const bool has_refetched = num_refetched > 0;
  if (way != Way::kMapped) Check(has_refetched == (cache_bytes != INT64_MAX), "only what the cache cannot hold comes again");
}

// What a client may not do is refused and counted, and the server goes on serving.
void TestStrangers() {
  Job job(2, 2, Way::kTcp);
  job.AddTable(Shape(2, 2, 1, 10, 2, 2));
  auto say = [&](const std::string& bytes) {
    fef::Descriptor socket;
    CheckOk(fef::ConnectTcp("127.0.0.1", job.ports[0].port, 5.0, &socket), "ConnectTcp");
    CheckOk(fef::WriteAll(socket.get(), bytes.data(), bytes.size(), 5.0), "WriteAll");
    shutdown(socket.get(), SHUT_WR);
    std::string answer;
    char byte;
    while (fef::ReadAll(socket.get(), &byte, 1, 5.0).ok()) answer += byte;
    return answer;
  };
  say("GET / HTTP/1.1\r\nHost: fef\r\n\r\n" + std::string(200, 'x'));
  fef::Message hello;
  hello.host = 1;
  hello.incarnation = 7;
  const std::string other = say(fef::ToBytes(hello, "another job"));
  Check(other.find("job token another job is not this job's, " + job.token) != std::string::npos, "both tokens: " + other);
  hello.incarnation = 6;
  const std::string old = say(fef::ToBytes(hello, job.token));
  Check(old.find("incarnation 6 is not this pool's, 7") != std::string::npos, "both incarnations: " + old);
  say(fef::ToBytes(hello, job.token).substr(0, 20));  // cut off: nothing to refuse
  fef::Message huge;
  huge.payload_bytes = 0xffffffff;
  std::string bytes = fef::ToBytes(huge);
  std::memcpy(&bytes[offsetof(fef::Message, payload_bytes)], "\xff\xff\xff\xff", 4);
  say(bytes);
  Check(job.hosts[0]->num_refused() == 4, std::to_string(job.hosts[0]->num_refused()) + " were refused");
  CheckOk(Publish(job.of(0), At(1), 0, 1), "Publish");
  CheckOk(Wait(job.of(1), [&] { return PollAll(job.of(1), At(1), 1, 0, {0}); }), "the others are served all the same");
}

// A read is answered with what was asked for or not at all.
void TestReadsAreChecked() {
  Job job(2, 2, Way::kTcp);
  job.AddTable(Shape(2, 2, 1, 1000, /*slots=*/2, 2));
  Domain& home = job.of(0);
  for (int counter = 1; counter <= 5; ++counter) {
    CheckOk(Publish(home, At(counter), 0, counter), "Publish");
    for (int rank : {0, 1}) home.Release(At(counter), rank);
  }
  fef::Message read;
  read.kind = fef::Kind::kRead;
  read.incarnation = 7;
  read.layer = read.expert = 0;
  read.length = 16;
  std::string bytes;
  auto ask = [&](auto change) {
    fef::Message changed = read;
    changed.counter = 5;
    change(changed);
    return home.OnRead(changed, &bytes);
  };
  CheckOk(ask([](fef::Message& m) { m.offset = 4000 - 16; }), "the last bytes");
  float value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  Check(bytes.size() == 16 && value == BlockValue(5, 0, 0, 0), "the bytes of the version");
  CheckError(ask([](fef::Message& m) { m.counter = 1; }), Code::kStaleVersion,
             "version (7,1), layer 0, expert 0 at host 0 (rank 0): no slot holds this version", "a refilled slot");
  CheckError(ask([](fef::Message& m) { m.counter = 9; }), Code::kStaleVersion, "never published", "no such version");
  CheckError(ask([](fef::Message& m) { m.incarnation = 6; }), Code::kStaleVersion, "another incarnation", "incarnation");
  CheckError(ask([](fef::Message& m) { m.offset = 4000 - 15; }), Code::kInvalidArgument, "16 bytes at 3985", "past the end");
  CheckError(ask([](fef::Message& m) { m.offset = ~0ull - 7; }), Code::kInvalidArgument, "are not in a block", "overflow");
  CheckError(ask([](fef::Message& m) { m.length = 0; }), Code::kInvalidArgument, "0 bytes", "no length");
  CheckError(ask([](fef::Message& m) { m.layer = 1; }), Code::kInvalidArgument, "out of range", "layer");
  CheckError(ask([](fef::Message& m) { m.expert = -1; }), Code::kInvalidArgument, "out of range", "expert");
  CheckError(ask([](fef::Message& m) { m.expert = 1; }), Code::kInvalidArgument, "its home is rank 1", "not its home");
  CheckError(ask([](fef::Message& m) { m.region = fef::Region::kGradient, m.stage = 0, m.rank = 0; }),
             Code::kStaleVersion, "not staged", "no such stage");
  CheckError(ask([](fef::Message& m) { m.region = fef::Region::kGradient, m.stage = 99, m.rank = 5; }),
             Code::kStaleVersion, "not staged", "stage 99");
}

// The home knows nothing of a one-sided read: the reader itself finds that the block is gone, also when that happens
// while it is read.
void TestReadsAreCheckedByTheReader() {
  Job job(2, 2, Way::kOneSided);
  job.AddTable(Shape(2, 2, 1, 1000, /*slots=*/2, 2));
  Domain &home = job.of(0), &reader = job.of(1);
  auto publish = [&](int counter) { CheckOk(Publish(home, At(counter), 0, counter), "Publish"); };
  auto let_go = [&](int counter) {
    for (int rank : {0, 1}) CheckOk(home.Release(At(counter), rank), "Release");
  };
  auto read = [&](int counter) {
    return Wait(reader, [&] { return PollAll(reader, At(counter), 1, 0, {0}); });
  };
  int num_blocks = 0;
  job.networks[1]->before_block = [&] {
    if (++num_blocks > 1) return;  // of the first version, on its way before anybody asks for it
    let_go(1);
    for (int counter : {2, 3}) publish(counter);
  };
  publish(1);
  CheckError(read(1), Code::kStaleVersion,
             "get: table moe, version (7,1), layer 0, expert 0 at host 0 (rank 0): no slot holds this version; it was",
             "a slot that is refilled while it is read");
  Check(job.hosts[0]->num_refused() == 0 && job.hosts[1]->num_refused() == 1, "the reader refuses, once");
  CheckOk(read(3), "what is there is read");
  Lease lease;
  CheckOk(Read(reader, At(3), 1, 0, 0, &lease), "Read");
  Check(HoldsOnly(lease, 1000, BlockValue(3, 0, 0, 0)), "the bytes of the version");
}

// A host that goes away ends the waits that need it, by name, and no others.
void TestHostIsLost(Way way) {
  Job job(3, 3, way);
  job.AddTable(Shape(3, 3, 2, 100, 2, 2));
  for (int rank : {0, 1}) CheckOk(Publish(job.of(rank), At(1), rank, 1), "Publish");
  std::thread wait([&] {
    CheckError(Wait(job.of(0), [&] { return PollAll(job.of(0), At(1), 0, 0, {2}); }), Code::kPeerLost,
               "table moe, version (7,1): rank 2 has not published it: host 2 (rank 2) is gone: it has closed its pool",
               "a wait for a host that goes away");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  job.hosts[2]->Close();
  wait.join();
  CheckOk(Wait(job.of(0), [&] { return PollAll(job.of(0), At(1), 0, 0, {0, 1}); }), "the others stay readable");
  Lease lease;
  CheckOk(Read(job.of(0), At(1), 0, 0, 1, &lease), "the others stay readable");
  int stage;
  CheckError(Wait(job.of(0), [&] { return job.of(0).StageAdmitted(At(1), 0, 1, 0, &stage); }), Code::kPeerLost,
             "accumulate: table moe, version (7,1), layer 0: host 2 (rank 2) is gone", "gradients need everybody");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  for (Way way : {Way::kTcp, Way::kMapped, Way::kOneSided}) {
    TestTrainingSteps(/*num_hosts=*/2, /*members=*/2, /*experts=*/2, /*block_elems=*/37, /*steps=*/10, way, 1);
    TestTrainingSteps(/*num_hosts=*/2, /*members=*/4, /*experts=*/6, /*block_elems=*/9000, /*steps=*/8, way, 3);
    TestTrainingSteps(/*num_hosts=*/4, /*members=*/4, /*experts=*/3, /*block_elems=*/20000, /*steps=*/4, way, 2);
    TestHostIsLost(way);
  }
  for (int64_t blocks : {0, 1, 5}) {
    for (Way way : {Way::kTcp, Way::kOneSided}) {
      TestTrainingSteps(/*num_hosts=*/2, /*members=*/4, /*experts=*/6, 9000, /*steps=*/4, way, 2, blocks * 9000 * 4);
    }
  }
  TestStrangers();
  TestReadsAreChecked();
  TestReadsAreCheckedByTheReader();
  std::puts(num_failures == 0 ? "all passed" : "some failed");
  return num_failures;
}
