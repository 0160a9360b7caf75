#include "rma.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <sstream>
#include <utility>

namespace fef {

namespace {

constexpr auto kDrainTime = std::chrono::seconds(5);

Status ToStatus(ucs_status_t status, const std::string& what) {
  if (status == UCS_OK) return Status::Ok();
  const Code code = status == UCS_ERR_NO_MEMORY ? Code::kResourceExhausted : Code::kPeerLost;
  return Status::Error(code, "rma: ", what, ": ", ucs_status_string(status));
}

}  // namespace

Status Rma::Open(std::unique_ptr<Rma>* result) {
  std::unique_ptr<Rma> rma(new Rma);
  if (Status status = rma->Start(); !status.ok()) return status;
  *result = std::move(rma);
  return Status::Ok();
}

Status Rma::Start() {
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  if (Status status = ToStatus(ucp_init(&params, nullptr, &context_), "opening UCX"); !status.ok()) return status;
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_THREAD_MODE;
  if (ucp_context_query(context_, &attributes) != UCS_OK || attributes.thread_mode == UCS_THREAD_MODE_SINGLE) {
    return Status::Error(Code::kInvalidArgument,
                         "rma: this UCX is for one thread alone; set FEF_UCX_DIR to one built with --enable-mt");
  }
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  Status status = ToStatus(ucp_worker_create(context_, &worker_params, &worker_), "making a worker");
  if (!status.ok()) return status;
  ucp_address_t* address;
  size_t length;
  status = ToStatus(ucp_worker_get_address(worker_, &address, &length), "asking for the own address");
  if (!status.ok()) return status;
  address_.assign(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_, address);
  int worker_fd;
  status = ToStatus(ucp_worker_get_efd(worker_, &worker_fd), "asking for the worker's descriptor");
  if (!status.ok()) return status;
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  for (int fd : {worker_fd, wake_.get()}) WatchInput(epoll_.get(), fd);
  thread_ = std::thread([this] { Run(); });
  return Status::Ok();
}

Rma::~Rma() { Close(); }

void Rma::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  if (thread_.joinable()) {
    Ring(wake_.get());
    thread_.join();
  }
  if (!is_drained_) return;  // UCX may still write to where a read was to go: its worker is left behind
  for (auto& [host, peer] : peers_) {
    for (ucp_rkey_h key : peer->keys) ucp_rkey_destroy(key);
  }
  peers_.clear();
  for (const Registered& one : registered_) ucp_mem_unmap(context_, one.handle);
  registered_.clear();
  if (worker_ != nullptr) ucp_worker_destroy(std::exchange(worker_, nullptr));
  if (context_ != nullptr) ucp_cleanup(std::exchange(context_, nullptr));
}

Status Rma::Do(const std::function<Status()>& work) {
  std::promise<Status> result;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopping_) return Status::Error(Code::kPoolClosed, "rma: the pool was closed");
    work_.push_back([&] { result.set_value(work()); });
  }
  Ring(wake_.get());
  return result.get_future().get();
}

// On the caller's thread, which UCX allows for what concerns no worker.
Status Rma::Register(char* data, uint64_t num_bytes, SegmentKey* key) {
  if (num_bytes == 0) return Status::Error(Code::kInvalidArgument, "rma: 0 bytes cannot be registered");
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_stopping_) return Status::Error(Code::kPoolClosed, "rma: the pool was closed");
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = data;
  params.length = num_bytes;
  ucp_mem_h handle;
  const std::string what = "registering " + std::to_string(num_bytes) + " bytes";
  if (Status status = ToStatus(ucp_mem_map(context_, &params, &handle), what); !status.ok()) return status;
  registered_.push_back({data, num_bytes, handle});
  void* packed;
  size_t length;
  if (Status status = ToStatus(ucp_rkey_pack(context_, handle, &packed, &length), what); !status.ok()) return status;
  key->address = reinterpret_cast<uint64_t>(data);
  key->num_bytes = num_bytes;
  key->packed.assign(static_cast<const char*>(packed), length);
  ucp_rkey_buffer_release(packed);
  return Status::Ok();
}

Status Rma::Connect(int host, const std::string& address) {
  return Do([&] {
    if (peers_.count(host)) return Status::Error(Code::kInvalidArgument, "rma: host ", host, " is connected already");
    auto peer = std::make_unique<Peer>();
    peer->rma = this;
    peer->host = host;
    ucp_ep_params_t params{};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler.cb = OnError;
    params.err_handler.arg = peer.get();
    const std::string what = "connecting to host " + std::to_string(host);
    if (Status status = ToStatus(ucp_ep_create(worker_, &params, &peer->endpoint), what); !status.ok()) return status;
    std::lock_guard<std::mutex> lock(mutex_);
    peers_[host] = std::move(peer);
    return Status::Ok();
  });
}

Status Rma::Import(int host, const SegmentKey& key, int* segment) {
  return Do([&] {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = peers_.find(host);
    if (found == peers_.end()) return Status::Error(Code::kInvalidArgument, "rma: host ", host, " is not connected");
    Peer& peer = *found->second;
    ucp_rkey_h unpacked;
    const std::string what = "taking in a key of host " + std::to_string(host);
    Status status = ToStatus(ucp_ep_rkey_unpack(peer.endpoint, key.packed.data(), &unpacked), what);
    if (!status.ok()) return status;
    *segment = int(peer.keys.size());
    peer.keys.push_back(unpacked);
    peer.addresses.push_back(key.address);
    peer.num_bytes.push_back(key.num_bytes);
    return Status::Ok();
  });
}

std::string Rma::TransportsTo(int host) {
  std::string text;
  const Status status = Do([&] {
    ucp_transport_entry_t entries[16];
    ucp_ep_attr_t attributes{};
    attributes.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS;
    attributes.transports = {entries, 16, sizeof(entries[0])};
    Status status = ToStatus(ucp_ep_query(peers_.at(host)->endpoint, &attributes), "asking for transports");
    for (unsigned i = 0; status.ok() && i < attributes.transports.num_entries; ++i) {
      text += (i > 0 ? "," : "") + std::string(entries[i].transport_name) + "/" + entries[i].device_name;
    }
    return status;
  });
  return status.ok() ? text : status.message;
}

void Rma::Get(int host, int segment, uint64_t offset, uint64_t num_bytes, char* destination, double deadline_s,
              Done done) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_stopping_) {
      const auto found = peers_.find(host);
      const bool is_known = found != peers_.end() && segment >= 0 && segment < int(found->second->keys.size());
      const uint64_t there = is_known ? found->second->num_bytes[segment] : 0;
      Status refusal;
      if (!is_known) {
        refusal = Status::Error(Code::kInvalidArgument, "rma: host ", host, " has no segment ", segment, " known here");
      } else if (num_bytes == 0 || offset > there || num_bytes > there - offset) {
        refusal = Status::Error(Code::kInvalidArgument, "rma: ", num_bytes, " bytes at ", offset,
                                " are not in segment ", segment, " of host ", host, ", which has ", there);
      }
      if (!refusal.ok()) {
        work_.push_back([refusal, done = std::move(done)] { done(refusal); });
      } else {
        Peer* peer = found->second.get();
        const uint64_t from = peer->addresses[segment] + offset;
        work_.push_back([=, key = peer->keys[segment], done = std::move(done)] {
          Post(peer, from, key, num_bytes, destination, deadline_s, done);
        });
      }
      return Ring(wake_.get());
    }
  }
  done(Status::Error(Code::kPoolClosed, "rma: the pool was closed"));
}

// --- On the thread ---------------------------------------------------------------------------------------------------

void Rma::Run() {
  while (true) {
    std::deque<std::function<void()>> work;
    bool is_stopping;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work.swap(work_);
      is_stopping = is_stopping_;
    }
    for (auto& one : work) one();
    if (is_stopping) break;
    bool is_busy = ucp_worker_progress(worker_) != 0;
    EndOverdue();
    for (auto& [host, peer] : peers_) {
      if (!peer->lost.ok()) is_busy |= Disconnect(*peer);
    }
    if (is_busy || ucp_worker_arm(worker_) != UCS_OK) continue;  // something has come in the meantime
    epoll_event events[2];
    const int num_events = epoll_wait(epoll_.get(), events, 2, MilliToDeadline());
    for (int i = 0; i < num_events; ++i) {
      if (events[i].data.fd != wake_.get()) continue;
      uint64_t count;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof(count));
    }
  }
  for (auto& [host, peer] : peers_) Lose(*peer, Code::kPoolClosed, "was left", "the pool was closed");
  is_drained_ = Drain();
}

ucp_mem_h Rma::HandleOf(const char* destination, uint64_t num_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Registered& one : registered_) {
    if (destination >= one.data && destination + num_bytes <= one.data + one.num_bytes) return one.handle;
  }
  return nullptr;
}

void Rma::Post(Peer* peer, uint64_t from, ucp_rkey_h key, uint64_t num_bytes, char* destination, double deadline_s,
               Done done) {
  if (!peer->lost.ok()) {
    return done(peer->lost);
  }
  const std::chrono::duration<double> time_left(deadline_s);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(time_left);
  reads_.push_back({peer, nullptr, deadline, deadline_s, std::move(done), {}});
  Read& read = reads_.back();
  read.self = std::prev(reads_.end());
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  params.cb.send = OnDone;
  params.user_data = &read;
  if (ucp_mem_h handle = HandleOf(destination, num_bytes)) {
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
    params.memh = handle;
  }
  read.request = ucp_get_nbx(peer->endpoint, destination, num_bytes, from, key, &params);
  if (!UCS_PTR_IS_ERR(read.request)) return;
  const Status status = ToStatus(UCS_PTR_STATUS(read.request), "a read of host " + std::to_string(peer->host));
  const Done call = std::move(read.done);
  reads_.erase(read.self);
  call(status);
}

void Rma::OnDone(void* request, ucs_status_t status, void* data) {
  Read& read = *static_cast<Read*>(data);
  Peer& peer = *read.peer;
  if (status != UCS_OK) Lose(peer, Code::kPeerLost, "is gone", ucs_status_string(status));
  const Done done = std::move(read.done);
  peer.rma->reads_.erase(read.self);
  ucp_request_free(request);
  done(status == UCS_OK ? Status::Ok() : peer.lost);
}

void Rma::OnError(void* data, ucp_ep_h, ucs_status_t status) {
  Peer& peer = *static_cast<Peer*>(data);
  Lose(peer, Code::kPeerLost, "is gone", ucs_status_string(status));
}

// The endpoint is closed later: UCX forbids it within its callbacks.
void Rma::Lose(Peer& peer, Code code, const std::string& how, const std::string& why) {
  if (peer.lost.ok()) peer.lost = Status::Error(code, "host ", peer.host, " ", how, ": ", why);
}

// Whether there was something to be closed.
bool Rma::Disconnect(Peer& peer) {
  if (peer.endpoint == nullptr) return false;
  ucp_request_param_t params{};
  params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  const ucs_status_ptr_t closing = ucp_ep_close_nbx(std::exchange(peer.endpoint, nullptr), &params);
  if (UCS_PTR_IS_PTR(closing)) closings_.push_back(closing);
  return true;
}

// A read that is given up may still be written to its destination until UCX says that it is over, which it does soon
// after its endpoint was closed.
void Rma::EndOverdue() {
  const auto now = Clock::now();
  for (Read& read : reads_) {
    if (read.deadline > now) continue;
    std::ostringstream why;
    why << "it has not answered within " << read.deadline_s << " s";
    Lose(*read.peer, Code::kDeadlineExceeded, "was given up", why.str());
  }
}

int Rma::MilliToDeadline() const {
  auto next = Clock::time_point::max();
  for (const Read& read : reads_) next = std::min(next, read.deadline);
  if (next == Clock::time_point::max()) return -1;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now());
  return int(std::max<int64_t>(0, left.count())) + 1;
}

// False when UCX does not let go of a read or an endpoint.
bool Rma::Drain() {
  for (auto& [host, peer] : peers_) Disconnect(*peer);
  const auto end = Clock::now() + kDrainTime;
  auto is_open = [](ucs_status_ptr_t closing) { return ucp_request_check_status(closing) == UCS_INPROGRESS; };
  while (!reads_.empty() || std::any_of(closings_.begin(), closings_.end(), is_open)) {
    if (Clock::now() > end) return false;
    ucp_worker_progress(worker_);
  }
  for (ucs_status_ptr_t closing : closings_) ucp_request_free(closing);
  return true;
}

}  // namespace fef
