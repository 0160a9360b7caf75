#include "client.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

namespace fef {

namespace {

constexpr auto kSilence = std::chrono::seconds(1);  // after which a host no longer keeps others from being asked

}  // namespace

Client::Client(Membership membership, Window window, std::function<void(int, const std::string&)> on_lost)
    : membership_(std::move(membership)),
      window_(window),
      on_lost_(std::move(on_lost)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Client::~Client() { Stop(); }

Status Client::Connect(int host, const Endpoint& endpoint, bool by_unix_socket, double deadline_s) {
  Peer& peer = peers_[host];
  const std::string where =
      by_unix_socket ? endpoint.unix_name : endpoint.address + ":" + std::to_string(endpoint.port);
  for (Channel channel : {Channel::kRequests, Channel::kReplies}) {
    Descriptor& socket = channel == Channel::kRequests ? peer.requests : peer.replies;
    Status status = by_unix_socket ? ConnectUnix(endpoint.unix_name, &socket)
                                   : ConnectTcp(endpoint.address, endpoint.port, deadline_s, &socket);
    Message hello, answer;
    hello.channel = channel;
    hello.host = membership_.me;
    hello.incarnation = membership_.incarnation;
    const std::string bytes = ToBytes(hello, membership_.token);
    if (status.ok()) status = WriteAll(socket.get(), bytes.data(), bytes.size(), deadline_s);
    if (status.ok()) status = ReadAll(socket.get(), &answer, sizeof(answer), deadline_s);
    std::string why(std::min(answer.payload_bytes, kMaxPayloadBytes), ' ');
    if (status.ok()) status = ReadAll(socket.get(), why.data(), why.size(), deadline_s);
    if (!status.ok()) {
      status.message = "host " + std::to_string(host) + " at " + where + ": " + status.message;
      return status;
    }
    if (answer.magic != kMagic || answer.code != 0 || answer.host != host) {
      return Status::Error(Code::kInvalidArgument, "host ", host, " at ", where, " refused this one: ",
                           answer.magic == kMagic ? why : "it is another program");
    }
  }
  return Status::Ok();
}

void Client::Start() {
  auto watch = [&](int fd, uint64_t data, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = data;
    epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
  };
  watch(wake_.get(), UINT64_MAX, EPOLLIN);
  for (auto& [host, peer] : peers_) {
    watch(peer.requests.get(), uint64_t(host) * 2, EPOLLIN | EPOLLOUT | EPOLLET);
    watch(peer.replies.get(), uint64_t(host) * 2 + 1, EPOLLIN);
  }
  thread_ = std::thread([this] { Run(); });
}

void Client::Stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  Ring(wake_.get());
  thread_.join();
}

void Client::Send(int host, const Message& message, const std::string& payload, int fd) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = peers_.find(host);
    if (found == peers_.end() || found->second.is_lost) return;  // whoever waits for this host is told so
    Peer& peer = found->second;
    Message mine = message;
    mine.host = membership_.me;
    peer.out.Add(ToBytes(mine, payload), fd);
    Flush(host, peer);
    if (finished_.empty()) return;
  }
  Ring(wake_.get());
}

uint64_t Client::Read(int host, ReadRequest request) {
  uint64_t ticket = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Peer& peer = peers_.at(host);
    if (!peer.is_lost && !is_stopping_) {
      ticket = ++last_ticket_;
      request.what.kind = Kind::kRead;
      request.what.host = membership_.me;
      request.what.ticket = ticket;
      request.what.offset = 0;
      const uint64_t num_bytes = request.num_bytes;
      peer.queue.emplace(request.urgency, ticket);
      peer.reads.emplace(ticket, Peer::Read{std::move(request), num_bytes});
      Pump();  // here and now: to wake the client's thread for it would take as long as the answer does
    } else {
      finished_.emplace_back(std::move(request.done), Status::Error(Code::kPeerLost, "host ", host, " is gone"));
    }
    if (finished_.empty()) return ticket;
  }
  Ring(wake_.get());
  return ticket;
}

void Client::Hurry(int host, uint64_t ticket, int urgency) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = peers_.at(host);
  const auto found = peer.reads.find(ticket);
  if (found == peer.reads.end()) return;
  int& current = found->second.request.urgency;
  if (peer.queue.erase({current, ticket}) > 0) peer.queue.emplace(urgency, ticket);
  current = urgency;
}

// Asks for the next chunks of the most urgent reads, whichever host has them, as far as the windows go; of reads that
// are equally urgent, from the host that owes least.
void Client::Ask() {
  for (uint64_t in_flight = InFlight(); in_flight < window_.total_bytes;) {
    Peer* chosen = nullptr;
    for (auto& [host, peer] : peers_) {
      if (peer.is_lost || peer.in_flight >= window_.host_bytes || peer.queue.empty()) continue;
      const auto rank = [](const Peer& p) { return std::make_pair(p.queue.begin()->first, p.in_flight); };
      if (chosen == nullptr || rank(peer) < rank(*chosen)) chosen = &peer;
    }
    if (chosen == nullptr) return;
    ReadRequest& request = chosen->reads.at(chosen->queue.begin()->second).request;
    Message& what = request.what;
    what.length = uint32_t(std::min<uint64_t>(kChunkBytes, request.num_bytes - what.offset));
    chosen->out.Add(ToBytes(what));
    if (chosen->in_flight == 0) chosen->heard = Clock::now();
    chosen->in_flight += what.length;
    in_flight += what.length;
    what.offset += what.length;
    if (what.offset == request.num_bytes) chosen->queue.erase(chosen->queue.begin());
  }
}

uint64_t Client::InFlight() const {
  const auto now = Clock::now();
  uint64_t in_flight = 0;
  for (const auto& [host, peer] : peers_) in_flight += now - peer.heard < kSilence ? peer.in_flight : 0;
  return in_flight;
}

void Client::Flush(int host, Peer& peer) {
  if (!peer.is_lost && !peer.out.Flush(peer.requests.get())) Lose(host, "its connection broke");
}

void Client::Pump() {
  Ask();
  for (auto& [host, peer] : peers_) Flush(host, peer);
}

void Client::Run() {
  using namespace std::chrono_literals;
  epoll_event events[64];
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Pump();
    auto finished = std::move(finished_);
    finished_.clear();
    if (!finished.empty()) {
      lock.unlock();
      for (auto& [done, status] : finished) done(status);
      lock.lock();
      continue;
    }
    if (is_stopping_) break;
    lock.unlock();
    // Again after kSilence at the latest: reads that wait for a silent host's share of the window may have it then.
    const int num_events = epoll_wait(epoll_.get(), events, 64, int(kSilence / 1ms));
    lock.lock();
    for (int i = 0; i < num_events; ++i) {
      if (events[i].data.u64 == UINT64_MAX) {
        uint64_t count;
        [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
        continue;
      }
      const int host = int(events[i].data.u64 / 2);
      Peer& peer = peers_.at(host);
      if (peer.is_lost) continue;
      if (events[i].data.u64 % 2 == 1) {
        if (!Receive(host, peer)) Lose(host, "its connection was closed");
      } else if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        char byte;  // nothing comes this way but the end
        const ssize_t got = recv(peer.requests.get(), &byte, 1, MSG_PEEK);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) Lose(host, "its connection was closed");
      }
    }
  }
  for (auto& [host, peer] : peers_) {
    peer.out.Flush(peer.requests.get());
    Lose(host, "the pool was closed");
  }
  auto finished = std::move(finished_);
  lock.unlock();
  for (auto& [done, status] : finished) done(status);
}

void Client::Lose(int host, const std::string& why) {
  Peer& peer = peers_.at(host);
  if (peer.is_lost) return;
  peer.is_lost = true;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.requests.get(), nullptr);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.replies.get(), nullptr);
  const Status status = Status::Error(Code::kPeerLost, "host ", host, " is gone: ", why);
  if (!is_stopping_) finished_.emplace_back([this, host, why](const Status&) { on_lost_(host, why); }, status);
  for (auto& [ticket, read] : peer.reads) finished_.emplace_back(std::move(read.request.done), status);
  peer.reads.clear();
  peer.queue.clear();
  peer.in_flight = 0;
}

// Takes in what is there. False when the connection is at its end or makes no sense.
bool Client::Receive(int host, Peer& peer) {
  while (true) {
    char* to;
    size_t wanted;
    if (peer.payload_left > 0 && peer.payload_to != nullptr) {
      to = peer.payload_to;
      wanted = peer.payload_left;
    } else {
      const size_t total = peer.payload_left > 0 ? peer.payload_left : sizeof(Message) - peer.in.size();
      peer.in.resize(peer.in.size() + total);
      to = peer.in.data() + peer.in.size() - total;
      wanted = total;
    }
    const ssize_t got = recv(peer.replies.get(), to, wanted, 0);
    const bool is_text = to != peer.payload_to;
    if (is_text) peer.in.resize(peer.in.size() - wanted + size_t(std::max<ssize_t>(got, 0)));
    if (got == 0) return false;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (peer.payload_left > 0) {
      peer.payload_left -= uint64_t(got);
      if (!is_text) peer.payload_to += got;
      if (peer.payload_left == 0) Finish(peer);
    } else if (peer.in.size() == sizeof(Message)) {
      std::memcpy(&peer.answer, peer.in.data(), sizeof(Message));
      peer.in.clear();
      if (peer.answer.magic != kMagic || peer.answer.kind != Kind::kData || peer.answer.host != host ||
          peer.answer.payload_bytes > kMaxPayloadBytes) {
        return false;
      }
      Begin(peer);
      if (peer.payload_left == 0) Finish(peer);
    }
    Pump();
    if (peer.is_lost) return true;
  }
}

// Where the payload of the answer goes: into the block that was asked for, or, if it is a text, into `in`.
void Client::Begin(Peer& peer) {
  const Message& answer = peer.answer;
  peer.payload_left = answer.payload_bytes;
  peer.payload_to = nullptr;
  if (answer.code != 0) return;
  const auto found = peer.reads.find(answer.ticket);
  if (found == peer.reads.end()) return;  // of a read that failed before
  const ReadRequest& request = found->second.request;
  const bool fits = answer.payload_bytes == answer.length && answer.offset + answer.length <= request.num_bytes;
  if (fits) peer.payload_to = request.destination + answer.offset;
}

void Client::Finish(Peer& peer) {
  const Message& answer = peer.answer;
  peer.in_flight -= std::min<uint64_t>(peer.in_flight, answer.length);
  peer.heard = Clock::now();
  const std::string text = std::move(peer.in);
  peer.in.clear();
  peer.payload_to = nullptr;
  const auto found = peer.reads.find(answer.ticket);
  if (found == peer.reads.end()) return;
  Peer::Read& read = found->second;
  Status status = Status::Ok();
  if (answer.code != 0) {
    status = {Code(answer.code), text};
  } else {
    read.missing -= std::min<uint64_t>(read.missing, answer.length);
    if (read.missing > 0) return;
  }
  finished_.emplace_back(std::move(read.request.done), status);
  peer.queue.erase({read.request.urgency, answer.ticket});  // it is still there if the read has failed
  peer.reads.erase(found);
}

}  // namespace fef
