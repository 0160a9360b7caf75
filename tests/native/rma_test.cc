// Checks one-sided reads between two processes without XLA. With UCX_TLS=tcp,self UCX emulates them, and what hardware
// does is not seen here.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory_segment.h"
#include "socket.h"
#include "ucx/rma.h"

namespace {

using fef::Code;
using fef::Status;

constexpr double kDeadlineS = 30;
constexpr uint64_t kBytes = 3 << 20, kRegistered = 2 << 20;  // the owner lets others read the first part only
bool has_failed = false;

void Check(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("FAILED: %s\n", what.c_str());
  has_failed = true;
}

void CheckOk(const Status& status, const std::string& what) { Check(status.ok(), what + ": " + status.message); }

void CheckError(const Status& status, Code code, const std::string& text, const std::string& what) {
  Check(status.code == code && status.message.find(text) != std::string::npos,
        what + ": code " + std::to_string(int(status.code)) + ", " + status.message);
}

char Byte(uint64_t at) { return char(at * 7 + at / 4099); }

void SendText(int socket, const std::string& text) {
  const uint64_t size = text.size();
  CheckOk(fef::WriteAll(socket, &size, sizeof(size), kDeadlineS), "a size to the other process");
  CheckOk(fef::WriteAll(socket, text.data(), size, kDeadlineS), "a text to the other process");
}

std::string ReceiveText(int socket) {
  uint64_t size = 0;
  CheckOk(fef::ReadAll(socket, &size, sizeof(size), kDeadlineS), "a size from the other process");
  std::string text(size, ' ');
  CheckOk(fef::ReadAll(socket, text.data(), size, kDeadlineS), "a text from the other process");
  return text;
}

// The owner, in a process of its own: offers a segment, then sleeps until it is told to end.
[[noreturn]] void Own(int socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::unique_ptr<fef::Rma> rma;
  CheckOk(fef::Rma::Open(&rma), "Open");
  fef::MemorySegment segment;
  CheckOk(segment.Create("rma-test", kBytes), "Create");
  CheckOk(segment.Take(kBytes), "Take");
  for (uint64_t i = 0; i < kBytes; ++i) segment.data()[i] = Byte(i);
  fef::SegmentKey key;
  CheckOk(rma->Register(segment.data(), kRegistered, &key), "Register");
  SendText(socket, rma->address());
  SendText(socket, std::string(reinterpret_cast<const char*>(&key.address), sizeof(key.address)));
  SendText(socket, key.packed);
  ReceiveText(socket);
  rma->Close();
  std::_Exit(has_failed);
}

struct Owner {
  Owner() {
    int pair[2];
    Check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
    fef::Descriptor theirs(pair[1]);
    socket = fef::Descriptor(pair[0]);
    fef::SetNonBlocking(pair[0]);
    pid = fork();
    if (pid == 0) Own(theirs.get());
  }
  ~Owner() {
    if (pid < 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  void Stop() {
    siginfo_t info;
    kill(pid, SIGSTOP);
    waitid(P_PID, id_t(pid), &info, WSTOPPED);
  }
  int End() {
    SendText(socket.get(), "end");
    int status = -1;
    waitpid(std::exchange(pid, -1), &status, 0);
    return status;
  }

  fef::Descriptor socket;
  pid_t pid = -1;
};

// The reading side.
struct Reader {
  explicit Reader(const Owner& owner) {
    CheckOk(fef::Rma::Open(&rma), "Open");
    const std::string address = ReceiveText(owner.socket.get());
    fef::SegmentKey key;
    std::memcpy(&key.address, ReceiveText(owner.socket.get()).data(), sizeof(key.address));
    key.num_bytes = kRegistered;
    key.packed = ReceiveText(owner.socket.get());
    CheckOk(rma->Connect(1, address), "Connect");
    CheckOk(rma->Import(1, key, &segment), "Import");
  }
  Status Get(uint64_t offset, uint64_t num_bytes, char* to, double deadline_s = kDeadlineS) {
    std::promise<Status> result;
    rma->Get(1, segment, offset, num_bytes, to, deadline_s, [&](const Status& status) { result.set_value(status); });
    return result.get_future().get();
  }

  std::unique_ptr<fef::Rma> rma;
  int segment = -1;
};

bool IsRight(const char* bytes, uint64_t offset, uint64_t num_bytes) {
  for (uint64_t i = 0; i < num_bytes; ++i) {
    if (bytes[i] != Byte(offset + i)) return false;
  }
  return true;
}

void TestBytes() {
  Owner owner;
  Reader reader(owner);
  fef::MemorySegment segment;  // registered, as a pool's own memory
  CheckOk(segment.Create("rma-test-here", kRegistered), "Create");
  CheckOk(segment.Take(kRegistered), "Take");
  fef::SegmentKey key;
  CheckOk(reader.rma->Register(segment.data(), kRegistered, &key), "Register");
  std::vector<char> bytes(kRegistered);
  for (char* to : {segment.data(), bytes.data()}) {
    for (const auto& [offset, length] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, 8}, {kRegistered - 1, 1}, {12345, 65536}, {0, kRegistered}}) {
      std::memset(to, 0, kRegistered);
      CheckOk(reader.Get(offset, length, to), "Get");
      Check(IsRight(to, offset, length), std::to_string(length) + " bytes at " + std::to_string(offset));
      Check(length == kRegistered || to[length] == 0, "nothing is written behind what was asked for");
    }
  }
  // Many at once, by several threads.
  std::vector<std::future<bool>> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.push_back(std::async(std::launch::async, [&, thread] {
      std::vector<char> mine(10000);
      for (int i = 0; i < 200; ++i) {
        const uint64_t offset = uint64_t(thread * 500 + i) * 999 % (kRegistered - mine.size());
        if (!reader.Get(offset, mine.size(), mine.data()).ok()) return false;
        if (!IsRight(mine.data(), offset, mine.size())) return false;
      }
      return true;
    }));
  }
  for (auto& thread : threads) Check(thread.get(), "reads by several threads");
  const std::string allowed = std::getenv("UCX_TLS"), wanted = allowed.substr(0, allowed.find(','));
  const std::string transports = reader.rma->TransportsTo(1);
  Check(transports.find(wanted) == 0, "the transport is " + wanted + ": " + transports);
  reader.rma->Close();
  Check(owner.End() == 0, "the owner ends well");
}

// Refused here. The owner would have been killed by a read of what it has not mapped.
void TestOutOfRange() {
  Owner owner;
  Reader reader(owner);
  char byte = 'x';
  auto ask = [&](int host, int segment, uint64_t offset, uint64_t num_bytes) {
    std::promise<Status> result;
    reader.rma->Get(host, segment, offset, num_bytes, &byte, kDeadlineS,
                    [&](const Status& status) { result.set_value(status); });
    return result.get_future().get();
  };
  CheckError(ask(1, 0, kRegistered, 1), Code::kInvalidArgument,
             "rma: 1 bytes at 2097152 are not in segment 0 of host 1, which has 2097152", "behind the end");
  CheckError(ask(1, 0, kRegistered - 10, 11), Code::kInvalidArgument, "11 bytes at", "over the end");
  CheckError(ask(1, 0, ~0ull - 3, 8), Code::kInvalidArgument, "8 bytes at", "overflow");
  CheckError(ask(1, 0, 0, ~0ull), Code::kInvalidArgument, "at 0 are not", "more than there is");
  CheckError(ask(1, 0, 0, 0), Code::kInvalidArgument, "0 bytes", "nothing");
  CheckError(ask(1, 1, 0, 1), Code::kInvalidArgument, "host 1 has no segment 1", "no such segment");
  CheckError(ask(1, -1, 0, 1), Code::kInvalidArgument, "host 1 has no segment -1", "no such segment");
  CheckError(ask(2, 0, 0, 1), Code::kInvalidArgument, "host 2 has no segment 0", "no such host");
  Check(byte == 'x', "nothing was written");
  CheckOk(reader.Get(0, 1, &byte), "the owner is unharmed");
  reader.rma->Close();
  CheckError(ask(1, 0, 0, 1), Code::kPoolClosed, "the pool was closed", "after Close");
  Check(owner.End() == 0, "the owner ends well");
}

void TestKilled() {
  Owner owner;
  Reader reader(owner);
  std::vector<char> bytes(kRegistered);
  CheckOk(reader.Get(0, kRegistered, bytes.data()), "a first read");
  kill(owner.pid, SIGKILL);
  Status status;
  do status = reader.Get(0, kRegistered, bytes.data());  // what was still in the connection may serve one more
  while (status.ok());
  CheckError(status, Code::kPeerLost, "host 1 is gone: ", "a read of a killed owner");
  CheckError(reader.Get(0, 8, bytes.data()), Code::kPeerLost, "host 1 is gone: ", "and each one after");
}

// It says nothing and its connections stay. What it still has to say must not reach the memory of a read that is over.
void TestStopped() {
  Owner owner;
  Reader reader(owner);
  std::vector<char> bytes(kRegistered);
  CheckOk(reader.Get(0, kRegistered, bytes.data()), "a first read");
  owner.Stop();
  const Status status = reader.Get(0, kRegistered, bytes.data(), 0.3);
  CheckError(status, Code::kDeadlineExceeded, "host 1 was given up: it has not answered within 0.3 s",
             "a read of a stopped owner");
  std::memset(bytes.data(), 'x', bytes.size());
  kill(owner.pid, SIGCONT);
  for (int i = 0; i < 20; ++i) {
    usleep(10'000);
    Check(bytes == std::vector<char>(kRegistered, 'x'), "nothing is written once the read is over");
  }
  CheckError(reader.Get(0, 8, bytes.data()), Code::kDeadlineExceeded, "host 1 was given up", "it stays so");
}

// Ends reads, each told, none of them waited for.
void TestCloseWithReadsPending() {
  Owner owner;
  Reader reader(owner);
  owner.Stop();
  std::vector<char> bytes(kRegistered);
  std::atomic<int> num_told{0};
  for (int i = 0; i < 5; ++i) {
    reader.rma->Get(1, 0, 0, 1000, bytes.data() + 1000 * i, kDeadlineS, [&](const Status& status) {
      CheckError(status, Code::kPoolClosed, "the pool was closed", "a read that Close ends");
      ++num_told;
    });
  }
  reader.rma->Close();
  Check(num_told == 5, std::to_string(num_told) + " of 5 reads were told");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  TestBytes();
  TestOutOfRange();
  TestKilled();
  TestStopped();
  TestCloseWithReadsPending();
  std::puts(has_failed ? "some failed" : "all passed");
  return has_failed;
}
