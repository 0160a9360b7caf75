// One-sided reads of other hosts' memory by the network's hardware. The library that has them, libfef-ucx.so, is apart
// from libfef.so, which loads without UCX and knows only this interface.
#ifndef FEF_ONE_SIDED_H_
#define FEF_ONE_SIDED_H_

#include <cstdint>
#include <functional>
#include <string>

#include "status.h"

namespace fef {

// What another host needs to read some of this one's memory.
struct SegmentKey {
  uint64_t address = 0;    // where it begins, in its owner's memory
  uint64_t num_bytes = 0;  // that may be read; nobody else checks it
  std::string packed;      // of the network, for its hardware
};

class OneSided {
 public:
  using Done = std::function<void(const Status&)>;

  virtual ~OneSided() = default;

  // Where other hosts find this one. Not a text.
  virtual const std::string& address() const = 0;
  // Lets others read these bytes, which must stay until Close. Reads into them need no registration of their own.
  // Waits for no `done`: the caller may hold what a `done` waits for. The two below may not be called so.
  virtual Status Register(char* data, uint64_t num_bytes, SegmentKey* key) = 0;
  virtual Status Connect(int host, const std::string& address) = 0;
  // The number of the segment for Get, from 0, counts the host's.
  virtual Status Import(int host, const SegmentKey& key, int* segment) = 0;
  // Reads into `destination`, which is written until `done`, called once on the library's thread; after Close, within
  // the call. What is out of range is refused before anything is sent. A read that has not ended after deadline_s takes
  // its host with it, for good: there is no other way to be sure that nothing is written any more.
  virtual void Get(int host, int segment, uint64_t offset, uint64_t num_bytes, char* destination, double deadline_s,
                   Done done) = 0;
  // Ends all reads. The others must have ended theirs of this host.
  virtual void Close() = 0;
};

}  // namespace fef

#endif  // FEF_ONE_SIDED_H_
