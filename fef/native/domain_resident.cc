// Tables whose contents stay in the pool: from version to version their homes change them block by block, and no array
// of the program ever holds more than a block. Beside each block its home keeps floats of its own (optimizer state).
//
// Of the two slots of a home one holds the contents. A program renews it: the same bytes under a new version, read and
// closed like any other. A training step then writes the next contents to the other slot and commits them, under a
// version that the next program takes as it is.
#include <cstring>
#include <utility>

#include "domain.h"

namespace fef {

Status Domain::OpenResident(int rank, const std::string& name) {
  Residence& residence = residences_[rank];
  const size_t blocks = size_t(shape_.layers) * shape_.blocks_per_member;
  const size_t own_bytes = kResidentSlots * blocks * shape_.own_elems * sizeof(float);
  const size_t sum_bytes = blocks * shape_.block_elems * sizeof(float);
  const auto take = [&](std::unique_ptr<MemorySegment>& segment, const char* kind, size_t num_bytes) {
    if (num_bytes == 0) return Status::Ok();
    segment = std::make_unique<MemorySegment>();
    Status status = segment->Create(name + kind, num_bytes, neighbourhood_.folder);
    return status.ok() ? segment->Take(num_bytes) : status;
  };
  if (Status status = TakeSlots(rank, kResidentSlots); !status.ok()) return status;
  if (Status status = take(residence.own, "-own", own_bytes); !status.ok()) return status;
  return take(residence.sums, "-sums", sum_bytes);
}

float* Domain::own(int rank, int slot, int layer, int local) const {
  if (shape_.own_elems == 0) return nullptr;
  const size_t index = (size_t(slot) * shape_.layers + layer) * shape_.blocks_per_member + local;
  return reinterpret_cast<float*>(residences_.at(rank).own->data()) + index * shape_.own_elems;
}

int32_t Domain::Unrenewed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return committed_;
}

Status Domain::Renew(const Version& version, int rank, int64_t run, int64_t contents) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = CheckResident(version, rank, "renew"); !status.ok()) return status;
  Residence& residence = residences_[rank];
  if (residence.contents != contents) {
    return Status::Error(Code::kStaleVersion, "renew: ", Where(version), ", rank ", rank, ": the state is that after ",
                         contents, " updates, the pool holds what came after ", residence.contents,
                         "; use each state once, the newest only");
  }
  DropUnused();
  latest_run_ = run;
  if (residence.version == version.key()) {
    versions_.at(version.key()).run = run;
    committed_ = 0;
    return Status::Ok();
  }
  const auto before = versions_.find(residence.version);
  if (before != versions_.end() && before->second.closed != all_ranks()) {
    return Status::Error(Code::kInvalidArgument, "renew: ", Where(version), ", rank ", rank,
                         ": a program that reads the version before has not ended; wait for its result");
  }
  CreateVersion(version).run = run;
  Show(version, rank);
  return Status::Ok();
}

Status Domain::BeginUpdate(const Version& next, int rank) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (Status status = CheckResident(next, rank, "update"); !status.ok()) return status;
  const std::vector<int> slots(shape_.layers, 1 - residences_[rank].slot);
  return EmptySlots(next, rank, slots, lock);
}

Status Domain::FindResident(const Version& version, int rank, int layer, int local, bool is_next, ResidentBlock* found) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = CheckResident(version, rank, "update"); !status.ok()) return status;
  if (layer < 0 || layer >= shape_.layers || local < 0 || local >= shape_.blocks_per_member) {
    return Status::Error(Code::kInvalidArgument, "update: ", Where(version), ": there is no block ", local,
                         " in layer ", layer);
  }
  const Residence& residence = residences_[rank];
  const int slot = is_next ? 1 - residence.slot : residence.slot;
  *found = {block(rank, slot, layer, local), own(rank, slot, layer, local), nullptr};
  const auto state = versions_.find(version.key());
  if (is_next || state == versions_.end()) return Status::Ok();
  const Gradients& gradients = state->second.gradients[rank];
  const int64_t index = SumIndex(layer, local);
  if (gradients.data() != nullptr && gradients.written[index]) {
    found->gradient = gradients.data() + index * shape_.block_elems;
  }
  return Status::Ok();
}

Status Domain::Commit(const Version& next, int rank, bool is_kept, Executor& executor) {
  if (is_kept) {  // what was written is not to be: the contents as they were, under the next version
    const int per_layer = shape_.blocks_per_member, slot = residences_[rank].slot;
    ParallelFor(executor, int64_t(shape_.layers) * per_layer, [&](int64_t task) {
      const int layer = int(task) / per_layer, local = int(task) % per_layer;
      std::memcpy(block(rank, 1 - slot, layer, local), block(rank, slot, layer, local), shape_.block_bytes());
      if (shape_.own_elems == 0) return;
      std::memcpy(own(rank, 1 - slot, layer, local), own(rank, slot, layer, local), shape_.own_elems * sizeof(float));
    });
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (Status status = CheckResident(next, rank, "update"); !status.ok()) return status;
  Residence& residence = residences_[rank];
  if (const auto before = versions_.find(residence.version); before != versions_.end()) {
    before->second.gradients[rank] = {};
    before->second.released |= 1ull << rank;
  }
  residence.slot = 1 - residence.slot;
  ++residence.contents;
  CreateVersion(next).run = latest_run_;
  Show(next, rank);
  committed_ = next.counter;
  return Status::Ok();
}

// The contents are readable under the version.
void Domain::Show(const Version& version, int rank) {
  Residence& residence = residences_[rank];
  residence.version = version.key();
  FillSlots(version, rank, std::vector<int>(shape_.layers, residence.slot));
}

Status Domain::CheckResident(const Version& version, int rank, const char* op) const {
  if (Status status = CheckOpen(version, op); !status.ok()) return status;
  const auto found = residences_.find(rank);
  if (found == residences_.end()) {
    return Status::Error(Code::kInvalidArgument, op, ": ", Where(version), ": rank ", rank, " has no contents here");
  }
  return Status::Ok();
}

Status Domain::Contents(int rank, char** blocks, float** own_floats) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = residences_.find(rank);
  if (found == residences_.end()) {
    return Status::Error(Code::kInvalidArgument, "table ", shape_.name, ": rank ", rank, " has no contents here");
  }
  *blocks = block(rank, found->second.slot, 0, 0);
  *own_floats = own(rank, found->second.slot, 0, 0);
  return Status::Ok();
}

}  // namespace fef
