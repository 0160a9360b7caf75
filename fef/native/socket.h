// Sockets as owned values, and output that does not block.
#ifndef FEF_SOCKET_H_
#define FEF_SOCKET_H_

#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "status.h"

namespace fef {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();

  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Where a host listens. An abstract unix name is known within one network namespace only, as it should be.
struct Endpoint {
  std::string address;    // IPv4
  int port = 0;
  std::string unix_name;  // abstract
};

// *port: 0, which becomes one that the system chooses, or the one to listen at.
Status ListenTcp(const std::string& address, Descriptor* listener, int* port);
Status ListenUnix(const std::string& name, Descriptor* listener);
// Blocks for at most `deadline_s`.
Status ConnectTcp(const std::string& address, int port, double deadline_s, Descriptor* socket);
Status ConnectUnix(const std::string& name, Descriptor* socket);

// Exactly num_bytes within deadline_s; what is wrong otherwise.
Status ReadAll(int socket, void* data, size_t num_bytes, double deadline_s);
Status WriteAll(int socket, const void* data, size_t num_bytes, double deadline_s);
void SetNonBlocking(int fd);
// `epoll` tells, by its number, when fd has something to be read.
void WatchInput(int epoll, int fd);
// Wakes who waits for the eventfd.
void Ring(int eventfd);

// Bytes, and descriptors, on their way out.
class Outbox {
 public:
  // fd, if not -1, goes with the first byte; it must stay open until it is sent.
  void Add(std::string bytes, int fd = -1);
  bool empty() const { return queue_.empty(); }
  size_t num_bytes() const { return num_bytes_; }
  // Writes what the socket takes now. False when the connection is broken.
  bool Flush(int socket);

 private:
  struct Item {
    std::string bytes;
    int fd;
  };
  std::deque<Item> queue_;
  size_t written_ = 0;  // of the first item
  size_t num_bytes_ = 0;
};

}  // namespace fef

#endif  // FEF_SOCKET_H_
