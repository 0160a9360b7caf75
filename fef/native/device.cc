#include "device.h"

#include <map>

namespace fef {

DeviceQueue& QueueOf(int32_t device_ordinal) {
  static auto* mutex = new std::mutex();
  static auto* queues = new std::map<int32_t, DeviceQueue>();  // never destroyed: work may outlive main()
  std::lock_guard<std::mutex> lock(*mutex);
  return (*queues)[device_ordinal];
}

}  // namespace fef
