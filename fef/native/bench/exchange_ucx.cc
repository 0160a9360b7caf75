// The exchange of exchange_sockets.cc over UCX active messages: a reader asks for a chunk, the owner answers with it.
//
//   exchange_ucx ME NUM_HOSTS BLOCK_BYTES
//
// Says "at HEX_ADDRESS"; hears "connect HEX_ADDRESS..."; then as there, but "go TIME CHUNK_BYTES WINDOW_BYTES", the
// window being asked for and not yet here, per host. UCX takes its settings from the environment.
#include <sys/epoll.h>
#include <ucp/api/ucp.h>

#include <algorithm>

#include "lines.h"

namespace {

using namespace fef_bench;

constexpr double kDeadlineS = 60;
enum { kAsk = 1, kAnswer = 2 };

struct Header {
  int32_t host;  // who sends it
  int32_t round;
  uint64_t offset, length;
};

void Must(ucs_status_t status, const char* what) {
  if (status != UCS_OK) Fail(std::string(what) + ": " + ucs_status_string(status));
}

void FreeRequest(void* request, ucs_status_t status, void*) {
  Must(status, "a send");
  ucp_request_free(request);
}

struct Host : Blocks {
  using Blocks::Blocks;
  uint64_t chunk_bytes = 0, window_bytes = 0;
  std::vector<uint64_t> asked, here;
  std::vector<ucp_ep_h> endpoints;
  ucp_worker_h worker = nullptr;
  Lines lines;

  void Send(ucp_ep_h to, unsigned id, const Header& header, const void* data, size_t length, uint32_t flags) {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = flags | UCP_AM_SEND_FLAG_COPY_HEADER;
    param.cb.send = FreeRequest;
    const ucs_status_ptr_t sent = ucp_am_send_nbx(to, id, &header, sizeof(header), data, length, &param);
    if (UCS_PTR_IS_ERR(sent)) Must(UCS_PTR_STATUS(sent), "ucp_am_send_nbx");
  }

  void Pump(int host) {
    while (asked[host] < block_bytes && asked[host] - here[host] < window_bytes) {
      const uint64_t length = std::min(chunk_bytes, block_bytes - asked[host]);
      Send(endpoints[host], kAsk, {me, round, asked[host], length}, nullptr, 0, UCP_AM_SEND_FLAG_REPLY);
      asked[host] += length;
    }
  }

  void Arrived(int host, uint64_t length) {
    here[host] += length;
    Pump(host);
  }

  static ucs_status_t OnAsk(void* arg, const void* header, size_t, void*, size_t, const ucp_am_recv_param_t* param) {
    Host& self = *static_cast<Host*>(arg);
    Header ask = *static_cast<const Header*>(header);
    if (ask.round != self.round || ask.offset > self.block_bytes || ask.length > self.block_bytes - ask.offset) {
      Fail("asked for bytes that are not there");
    }
    const char* block = reinterpret_cast<const char*>(self.mine[ask.host].data());
    ask.host = self.me;
    self.Send(param->reply_ep, kAnswer, ask, block + ask.offset, ask.length, 0);
    return UCS_OK;
  }

  struct Receive {
    Host* self;
    int host;
    uint64_t length;
  };
  static void OnReceived(void* request, ucs_status_t status, size_t, void* data) {
    Must(status, "a receive");
    const Receive receive = *static_cast<Receive*>(data);
    delete static_cast<Receive*>(data);
    ucp_request_free(request);
    receive.self->Arrived(receive.host, receive.length);
  }

  static ucs_status_t OnAnswer(void* arg, const void* header, size_t, void* data, size_t length,
                               const ucp_am_recv_param_t* param) {
    Host& self = *static_cast<Host*>(arg);
    const Header answer = *static_cast<const Header*>(header);
    char* to = reinterpret_cast<char*>(self.theirs[answer.host].data()) + answer.offset;
    if (length != answer.length || answer.offset + length > self.block_bytes) Fail("an answer of another size");
    if (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) {
      auto* receive = new Receive{&self, answer.host, length};
      ucp_request_param_t how{};
      how.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
      how.cb.recv_am = OnReceived;
      how.user_data = receive;
      const ucs_status_ptr_t request = ucp_am_recv_data_nbx(self.worker, data, to, length, &how);
      if (UCS_PTR_IS_ERR(request)) Must(UCS_PTR_STATUS(request), "ucp_am_recv_data_nbx");
      return UCS_INPROGRESS;
    }
    std::memcpy(to, data, length);
    self.Arrived(answer.host, length);
    return UCS_OK;
  }

  bool IsComplete() const {
    for (int other = 0; other < num_hosts; ++other) {
      if (other != me && here[other] < block_bytes) return false;
    }
    return true;
  }

  // Serves the others, asleep while nothing comes, until `is_over` holds; looks at it every `tick_ms` at least.
  template <typename Predicate>
  void Serve(int epoll, double deadline, int tick_ms, const Predicate& is_over) {
    while (true) {
      while (ucp_worker_progress(worker) != 0) continue;
      if (is_over()) return;
      if (Now() > deadline) Fail("nothing came within the deadline");
      if (ucp_worker_arm(worker) != UCS_OK) continue;  // something has come
      epoll_event event;
      epoll_wait(epoll, &event, 1, tick_ms);
    }
  }
};

ucp_worker_h OpenWorker(Host* host) {
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  ucp_context_h context;
  Must(ucp_init(&params, nullptr, &context), "ucp_init");
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  ucp_worker_h worker;
  Must(ucp_worker_create(context, &worker_params, &worker), "ucp_worker_create");
  for (const auto& [id, callback] : {std::pair{kAsk, &Host::OnAsk}, std::pair{kAnswer, &Host::OnAnswer}}) {
    ucp_am_handler_param_t handler{};
    handler.field_mask =
        UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = id;
    handler.cb = callback;
    handler.arg = host;
    Must(ucp_worker_set_am_recv_handler(worker, &handler), "ucp_worker_set_am_recv_handler");
  }
  return worker;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) Fail("wants ME NUM_HOSTS BLOCK_BYTES");
  Host host(std::atoi(argv[1]), std::atoi(argv[2]), size_t(std::atoll(argv[3])));
  host.endpoints.resize(host.num_hosts);
  host.worker = OpenWorker(&host);
  int worker_fd;
  Must(ucp_worker_get_efd(host.worker, &worker_fd), "ucp_worker_get_efd");
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  for (int fd : {worker_fd, STDIN_FILENO}) {
    epoll_event event{};
    event.events = EPOLLIN;
    epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
  }
  ucp_address_t* address;
  size_t length;
  Must(ucp_worker_get_address(host.worker, &address, &length), "ucp_worker_get_address");
  Say("at", ToHex(std::string(reinterpret_cast<const char*>(address), length)));
  while (true) {
    std::vector<std::string> words;
    host.Serve(epoll, Now() + kHearMs / 1e3, 100, [&] { return host.lines.Poll(&words); });
    if (words[0] == "connect") {
      for (int other = 0; other < host.num_hosts; ++other) {
        if (other == host.me) continue;
        const std::string bytes = FromHex(words[size_t(other) + 1]);
        ucp_ep_params_t params{};
        params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
        params.address = reinterpret_cast<const ucp_address_t*>(bytes.data());
        Must(ucp_ep_create(host.worker, &params, &host.endpoints[other]), "ucp_ep_create");
      }
      Say("connected");
    } else if (words[0] == "prepare") {
      host.Prepare(std::atoi(words[1].c_str()));
      host.asked.assign(host.num_hosts, 0);
      host.here = host.asked;
      Say("ready");
    } else if (words[0] == "go") {
      host.chunk_bytes = uint64_t(std::atoll(words[2].c_str()));
      host.window_bytes = uint64_t(std::atoll(words[3].c_str()));
      const double start = std::atof(words[1].c_str());
      host.Serve(epoll, start + kDeadlineS, 1, [&] { return Now() > start - 1e-3; });
      SleepUntil(start);
      const double begin = Now();
      for (int i = 1; i < host.num_hosts; ++i) host.Pump((host.me + i) % host.num_hosts);
      host.Serve(epoll, begin + kDeadlineS, 100, [&] { return host.IsComplete(); });
      const double end = Now();
      Say("took", begin, end, host.CountAllWrong());
    } else {
      Fail("unknown command " + words[0]);
    }
  }
}
