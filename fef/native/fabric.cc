#include "fabric.h"

#include <utility>

namespace fef {

namespace {

constexpr double kPatience = 2;  // deadlines: whoever waits for a block hears of it before the host is given up

}  // namespace

Fabric::Fabric(Membership membership, Window window, Receiver receiver, std::shared_ptr<OneSided> one_sided)
    : membership_(std::move(membership)),
      receiver_(std::move(receiver)),
      one_sided_(std::move(one_sided)),
      window_(window),
      server_(membership_,
              {[this](const Message& message, const std::string& payload, Descriptor fd) {
                 if (message.kind == Kind::kBye) return Leave(message.host, "it has closed its pool", true);
                 if (message.kind == Kind::kAddress) return Meet(message.host, payload);
                 receiver_.on_message(message, payload, std::move(fd));
               },
               receiver_.on_read, [this](int host, const std::string& why) { Leave(host, why, false); }}),
      client_(membership_, window, [this](int host, const std::string& why) { Leave(host, why, false); }),
      gone_(membership_.num_hosts) {}

Fabric::~Fabric() { Close(); }

Status Fabric::Listen(const std::string& address, Endpoint* endpoint) {
  endpoint->address = address;
  endpoint->unix_name = "fef-" + membership_.token + "-" + std::to_string(membership_.incarnation) + "-" +
                        std::to_string(membership_.me);
  return server_.Start(address, endpoint->unix_name, &endpoint->port);
}

Status Fabric::Connect(const std::vector<Endpoint>& endpoints, const std::vector<bool>& is_mapped, double deadline_s) {
  is_mapped_ = is_mapped;
  for (int host = 0; host < num_hosts(); ++host) {
    if (host == me()) continue;
    if (Status status = client_.Connect(host, endpoints[host], is_mapped[host], deadline_s); !status.ok()) {
      return status;
    }
  }
  client_.Start();
  if (one_sided_ == nullptr) return Status::Ok();
  one_sided_reads_ = std::make_unique<OneSidedReads>(one_sided_.get(), window_.host_bytes, kPatience * deadline_s);
  Message message;
  message.kind = Kind::kAddress;
  for (int host = 0; host < num_hosts(); ++host) {
    if (host != me() && !is_mapped_[host]) Send(host, message, one_sided_->address());
  }
  return Status::Ok();
}

// Before the host's first key: messages come in their order.
void Fabric::Meet(int host, const std::string& address) {
  if (one_sided_ == nullptr) return;  // all hosts of a job have the same transport
  if (Status status = one_sided_->Connect(host, address); !status.ok()) Leave(host, status.message, false);
}

void Fabric::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_) return;
    is_closed_ = true;
  }
  Message bye;
  bye.kind = Kind::kBye;
  Broadcast(bye);
  client_.Stop();
  server_.Stop();
  if (one_sided_ != nullptr) one_sided_->Close();
}

void Fabric::Send(int host, const Message& message, const std::string& payload, int fd) {
  client_.Send(host, message, payload, fd);
}

void Fabric::Broadcast(const Message& message) {
  for (int host = 0; host < num_hosts(); ++host) {
    if (host != me()) Send(host, message);
  }
}

uint64_t Fabric::Read(int host, ReadRequest request) {
  if (one_sided_reads_ != nullptr && !request.is_requested) return one_sided_reads_->Add(host, std::move(request));
  return client_.Read(host, std::move(request));
}

void Fabric::Hurry(int host, uint64_t ticket, int urgency) {
  if (one_sided_reads_ != nullptr) one_sided_reads_->Hurry(host, ticket, urgency);
  else client_.Hurry(host, ticket, urgency);
}

void Fabric::Leave(int host, const std::string& why, bool is_orderly) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_closed_ || !gone_[host].empty()) return;
    gone_[host] = why;
  }
  receiver_.on_lost(host, why, is_orderly);
}

}  // namespace fef
