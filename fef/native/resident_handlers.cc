// XLA's custom calls for resident tables; see domain_resident.cc.
#include <cstring>
#include <utility>

#include "handlers.h"

namespace fef {
namespace {

// handle (2,) -> number of the version under which the contents are to be read: the one of a commit that no program has
// renewed yet, else a new one. Drawn by the first member only, as TicketHandler does.
ffi::Error RenewalHandler(Ints handle, Ints member, ffi::Result<Scalar> ticket) {
  const int table = handle.typed_data()[0];
  const auto pool = FindPool(handle.typed_data()[1]);
  Domain* domain = pool == nullptr ? nullptr : pool->domain(table, 0);
  if (domain == nullptr) {
    return ToError(Status::Error(Code::kPoolClosed, "renew: the pool was closed; open one and pass it to the step"));
  }
  const bool is_first = member.typed_data()[0] == 0 && member.typed_data()[1] == 0;
  const int32_t committed = is_first ? domain->Unrenewed() : 0;
  *ticket->typed_data() = is_first && committed == 0 ? pool->NextVersion(table) : committed;
  return ffi::Error::Success();
}

// contents () -> token.
ffi::Error RenewHandler(ffi::RunId run, Ints version, Ints member, Scalar contents, ffi::Result<Token> token) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return ToError(status);
  *token->typed_data() = 0.0f;
  return ToError(place.domain->Renew(place.version, place.rank, run.run_id, *contents.typed_data()));
}

// A part of the contents between programs: token, array (layers, P/R, ...) -> token. Goes to `first_layer` and the
// layers after it, at `offset` bytes in each block, or, if `is_own`, in the floats that the home keeps beside it.
ffi::Error FillHandler(Ints version, Ints member, Token, ffi::AnyBuffer array, ffi::Result<Token> token,
                       int64_t first_layer, int64_t offset, bool is_own) {
  Place place;
  if (Status status = place.Resolve(version, member); !status.ok()) return ToError(status);
  *token->typed_data() = 0.0f;
  const TableShape& table = place.domain->shape();
  const auto dims = array.dimensions();
  const int64_t room = is_own ? table.own_elems * int64_t(sizeof(float)) : table.block_bytes();
  const int64_t bytes = dims.size() < 2 || dims[0] == 0 ? 0 : int64_t(array.size_bytes()) / (dims[0] * dims[1]);
  if (bytes == 0 || dims[1] != table.blocks_per_member || first_layer + dims[0] > table.layers || offset + bytes > room) {
    return ToError(Status::Error(Code::kInvalidArgument, "fill: table ", table.name, ": an array of ",
                                 array.size_bytes(), " bytes does not fit in layer ", first_layer));
  }
  const char* from = static_cast<const char*>(array.untyped_data());
  for (int64_t layer = 0; layer < dims[0]; ++layer) {
    for (int64_t local = 0; local < dims[1]; ++local, from += bytes) {
      ResidentBlock found;
      const Status status = place.domain->FindResident(place.version, place.rank, int(first_layer + layer), int(local),
                                                       /*is_next=*/false, &found);
      if (!status.ok()) return ToError(status);
      std::memcpy((is_own ? reinterpret_cast<char*>(found.own) : found.block) + offset, from, bytes);
    }
  }
  return ffi::Error::Success();
}

ffi::Error BeginUpdateHandler(Ints next, Ints member, Token, ffi::Result<Token> token) {
  Place place;
  if (Status status = place.Resolve(next, member); !status.ok()) return ToError(status);
  *token->typed_data() = 0.0f;
  return ToError(place.domain->BeginUpdate(place.version, place.rank));
}

Status Find(const Ints& version, const Ints& member, const Scalar& layer, const Scalar& local, bool is_next,
            Place* place, ResidentBlock* found) {
  if (Status status = place->Resolve(version, member); !status.ok()) return status;
  return place->domain->FindResident(place->version, place->rank, *layer.typed_data(), *local.typed_data(), is_next,
                                     found);
}

Status CheckBytes(const TableShape& table, size_t bytes, int64_t wanted) {
  if (int64_t(bytes) == wanted) return Status::Ok();
  return Status::Error(Code::kInvalidArgument, "update: table ", table.name, " has ", wanted, " bytes where ", bytes,
                       " are given");
}

Status CheckBlock(const TableShape& table, size_t block_bytes, size_t own_bytes) {
  const Status status = CheckBytes(table, block_bytes, table.block_bytes());
  return status.ok() ? CheckBytes(table, own_bytes, table.own_elems * int64_t(sizeof(float))) : status;
}

// layer, local, token -> gradient (block_elems,), zeros where nobody sent one.
ffi::Error GradientOfHandler(Ints version, Ints member, Scalar layer, Scalar local, Token,
                             ffi::Result<Vector> gradient) {
  Place place;
  ResidentBlock found;
  Status status = Find(version, member, layer, local, /*is_next=*/false, &place, &found);
  if (!status.ok()) return ToError(status);
  const TableShape& table = place.domain->shape();
  const int64_t bytes = table.block_elems * int64_t(sizeof(float));
  if (status = CheckBytes(table, gradient->size_bytes(), bytes); !status.ok()) return ToError(status);
  if (found.gradient == nullptr) std::memset(gradient->untyped_data(), 0, bytes);
  else std::memcpy(gradient->untyped_data(), found.gradient, bytes);
  return ffi::Error::Success();
}

// layer, local, token -> block (block_elems,), own (own_elems,).
ffi::Error ContentsOfHandler(Ints version, Ints member, Scalar layer, Scalar local, Token,
                             ffi::Result<ffi::AnyBuffer> block, ffi::Result<Vector> own) {
  Place place;
  ResidentBlock found;
  Status status = Find(version, member, layer, local, /*is_next=*/false, &place, &found);
  if (status.ok()) status = CheckBlock(place.domain->shape(), block->size_bytes(), own->size_bytes());
  if (!status.ok()) return ToError(status);
  std::memcpy(block->untyped_data(), found.block, block->size_bytes());
  if (found.own != nullptr) std::memcpy(own->untyped_data(), found.own, own->size_bytes());
  return ffi::Error::Success();
}

// layer, local, token, block (block_elems,), own (own_elems,) -> token.
ffi::Error WriteNextHandler(Ints next, Ints member, Scalar layer, Scalar local, Token, ffi::AnyBuffer block, Vector own,
                            ffi::Result<Token> token) {
  Place place;
  ResidentBlock found;
  Status status = Find(next, member, layer, local, /*is_next=*/true, &place, &found);
  if (status.ok()) status = CheckBlock(place.domain->shape(), block.size_bytes(), own.size_bytes());
  if (!status.ok()) return ToError(status);
  *token->typed_data() = 0.0f;
  std::memcpy(found.block, block.untyped_data(), block.size_bytes());
  if (found.own != nullptr) std::memcpy(found.own, own.untyped_data(), own.size_bytes());
  return ffi::Error::Success();
}

// is_kept (), token -> token.
ffi::Error CommitHandler(ffi::ThreadPool pool, Ints next, Ints member, Scalar is_kept, Token,
                         ffi::Result<Token> token) {
  Place place;
  if (Status status = place.Resolve(next, member); !status.ok()) return ToError(status);
  *token->typed_data() = 0.0f;
  XlaExecutor executor(pool);
  return ToError(place.domain->Commit(place.version, place.rank, *is_kept.typed_data() != 0, executor));
}

// version, member, layer, local, token
auto BindBlock() { return ffi::Ffi::Bind().Arg<Ints>().Arg<Ints>().Arg<Scalar>().Arg<Scalar>().Arg<Token>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(fef_renewal, RenewalHandler, ffi::Ffi::Bind().Arg<Ints>().Arg<Ints>().Ret<Scalar>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    fef_renew, RenewHandler,
    ffi::Ffi::Bind().Ctx<ffi::RunId>().Arg<Ints>().Arg<Ints>().Arg<Scalar>().Ret<Token>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(fef_fill, FillHandler,
                              ffi::Ffi::Bind()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Token>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<Token>()
                                  .Attr<int64_t>("first_layer")
                                  .Attr<int64_t>("offset")
                                  .Attr<bool>("is_own"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(fef_begin_update, BeginUpdateHandler,
                              ffi::Ffi::Bind().Arg<Ints>().Arg<Ints>().Arg<Token>().Ret<Token>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(fef_gradient_of, GradientOfHandler, BindBlock().Ret<Vector>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(fef_contents_of, ContentsOfHandler, BindBlock().Ret<ffi::AnyBuffer>().Ret<Vector>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(fef_write_next, WriteNextHandler,
                              BindBlock().Arg<ffi::AnyBuffer>().Arg<Vector>().Ret<Token>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    fef_commit, CommitHandler,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Ints>().Arg<Ints>().Arg<Scalar>().Arg<Token>().Ret<Token>());

}  // namespace fef
