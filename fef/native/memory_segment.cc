#include "memory_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>

namespace fef {

namespace {

// The number after `field` in a file of "field number" lines, or in a file that is a number; the largest if not there.
uint64_t ReadNumber(const char* path, const std::string& field) {
  std::ifstream file(path);
  std::string word;
  uint64_t number = UINT64_MAX;
  while (!field.empty() && file >> word && word != field) continue;
  return file >> number ? number : UINT64_MAX;
}

// What can be allocated before the kernel, or the container's limit, ends a process. A memfd is bounded by neither
// beforehand: posix_fallocate fills page after page until something is killed.
uint64_t AvailableBytes() {
  const uint64_t kib = ReadNumber("/proc/meminfo", "MemAvailable:");
  const uint64_t machine = kib == UINT64_MAX ? kib : kib * 1024;
  const uint64_t limit = ReadNumber("/sys/fs/cgroup/memory.max", "");
  const uint64_t used = ReadNumber("/sys/fs/cgroup/memory.current", "");
  if (limit == UINT64_MAX || used == UINT64_MAX) return machine;
  const uint64_t cache = ReadNumber("/sys/fs/cgroup/memory.stat", "inactive_file");  // given up when memory is needed
  const uint64_t kept = cache < used ? used - cache : used;
  return std::min(machine, limit > kept ? limit - kept : 0);
}

}  // namespace

MemorySegment::~MemorySegment() {
  if (data_ != nullptr) munmap(data_, num_bytes_);
  if (fd_ >= 0) close(fd_);
}

Status MemorySegment::Create(const std::string& name, size_t num_bytes) {
  const uint64_t available = AvailableBytes();
  auto refuse = [&](const char* call, int error) {
    return Status::Error(Code::kResourceExhausted, "segment ", name, ": ", call, " of ", num_bytes, " bytes failed, ",
                         available, " are free: ", std::strerror(error),
                         "; lower config.pool.slots or the model's size");
  };
  if (num_bytes > available) return refuse("memfd_create", ENOMEM);
  fd_ = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (fd_ < 0) return refuse("memfd_create", errno);
  if (const int error = posix_fallocate(fd_, 0, static_cast<off_t>(num_bytes)); error != 0) {
    return refuse("posix_fallocate", error);
  }
  void* address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (address == MAP_FAILED) return refuse("mmap", errno);
  data_ = static_cast<char*>(address);
  num_bytes_ = num_bytes;
  return Status::Ok();
}

}  // namespace fef
