#include "one_sided_reads.h"

#include <utility>

namespace fef {

uint64_t OneSidedReads::Add(int host, ReadRequest request) {
  uint64_t ticket;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Peer& peer = peers_[host];
    ticket = ++last_ticket_;
    peer.queue.emplace(request.urgency, ticket);
    peer.waiting.emplace(ticket, std::make_shared<ReadRequest>(std::move(request)));
  }
  Pump(host);
  return ticket;
}

void OneSidedReads::Hurry(int host, uint64_t ticket, int urgency) {
  std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = peers_[host];
  const auto found = peer.waiting.find(ticket);
  if (found == peer.waiting.end()) return;
  peer.queue.erase({found->second->urgency, ticket});
  found->second->urgency = urgency;
  peer.queue.emplace(urgency, ticket);
}

void OneSidedReads::Pump(int host) {
  while (true) {
    Read read;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Peer& peer = peers_[host];
      if (peer.queue.empty() || peer.in_flight >= window_bytes_) return;
      const auto first = peer.waiting.find(peer.queue.begin()->second);
      peer.queue.erase(peer.queue.begin());
      read = std::move(first->second);
      peer.waiting.erase(first);
      peer.in_flight += read->num_bytes;
    }
    Begin(host, read);
  }
}

// The look before spares the bytes of a block that is gone. The one after is the proof: a slot never holds a version
// again that it has lost, so what it holds now it has held all the time.
void OneSidedReads::Begin(int host, const Read& read) {
  CheckVersion(host, read, [=] {
    network_->Get(host, read->spot.segment, read->spot.offset, read->num_bytes, read->destination, deadline_s_,
                  [=](const Status& status) {
                    if (!status.ok()) return End(host, read, status);
                    CheckVersion(host, read, [=] { End(host, read, Status::Ok()); });
                  });
  });
}

// Goes on if the slot holds the version that is read.
void OneSidedReads::CheckVersion(int host, const Read& read, const std::function<void()>& then) {
  const Spot& spot = read->spot;
  if (spot.version == 0) return then();
  auto word = std::make_shared<uint64_t>(0);
  network_->Get(host, spot.version_segment, spot.version_offset, sizeof(*word), reinterpret_cast<char*>(word.get()),
                deadline_s_, [=](const Status& status) {
                  if (!status.ok()) return End(host, read, status);
                  if (*word == read->spot.version) return then();
                  End(host, read,
                      Status::Error(Code::kStaleVersion,
                                    "no slot holds this version; it was refilled or never published"));
                });
}

void OneSidedReads::End(int host, const Read& read, const Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    peers_[host].in_flight -= read->num_bytes;
  }
  read->done(status);
  Pump(host);
}

}  // namespace fef
