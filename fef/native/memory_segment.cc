#include "memory_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <random>

namespace fef {

namespace {

constexpr size_t kPageBytes = 4096;

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

uint64_t FreeBytes(int file) {
  struct statvfs system;
  return fstatvfs(file, &system) == 0 ? uint64_t(system.f_bavail) * system.f_frsize : 0;
}

// A file in `folder` that has no name, or loses it at once. The folder is not to be a link: it might lead anywhere.
int OpenFile(const std::string& folder) {
  const int directory = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (directory < 0) return -1;
  int file = openat(directory, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {  // not every file system has files without a name
    const std::string name = "fef-" + std::to_string(getpid()) + "-" + std::to_string(std::random_device()());
    file = openat(directory, name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0) unlinkat(directory, name.c_str(), 0);
  }
  const int error = errno;
  close(directory);
  errno = error;
  return file;
}

}  // namespace

MemorySegment::~MemorySegment() {
  if (data_ != nullptr) munmap(data_, num_bytes_);
  if (fd_ >= 0) close(fd_);
}

Status MemorySegment::Create(const std::string& name, size_t num_bytes, const std::string& folder) {
  name_ = name;
  folder_ = folder;
  fd_ = folder.empty() ? memfd_create(name.c_str(), MFD_CLOEXEC) : OpenFile(folder);
  if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(num_bytes)) != 0) {
    return Status::Error(Code::kResourceExhausted, "segment ", name, " of ", num_bytes, " bytes cannot be made",
                         folder.empty() ? "" : " in " + folder, ": ", std::strerror(errno));
  }
  void* address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (address == MAP_FAILED) {
    return Status::Error(Code::kResourceExhausted, "segment ", name, " of ", num_bytes,
                         " bytes cannot be mapped: ", std::strerror(errno), "; raise the limit of addresses (ulimit -v)");
  }
  data_ = static_cast<char*>(address);
  num_bytes_ = num_bytes;
  return Status::Ok();
}

Status MemorySegment::Map(const std::string& name, int fd) {
  name_ = name;
  fd_ = fd;
  struct stat file;
  void* address = MAP_FAILED;
  if (fstat(fd, &file) == 0 && file.st_size > 0) {
    address = mmap(nullptr, size_t(file.st_size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  }
  if (address == MAP_FAILED) {
    return Status::Error(Code::kResourceExhausted, "segment ", name, " of another process cannot be mapped: ",
                         std::strerror(errno));
  }
  data_ = static_cast<char*>(address);
  num_bytes_ = size_t(file.st_size);
  return Status::Ok();
}

Status MemorySegment::Take(size_t num_bytes) {
  if (num_bytes <= taken_) return Status::Ok();
  const size_t more = num_bytes - taken_;
  const bool is_file = !folder_.empty();
  const uint64_t available = is_file ? FreeBytes(fd_) : AvailableBytes();
  const int no_room = is_file ? ENOSPC : ENOMEM;
  const int error = more > available ? no_room : posix_fallocate(fd_, off_t(taken_), off_t(more));
  if (error != 0) {
    return Status::Error(Code::kResourceExhausted, "segment ", name_, is_file ? " in " + folder_ : "", ": taking ", more,
                         " bytes failed, ", available, " are free: ", std::strerror(error),
                         "; use a smaller model or release() versions");
  }
  // Maps the pages that posix_fallocate has filled, so that no step pays for the faults.
  for (size_t at = taken_; at < num_bytes; at += kPageBytes) static_cast<volatile char*>(data_)[at];
  taken_ = num_bytes;
  return Status::Ok();
}

}  // namespace fef
