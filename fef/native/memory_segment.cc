#include "memory_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace fef {

MemorySegment::~MemorySegment() {
  if (data_ != nullptr) munmap(data_, num_bytes_);
  if (fd_ >= 0) close(fd_);
}

Status MemorySegment::Create(const std::string& name, size_t num_bytes) {
  auto refuse = [&](const char* call, int error) {
    return Status::Error(Code::kResourceExhausted, "segment " + name + ": " + call + " of " +
                                                       std::to_string(num_bytes) +
                                                       " bytes failed: " + std::strerror(error) +
                                                       "; lower config.pool.slots or the model's size");
  };
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
