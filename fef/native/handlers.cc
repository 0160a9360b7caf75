// XLA's FFI custom calls: one short wrapper for each function of the core, those of resident tables in a file of their
// own. Python registers the entries of fef_registrations (at the end) with XLA.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "fluid_ffn.h"
#include "gemm.h"
#include "handlers.h"
#include "pooled_ffn.h"
#include "task.h"

namespace fef {
namespace {

std::vector<RowSegment> MakeSegments(const Ints& first, const Ints& rows, const Ints& expert) {
  std::vector<RowSegment> segments(first.element_count());
  for (size_t i = 0; i < segments.size(); ++i) {
    segments[i] = {first.typed_data()[i], rows.typed_data()[i], expert.typed_data()[i]};
  }
  return segments;
}

ffi::Error InvalidArgument(const std::string& op, const std::string& what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, op + ": " + what);
}

// x_NK, w_EKM (w_EMK if transpose_w), segments -> y_NM.
ffi::Error GroupedMatmulHandler(ffi::ThreadPool pool, Floats x, Floats w, Ints first, Ints rows, Ints expert,
                                ffi::Result<Floats> y, bool transpose_w) {
  const int64_t num_rows = x.dimensions()[0], inner = x.dimensions()[1], outer = y->dimensions()[1];
  const int64_t num_experts = w.dimensions()[0];
  const std::vector<RowSegment> segments = MakeSegments(first, rows, expert);
  const std::string fault = CheckSegments(segments, num_rows, num_experts);
  if (!fault.empty()) return InvalidArgument("fef_grouped_matmul", fault);
  std::vector<const float*> weights(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) weights[e] = w.typed_data() + e * inner * outer;
  XlaExecutor executor(pool);
  ZeroOtherRows(segments, num_rows, outer, y->typed_data());
  GroupedMatmul(executor, segments, CountRows(segments), x.typed_data(), inner, weights.data(), transpose_w,
                y->typed_data(), outer, 0.0f);
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(kGroupedMatmul, GroupedMatmulHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Floats>()
                           .Arg<Floats>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Ret<Floats>()
                           .Attr<bool>("transpose_w"));

// a_NK, b_NM, segments -> c_EKM.
ffi::Error GroupedOuterHandler(ffi::ThreadPool pool, Floats a, Floats b, Ints first, Ints rows, Ints expert,
                               ffi::Result<Floats> c) {
  const int64_t num_experts = c->dimensions()[0], inner = c->dimensions()[1], outer = c->dimensions()[2];
  const std::vector<RowSegment> segments = MakeSegments(first, rows, expert);
  const std::string fault = CheckSegments(segments, a.dimensions()[0], num_experts);
  if (!fault.empty()) return InvalidArgument("fef_grouped_outer", fault);
  std::vector<float*> outputs(num_experts);
  for (int64_t e = 0; e < num_experts; ++e) outputs[e] = c->typed_data() + e * inner * outer;
  XlaExecutor executor(pool);
  GroupedOuter(executor, segments, CountRows(segments), a.typed_data(), inner, b.typed_data(), outer, outputs.data(),
               num_experts);
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(kGroupedOuter, GroupedOuterHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Floats>()
                           .Arg<Floats>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Ret<Floats>());

// ---- Modelled device time ----

// When the device began, by clock. Clocks are small integers, which a float32 holds exactly.
class Clocks {
 public:
  float Start() {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t clock = next_++ % kClocks;
    times_[clock] = Task::Clock::now();
    return float(clock);
  }
  Task::Clock::time_point Started(float clock) {
    std::lock_guard<std::mutex> lock(mutex_);
    return times_[size_t(clock) % kClocks];
  }

 private:
  static constexpr size_t kClocks = 1 << 16;  // far more than ever run at once
  std::mutex mutex_;
  size_t next_ = 0;
  std::vector<Task::Clock::time_point> times_ = std::vector<Task::Clock::time_point>(kClocks);
};

Clocks& DeviceClocks() {
  static auto* clocks = new Clocks();
  return *clocks;
}

void PassOn(const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& y) {
  if (x.untyped_data() != y->untyped_data()) std::memcpy(y->untyped_data(), x.untyped_data(), x.size_bytes());
}

// x -> x, clock.
ffi::Error DeviceStartHandler(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                              ffi::Result<ffi::BufferR0<ffi::F32>> clock) {
  PassOn(x, y);
  *clock->typed_data() = DeviceClocks().Start();
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(
    kDeviceStart, DeviceStartHandler,
    ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::BufferR0<ffi::F32>>());

// y, clock, rows and expert of each segment -> y, once the device would have it: a GEMM for each expert.
ffi::Future DeviceFinishHandler(int32_t ordinal, ffi::AnyBuffer y, ffi::BufferR0<ffi::F32> clock, Ints rows, Ints expert,
                                ffi::Result<ffi::AnyBuffer> out, double flops_per_row, double flops, double half_rows) {
  PassOn(y, out);
  std::map<int32_t, int64_t> rows_of_expert;
  for (size_t i = 0; i < rows.element_count(); ++i) rows_of_expert[expert.typed_data()[i]] += rows.typed_data()[i];
  std::chrono::nanoseconds length{0};
  for (const auto& [id, count] : rows_of_expert) length += Device{flops, half_rows, true}.Time(count, flops_per_row);
  const auto end = QueueOf(ordinal).Add(DeviceClocks().Started(*clock.typed_data()), length);
  ffi::Promise promise;
  ffi::Future future(promise);
  std::thread([end, promise]() mutable {
    std::this_thread::sleep_until(end);
    promise.SetAvailable();
  }).detach();
  return future;
}
XLA_FFI_DEFINE_HANDLER(kDeviceFinish, DeviceFinishHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::BufferR0<ffi::F32>>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<double>("flops_per_row")
                           .Attr<double>("flops")
                           .Attr<double>("half_rows"));

// ---- The pool ----

std::vector<int> ToVector(const Ints& ints) {
  return std::vector<int>(ints.typed_data(), ints.typed_data() + ints.element_count());
}

// Each expert once, in the order of the ids; those below 0 name none.
std::vector<int> NamedExperts(const std::vector<int>& ids) {
  std::vector<int> experts;
  for (int id : ids) {
    if (id >= 0 && std::find(experts.begin(), experts.end(), id) == experts.end()) experts.push_back(id);
  }
  return experts;
}

void Complete(ffi::Promise& promise, const Status& status) {
  if (status.ok()) {
    promise.SetAvailable();
  } else {
    promise.SetError(ToError(status));
  }
}

ffi::Future Completed(const Status& status) {
  ffi::Promise promise;
  ffi::Future future(promise);
  Complete(promise, status);
  return future;
}

// The operation's results are there when the task is done. The buffers that it was made with live until then.
ffi::Future Start(const Place& place, ffi::ThreadPool pool, std::shared_ptr<Task> task) {
  ffi::Promise promise;
  ffi::Future future(promise);
  XlaExecutor executor(pool);
  Run(place.pool, *place.domain, std::move(task), executor,
      [promise](const Status& status) mutable { Complete(promise, status); });
  return future;
}

// Attributes table, incarnation -> handle (2,).
ffi::Error HandleHandler(ffi::Result<Ints> handle, int32_t table, int32_t incarnation) {
  handle->typed_data()[0] = table;
  handle->typed_data()[1] = incarnation;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(kHandle, HandleHandler,
                       ffi::Ffi::Bind().Ret<Ints>().Attr<int32_t>("table").Attr<int32_t>("incarnation"));

// handle (2,) = table, incarnation -> number of the next version, drawn by the first member only; others return 0, so
// that a sum over members agrees on it.
ffi::Error TicketHandler(Ints handle, Ints member, ffi::Result<Scalar> ticket) {
  // Every member looks for the pool: if only the first one failed, the others would wait in the sum for ever.
  const auto pool = FindPool(handle.typed_data()[1]);
  if (pool == nullptr || pool->domain(handle.typed_data()[0], 0) == nullptr) {
    return ToError(Status::Error(Code::kPoolClosed, "publish: the pool was closed; open one and pass it to the step"));
  }
  const bool is_first = member.typed_data()[0] == 0 && member.typed_data()[1] == 0;
  *ticket->typed_data() = is_first ? pool->NextVersion(handle.typed_data()[0]) : 0;
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER(kTicket, TicketHandler, ffi::Ffi::Bind().Arg<Ints>().Arg<Ints>().Ret<Scalar>());

// Walks arrays of shape (layers, P/R, ...), num_parts of them for each run of layers, and gives for one block the
// address and the bytes of each part.
struct BlockParts {
  struct Part {
    char* data;
    int64_t bytes;  // of one block
  };
  std::vector<std::vector<Part>> layers;  // [layer][part], at local 0
  int64_t per_member = 0;

  template <typename Buffers>
  Status Collect(Buffers& buffers, size_t num_buffers, int64_t num_parts, const TableShape& table) {
    per_member = table.blocks_per_member;
    for (size_t i = 0; i < num_buffers; i += num_parts) {
      std::vector<std::vector<Part>> run;
      for (int64_t part = 0; part < num_parts; ++part) {
        const auto buffer = buffers(i + part);
        const auto dims = buffer.dimensions();
        if (dims.size() < 2 || dims[1] != per_member) {
          return Status::Error(Code::kInvalidArgument, "publish: table ", table.name,
                               ": an array's second dimension is not the ", per_member, " positions of a member");
        }
        run.resize(dims[0]);
        const int64_t bytes = dims[0] == 0 ? 0 : int64_t(buffer.size_bytes()) / (dims[0] * per_member);
        for (int64_t layer = 0; layer < dims[0]; ++layer) {
          run[layer].push_back({static_cast<char*>(buffer.untyped_data()) + layer * per_member * bytes, bytes});
        }
      }
      layers.insert(layers.end(), run.begin(), run.end());
    }
    if (int(layers.size()) != table.layers) {
      return Status::Error(Code::kInvalidArgument, "publish: table ", table.name, " has ", table.layers,
                           " layers, the arrays ", layers.size());
    }
    for (size_t layer = 0; layer < layers.size(); ++layer) {
      int64_t bytes = 0;
      for (const Part& part : layers[layer]) bytes += part.bytes;
      if (bytes == table.block_bytes()) continue;
      return Status::Error(Code::kInvalidArgument, "publish: table ", table.name, ", layer ", layer, ": blocks have ",
                           table.block_bytes(), " bytes, the arrays ", bytes);
    }
    return Status::Ok();
  }
};

// arrays, num_parts for each run of layers -> token.
ffi::Error PublishHandler(ffi::RunId run, ffi::ThreadPool pool, Ints version, Ints member, ffi::RemainingArgs arrays,
                          ffi::Result<Token> token, int64_t num_parts) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return ToError(status);
  BlockParts parts;
  auto array = [&](size_t i) { return arrays.get<ffi::AnyBuffer>(i).value(); };
  const TableShape& table = place.domain->shape();
  if (Status status = parts.Collect(array, arrays.size(), num_parts, table); !status.ok()) return ToError(status);
  XlaExecutor executor(pool);
  *token->typed_data() = 0.0f;
  return ToError(place.domain->Publish(
      place.version, place.rank, run.run_id,
      [&](int layer, int local, char* block) {
        for (const BlockParts::Part& part : parts.layers[layer]) {
          std::memcpy(block, part.data + local * part.bytes, part.bytes);
          block += part.bytes;
        }
      },
      executor));
}
XLA_FFI_DEFINE_HANDLER(kPublish, PublishHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .RemainingArgs()
                           .Ret<Token>()
                           .Attr<int64_t>("num_parts"));

// token -> the sums of this member's gradients, in the shapes of PublishHandler's arrays, float32.
ffi::Error CollectHandler(ffi::ThreadPool pool, Ints version, Ints member, Token, ffi::RemainingRets sums,
                          int64_t num_parts) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return ToError(status);
  const TableShape& table = place.domain->shape();
  BlockParts parts;
  TableShape float_table = table;
  float_table.elem_bytes = sizeof(float);
  auto array = [&](size_t i) { return *sums.get<ffi::AnyBuffer>(i).value(); };
  if (Status status = parts.Collect(array, sums.size(), num_parts, float_table); !status.ok()) return ToError(status);
  XlaExecutor executor(pool);
  return ToError(place.domain->Collect(
      place.version, place.rank,
      [&](int layer, int local, const float* sum) {
        for (const BlockParts::Part& part : parts.layers[layer]) {
          if (sum == nullptr) {
            std::memset(part.data + local * part.bytes, 0, part.bytes);
          } else {
            std::memcpy(part.data + local * part.bytes, sum, part.bytes);
            sum += part.bytes / sizeof(float);
          }
        }
      },
      executor));
}
XLA_FFI_DEFINE_HANDLER(kCollect, CollectHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Token>()
                           .RemainingRets()
                           .Attr<int64_t>("num_parts"));

// Says that this member sends no more -> token, once every member has said so and all sums are made.
ffi::Future AwaitClosedHandler(ffi::ThreadPool pool, Ints version, Ints member, Token, Token,
                               ffi::Result<Token> token) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return Completed(status);
  if (Status status = place.domain->CloseVersion(place.version, place.rank); !status.ok()) return Completed(status);
  *token->typed_data() = 0.0f;
  return Start(place, pool,
               std::make_shared<Condition>(
                   [place] { return place.domain->AllClosed(place.version); },
                   [place] { return place.domain->DescribeUnclosed(place.version); },
                   [place](double us) { place.domain->CountWait(place.version, place.rank, 0, kWaitClosed, us); }));
}
XLA_FFI_DEFINE_HANDLER(kAwaitClosed, AwaitClosedHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Token>()
                           .Arg<Token>()
                           .Ret<Token>());

// The forward pass's end of a version: nothing is collected, its slots may be refilled.
ffi::Error ReleaseHandler(Ints version, Ints member, Token, ffi::Result<Token> token) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return ToError(status);
  *token->typed_data() = 0.0f;
  return ToError(place.domain->Release(place.version, place.rank));
}
XLA_FFI_DEFINE_HANDLER(kRelease, ReleaseHandler,
                       ffi::Ffi::Bind().Arg<Ints>().Arg<Ints>().Arg<Token>().Ret<Token>());

FfnCall MakeFfnCall(const Place& place, ffi::RunId run, int32_t ordinal, const Scalar& layer, const Floats& x_ND,
                    const Floats& u_NF, const Ints& rows_E, const Device& device, std::string_view ffn) {
  FfnCall call;
  call.domain = place.domain;
  call.version = place.version;
  call.run = run.run_id;
  call.rank = place.rank;
  call.layer = *layer.typed_data();
  call.ffn = ffn;
  call.kind = FindFfnKind(ffn);
  call.device = device;
  call.queue = &QueueOf(ordinal);
  call.num_rows = x_ND.dimensions()[0];
  call.d_model = x_ND.dimensions()[1];
  call.d_expert = u_NF.dimensions()[1];
  call.num_experts = int64_t(rows_E.element_count());
  call.rows = rows_E.typed_data();
  return call;
}

// The bindings of the expert FFNs have parts in common: what they begin with, a member's sorted assignments (token,
// weight, rows, is_visiting), the device, and the kind of FFN.
auto BindFfn() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::RunId>()
      .Ctx<ffi::ThreadPool>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Ints>()
      .Arg<Ints>()
      .Arg<Scalar>()
      .Arg<Token>();
}

template <typename Binding>
auto Assigned(Binding binding) {
  return std::move(binding).template Arg<Ints>().template Arg<Vector>().template Arg<Ints>().template Arg<Ints>();
}

template <typename Binding>
auto Computing(Binding binding) {
  return std::move(binding)
      .template Attr<double>("flops")
      .template Attr<double>("half_rows")
      .template Attr<bool>("has_values")
      .template Attr<std::string_view>("ffn");
}

// chain, x_ND, rows_E -> y_ND, g_NF ((0, F) without a gate), u_NF.
ffi::Future PooledFfnHandler(ffi::RunId run, ffi::ThreadPool pool, int32_t ordinal, Ints version, Ints member,
                             Scalar layer, Token, Floats x, Ints rows, ffi::Result<Floats> y, ffi::Result<Floats> g,
                             ffi::Result<Floats> u, double flops, double half_rows, bool has_values,
                             std::string_view ffn) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return Completed(status);
  const FfnCall call = MakeFfnCall(place, run, ordinal, layer, x, *u, rows, {flops, half_rows, has_values}, ffn);
  return Start(place, pool, PooledFfn(call, x.typed_data(), y->typed_data(), g->typed_data(), u->typed_data()));
}
XLA_FFI_DEFINE_HANDLER(kPooledFfn, PooledFfnHandler,
                       Computing(BindFfn().Arg<Floats>().Arg<Ints>().Ret<Floats>().Ret<Floats>().Ret<Floats>()));

// chain, dy_ND, x_ND, g_NF, u_NF, rows_E -> dx_ND, token.
ffi::Future PooledFfnBackwardHandler(ffi::RunId run, ffi::ThreadPool pool, int32_t ordinal, Ints version, Ints member,
                                     Scalar layer, Token, Floats dy, Floats x, Floats g, Floats u, Ints rows,
                                     ffi::Result<Floats> dx, ffi::Result<Token> token, double flops, double half_rows,
                                     bool has_values, std::string_view ffn) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return Completed(status);
  *token->typed_data() = 0.0f;
  const FfnCall call = MakeFfnCall(place, run, ordinal, layer, x, u, rows, {flops, half_rows, has_values}, ffn);
  return Start(place, pool, PooledFfnBackward(call, dy.typed_data(), x.typed_data(), g.typed_data(), u.typed_data(),
                                              dx->typed_data()));
}
XLA_FFI_DEFINE_HANDLER(kPooledFfnBackward, PooledFfnBackwardHandler,
                       Computing(BindFfn().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Ints>()
                           .Ret<Floats>().Ret<Token>()));

FluidCall MakeFluidCall(const Place& place, ffi::RunId run, int32_t ordinal, const Scalar& layer, const Floats& x_TD,
                        const Floats& x_MD, const Floats& u_MF, const Ints& token_N, const Vector& weight_N,
                        const Ints& rows_E, const Ints& is_visiting_E, const Device& device, std::string_view ffn,
                        bool is_deduplicated) {
  FluidCall call;
  call.ffn = MakeFfnCall(place, run, ordinal, layer, x_MD, u_MF, rows_E, device, ffn);
  call.ffn.num_rows = int64_t(token_N.element_count());
  call.assignments = {token_N.typed_data(), weight_N.typed_data(), rows_E.typed_data(), is_visiting_E.typed_data(),
                      x_TD.dimensions()[0]};
  call.room = x_MD.dimensions()[0] - call.ffn.num_rows;
  call.is_deduplicated = is_deduplicated;
  return call;
}

// chain, x_TD, token_N, weight_N, rows_E, is_visiting_E -> y_TD, and for the backward pass x_MD, y_MD, g_MF, u_MF.
ffi::Future FluidFfnHandler(ffi::RunId run, ffi::ThreadPool pool, int32_t ordinal, Ints version, Ints member,
                            Scalar layer, Token, Floats x, Ints token, Vector weight, Ints rows, Ints is_visiting,
                            ffi::Result<Floats> y, ffi::Result<Floats> x_MD, ffi::Result<Floats> y_MD,
                            ffi::Result<Floats> g_MF, ffi::Result<Floats> u_MF, double flops, double half_rows,
                            bool has_values, std::string_view ffn, bool is_deduplicated) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return Completed(status);
  const FluidCall call = MakeFluidCall(place, run, ordinal, layer, x, *x_MD, *u_MF, token, weight, rows, is_visiting,
                                       {flops, half_rows, has_values}, ffn, is_deduplicated);
  return Start(place, pool,
               FluidFfn(call, x.typed_data(), y->typed_data(),
                        {x_MD->typed_data(), y_MD->typed_data(), g_MF->typed_data(), u_MF->typed_data()}));
}
XLA_FFI_DEFINE_HANDLER(kFluidFfn, FluidFfnHandler,
                       Computing(Assigned(BindFfn().Arg<Floats>()).Ret<Floats>().Ret<Floats>().Ret<Floats>()
                           .Ret<Floats>().Ret<Floats>()).Attr<bool>("is_deduplicated"));

// chain, dy_TD, x_MD, y_MD, g_MF, u_MF, token_N, weight_N, rows_E, is_visiting_E -> dx_TD, dweight_N, token.
ffi::Future FluidFfnBackwardHandler(ffi::RunId run, ffi::ThreadPool pool, int32_t ordinal, Ints version, Ints member,
                                    Scalar layer, Token, Floats dy, Floats x_MD, Floats y_MD, Floats g_MF, Floats u_MF,
                                    Ints token, Vector weight, Ints rows, Ints is_visiting, ffi::Result<Floats> dx,
                                    ffi::Result<Vector> dweight, ffi::Result<Token> done, double flops,
                                    double half_rows, bool has_values, std::string_view ffn, bool is_deduplicated) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return Completed(status);
  *done->typed_data() = 0.0f;
  const FluidCall call = MakeFluidCall(place, run, ordinal, layer, dy, x_MD, u_MF, token, weight, rows, is_visiting,
                                       {flops, half_rows, has_values}, ffn, is_deduplicated);
  return Start(place, pool,
               FluidFfnBackward(call, dy.typed_data(),
                                {x_MD.typed_data(), y_MD.typed_data(), g_MF.typed_data(), u_MF.typed_data()},
                                dx->typed_data(), dweight->typed_data()));
}
XLA_FFI_DEFINE_HANDLER(kFluidFfnBackward, FluidFfnBackwardHandler,
                       Computing(Assigned(BindFfn().Arg<Floats>().Arg<Floats>().Arg<Floats>().Arg<Floats>()
                           .Arg<Floats>()).Ret<Floats>().Ret<Vector>().Ret<Token>()).Attr<bool>("is_deduplicated"));

// Waits for all blocks and copies them.
class GetTask : public Task {
 public:
  GetTask(const Place& place, int layer, std::vector<int> ids, char* out)
      : place_(place), layer_(layer), ids_(std::move(ids)), experts_(NamedExperts(ids_)), out_(out) {
    place_.domain->Approach(place_.version, layer_, /*is_backward=*/false);
  }

  std::optional<Status> Ready() override {
    return place_.domain->Read(place_.version, place_.rank, layer_, experts_, /*is_all=*/true, &loans_);
  }
  std::string Describe() const override {
    return place_.domain->DescribeUnreadable(place_.version, layer_, experts_);
  }
  Status Work(Executor& executor, bool* is_done) override {
    const int64_t bytes = place_.domain->shape().block_bytes();
    ParallelFor(executor, int64_t(ids_.size()), [&](int64_t i) {
      const auto loan = std::find_if(loans_.begin(), loans_.end(), [&](const Loan& l) { return l.expert == ids_[i]; });
      if (loan == loans_.end()) std::memset(out_ + i * bytes, 0, bytes);
      else std::memcpy(out_ + i * bytes, loan->lease.block(), bytes);
    });
    loans_.clear();
    *is_done = true;
    return Status::Ok();
  }
  void Waited(double microseconds) override {
    place_.domain->CountWait(place_.version, place_.rank, layer_, kWaitPublished, microseconds);
  }

 private:
  const Place place_;
  const int layer_;
  const std::vector<int> ids_, experts_;
  char* const out_;
  std::vector<Loan> loans_;
};

// chain, ids (n,), -1 = none -> blocks (n, block_elems).
ffi::Future GetHandler(ffi::ThreadPool pool, Ints version, Ints member, Scalar layer, Token, Ints ids,
                       ffi::Result<ffi::AnyBuffer> blocks) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return Completed(status);
  const TableShape& table = place.domain->shape();
  const int64_t bytes = table.block_bytes(), num_ids = int64_t(ids.element_count());
  const int64_t elems = blocks->dimensions()[1];
  const int64_t asked_bytes = num_ids == 0 ? bytes : int64_t(blocks->size_bytes()) / num_ids;
  if (elems != table.block_elems || asked_bytes != bytes) {
    return Completed(Status::Error(Code::kInvalidArgument, "get: table ", table.name, " holds blocks of ",
                                   table.block_elems, " elements in ", bytes, " bytes, asked for ", elems, " in ",
                                   asked_bytes));
  }
  return Start(place, pool, std::make_shared<GetTask>(place, *layer.typed_data(), ToVector(ids),
                                                      static_cast<char*>(blocks->untyped_data())));
}
XLA_FFI_DEFINE_HANDLER(kGet, GetHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Scalar>()
                           .Arg<Token>()
                           .Arg<Ints>()
                           .Ret<ffi::AnyBuffer>());

// Waits to be admitted, adds up the blocks of each expert in their order, and sends the sums. To wait and to send is one
// operation: between two, XLA may put another one's wait for a stage that only this one can make free.
class AccumulateTask : public Task {
 public:
  AccumulateTask(const Place& place, ffi::RunId run, int layer, std::vector<int> ids, const float* blocks)
      : place_(place),
        run_(run.run_id),
        layer_(layer),
        ids_(std::move(ids)),
        experts_(NamedExperts(ids_)),
        blocks_(blocks) {}

  std::optional<Status> Ready() override {
    return place_.domain->StageAdmitted(place_.version, place_.rank, run_, layer_, &stage_);
  }
  std::string Describe() const override { return place_.domain->DescribeStages(); }
  Status Work(Executor& executor, bool* is_done) override {
    *is_done = true;
    Domain& domain = *place_.domain;
    const int64_t elems = domain.shape().block_elems;
    std::vector<float*> staged;
    Status status = domain.StageGradients(place_.version, place_.rank, layer_, stage_, experts_, &staged, executor);
    if (!status.ok() || experts_.empty()) return status;
    ParallelFor(executor, int64_t(experts_.size()), [&](int64_t k) {
      bool is_first = true;
      for (size_t i = 0; i < ids_.size(); ++i) {
        if (ids_[i] != experts_[k]) continue;
        const float* block = blocks_ + i * elems;
        if (is_first) std::memcpy(staged[k], block, elems * sizeof(float));
        else
          for (int64_t j = 0; j < elems; ++j) staged[k][j] += block[j];
        is_first = false;
      }
    });
    return domain.SendGradients(place_.version, place_.rank, layer_, stage_, experts_, executor);
  }
  void Waited(double microseconds) override {
    place_.domain->CountWait(place_.version, place_.rank, layer_, kWaitStage, microseconds);
  }

 private:
  const Place place_;
  const int64_t run_;
  const int layer_;
  const std::vector<int> ids_, experts_;
  const float* const blocks_;
  int stage_ = -1;
};

// ids (n,), -1 = none, blocks (n, block_elems) float32 -> token. An expert named twice gets the sum.
ffi::Future AccumulateHandler(ffi::RunId run, ffi::ThreadPool pool, Ints version, Ints member, Scalar layer, Token,
                              Ints ids, Floats blocks, ffi::Result<Token> token) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return Completed(status);
  const TableShape& table = place.domain->shape();
  if (blocks.dimensions()[1] != table.block_elems) {
    return Completed(Status::Error(Code::kInvalidArgument, "accumulate: table ", table.name, " holds blocks of ",
                                   table.block_elems, " elements, sent were ", blocks.dimensions()[1]));
  }
  *token->typed_data() = 0.0f;
  return Start(place, pool, std::make_shared<AccumulateTask>(place, run, *layer.typed_data(), ToVector(ids),
                                                             blocks.typed_data()));
}
XLA_FFI_DEFINE_HANDLER(kAccumulate, AccumulateHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Scalar>()
                           .Arg<Token>()
                           .Arg<Ints>()
                           .Arg<Floats>()
                           .Ret<Token>());

// A hint: x comes back untouched (the same buffer), and the memory of the blocks is asked for.
ffi::Error PrefetchHandler(Ints version, Ints member, Scalar layer, Ints ids, ffi::AnyBuffer x,
                           ffi::Result<ffi::AnyBuffer> y) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return ToError(status);
  PassOn(x, y);
  return ToError(place.domain->Prefetch(place.version, *layer.typed_data(), NamedExperts(ToVector(ids))));
}
XLA_FFI_DEFINE_HANDLER(
    kPrefetch, PrefetchHandler,
    ffi::Ffi::Bind().Arg<Ints>().Arg<Ints>().Arg<Scalar>().Arg<Ints>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

// -> counts (layers, purposes, experts) blocks, waits_us (layers, kinds), of this member under this version.
ffi::Error LedgerHandler(Ints version, Ints member, Token, ffi::Result<ffi::BufferR3<ffi::S32>> counts,
                         ffi::Result<ffi::BufferR2<ffi::F32>> waits_us) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return ToError(status);
  const TableShape& table = place.domain->shape();
  const auto dims = counts->dimensions(), wait_dims = waits_us->dimensions();
  if (dims[0] != table.layers || dims[1] != kNumPurposes || dims[2] != table.experts || wait_dims[0] != table.layers ||
      wait_dims[1] != kNumWaitKinds) {
    return ToError(Status::Error(Code::kInvalidArgument, "ledger: table ", table.name, " has ", table.layers,
                                 " layers of ", table.experts, " experts, asked for ", dims[0], " of ", dims[2]));
  }
  return ToError(place.domain->ReadLedger(place.version, place.rank, counts->typed_data(), waits_us->typed_data()));
}
XLA_FFI_DEFINE_HANDLER(kLedger, LedgerHandler,
                       ffi::Ffi::Bind()
                           .Arg<Ints>()
                           .Arg<Ints>()
                           .Arg<Token>()
                           .Ret<ffi::BufferR3<ffi::S32>>()
                           .Ret<ffi::BufferR2<ffi::F32>>());

}  // namespace

struct Registration {
  const char* target;
  XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*);
};

// Ends with an entry of null pointers.
extern "C" [[gnu::visibility("default")]] const Registration fef_registrations[];
const Registration fef_registrations[] = {
    {"fef_grouped_matmul", kGroupedMatmul},
    {"fef_grouped_outer", kGroupedOuter},
    {"fef_device_start", kDeviceStart},
    {"fef_device_finish", kDeviceFinish},
    {"fef_handle", kHandle},
    {"fef_ticket", kTicket},
    {"fef_publish", kPublish},
    {"fef_await_closed", kAwaitClosed},
    {"fef_pooled_ffn", kPooledFfn},
    {"fef_pooled_ffn_backward", kPooledFfnBackward},
    {"fef_fluid_ffn", kFluidFfn},
    {"fef_fluid_ffn_backward", kFluidFfnBackward},
    {"fef_get", kGet},
    {"fef_accumulate", kAccumulate},
    {"fef_prefetch", kPrefetch},
    {"fef_collect", kCollect},
    {"fef_release", kRelease},
    {"fef_ledger", kLedger},
    {"fef_renewal", fef_renewal},
    {"fef_renew", fef_renew},
    {"fef_fill", fef_fill},
    {"fef_begin_update", fef_begin_update},
    {"fef_gradient_of", fef_gradient_of},
    {"fef_contents_of", fef_contents_of},
    {"fef_write_next", fef_write_next},
    {"fef_commit", fef_commit},
    {nullptr, nullptr},
};

}  // namespace fef
