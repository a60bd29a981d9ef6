// Device memory (host memory that is counted) and pinned memory (host memory that is remembered).
#include "simulator.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>

namespace sim {
namespace {

std::mutex lock_;
Memory memory_[kDevices] = {};
std::map<uintptr_t, size_t> pinned_;
size_t capacity_ = 8ULL << 30;
constexpr int64_t kSegment = 2 << 20;

}  // namespace

void set_capacity(size_t bytes) {
  std::lock_guard<std::mutex> held(lock_);
  capacity_ = bytes;
}

void* allocate(int device, size_t bytes) {
  check(kApiAllocate);
  std::lock_guard<std::mutex> held(lock_);
  Memory& counts = memory_[device];
  if (counts.bytes + static_cast<int64_t>(bytes) > static_cast<int64_t>(capacity_)) {
    ++counts.retries;  // as a caching allocator: it gives its cache back and asks again before it fails
    ++counts.ooms;
    return nullptr;
  }
  ++counts.count;
  ++counts.total_count;
  counts.bytes += static_cast<int64_t>(bytes);
  counts.total_bytes += static_cast<int64_t>(bytes);
  counts.peak_count = std::max(counts.peak_count, counts.count);
  counts.peak_bytes = std::max(counts.peak_bytes, counts.bytes);
  if (counts.bytes > counts.reserved) {  // as a caching allocator: grows by segments of 2 MiB, shrinks when the cache is emptied
    counts.segments += (counts.bytes - counts.reserved + kSegment - 1) / kSegment;
    counts.reserved = (counts.bytes + kSegment - 1) / kSegment * kSegment;
    counts.peak_reserved = std::max(counts.peak_reserved, counts.reserved);
  }
  void* found = nullptr;
  return posix_memalign(&found, 64, std::max<size_t>(bytes, 64)) == 0 ? found : nullptr;
}

void release(int device, void* memory, size_t bytes) {
  std::lock_guard<std::mutex> held(lock_);
  --memory_[device].count;
  memory_[device].bytes -= static_cast<int64_t>(bytes);
  free(memory);
}

void empty_cache() {
  std::lock_guard<std::mutex> held(lock_);
  for (Memory& counts : memory_) counts.reserved = counts.bytes;
}

std::pair<size_t, size_t> memory_info(int device) {
  std::lock_guard<std::mutex> held(lock_);
  return {capacity_ - static_cast<size_t>(memory_[device].reserved), capacity_};
}

Memory memory(int device) {
  std::lock_guard<std::mutex> held(lock_);
  Memory found = memory_[device];
  found.split = found.bytes % kSegment == 0 ? 0 : kSegment - found.bytes % kSegment;  // what its last segment has left
  return found;
}

void reset_peaks(int device) {
  std::lock_guard<std::mutex> held(lock_);
  Memory& counts = memory_[device];
  counts.peak_count = counts.count;
  counts.peak_bytes = counts.bytes;
  counts.peak_reserved = counts.reserved;
}

void* pin(size_t bytes) {
  void* found = nullptr;
  if (posix_memalign(&found, 4096, std::max<size_t>(bytes, 64)) != 0) return nullptr;
  std::lock_guard<std::mutex> held(lock_);
  pinned_[reinterpret_cast<uintptr_t>(found)] = std::max<size_t>(bytes, 64);
  return found;
}

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> held(lock_);
    pinned_.erase(reinterpret_cast<uintptr_t>(memory));
  }
  free(memory);
}

bool pinned(const void* memory) {
  std::lock_guard<std::mutex> held(lock_);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto after = pinned_.upper_bound(address);
  if (after == pinned_.begin()) return false;
  --after;
  return address < after->first + after->second;
}

}  // namespace sim
