// What hosts say to each other: messages of one size, some followed by a payload. All hosts of a job run the same build
// (fef/pool/rendezvous.py refuses others), so a message travels as it lies in memory.
#ifndef FEF_WIRE_H_
#define FEF_WIRE_H_

#include <cstdint>
#include <string>
#include <type_traits>

namespace fef {

constexpr uint32_t kMagic = 0x31666566;             // "fef1"
constexpr uint32_t kMaxPayloadBytes = 1u << 20;     // of anything that is believed
constexpr uint32_t kMaxParcelBytes = 1u << 27;      // of what a host of the job says
constexpr uint32_t kChunkBytes = 32 << 10;          // of one read request

// A host reads from another over two connections, so that a request never waits behind bulk data.
enum class Channel : uint16_t { kRequests, kReplies };

enum class Kind : uint16_t {
  kHello,      // first on every connection, both ways; payload: the job's token, or why it is refused
  kSegment,    // a descriptor comes with it: memory to be mapped, of `rank`, or of the host's stages if rank is -1
  kAddress,    // payload: where the host is found by one-sided reads
  kKey,        // memory of a segment, from `offset` on, can be read one-sided; `rank` as above; payload: how
  kPublished,  // `rank` has published `version`; payload: its slot in each layer, int32, if blocks are read one-sided
  kClosed,     // `rank` sends nothing more under `version` and reads it no more
  kManifest,   // of a stage; payload: the experts, int32 each, that will get a gradient from this host
  kGradient,   // one of these is made; `stage` and `rank`, an index among the host's members, say where it lies
  kSummed,     // the host has taken what it needs from a stage
  kTokens,     // in a flight `rank` sends rows of `offset` floats; payload: the parcel
  kServed,     // what became of the rows that `rank`, a member of the receiving host, has sent; payload: the dot products
  kReceived,   // `rank` has the results of its rows
  kWant,       // asks the leaf's relay for a block of another leaf; `is_hint` as of a read
  kHurry,      // what was only hinted at by a want is awaited now
  kHave,       // the answer to a want: the block can be read here or, if `code` is not 0, at its home only
  kRead,       // asks for `length` bytes at `offset` of a block
  kData,       // the answer; payload: the bytes, or the text of an error if `code` is not 0
  kBye,        // an orderly end
};

// What a read asks for.
enum class Region : int32_t {
  kBlock,     // of an expert's weights
  kRelayed,   // likewise, of another leaf's expert, as the relay has it for its leaf
  kGradient,  // of an expert; `stage` and `rank`, an index among the host's members, say where it lies
  kRows,      // that `rank` has sent to the asking host
  kResults,   // of the rows of `rank`, a member of the asking host
};

struct Message {
  uint32_t magic = kMagic;
  Kind kind = Kind::kHello;
  Channel channel = Channel::kRequests;
  int32_t host = 0;  // who sends it
  int32_t table = 0, group = 0;
  int32_t incarnation = 0, counter = 0, microbatch = 0;  // the version
  int32_t layer = 0, use = 0, rank = -1, expert = -1;
  int32_t stage = -1;
  Region region = Region::kBlock;
  int32_t is_backward = 0;  // of a flight
  int32_t code = 0;
  uint32_t length = 0;
  uint64_t offset = 0;
  uint64_t ticket = 0;
  uint32_t payload_bytes = 0;
  uint32_t is_hint = 0;  // of a read or a want: nobody waits for it (yet)
};
static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) == 96);

inline std::string ToBytes(const Message& message, const std::string& payload = {}) {
  Message copy = message;
  copy.payload_bytes = uint32_t(payload.size());
  return std::string(reinterpret_cast<const char*>(&copy), sizeof(copy)) + payload;
}

}  // namespace fef

#endif  // FEF_WIRE_H_
