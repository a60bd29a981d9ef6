// The device itself: streams, events, copies and graph captures as a discrete-event simulation. Knows nothing of torch.
//
// There are no worker threads. When work is issued its start and end are already decided: start = max(now + launch delay, what the stream
// holds before it), end = start + duration. An event's instant is known when it is recorded; a query compares it with the clock; a wait sleeps until
// then. On the real clock this gives true asynchrony, on the virtual clock exactly the same run every time.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreams = 64;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum Kind : int32_t { kKernel = 0, kH2D = 1, kD2H = 2, kD2D = 3, kEvent = 4, kScalar = 5 };
enum Flag : int32_t { kPageable = 1, kBlocking = 2, kReplayed = 4 };
enum Mode : int32_t { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };

enum Api { kApiLaunch, kApiCopy, kApiRecord, kApiQuery, kApiElapsed, kApiSynchronize, kApiWait, kApiEventCreate, kApiStreamCreate, kApiAllocate, kApiCount };

// What truly happened; instants in ns on the host clock. Mirrored by ctypes.
struct Operation {
  int64_t issue, start, end, returned, bytes;
  int32_t kind, device, stream, thread, name, flags;
};

struct Event {
  int64_t instant = 0;
  int32_t device = 0;
  int32_t stream = 0;
  bool captured = false;
};

struct Graph;

int64_t now();

// Work on the calling thread's behalf.
void kernel(int device, int stream, const std::string& name, int64_t duration_ns);
void launch(int device, int stream, const std::string& name);  // duration from the table of costs
Operation copy(int device, int stream, Kind kind, int64_t bytes, bool pageable, bool non_blocking);
void finish(Operation copy);  // waits for a blocking one; the bytes are moved in between
void scalar(int device, int stream, int64_t bytes);
void synchronize_stream(int device, int stream);
void synchronize_device(int device);
bool query_stream(int device, int stream);
int new_stream(int device);

Event* record(Event* event, int device, int stream);
void destroy(Event* event);
bool query(Event* event);
void synchronize(Event* event);
void wait(Event* event, int device, int stream);
double elapsed_ms(Event* first, Event* second);

bool capturing(int device, int stream);
Graph* capture_begin(int device, int stream, Mode mode);
void capture_end(Graph* graph);
void replay(Graph* graph, int device, int stream);
void destroy(Graph* graph);

// Memory: host memory that stands for the device's.
void* allocate(int device, size_t bytes);
void release(int device, void* memory, size_t bytes);
void empty_cache();
std::pair<size_t, size_t> memory_info(int device);
struct Memory {
  int64_t count, bytes, peak_count, peak_bytes, total_count, total_bytes, reserved, peak_reserved, segments, ooms, retries, split;
};
Memory memory(int device);
void reset_peaks(int device);
void set_capacity(size_t bytes);

void* pin(size_t bytes);
void unpin(void* memory);
bool pinned(const void* memory);

// A card that several processes use: their kernels take turns, in the order of issue. Throws when the file cannot be mapped.
void share(const char* path);
void unshare();

void check(Api api);  // throws when a fault was planted for this call

}  // namespace sim
