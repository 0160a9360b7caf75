// The other hosts, as a pool sees them: how each is reached, messages to them, reads from them, and who is gone.
#ifndef FEF_FABRIC_H_
#define FEF_FABRIC_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client.h"
#include "one_sided.h"
#include "one_sided_reads.h"
#include "server.h"
#include "status.h"

namespace fef {

class Fabric {
 public:
  struct Receiver {
    std::function<void(const Message& message, const std::string& payload, Descriptor fd)> on_message;
    std::function<Status(const Message& read, std::string* bytes)> on_read;
    // Once for each host; is_orderly: it has taken leave.
    std::function<void(int host, const std::string& why, bool is_orderly)> on_lost;
  };

  // one_sided: by which the hosts that are not mapped are read; null: by requests over TCP.
  Fabric(Membership membership, Window window, Receiver receiver, std::shared_ptr<OneSided> one_sided = nullptr);
  ~Fabric();

  // Other hosts may connect from now on; *endpoint tells them where.
  Status Listen(const std::string& address, Endpoint* endpoint);
  // Connects to all of them, one entry per host. is_mapped: the host's memory can be mapped, by descriptors that come
  // over its unix socket; the others are reached by TCP.
  Status Connect(const std::vector<Endpoint>& endpoints, const std::vector<bool>& is_mapped, double deadline_s);
  // Takes leave of the others and ends the threads.
  void Close();

  int me() const { return membership_.me; }
  int num_hosts() const { return membership_.num_hosts; }
  bool is_mapped(int host) const { return is_mapped_[host]; }
  OneSided* one_sided() const { return one_sided_.get(); }
  int64_t num_refused() const { return server_.num_refused(); }

  void Send(int host, const Message& message, const std::string& payload = {}, int fd = -1);
  void Broadcast(const Message& message);
  uint64_t Read(int host, ReadRequest request);
  void Hurry(int host, uint64_t ticket, int urgency);

 private:
  void Meet(int host, const std::string& address);
  void Leave(int host, const std::string& why, bool is_orderly);

  const Membership membership_;
  const Receiver receiver_;
  const std::shared_ptr<OneSided> one_sided_;
  const Window window_;
  std::unique_ptr<OneSidedReads> one_sided_reads_;
  Server server_;
  Client client_;
  std::vector<bool> is_mapped_;
  std::mutex mutex_;
  std::vector<std::string> gone_;  // why, by host; empty while it is there
  bool is_closed_ = false;
};

}  // namespace fef

#endif  // FEF_FABRIC_H_
