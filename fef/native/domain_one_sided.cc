// How other hosts read a domain's segments one-sided, and where this host finds theirs. A segment is told of piece by
// piece, as its memory is taken: what can be read so holds its memory for good.
#include <cstring>

#include "domain.h"

namespace fef {

// Lets the hosts that are not mapped read bytes [begin, end) of a segment: of `rank`, or of the stages if it is -1.
Status Domain::Offer(int rank, const MemorySegment& segment, size_t begin, size_t end) {
  if (!is_one_sided() || begin == end) return Status::Ok();
  SegmentKey key;
  Status status = neighbourhood_.fabric->one_sided()->Register(segment.data() + begin, end - begin, &key);
  if (!status.ok()) return status;
  Message message = About(Kind::kKey, Version{incarnation_, 0, 0});
  message.rank = rank;
  message.offset = begin;
  std::string payload(reinterpret_cast<const char*>(&key.address), sizeof(key.address));
  payload.append(reinterpret_cast<const char*>(&key.num_bytes), sizeof(key.num_bytes));
  payload += key.packed;
  for (int host : hosts_) {
    if (host != me_ && !neighbourhood_.fabric->is_mapped(host)) neighbourhood_.fabric->Send(host, message, payload);
  }
  return Status::Ok();
}

// Takes in what Offer has sent. Not under mutex(): the network's thread, which is waited for, may be waiting for that.
void Domain::TakeKey(const Message& message, const std::string& payload) {
  SegmentKey key;
  Piece piece;
  Status status = Status::Error(Code::kInvalidArgument, "its key has ", payload.size(), " bytes");
  constexpr size_t kNumbersBytes = sizeof(key.address) + sizeof(key.num_bytes);
  if (is_one_sided() && payload.size() > kNumbersBytes) {
    std::memcpy(&key.address, payload.data(), sizeof(key.address));
    std::memcpy(&key.num_bytes, payload.data() + sizeof(key.address), sizeof(key.num_bytes));
    key.packed = payload.substr(kNumbersBytes);
    status = neighbourhood_.fabric->one_sided()->Import(message.host, key, &piece.segment);
  }
  piece.begin = message.offset;
  piece.end = message.offset + key.num_bytes;
  std::lock_guard<std::mutex> lock(mutex_);
  if (!status.ok() && lost_[message.host].empty()) lost_[message.host] = status.message;  // it cannot be read any more
  if (status.ok() && message.rank < 0) stage_pieces_[message.host].push_back(piece);
  if (status.ok() && is_member(message.rank, message.host)) pieces_[message.rank].push_back(piece);
  changed_.notify_all();
}

// The piece that holds these bytes, and where in it. What is in no piece is refused by OneSided.
std::pair<int, uint64_t> Domain::Find(const std::vector<Piece>& pieces, uint64_t offset, uint64_t num_bytes) {
  for (const Piece& piece : pieces) {
    if (offset >= piece.begin && offset + num_bytes <= piece.end) return {piece.segment, offset - piece.begin};
  }
  return {-1, 0};
}

Spot Domain::SpotOfBlock(const VersionState& state, const Version& version, int layer, int expert) const {
  Spot spot;
  const int home = shape_.home[expert];
  const auto slots = state.slots.find(home);
  if (slots == state.slots.end()) return spot;
  const int slot = slots->second[layer];
  std::tie(spot.segment, spot.offset) =
      Find(pieces_[home], BlockOffset(slot, layer, shape_.local[expert]), uint64_t(shape_.block_bytes()));
  std::tie(spot.version_segment, spot.version_offset) =
      Find(pieces_[home], HeaderOffset(slot, layer) + offsetof(SlotHeader, version), sizeof(spot.version));
  spot.version = version.key();
  return spot;
}

// `index`: of the gradient's first number among those of the host's stages.
Spot Domain::SpotOfGradient(int host, uint64_t index) const {
  Spot spot;
  const uint64_t num_bytes = uint64_t(shape_.block_elems) * sizeof(float);
  std::tie(spot.segment, spot.offset) = Find(stage_pieces_[host], index * sizeof(float), num_bytes);
  return spot;
}

}  // namespace fef
