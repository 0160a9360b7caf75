// One of two hosts between which one-sided reads through UCX are timed: 0 owns the blocks, 1 reads them.
//
//   rma_host ME BLOCK_BYTES...
//
// The owner says "at ADDRESS KEY_ADDRESS KEY". The reader says "at", hears "connect" with the owner's words and says
// "connected TRANSPORTS"; then, again and again, hears "time WAY TABLE REPEATS", where WAY is `rma`, the pool's way, or
// `ucx`, ucp_get_nbx on a thread that asks for progress without a pause, and says "took SECONDS".
#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "lines.h"
#include "memory_segment.h"
#include "ucx/rma.h"

namespace {

using namespace fef_bench;

constexpr double kDeadlineS = 60;

void Must(const fef::Status& status) {
  if (!status.ok()) Fail(status.message);
}

void Must(ucs_status_t status, const char* what) {
  if (status != UCS_OK) Fail(std::string(what) + ": " + ucs_status_string(status));
}

// A reader that does nothing but UCX's own calls, and spins.
class Plain {
 public:
  Plain() {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_RMA;
    Must(ucp_init(&params, nullptr, &context_), "ucp_init");
    ucp_worker_params_t worker_params{};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
    Must(ucp_worker_create(context_, &worker_params, &worker_), "ucp_worker_create");
  }

  void Connect(const std::string& address, const std::string& key) {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    Must(ucp_ep_create(worker_, &params, &endpoint_), "ucp_ep_create");
    Must(ucp_ep_rkey_unpack(endpoint_, key.data(), &key_), "ucp_ep_rkey_unpack");
  }

  void Get(uint64_t from, uint64_t num_bytes, char* to) {
    ucp_request_param_t params{};
    const ucs_status_ptr_t request = ucp_get_nbx(endpoint_, to, num_bytes, from, key_, &params);
    if (UCS_PTR_IS_ERR(request)) Must(UCS_PTR_STATUS(request), "ucp_get_nbx");
    if (request == nullptr) return;
    const double deadline = Now() + kDeadlineS;
    while (ucp_request_check_status(request) == UCS_INPROGRESS) {
      if (ucp_worker_progress(worker_) == 0 && Now() > deadline) Fail("ucp_get_nbx: no answer");
    }
    Must(ucp_request_check_status(request), "ucp_get_nbx");
    ucp_request_free(request);
  }

 private:
  ucp_context_h context_;
  ucp_worker_h worker_;
  ucp_ep_h endpoint_;
  ucp_rkey_h key_;
};

void GetByRma(fef::Rma& rma, uint64_t num_bytes, char* to) {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_done = false;
  rma.Get(0, 0, 0, num_bytes, to, kDeadlineS, [&](const fef::Status& status) {
    Must(status);
    std::lock_guard<std::mutex> lock(mutex);
    is_done = true;
    changed.notify_all();
  });
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return is_done; });  // the read has a deadline
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) Fail("wants ME BLOCK_BYTES...");
  const int me = std::atoi(argv[1]);
  std::vector<uint64_t> sizes;
  for (int i = 2; i < argc; ++i) sizes.push_back(uint64_t(std::atoll(argv[i])));
  const uint64_t largest = *std::max_element(sizes.begin(), sizes.end());
  std::unique_ptr<fef::Rma> rma;
  fef::MemorySegment segment;
  fef::SegmentKey key;
  Must(fef::Rma::Open(&rma));
  Must(segment.Create("fef-bench", largest));
  Must(segment.Take(largest));
  Must(rma->Register(segment.data(), largest, &key));
  std::unique_ptr<Plain> plain;
  if (me == 0) {
    for (uint64_t i = 0; i < largest / 8; ++i) reinterpret_cast<uint64_t*>(segment.data())[i] = Word(0, i);
    Say("at", ToHex(rma->address()), key.address, ToHex(key.packed));
  } else {
    Say("at");
  }
  Lines lines;
  fef::SegmentKey theirs;
  while (true) {
    const std::vector<std::string> words = lines.Hear();
    if (words[0] == "connect") {
      theirs = {std::stoull(words[2]), largest, FromHex(words[3])};
      int number;
      Must(rma->Connect(0, FromHex(words[1])));
      Must(rma->Import(0, theirs, &number));
      plain = std::make_unique<Plain>();
      plain->Connect(FromHex(words[1]), theirs.packed);
      Say("connected", rma->TransportsTo(0));
    } else if (words[0] == "time") {
      const uint64_t num_bytes = sizes[size_t(std::atoi(words[2].c_str()))];
      const int repeats = std::atoi(words[3].c_str());
      auto read_once = [&] {
        if (words[1] == "rma") GetByRma(*rma, num_bytes, segment.data());
        else plain->Get(theirs.address, num_bytes, segment.data());
      };
      const double took = Median(repeats, false, read_once);
      for (uint64_t i = 0; i < num_bytes / 8; ++i) {
        if (reinterpret_cast<uint64_t*>(segment.data())[i] != Word(0, i)) Fail("the bytes are not the owner's");
      }
      Say("took", took);
    } else {
      Fail("unknown command " + words[0]);
    }
  }
}
