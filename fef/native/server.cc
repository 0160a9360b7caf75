#include "server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace fef {

namespace {

constexpr size_t kReceiveBytes = 64 << 10;
constexpr size_t kMaxOutBytes = 256 << 20;  // of answers to a host that does not take them
constexpr size_t kRefusedRemembered = 64;   // reads of a host, of whose chunks some may still come

}  // namespace

Server::Server(Membership membership, Callbacks callbacks)
    : membership_(std::move(membership)), callbacks_(std::move(callbacks)) {}

Server::~Server() { Stop(); }

Status Server::Start(const std::string& address, const std::string& unix_name, int* port) {
  if (Status status = ListenTcp(address, &tcp_, port); !status.ok()) return status;
  if (Status status = ListenUnix(unix_name, &unix_); !status.ok()) return status;
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  stop_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (int fd : {tcp_.get(), unix_.get(), stop_.get()}) WatchInput(epoll_.get(), fd);
  thread_ = std::thread([this] { Run(); });
  return Status::Ok();
}

void Server::Stop() {
  if (!thread_.joinable()) return;
  Ring(stop_.get());
  thread_.join();
}

void Server::Run() {
  epoll_event events[64];
  while (true) {
    const int num_events = epoll_wait(epoll_.get(), events, 64, -1);
    for (int i = 0; i < num_events; ++i) {
      const int fd = events[i].data.fd;
      if (fd == stop_.get()) return;
      if (fd == tcp_.get() || fd == unix_.get()) {
        Accept(fd, fd == unix_.get());
        continue;
      }
      const auto found = connections_.find(fd);
      if (found == connections_.end()) continue;
      Connection& connection = *found->second;
      if ((events[i].events & EPOLLOUT) && !connection.out.Flush(fd)) {
        Drop(fd, "its connection broke");
      } else if ((events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) && !Receive(connection)) {
        Drop(fd, "its connection was closed");
      } else {
        Watch(connection);
      }
    }
  }
}

void Server::Accept(int listener, bool is_unix) {
  while (true) {
    Descriptor socket(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) return;
    const int fd = socket.get(), one = 1;
    if (!is_unix) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    auto connection = std::make_unique<Connection>();
    connection->socket = std::move(socket);
    connection->is_unix = is_unix;
    WatchInput(epoll_.get(), fd);
    connections_[fd] = std::move(connection);
  }
}

void Server::Watch(Connection& connection) {
  const bool has_output = !connection.out.empty();
  if (std::exchange(connection.is_waiting_to_write, has_output) == has_output) return;
  epoll_event event{};
  event.events = EPOLLIN | (has_output ? unsigned(EPOLLOUT) : 0u);
  event.data.fd = connection.socket.get();
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, event.data.fd, &event);
}

void Server::Drop(int fd, const std::string& why) {
  const auto found = connections_.find(fd);
  const int host = found->second->host;
  if (host >= 0 && replies_.count(host) && replies_[host] == found->second.get()) replies_.erase(host);
  connections_.erase(found);
  if (host >= 0) callbacks_.on_lost(host, why);
}

// False when the connection is to be dropped.
bool Server::Receive(Connection& connection) {
  char buffer[kReceiveBytes];
  while (true) {
    iovec part{buffer, sizeof(buffer)};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))];
    if (connection.is_unix) {
      header.msg_control = control;
      header.msg_controllen = sizeof(control);
    }
    const ssize_t got = recvmsg(connection.socket.get(), &header, MSG_CMSG_CLOEXEC);
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    for (cmsghdr* item = CMSG_FIRSTHDR(&header); item != nullptr; item = CMSG_NXTHDR(&header, item)) {
      if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
        connection.descriptors.emplace_back(fd);
      }
    }
    connection.in.append(buffer, size_t(got));
    size_t at = 0;
    while (connection.in.size() - at >= sizeof(Message)) {
      Message message;
      std::memcpy(&message, connection.in.data() + at, sizeof(message));
      const uint32_t max_bytes = connection.host < 0 ? kMaxPayloadBytes : kMaxParcelBytes;
      if (message.magic != kMagic || message.payload_bytes > max_bytes) {
        ++num_refused_;
        return false;
      }
      if (connection.in.size() - at < sizeof(message) + message.payload_bytes) break;
      const std::string payload = connection.in.substr(at + sizeof(message), message.payload_bytes);
      at += sizeof(message) + message.payload_bytes;
      if (!Handle(connection, message, payload)) return false;
    }
    connection.in.erase(0, at);
  }
}

bool Server::Handle(Connection& connection, const Message& message, const std::string& payload) {
  if (connection.host < 0) return Greet(connection, message, payload);
  if (message.host != connection.host || connection.channel != Channel::kRequests || message.kind == Kind::kHello ||
      message.kind == Kind::kData) {
    ++num_refused_;
    return false;
  }
  if (message.kind == Kind::kRead) {
    Answer(message);
    return true;
  }
  Descriptor fd;
  if (message.kind == Kind::kSegment) {
    if (connection.descriptors.empty()) {
      ++num_refused_;
      return false;
    }
    fd = std::move(connection.descriptors.front());
    connection.descriptors.pop_front();
  }
  callbacks_.on_message(message, payload, std::move(fd));
  return true;
}

bool Server::Greet(Connection& connection, const Message& message, const std::string& payload) {
  Message answer;
  answer.host = membership_.me;
  std::string why;
  if (message.kind != Kind::kHello || message.host < 0 || message.host >= membership_.num_hosts) {
    why = "this is host " + std::to_string(membership_.me) + " of " + std::to_string(membership_.num_hosts);
  } else if (payload != membership_.token) {
    why = "job token " + payload + " is not this job's, " + membership_.token;
  } else if (message.incarnation != membership_.incarnation) {
    why = "incarnation " + std::to_string(message.incarnation) + " is not this pool's, " +
          std::to_string(membership_.incarnation);
  }
  answer.code = why.empty() ? 0 : int(Code::kInvalidArgument);
  if (!why.empty()) ++num_refused_;  // before anybody hears of it
  connection.out.Add(ToBytes(answer, why));
  connection.out.Flush(connection.socket.get());
  if (!why.empty()) return false;
  connection.host = message.host;
  connection.channel = message.channel;
  if (message.channel == Channel::kReplies) replies_[message.host] = &connection;
  return true;
}

void Server::Answer(const Message& read) {
  const auto found = replies_.find(read.host);
  if (found == replies_.end() || found->second->out.num_bytes() > kMaxOutBytes) return;
  std::string bytes;
  const Status status = callbacks_.on_read(read, &bytes);
  if (!status.ok()) CountRefusal(*found->second, read);
  Message answer = read;
  answer.kind = Kind::kData;
  answer.host = membership_.me;
  answer.code = int(status.code);
  Connection& connection = *found->second;
  connection.out.Add(ToBytes(answer, status.ok() ? bytes : status.message));
  connection.out.Flush(connection.socket.get());  // a broken connection shows itself to epoll
  Watch(connection);
}

void Server::CountRefusal(Connection& connection, const Message& read) {
  std::deque<uint64_t>& refused = connection.refused;
  if (read.is_hint || std::find(refused.begin(), refused.end(), read.ticket) != refused.end()) return;
  refused.push_back(read.ticket);
  if (refused.size() > kRefusedRemembered) refused.pop_front();
  ++num_refused_;
}

}  // namespace fef
