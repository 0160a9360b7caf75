// One host of an exchange in which every host reads a block from every other at once, over fef's own sockets.
//
//   exchange_sockets ME NUM_HOSTS ADDRESS BLOCK_BYTES WINDOW_BYTES TOTAL_WINDOW_BYTES TOKEN
//
// Says "at PORT UNIX_NAME"; hears "connect ADDRESS:PORT..." (one for each host) and says "connected"; then, again and
// again, hears "prepare ROUND" and says "ready", hears "go TIME" and says "took BEGIN END WRONG_WORDS".
#include <condition_variable>
#include <mutex>

#include "fabric.h"
#include "lines.h"

namespace {

constexpr double kDeadlineS = 60;

struct Host : fef_bench::Blocks {
  using Blocks::Blocks;
  std::mutex mutex;
  std::condition_variable changed;
  int num_missing = 0;
  std::string error;

  fef::Status OnRead(const fef::Message& read, std::string* bytes) {
    if (read.counter != round || read.offset > block_bytes || read.length > block_bytes - read.offset) {
      return fef::Status::Error(fef::Code::kInvalidArgument, "no such bytes");
    }
    bytes->assign(reinterpret_cast<const char*>(mine[read.host].data()) + read.offset, read.length);
    return fef::Status::Ok();
  }

  void Ask(fef::Fabric& fabric, int host) {
    fef::ReadRequest request;
    request.what.counter = round;
    request.destination = reinterpret_cast<char*>(theirs[host].data());
    request.num_bytes = block_bytes;
    request.done = [this](const fef::Status& status) {
      std::lock_guard<std::mutex> lock(mutex);
      if (!status.ok()) error = status.message;
      --num_missing;
      changed.notify_all();
    };
    fabric.Read(host, std::move(request));
  }

  void Exchange(fef::Fabric& fabric) {
    num_missing = num_hosts - 1;
    for (int i = 1; i < num_hosts; ++i) Ask(fabric, (me + i) % num_hosts);
    std::unique_lock<std::mutex> lock(mutex);
    const auto deadline = std::chrono::duration<double>(kDeadlineS);
    if (!changed.wait_for(lock, deadline, [&] { return num_missing == 0; })) error = "deadline";
    if (!error.empty()) fef_bench::Fail("exchange: " + error);
  }
};

}  // namespace

int main(int argc, char** argv) {
  using namespace fef_bench;
  if (argc != 8) Fail("wants ME NUM_HOSTS ADDRESS BLOCK_BYTES WINDOW_BYTES TOTAL_WINDOW_BYTES TOKEN");
  Host host(std::atoi(argv[1]), std::atoi(argv[2]), size_t(std::atoll(argv[4])));
  const fef::Window window{uint64_t(std::atoll(argv[5])), uint64_t(std::atoll(argv[6]))};
  fef::Fabric fabric({host.me, host.num_hosts, 1, argv[7]}, window,
                     {[](const fef::Message&, const std::string&, fef::Descriptor) {},
                      [&](const fef::Message& read, std::string* bytes) { return host.OnRead(read, bytes); },
                      [](int, const std::string& why, bool is_orderly) {
                        if (!is_orderly) Fail("another host is gone: " + why);
                      }});
  fef::Endpoint endpoint;
  if (fef::Status status = fabric.Listen(argv[3], &endpoint); !status.ok()) Fail(status.message);
  Say("at", endpoint.port, endpoint.unix_name);
  Lines lines;
  double begin = 0;
  while (true) {
    const std::vector<std::string> words = lines.Hear();
    if (words[0] == "connect") {
      std::vector<fef::Endpoint> endpoints;
      for (size_t i = 1; i < words.size(); ++i) {
        const size_t colon = words[i].find(':');
        endpoints.push_back({words[i].substr(0, colon), std::atoi(words[i].c_str() + colon + 1), ""});
      }
      const std::vector<bool> is_mapped(endpoints.size(), false);
      if (fef::Status status = fabric.Connect(endpoints, is_mapped, kDeadlineS); !status.ok()) Fail(status.message);
      Say("connected");
    } else if (words[0] == "prepare") {
      host.Prepare(std::atoi(words[1].c_str()));
      Say("ready");
    } else if (words[0] == "go") {
      SleepUntil(std::atof(words[1].c_str()));
      begin = Now();
      host.Exchange(fabric);
      const double end = Now();
      Say("took", begin, end, host.CountAllWrong());
    } else {
      Fail("unknown command " + words[0]);
    }
  }
}
