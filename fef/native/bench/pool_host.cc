// One of two hosts between which reads are timed: 0 owns the blocks, 1 reads them. Each pair has two fabrics, one whose
// memory is mapped and one over TCP, and the owner serves plain sockets beside them.
//
//   pool_host ME ADDRESS TOKEN WINDOW_BYTES BLOCK_BYTES...
//
// Says "at ADDRESS MAPPED_PORT UNIX_NAME TCP_PORT UNIX_NAME PLAIN_PORT"; hears "connect mmap|tcp" and these words of
// host 0 and of host 1 and says "connected"; tcp: the first fabric goes over TCP as well. Then
//
//   owner   "publish"                 a version of each table                      "published"
//           "start WAY TABLE" "stop"  publishes in between, on and on              "started", "stopped VERSIONS"
//   reader  "time WAY TABLE REPEATS"  WAY: memcpy, mmap, tcp or sockets            "took SECONDS" (median of a read)
//           "check WAY TABLE READS"   reads the newest version, again and again    "read WHOLE STALE TORN"
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "domain.h"
#include "fabric.h"
#include "lines.h"

namespace {

using namespace fef_bench;

constexpr double kDeadlineS = 60;
constexpr int kIncarnation = 1;
constexpr int64_t kBatched = 32 << 10;  // reads of less from memory take about as long as a look at the clock

void Must(const fef::Status& status) {
  if (!status.ok()) Fail(status.message);
}

// A fabric with a domain for each size: one expert, whose home is rank 0 on host 0; rank 1 is on host 1.
class Side {
 public:
  Side(int me, const std::string& token, uint64_t window_bytes, const std::vector<int64_t>& sizes)
      : fabric_({me, 2, kIncarnation, token}, {window_bytes, window_bytes},
                {[this](const fef::Message& message, const std::string& payload, fef::Descriptor fd) {
                   AwaitOpen();
                   domains_[message.table]->OnMessage(message, payload, std::move(fd));
                   if (message.kind != fef::Kind::kPublished) return;
                   std::lock_guard<std::mutex> lock(mutex_);
                   newest_[message.table] = message.counter;
                   changed_.notify_all();
                 },
                 [this](const fef::Message& read, std::string* bytes) {
                   AwaitOpen();
                   return domains_[read.table]->OnRead(read, bytes);
                 },
                 [](int, const std::string& why, bool is_orderly) {
                   if (!is_orderly) Fail("the other host is gone: " + why);
                 }}),
        newest_(sizes.size()) {
    for (size_t table = 0; table < sizes.size(); ++table) {
      fef::TableShape shape;
      shape.name = "bench" + std::to_string(sizes[table]);
      shape.layers = shape.experts = shape.blocks_per_member = 1;
      shape.members = 2;
      shape.home = shape.local = {0};
      shape.block_elems = sizes[table] / 4;
      const fef::Neighbourhood here{&fabric_, &worker_, int(table), 0, {0, 1}, {}, {}};
      domains_.push_back(std::make_unique<fef::Domain>(shape, kIncarnation, kDeadlineS, std::nullopt, here));
    }
  }

  fef::Endpoint Listen(const std::string& address) {
    fef::Endpoint endpoint;
    Must(fabric_.Listen(address, &endpoint));
    return endpoint;
  }

  void Open(const std::vector<fef::Endpoint>& endpoints, bool is_mapped) {
    Must(fabric_.Connect(endpoints, {is_mapped, is_mapped}, kDeadlineS));
    for (auto& domain : domains_) Must(domain->Open());
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }

  // The block's words are those of its version.
  void Publish(int table) {
    fef::Domain& domain = *domains_[table];
    const fef::Version version{kIncarnation, ++last_published_[table], 0};
    if (version.counter > 1) Must(domain.Release({kIncarnation, version.counter - 1, 0}, 0));
    fef::CallerAlone executor;
    Must(domain.Publish(
        version, 0, version.counter,
        [&](int, int, char* block) {
          for (int64_t i = 0; i < domain.shape().block_bytes() / 8; ++i) {
            reinterpret_cast<uint64_t*>(block)[i] = Word(version.counter, i);
          }
        },
        executor));
  }

  // One read of a version, if it is still there.
  fef::Status Get(int table, bool is_mapped, int counter, char* to) {
    const fef::Version version{kIncarnation, counter, 0};
    fef::Domain& domain = *domains_[table];
    const size_t num_bytes = size_t(domain.shape().block_bytes());
    if (!is_mapped) return Fetch(table, version, num_bytes, to);
    std::vector<fef::Loan> loans;
    std::optional<fef::Status> status;
    {
      std::lock_guard<std::mutex> lock(domain.mutex());
      status = domain.Read(version, 1, 0, {0}, /*is_all=*/true, &loans);
    }
    if (!status) Fail("a version that was published cannot be read");
    if (status->ok()) std::memcpy(to, loans[0].lease.block(), num_bytes);
    return *status;
  }

  // The reader has done with the versions up to this one. It publishes nothing of its own, but says so, as every member
  // does; that is when a domain gives back what it has fetched.
  void Done(int table, int* last_done, int counter) {
    fef::Domain& domain = *domains_[table];
    while (*last_done < counter) Must(domain.Release({kIncarnation, ++*last_done, 0}, 1));
    fef::CallerAlone executor;
    Must(domain.Publish({kIncarnation, counter, 0}, 1, counter, [](int, int, char*) {}, executor));
  }

  // The newest version of the table, after `counter`.
  int AwaitNewer(int table, int counter) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto deadline = std::chrono::duration<double>(kDeadlineS);
    if (!changed_.wait_for(lock, deadline, [&] { return newest_[table] > counter; })) Fail("nothing is published");
    return newest_[table];
  }

 private:
  // Messages wait until their domain can take them.
  void AwaitOpen() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(kDeadlineS), [&] { return is_open_; })) {
      Fail("the tables were not opened");
    }
  }

  fef::Status Fetch(int table, const fef::Version& version, size_t num_bytes, char* to) {
    fef::ReadRequest request;
    request.what.table = table;
    request.what.incarnation = version.incarnation;
    request.what.counter = version.counter;
    request.what.layer = request.what.expert = 0;
    request.destination = to;
    request.num_bytes = num_bytes;
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<fef::Status> result;
    request.done = [&](const fef::Status& status) {
      std::lock_guard<std::mutex> lock(mutex);
      result = status;
      changed.notify_all();
    };
    fabric_.Read(0, std::move(request));
    std::unique_lock<std::mutex> lock(mutex);
    if (!changed.wait_for(lock, std::chrono::duration<double>(kDeadlineS), [&] { return result.has_value(); })) {
      Fail("a read was not answered");
    }
    return *result;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  fef::Worker worker_;
  std::vector<std::unique_ptr<fef::Domain>> domains_;
  fef::Fabric fabric_;
  std::vector<int> newest_;
  std::map<int, int> last_published_;
};

// What a program gets that asks for a block over a connection of its own, with blocking calls and nothing else.
class PlainSockets {
 public:
  explicit PlainSockets(const std::vector<int64_t>& sizes) : sizes_(sizes), block_(sizes.back()) {}

  int Listen(const std::string& address) {
    int port = 0;
    Must(fef::ListenTcp(address, &listener_, &port));
    return port;
  }

  void Serve() {
    pollfd ready{listener_.get(), POLLIN, 0};
    if (poll(&ready, 1, int(kDeadlineS * 1e3)) != 1) Fail("nobody connects to the plain socket");
    const int socket = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
    Prepare(socket);
    fef::Message ask;
    while (recv(socket, &ask, sizeof(ask), MSG_WAITALL) == ssize_t(sizeof(ask))) {
      const char* from = block_.data();
      for (int64_t left = sizes_[ask.table]; left > 0;) {
        const ssize_t sent = send(socket, from, size_t(left), MSG_NOSIGNAL);
        if (sent <= 0) Fail("the plain socket broke");
        from += sent;
        left -= sent;
      }
    }
  }

  void Connect(const std::string& address, int port) {
    Must(fef::ConnectTcp(address, port, kDeadlineS, &socket_));
    fcntl(socket_.get(), F_SETFL, fcntl(socket_.get(), F_GETFL) & ~O_NONBLOCK);
    Prepare(socket_.get());
  }

  void Get(int table, char* to) {
    fef::Message ask;
    ask.table = table;
    if (send(socket_.get(), &ask, sizeof(ask), MSG_NOSIGNAL) != ssize_t(sizeof(ask))) Fail("the plain socket broke");
    if (recv(socket_.get(), to, size_t(sizes_[table]), MSG_WAITALL) != ssize_t(sizes_[table])) {
      Fail("the plain socket did not answer");
    }
  }

 private:
  static void Prepare(int socket) {
    const int one = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    const timeval deadline{int(kDeadlineS), 0};
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &deadline, sizeof(deadline));
  }

  const std::vector<int64_t> sizes_;
  std::vector<char> block_;
  fef::Descriptor listener_, socket_;
};

struct Host {
  int me;
  std::vector<int64_t> sizes;
  Side mapped, tcp;
  PlainSockets plain;
  // What memcpy reads: memory of the same kind as a mapped block. Where all reads go: aligned as that is, for a copy
  // whose addresses differ by a little modulo 4096 is several times slower.
  fef::MemorySegment own, destination;
  Lines lines;

  Host(int me, const std::string& token, uint64_t window_bytes, std::vector<int64_t> all)
      : me(me),
        sizes(std::move(all)),
        mapped(me, token + "m", window_bytes, sizes),
        tcp(me, token + "t", window_bytes, sizes),
        plain(sizes) {
    for (fef::MemorySegment* segment : {&own, &destination}) {
      Must(segment->Create("fef-bench", size_t(sizes.back())));
      Must(segment->Take(size_t(sizes.back())));
      std::memset(segment->data(), 1, size_t(sizes.back()));
    }
  }

  double Time(const std::string& way, int table, int repeats) {
    Side& side = way == "mmap" ? mapped : tcp;
    const int counter = way == "mmap" || way == "tcp" ? side.AwaitNewer(table, 0) : 0;
    auto read_once = [&]() -> void {
      if (way == "memcpy") {
        std::memcpy(destination.data(), own.data(), size_t(sizes[table]));
        asm volatile("" : : "r"(destination.data()) : "memory");  // or it is left out
      } else if (way == "sockets") {
        plain.Get(table, destination.data());
      } else {
        Must(side.Get(table, way == "mmap", counter, destination.data()));
      }
    };
    return Median(repeats, sizes[table] < kBatched && (way == "memcpy" || way == "mmap"), read_once);
  }

  void Check(const std::string& way, int table, int num_reads) {
    Side& side = way == "mmap" ? mapped : tcp;
    int whole = 0, stale = 0, torn = 0, counter = 0;
    while (whole + torn < num_reads) {
      const int newest = side.AwaitNewer(table, counter);
      const fef::Status status = side.Get(table, way == "mmap", newest, destination.data());
      if (status.ok()) {
        bool is_whole = true;
        for (int64_t i = 0; i < sizes[table] / 8; ++i) {
          is_whole &= reinterpret_cast<const uint64_t*>(destination.data())[i] == Word(uint64_t(newest), uint64_t(i));
        }
        ++(is_whole ? whole : torn);
      } else if (status.code == fef::Code::kStaleVersion) {
        ++stale;
      } else {
        Must(status);
      }
      side.Done(table, &counter, newest);
    }
    Say("read", whole, stale, torn);
  }

  void Connect(const std::vector<std::string>& words) {
    std::vector<fef::Endpoint> of_mapped, of_tcp;
    for (size_t at = 2; at + 5 < words.size(); at += 6) {
      of_mapped.push_back({words[at], std::atoi(words[at + 1].c_str()), words[at + 2]});
      of_tcp.push_back({words[at], std::atoi(words[at + 3].c_str()), words[at + 4]});
    }
    if (me == 0) std::thread([this] { plain.Serve(); }).detach();
    if (me == 1) plain.Connect(words[2], std::atoi(words[7].c_str()));
    mapped.Open(of_mapped, words[1] == "mmap");
    tcp.Open(of_tcp, false);
    Say("connected");
  }

  // Publishes on and on, until a line comes.
  void PublishUntilTold(const std::string& way, int table) {
    Side& side = way == "mmap" ? mapped : tcp;
    Say("started");
    std::vector<std::string> words;
    int versions = 0;
    for (; !lines.Poll(&words); ++versions) side.Publish(table);
    Say("stopped", versions);
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) Fail("wants ME ADDRESS TOKEN WINDOW_BYTES BLOCK_BYTES...");
  std::vector<int64_t> sizes;
  for (int i = 5; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  const std::string address = argv[2];
  Host host(std::atoi(argv[1]), argv[3], uint64_t(std::atoll(argv[4])), sizes);
  const fef::Endpoint mapped = host.mapped.Listen(address), tcp = host.tcp.Listen(address);
  Say("at", address, mapped.port, mapped.unix_name, tcp.port, tcp.unix_name, host.plain.Listen(address));
  while (true) {
    const std::vector<std::string> words = host.lines.Hear();
    if (words[0] == "connect") {
      host.Connect(words);
    } else if (words[0] == "publish") {
      for (size_t table = 0; table < sizes.size(); ++table) {
        host.mapped.Publish(int(table));
        host.tcp.Publish(int(table));
      }
      Say("published");
    } else if (words[0] == "start") {
      host.PublishUntilTold(words[1], std::atoi(words[2].c_str()));
    } else if (words[0] == "time") {
      Say("took", host.Time(words[1], std::atoi(words[2].c_str()), std::atoi(words[3].c_str())));
    } else if (words[0] == "check") {
      host.Check(words[1], std::atoi(words[2].c_str()), std::atoi(words[3].c_str()));
    } else {
      Fail("unknown command " + words[0]);
    }
  }
}
