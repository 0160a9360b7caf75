// One-sided reads by UCX: in hardware where it finds RDMA. Over TCP UCX emulates them, with the owner's progress thread
// and without a look at what is read: for tests only.
#ifndef FEF_UCX_RMA_H_
#define FEF_UCX_RMA_H_

#include <ucp/api/ucp.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "one_sided.h"
#include "socket.h"

namespace fef {

// One thread does all that concerns the worker, asleep in epoll while nothing is on its way.
class Rma : public OneSided {
 public:
  static Status Open(std::unique_ptr<Rma>* rma);
  ~Rma() override;

  const std::string& address() const override { return address_; }
  Status Register(char* data, uint64_t num_bytes, SegmentKey* key) override;
  Status Connect(int host, const std::string& address) override;
  Status Import(int host, const SegmentKey& key, int* segment) override;
  void Get(int host, int segment, uint64_t offset, uint64_t num_bytes, char* destination, double deadline_s,
           Done done) override;
  void Close() override;

  // The transports by which a host is reached, such as "tcp/eth0".
  std::string TransportsTo(int host);

 private:
  using Clock = std::chrono::steady_clock;
  struct Peer {
    Rma* rma = nullptr;
    int host = 0;
    ucp_ep_h endpoint = nullptr;
    Status lost;  // what its reads end with; ok while it is there
    std::vector<ucp_rkey_h> keys;
    std::vector<uint64_t> addresses, num_bytes;  // of its segments
  };
  struct Read {
    Peer* peer;
    ucs_status_ptr_t request;
    Clock::time_point deadline;
    double deadline_s;
    Done done;
    std::list<Read>::iterator self;
  };
  struct Registered {
    const char* data;
    uint64_t num_bytes;
    ucp_mem_h handle;
  };

  Rma() = default;
  Status Start();
  void Run();
  // Runs `work` on the thread and waits for it.
  Status Do(const std::function<Status()>& work);
  void Post(Peer* peer, uint64_t from, ucp_rkey_h key, uint64_t num_bytes, char* destination, double deadline_s,
            Done done);
  void EndOverdue();
  int MilliToDeadline() const;
  static void Lose(Peer& peer, Code code, const std::string& how, const std::string& why);
  bool Disconnect(Peer& peer);
  bool Drain();
  ucp_mem_h HandleOf(const char* destination, uint64_t num_bytes);
  static void OnDone(void* request, ucs_status_t status, void* read);
  static void OnError(void* peer, ucp_ep_h endpoint, ucs_status_t status);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::string address_;
  Descriptor epoll_, wake_;
  std::mutex mutex_;  // of what follows, as far as others than the thread use it
  std::deque<std::function<void()>> work_;
  bool is_stopping_ = false;
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::vector<Registered> registered_;
  std::list<Read> reads_;
  std::vector<ucs_status_ptr_t> closings_;
  bool is_drained_ = true;
  std::thread thread_;
};

}  // namespace fef

#endif  // FEF_UCX_RMA_H_
