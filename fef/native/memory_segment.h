// One contiguous piece of shared memory, owned by one member and mapped by whoever reads it.
#ifndef FEF_MEMORY_SEGMENT_H_
#define FEF_MEMORY_SEGMENT_H_

#include <cstddef>
#include <string>

#include "status.h"

namespace fef {

// A memfd, or a file without a name, of fixed size, mapped for the life of the object. It holds memory only where that
// was taken. Freed by the kernel when the last mapping is gone, also after SIGKILL, so nothing is left behind.
class MemorySegment {
 public:
  MemorySegment() = default;
  MemorySegment(const MemorySegment&) = delete;
  MemorySegment& operator=(const MemorySegment&) = delete;
  ~MemorySegment();

  // Reserves addresses, no memory. With a folder, the segment is a file on its file system.
  Status Create(const std::string& name, size_t num_bytes, const std::string& folder = {});
  // Maps what another process has created; the descriptor is this object's from now on.
  Status Map(const std::string& name, int fd);
  // Takes and faults in the memory of the first num_bytes, once and for all. What does not fit is refused here, not by
  // a bus error at the first write or by the kernel's killing of this or another process.
  Status Take(size_t num_bytes);

  char* data() const { return data_; }
  int fd() const { return fd_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  int fd_ = -1;
  std::string name_, folder_;
  char* data_ = nullptr;
  size_t num_bytes_ = 0;
  size_t taken_ = 0;
};

}  // namespace fef

#endif  // FEF_MEMORY_SEGMENT_H_
