#include "socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace fef {

namespace {

Status SystemError(const std::string& what) {
  return Status::Error(Code::kPeerLost, what, ": ", std::strerror(errno));
}

int MilliLeft(std::chrono::steady_clock::time_point end) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
  return int(std::max<int64_t>(0, left.count()));
}

std::chrono::steady_clock::time_point In(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

Status ToAddress(const std::string& address, int port, sockaddr_in* result) {
  *result = {};
  result->sin_family = AF_INET;
  result->sin_port = htons(uint16_t(port));
  if (inet_pton(AF_INET, address.c_str(), &result->sin_addr) == 1) return Status::Ok();
  return Status::Error(Code::kInvalidArgument, "'", address, "' is no IPv4 address");
}

socklen_t ToUnixAddress(const std::string& name, sockaddr_un* result) {
  *result = {};
  result->sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof(result->sun_path) - 1);
  std::memcpy(result->sun_path + 1, name.data(), length);  // the 0 before it makes it abstract
  return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// `move(done)` is recv or send, behind the bytes that are done.
template <typename Move>
Status MoveAll(int socket, short event, size_t num_bytes, double deadline_s, const Move& move) {
  const auto end = In(deadline_s);
  for (size_t done = 0; done < num_bytes;) {
    const ssize_t moved = move(done);
    if (moved == 0) return Status::Error(Code::kPeerLost, "the connection was closed");
    if (moved > 0) {
      done += size_t(moved);
      continue;
    }
    if (errno != EAGAIN && errno != EINTR) return SystemError("the connection broke");
    pollfd ready{socket, event, 0};
    if (poll(&ready, 1, MilliLeft(end)) == 0) {
      return Status::Error(Code::kDeadlineExceeded, "no answer within ", deadline_s, " s");
    }
  }
  return Status::Ok();
}

void SendAtOnce(int socket) {
  const int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

void SetNonBlocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

void WatchInput(int epoll, int fd) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

void Ring(int eventfd) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(eventfd, &one, sizeof(one));
}

Status ListenTcp(const std::string& address, Descriptor* listener, int* port) {
  sockaddr_in where;
  if (Status status = ToAddress(address, *port, &where); !status.ok()) return status;
  Descriptor socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  socklen_t length = sizeof(where);
  // At a given port, connections of the process that was there before may still be closing. Where the system chooses,
  // only what has its port may share it: two that choose at the same time must not get the same one.
  const int one = 1;
  auto share = [&] { return setsockopt(socket_fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) == 0; };
  if (!socket_fd || (*port != 0 && !share()) ||
      bind(socket_fd.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) != 0 || !share() ||
      listen(socket_fd.get(), 256) != 0 ||
      getsockname(socket_fd.get(), reinterpret_cast<sockaddr*>(&where), &length) != 0) {
    return SystemError("listening at " + address);
  }
  *port = ntohs(where.sin_port);
  *listener = std::move(socket_fd);
  return Status::Ok();
}

Status ListenUnix(const std::string& name, Descriptor* listener) {
  sockaddr_un where;
  const socklen_t length = ToUnixAddress(name, &where);
  Descriptor socket_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_fd || bind(socket_fd.get(), reinterpret_cast<sockaddr*>(&where), length) != 0 ||
      listen(socket_fd.get(), 256) != 0) {
    return SystemError("listening at the unix socket " + name);
  }
  *listener = std::move(socket_fd);
  return Status::Ok();
}

Status ConnectTcp(const std::string& address, int port, double deadline_s, Descriptor* result) {
  sockaddr_in where;
  if (Status status = ToAddress(address, port, &where); !status.ok()) return status;
  const std::string what = "connecting to " + address + ":" + std::to_string(port);
  Descriptor socket_fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_fd) return SystemError(what);
  if (connect(socket_fd.get(), reinterpret_cast<sockaddr*>(&where), sizeof(where)) != 0) {
    if (errno != EINPROGRESS) return SystemError(what);
    pollfd ready{socket_fd.get(), POLLOUT, 0};
    if (poll(&ready, 1, int(deadline_s * 1e3)) != 1) {
      return Status::Error(Code::kDeadlineExceeded, what, ": no answer within ", deadline_s, " s");
    }
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(socket_fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    errno = error;
    if (error != 0) return SystemError(what);
  }
  SendAtOnce(socket_fd.get());
  *result = std::move(socket_fd);
  return Status::Ok();
}

Status ConnectUnix(const std::string& name, Descriptor* result) {
  sockaddr_un where;
  const socklen_t length = ToUnixAddress(name, &where);
  Descriptor socket_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket_fd || connect(socket_fd.get(), reinterpret_cast<sockaddr*>(&where), length) != 0) {
    return SystemError("connecting to the unix socket " + name);
  }
  SetNonBlocking(socket_fd.get());
  *result = std::move(socket_fd);
  return Status::Ok();
}

Status ReadAll(int socket, void* data, size_t num_bytes, double deadline_s) {
  return MoveAll(socket, POLLIN, num_bytes, deadline_s,
                 [&](size_t done) { return recv(socket, static_cast<char*>(data) + done, num_bytes - done, 0); });
}

Status WriteAll(int socket, const void* data, size_t num_bytes, double deadline_s) {
  return MoveAll(socket, POLLOUT, num_bytes, deadline_s, [&](size_t done) {
    return send(socket, static_cast<const char*>(data) + done, num_bytes - done, MSG_NOSIGNAL);
  });
}

void Outbox::Add(std::string bytes, int fd) {
  num_bytes_ += bytes.size();
  queue_.push_back({std::move(bytes), fd});
}

bool Outbox::Flush(int socket) {
  while (!queue_.empty()) {
    Item& item = queue_.front();
    iovec part{item.bytes.data() + written_, item.bytes.size() - written_};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (item.fd >= 0) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
      cmsghdr* message = CMSG_FIRSTHDR(&header);
      message->cmsg_level = SOL_SOCKET;
      message->cmsg_type = SCM_RIGHTS;
      message->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(message), &item.fd, sizeof(int));
    }
    const ssize_t sent = sendmsg(socket, &header, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN || errno == EINTR;
    item.fd = -1;
    written_ += size_t(sent);
    num_bytes_ -= size_t(sent);
    if (written_ < item.bytes.size()) continue;
    queue_.pop_front();
    written_ = 0;
  }
  return true;
}

}  // namespace fef
