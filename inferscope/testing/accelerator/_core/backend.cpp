// The simulator as torch's PrivateUse1 backend: guard, streams, events, hooks, allocators and graphs.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GraphImplInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "simulator.h"

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_device = 0;
thread_local int current_stream[sim::kDevices] = {};

c10::Stream stream_of(c10::Device device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(id));
}

int id_of(const c10::Stream& stream) { return static_cast<int>(stream.id()); }

sim::Event* event_of(void* event) { return static_cast<sim::Event*>(event); }

c10::Device device_or_current(c10::Device device) {
  return device.has_index() ? device : c10::Device(kType, current_device);
}

void set_device(c10::DeviceIndex index) {
  if (index < 0) return;
  TORCH_CHECK(index < sim::kDevices, "SIM error: there are ", sim::kDevices, " devices, not one with index ", static_cast<int>(index));
  current_device = index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before(kType, current_device);
    set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, current_device); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < sim::kDevices) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return sim::kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    const c10::Device found = device_or_current(device);
    return stream_of(found, current_stream[found.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device_or_current(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const c10::Device found = device_or_current(device);
    return stream_of(found, sim::new_stream(found.index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_stream[stream.device_index()] = id_of(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return sim::query_stream(stream.device_index(), id_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { sim::synchronize_stream(stream.device_index(), id_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { sim::synchronize_device(index < 0 ? current_device : index); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return sim::capturing(stream.device_index(), id_of(stream)); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index, const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "SIM error: event of device ", static_cast<int>(index),
                " recorded on a stream of device ", static_cast<int>(stream.device_index()));
    *event = sim::record(event_of(*event), stream.device_index(), id_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override { sim::wait(event_of(event), stream.device_index(), id_of(stream)); }
  bool queryEvent(void* event) const override { return event == nullptr || sim::query(event_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) sim::synchronize(event_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { sim::destroy(event_of(event)); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return sim::elapsed_ms(event_of(first), event_of(second));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Block {
  void* memory;
  size_t bytes;
  c10::DeviceIndex device;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  sim::release(block->device, block->memory, block->bytes);
  delete block;
}

c10::CachingAllocator::Stat stat(int64_t current, int64_t peak, int64_t total) {
  c10::CachingAllocator::Stat result;
  result.current = current;
  result.peak = peak;
  result.allocated = total;
  result.freed = total - current;
  return result;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = sim::allocate(current_device, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "SIM out of memory: tried to allocate ", bytes, " bytes");
    return {memory, new Block{memory, bytes, current_device}, &free_block, c10::Device(kType, current_device)};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { sim::empty_cache(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const sim::Memory seen = sim::memory(device);
    c10::CachingDeviceAllocator::DeviceStats result;
    result.allocation[0] = result.active[0] = stat(seen.count, seen.peak_count, seen.total_count);
    result.allocated_bytes[0] = result.active_bytes[0] = result.requested_bytes[0] = stat(seen.bytes, seen.peak_bytes, seen.total_bytes);
    result.reserved_bytes[0] = stat(seen.reserved, seen.peak_reserved, seen.peak_reserved);
    result.inactive_split_bytes[0] = stat(seen.split, seen.split, seen.split);
    result.segment[0] = stat(seen.segments, seen.segments, seen.segments);
    result.num_ooms = seen.ooms;
    result.num_alloc_retries = seen.retries;
    result.num_device_alloc = seen.segments;
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { sim::reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override { return sim::memory_info(device); }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_memory);

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = sim::pin(bytes);
    return {memory, memory, &sim::unpin, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &pinned_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return sim::kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const c10::DeviceIndex before = current_device;
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* memory) const override { return sim::pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* held = storage.unsafeGetStorageImpl();
    const c10::DeviceIndex before = exchangeDevice(storage.device().index());
    c10::DataPtr grown = device_memory.allocate(bytes);
    if (held->data() != nullptr) std::memcpy(grown.get(), held->data(), std::min(bytes, held->nbytes()));
    held->set_data_ptr_noswap(std::move(grown));
    held->set_nbytes(bytes);
    set_device(before);
  }
};

struct Graph final : at::GraphImplInterface {
  ~Graph() override { reset(); }
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode mode) override {
    reset();
    const sim::Mode asked = mode == at::GraphCaptureMode::ThreadLocal ? sim::kThreadLocal
                            : mode == at::GraphCaptureMode::Relaxed   ? sim::kRelaxed
                                                                      : sim::kGlobal;
    graph_ = sim::capture_begin(current_device, current_stream[current_device], asked);
  }
  void capture_end() override {
    TORCH_CHECK(graph_ != nullptr, "SIM error: no capture was begun");
    sim::capture_end(graph_);
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(graph_ != nullptr, "SIM error: nothing was captured");
    sim::replay(graph_, current_device, current_stream[current_device]);
  }
  void reset() override {
    if (graph_ != nullptr) sim::destroy(graph_);
    graph_ = nullptr;
  }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  sim::Graph* graph_ = nullptr;
};

std::unique_ptr<at::GraphImplInterface> make_graph(const at::GraphImplArgs&) { return std::make_unique<Graph>(); }

}  // namespace

namespace sim {

int device_now() { return current_device; }
int stream_now(int device) { return current_stream[device]; }

}  // namespace sim

extern "C" {

// Once a process, after torch was told the backend's name: the registry of graphs is keyed by it.
void sim_register() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kType, false), make_graph);
}

int sim_current_device() { return current_device; }
int sim_current_stream(int device) { return current_stream[device]; }

}  // extern "C"
