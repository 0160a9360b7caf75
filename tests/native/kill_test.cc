// Kills homes while others read from them, and restarts them at the same port. A home is a process of its own: this
// program, started again with the arguments "home INCARNATION HOST HOSTS TOKEN PORT IS_MAPPED SHAPE VERSIONS".
//
// A home says where it listens, is told where the others do, and publishes VERSIONS versions; then it says "published",
// and obeys the lines that it reads until it is killed or its input ends: to "refused" it answers how often it has
// refused so far, and with "hold" it reads the first host's block of version 1 for ever.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "pool.h"
#include "pool_checks.h"
#include "socket.h"
#include "wire.h"

extern char** environ;

namespace {

using namespace fef_test;

constexpr int kReader = 0;  // this process; the other hosts are homes

struct Job {
  int incarnation = 7;
  int num_hosts = 2;
  bool is_mapped = false;
  int layers = 1;
  int64_t block_elems = 1000;
  int versions = 1;
  std::string token;

  // One member and one expert on each host.
  fef::TableShape shape() const { return Shape(num_hosts, num_hosts, layers, block_elems, /*slots=*/2, /*stages=*/2); }
  std::string unix_name(int host) const {
    return "fef-" + token + "-" + std::to_string(incarnation) + "-" + std::to_string(host);
  }
};

fef::PoolOptions Options(const Job& job, int host) {
  fef::PoolOptions options;
  options.deadline_s = kDeadline;
  options.membership = {host, job.num_hosts, job.incarnation, job.token};
  for (int rank = 0; rank < job.num_hosts; ++rank) options.host_of_member.push_back(rank);
  options.window = {64 << 10, 96 << 10};
  return options;
}

// Publishes versions of which every member has done with all but the last.
void PublishAll(Domain& domain, const Job& job, int rank) {
  for (int counter = 1; counter <= job.versions; ++counter) {
    CheckOk(Publish(domain, {job.incarnation, counter, 0}, rank, counter), "Publish");
    if (counter == job.versions) break;
    for (int other = 0; other < job.num_hosts; ++other) domain.Release({job.incarnation, counter, 0}, other);
  }
}

Status Hold(Domain& domain, const Job& job, int rank, Lease* lease) {
  const Version first{job.incarnation, 1, 0};
  std::vector<fef::Loan> loans;
  const Status status = Wait(domain, [&] { return domain.Read(first, rank, 0, {kReader}, true, &loans); });
  if (status.ok()) *lease = std::move(loans[0].lease);
  return status;
}

int Home(char** argv) {
  Job job;
  job.incarnation = atoi(argv[0]);
  const int me = atoi(argv[1]);
  job.num_hosts = atoi(argv[2]);
  job.token = argv[3];
  fef::Endpoint own;
  own.port = atoi(argv[4]);
  job.is_mapped = atoi(argv[5]) != 0;
  job.layers = atoi(argv[6]);
  job.block_elems = atoll(argv[7]);
  job.versions = atoi(argv[8]);
  fef::Pool pool(Options(job, me));
  pool.liveness().Disarm();
  CheckOk(pool.Listen("127.0.0.1", &own), "Listen");
  std::cout << own.port << std::endl;
  std::vector<fef::Endpoint> endpoints(job.num_hosts);
  for (int host = 0; host < job.num_hosts; ++host) {
    endpoints[host].address = "127.0.0.1";
    endpoints[host].unix_name = job.unix_name(host);
    std::cin >> endpoints[host].port;
  }
  CheckOk(pool.Connect(endpoints, std::vector<bool>(job.num_hosts, job.is_mapped)), "Connect");
  int32_t table = -1;
  CheckOk(pool.AddTable(job.shape(), &table), "AddTable");
  PublishAll(*pool.domain(table, 0), job, me);
  std::cout << (num_failures == 0 ? "published" : "failed") << std::endl;
  std::string line;
  std::getline(std::cin, line);  // the end of the line of ports
  Lease lease;
  while (std::getline(std::cin, line)) {
    if (line == "refused") std::cout << pool.num_refused() << std::endl;
    if (line == "hold") std::cout << Hold(*pool.domain(table, 0), job, me, &lease).message << std::endl;
  }
  pool.Close();
  return num_failures;
}

class HomeProcess {
 public:
  HomeProcess(const Job& job, int host, int port = 0) {
    int in[2], out[2];
    Check(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0, "pipe2");
    std::vector<std::string> words = {"kill_test",
                                      "home",
                                      std::to_string(job.incarnation),
                                      std::to_string(host),
                                      std::to_string(job.num_hosts),
                                      job.token,
                                      std::to_string(port),
                                      std::to_string(job.is_mapped),
                                      std::to_string(job.layers),
                                      std::to_string(job.block_elems),
                                      std::to_string(job.versions)};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    Check(posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv.data(), environ) == 0, "posix_spawn");
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
    port_ = std::atoi(Line().c_str());
  }
  ~HomeProcess() {
    Kill();
    if (to_ >= 0) close(to_);
    close(from_);
  }

  int port() const { return port_; }
  void Say(const std::string& line) {
    const std::string bytes = line + "\n";
    Check(write(to_, bytes.data(), bytes.size()) == ssize_t(bytes.size()), "the home takes a line");
  }
  std::string Line() {
    std::string line;
    for (char byte; read(from_, &byte, 1) == 1 && byte != '\n';) line += byte;
    return line;
  }
  int64_t NumRefused() {
    Say("refused");
    return std::atoll(Line().c_str());
  }
  void Kill() {
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    Await();
  }
  // It closes its pool and ends.
  void Leave() {
    close(to_);
    to_ = -1;
    Await();
  }

 private:
  void Await() {
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  pid_t pid_ = -1;
  int to_ = -1, from_ = -1, port_ = 0;
};

// The reader and its homes, met. All versions are published when it is made.
struct Met {
  explicit Met(const Job& job, int port = 0) : job(job), pool(Options(job, kReader)) {
    // Whoever holds the error goes on; otherwise this process would end with the home.
    pool.liveness().Disarm();
    std::vector<fef::Endpoint> endpoints(job.num_hosts);
    CheckOk(pool.Listen("127.0.0.1", &endpoints[kReader]), "Listen");
    std::string ports = std::to_string(endpoints[kReader].port);
    for (int host = 1; host < job.num_hosts; ++host) {
      homes.push_back(std::make_unique<HomeProcess>(job, host, port));
      endpoints[host] = {"127.0.0.1", homes.back()->port(), job.unix_name(host)};
      ports += " " + std::to_string(homes.back()->port());
    }
    for (auto& home : homes) home->Say(ports);
    CheckOk(pool.Connect(endpoints, std::vector<bool>(job.num_hosts, job.is_mapped)), "Connect");
    int32_t table = -1;
    CheckOk(pool.AddTable(job.shape(), &table), "AddTable");
    domain = pool.domain(table, 0);
    for (auto& home : homes) Check(home->Line() == "published", "the home has published");
    if (num_failures != 0) _exit(num_failures);  // what follows would wait for hosts that are not there
  }
  ~Met() {
    homes.clear();
    pool.Close();
  }
  HomeProcess& home(int host) { return *homes[host - 1]; }
  Version At(int counter) const { return {job.incarnation, counter, 0}; }

  Status Get(int counter, int layer, int expert) {
    std::vector<fef::Loan> loans;
    const Status status =
        Wait(*domain, [&] { return domain->Read(At(counter), kReader, layer, {expert}, true, &loans); });
    if (!status.ok()) return status;
    const float wanted = BlockValue(counter, layer, 0, expert);
    Check(HoldsOnly(loans[0].lease, job.block_elems, wanted), "bytes of another block");
    return Status::Ok();
  }

  const Job job;
  fef::Pool pool;
  std::vector<std::unique_ptr<HomeProcess>> homes;
  Domain* domain = nullptr;
};

std::string Token() {
  static int last = 0;
  return "kill" + std::to_string(getpid()) + "." + std::to_string(++last);
}

// Reads a block after another, from a home that is killed meanwhile and from one that lives on.
void TestKilledWhileRead(bool is_mapped, int round) {
  Job job;
  job.num_hosts = 3;
  job.is_mapped = is_mapped;
  job.layers = 60;
  job.block_elems = 10000;
  job.token = Token();
  Met met(job);
  CheckOk(met.Get(1, 0, 1), "it is known here that it was published");
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::microseconds(700 * round));
    met.home(1).Kill();
  });
  Status status;
  int layer = 0;
  for (; (status = met.Get(1, layer, 1)).ok(); layer = (layer + 1) % job.layers) continue;
  killer.join();
  const std::string where = "get: table moe, version (7,1), layer " + std::to_string(layer) + ", expert 1: host 1 ";
  CheckError(status, Code::kPeerLost, where, "a read from a home that was killed");
  Check(status.message.find("is gone: ") != std::string::npos &&
            status.message.find("its 40000 bytes are missing") != std::string::npos,
        "says what is missing, and why: " + status.message);
  for (layer = 0; layer < job.layers; ++layer) CheckOk(met.Get(1, layer, 2), "the other home stays readable");
  Check(met.pool.num_refused() == 0, "a death is no refusal");
}

// What is leased stays readable, though its home unmaps it.
void TestHomeEndsWhileItIsRead(bool is_killed) {
  Job job;
  job.is_mapped = true;
  job.token = Token();
  Met met(job);
  CheckOk(met.Get(1, 0, 1), "a read");
  Lease lease;
  CheckOk(Read(*met.domain, met.At(1), kReader, 0, 1, &lease), "Read");
  if (is_killed) met.home(1).Kill();
  else met.home(1).Leave();
  Status status;
  while ((status = met.Get(1, 0, 1)).ok()) continue;
  CheckError(status, Code::kPeerLost, "host 1 (rank 1) is gone", "the next read");
  Check(HoldsOnly(lease, job.block_elems, BlockValue(1, 0, 0, 1)), "the bytes that were leased");
}

// A publisher does not wait for a reader that has died.
void TestReaderDiesWithALease() {
  Job job;
  job.is_mapped = true;
  job.token = Token();
  Met met(job);
  auto publish = [&](int counter) { return Publish(*met.domain, met.At(counter), kReader, /*run=*/1); };
  CheckOk(publish(1), "Publish");
  met.home(1).Say("hold");
  Check(met.home(1).Line() == "", "the other host holds a lease");
  for (int rank = 0; rank < job.num_hosts; ++rank) met.domain->Release(met.At(1), rank);
  CheckOk(publish(2), "Publish into the other slot");
  std::atomic<bool> is_done{false};
  std::thread publisher([&] {
    CheckOk(publish(3), "Publish into the slot of the dead reader");
    is_done = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  Check(!is_done, "a living reader is waited for");
  met.home(1).Kill();
  publisher.join();
}

// Says something to a home that is no member's client, and returns all that it answers.
class Stranger {
 public:
  Stranger(const HomeProcess& home, const Job& job) {
    for (fef::Channel channel : {fef::Channel::kRequests, fef::Channel::kReplies}) {
      fef::Descriptor& socket = channel == fef::Channel::kRequests ? requests_ : replies_;
      CheckOk(fef::ConnectTcp("127.0.0.1", home.port(), 5.0, &socket), "ConnectTcp");
      fef::Message hello;
      hello.channel = channel;
      hello.host = kReader;
      hello.incarnation = job.incarnation;
      const std::string bytes = fef::ToBytes(hello, job.token);
      CheckOk(fef::WriteAll(socket.get(), bytes.data(), bytes.size(), 5.0), "WriteAll");
      greeting = Answer(socket);
      if (!greeting.empty()) return;
    }
  }
  std::string Ask(fef::Message read) {
    read.kind = fef::Kind::kRead;
    read.host = kReader;
    read.ticket = ++ticket_;
    const std::string bytes = fef::ToBytes(read);
    CheckOk(fef::WriteAll(requests_.get(), bytes.data(), bytes.size(), 5.0), "WriteAll");
    return Answer(replies_);
  }

  std::string greeting;  // why this one was refused, empty when it was not

 private:
  std::string Answer(const fef::Descriptor& socket) {
    fef::Message answer;
    CheckOk(fef::ReadAll(socket.get(), &answer, sizeof(answer), 5.0), "an answer");
    std::string text(answer.payload_bytes, ' ');
    CheckOk(fef::ReadAll(socket.get(), text.data(), text.size(), 5.0), "its payload");
    return text;
  }
  fef::Descriptor requests_, replies_;
  uint64_t ticket_ = 0;
};

// Whoever asks for what is not there, or no longer, is told so, and it is counted once.
void TestRefusalsAreCounted(bool is_mapped) {
  Job job;
  job.is_mapped = is_mapped;
  job.versions = 5;
  job.block_elems = 20000;  // several chunks
  job.token = Token();
  Met met(job);
  CheckOk(met.Get(5, 0, 1), "the last version");
  // The reader has what was published while it listened; it forgets it with the versions.
  for (int counter = 1; counter <= 4; ++counter) met.domain->Release(met.At(counter), kReader);
  CheckOk(Publish(*met.domain, met.At(5), kReader, 5), "Publish");
  const int64_t before = met.home(1).NumRefused();
  CheckError(met.Get(1, 0, 1), Code::kStaleVersion, "get: table moe, version (7,1), layer 0, expert 1", "a refilled slot");
  const int64_t here = met.pool.num_refused(), there = met.home(1).NumRefused() - before;
  Check(here == (is_mapped ? 1 : 0) && there == (is_mapped ? 0 : 1),
        "counted once, where it was refused: " + std::to_string(here) + " here, " + std::to_string(there) + " there");
  CheckError(met.Get(5, 1, 1), Code::kInvalidArgument, "layer 1, expert 1 is out of range", "a layer that is not there");
  Check(met.pool.num_refused() == here + 1, "counted once");
}

void TestRestartAtTheSamePort() {
  Job job;
  job.token = Token();
  Met old(job);
  CheckOk(old.Get(1, 0, 1), "before");
  const int port = old.home(1).port();
  old.home(1).Kill();
  Check(Wait(*old.domain, [&] { return PollAll(*old.domain, old.At(1), kReader, 0, {1}); }).code == Code::kPeerLost, "killed");

  Job next = job;
  next.incarnation = 8;
  next.versions = 3;
  next.token = Token();
  Met met(next, port);
  HomeProcess& home = met.home(1);
  Check(home.port() == port, "the same port");
  CheckError(old.Get(1, 0, 1), Code::kPeerLost, "host 1 (rank 1) is gone", "the old table is of no more use");
  int64_t refused = home.NumRefused();
  auto check = [&](const std::string& answer, const std::string& text) {
    Check(answer.find(text) != std::string::npos, "'" + text + "' is in: " + answer);
    const int64_t now = home.NumRefused();
    Check(now == refused + 1, text + ": counted once, not " + std::to_string(now - refused) + " times");
    refused = now;
  };
  check(Stranger(home, job).greeting, "job token " + job.token + " is not this job's, " + next.token);
  Job mixed = next;
  mixed.incarnation = 7;
  check(Stranger(home, mixed).greeting, "incarnation 7 is not this pool's, 8");
  CheckOk(met.Get(3, 0, 1), "a new meeting works");

  Stranger member(home, next);  // speaks as the reader, with what the reader would never say
  fef::Message read;
  read.table = read.group = read.layer = 0;
  read.incarnation = 8;
  read.counter = 3;
  read.expert = 1;
  read.length = 16;
  auto changed = [&](auto change) {
    fef::Message copy = read;
    change(copy);
    return member.Ask(copy);
  };
  float value;
  std::memcpy(&value, member.Ask(read).data(), sizeof(value));
  Check(value == BlockValue(3, 0, 0, 1), "the bytes of the version");
  const std::string at = "layer 0, expert 1 at host 1 (rank 1): ";
  check(changed([](fef::Message& m) { m.incarnation = 7; m.counter = 1; }), "version (7,1) belongs to another incarnation");
  check(changed([](fef::Message& m) { m.counter = 1; }), "version (8,1), " + at + "no slot holds this version");
  check(changed([](fef::Message& m) { m.counter = 4; }), "version (8,4), " + at + "no slot holds this version");
  check(changed([](fef::Message& m) { m.offset = 3990; }), at + "16 bytes at 3990 are not in a block of 4000");
  check(changed([](fef::Message& m) { m.length = 0; }), at + "0 bytes at 0 are not in a block of 4000");
  check(changed([](fef::Message& m) { m.table = 5; }), "host 1 has no table 5 in group 0");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 11 && argv[1] == std::string("home")) return Home(argv + 2);
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  signal(SIGPIPE, SIG_IGN);
  for (int round = 0; round < 20; ++round) {
    for (bool is_mapped : {false, true}) TestKilledWhileRead(is_mapped, round);
  }
  for (bool is_mapped : {false, true}) TestRefusalsAreCounted(is_mapped);
  for (bool is_killed : {false, true}) TestHomeEndsWhileItIsRead(is_killed);
  TestReaderDiesWithALease();
  TestRestartAtTheSamePort();
  std::puts(num_failures == 0 ? "all passed" : "some failed");
  return num_failures;
}
