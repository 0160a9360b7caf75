// The serving half of a host: other hosts' requests come in here, and the bytes they ask for go out.
#ifndef FEF_SERVER_H_
#define FEF_SERVER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "socket.h"
#include "status.h"
#include "wire.h"

namespace fef {

// Who takes part in a job. A connection that says anything else is refused.
struct Membership {
  int me = 0;
  int num_hosts = 1;
  int32_t incarnation = 0;
  std::string token;
};

// One thread, asleep in epoll while nobody asks. The callbacks are called on it and must not block.
class Server {
 public:
  struct Callbacks {
    std::function<void(const Message& message, const std::string& payload, Descriptor fd)> on_message;
    // Copies the bytes that `read` asks for to *bytes, or says why not.
    std::function<Status(const Message& read, std::string* bytes)> on_read;
    std::function<void(int host, const std::string& why)> on_lost;
  };

  Server(Membership membership, Callbacks callbacks);
  ~Server();

  // Accepts from now on. *port: as of ListenTcp.
  Status Start(const std::string& address, const std::string& unix_name, int* port);
  void Stop();

  // What was refused: connections dropped because of what they said (other jobs, other programs, garbage), and reads of
  // what is not, or is no longer, there. A hint that comes too late is no fault and does not count.
  int64_t num_refused() const { return num_refused_; }

 private:
  struct Connection {
    Descriptor socket;
    bool is_unix = false;
    int host = -1;  // after its hello
    Channel channel = Channel::kRequests;
    std::string in;
    std::deque<Descriptor> descriptors;
    Outbox out;
    bool is_waiting_to_write = false;  // what epoll has been told
    std::deque<uint64_t> refused;  // the last tickets, so that the chunks of one read count once
  };

  void Run();
  void Accept(int listener, bool is_unix);
  bool Receive(Connection& connection);
  bool Handle(Connection& connection, const Message& message, const std::string& payload);
  bool Greet(Connection& connection, const Message& message, const std::string& payload);
  void Answer(const Message& read);
  void CountRefusal(Connection& connection, const Message& read);
  void Watch(Connection& connection);
  void Drop(int fd, const std::string& why);

  const Membership membership_;
  const Callbacks callbacks_;
  Descriptor tcp_, unix_, epoll_, stop_;
  std::map<int, std::unique_ptr<Connection>> connections_;  // by descriptor
  std::map<int, Connection*> replies_;                      // by host
  std::atomic<int64_t> num_refused_{0};
  std::thread thread_;
};

}  // namespace fef

#endif  // FEF_SERVER_H_
