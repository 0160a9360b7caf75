// The asking half of a host: messages to other hosts, and reads of their memory, paced by the reader.
#ifndef FEF_CLIENT_H_
#define FEF_CLIENT_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server.h"
#include "socket.h"
#include "status.h"
#include "wire.h"

namespace fef {

// Where a block lies in another host's memory, and the word that says which version is there: OneSided's segments.
struct Spot {
  int segment = -1;
  uint64_t offset = 0;
  int version_segment = -1;
  uint64_t version_offset = 0;
  uint64_t version = 0;  // 0: there is no such word, the bytes stay until they were read
};

// A block of another host on its way into this one's memory.
struct ReadRequest {
  Message what;             // kRead; offset and length are filled in chunk by chunk
  Spot spot;                // for one-sided reads
  bool is_requested = false;  // never one-sided
  char* destination = nullptr;
  uint64_t num_bytes = 0;
  int urgency = 0;  // the smallest first; equals in their order
  std::function<void(const Status&)> done;  // on the client's thread, once
};

// Bytes asked for and not yet here, of one host and of all together. They bound what queues in a switch, and how long
// an urgent read waits behind others.
struct Window {
  uint64_t host_bytes = 0, total_bytes = 0;
};

// One thread, asleep in epoll while nothing comes. What goes out does so on the threads that ask for it.
class Client {
 public:
  Client(Membership membership, Window window, std::function<void(int host, const std::string& why)> on_lost);
  ~Client();

  // Opens the connections to a host; before Start. Blocks for at most deadline_s.
  Status Connect(int host, const Endpoint& endpoint, bool by_unix_socket, double deadline_s);
  void Start();
  void Stop();

  // Messages to one host arrive in their order. `fd` must stay open until then.
  void Send(int host, const Message& message, const std::string& payload = {}, int fd = -1);
  // Returns a number for Hurry.
  uint64_t Read(int host, ReadRequest request);
  // Changes a read's urgency, as far as it is not asked for yet.
  void Hurry(int host, uint64_t ticket, int urgency);

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    Descriptor requests, replies;
    Outbox out;
    bool is_lost = false;
    struct Read {
      ReadRequest request;
      uint64_t missing;  // bytes that are not here
    };
    std::map<uint64_t, Read> reads;  // by ticket, not wholly here
    std::set<std::pair<int, uint64_t>> queue;  // of these, urgency and ticket of those not wholly asked for
    uint64_t in_flight = 0;
    Clock::time_point heard;  // when bytes came last, or the first were asked for
    std::string in;  // of an answer: the message, then a text
    Message answer;
    uint64_t payload_left = 0;
    char* payload_to = nullptr;  // null: to `in`
  };

  void Run();
  void Pump();
  void Ask();
  uint64_t InFlight() const;
  void Flush(int host, Peer& peer);
  bool Receive(int host, Peer& peer);
  void Begin(Peer& peer);
  void Finish(Peer& peer);
  void Lose(int host, const std::string& why);

  const Membership membership_;
  const Window window_;
  const std::function<void(int, const std::string&)> on_lost_;
  std::mutex mutex_;
  std::map<int, Peer> peers_;
  uint64_t last_ticket_ = 0;
  bool is_stopping_ = false;
  std::vector<std::pair<std::function<void(const Status&)>, Status>> finished_;  // to be called without the mutex
  Descriptor epoll_, wake_;
  std::thread thread_;
};

}  // namespace fef

#endif  // FEF_CLIENT_H_
