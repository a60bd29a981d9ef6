#include "simulator.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "state.h"

namespace sim {

int64_t monotonic() {
  timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return moment.tv_sec * 1000000000LL + moment.tv_nsec;
}

void wait_until(int64_t instant) {
  if (virtual_) {
    int64_t seen = virtual_now_;
    while (seen < instant && !virtual_now_.compare_exchange_weak(seen, instant)) {
    }
    return;
  }
  timespec until{static_cast<time_t>(instant / 1000000000LL), static_cast<long>(instant % 1000000000LL)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

namespace {

int32_t tid() {
  thread_local const int32_t id = static_cast<int32_t>(syscall(SYS_gettid));
  return id;
}

// A call into a driver costs its caller time, and what it issues is issued at its end.
int64_t called() {
  const auto cost = static_cast<int64_t>(settings_[kCall]);
  if (virtual_) virtual_now_ += cost;
  int64_t moment = now();
  if (cost > 0 && !virtual_) {
    for (const int64_t until = moment + cost; moment < until;) moment = now();
  }
  return moment;
}

int64_t launch_delay() {
  const double jitter = settings_[kJitter];
  double delay = settings_[kLaunch];
  if (jitter > 0) delay += std::exponential_distribution<double>(1.0 / jitter)(random_);
  return static_cast<int64_t>(delay);
}

int32_t intern(const std::string& name) {
  const auto found = name_ids_.find(name);
  if (found != name_ids_.end()) return found->second;
  names_.push_back(name);
  return name_ids_[name] = static_cast<int32_t>(names_.size()) - 1;
}

void note(Operation operation) {
  if (static_cast<double>(log_.size()) < settings_[kLogLimit]) log_.push_back(operation);
  else ++counters_["log_dropped"];
}

void planted(Api api) {
  ++calls_[api];
  if (!faulty_) return;
  for (const char* key : {kApis[api], "*"}) {
    const auto found = faults_.find(key);
    if (found == faults_.end() || found->second.times == 0) continue;
    if (found->second.times > 0) --found->second.times;
    ++counters_["faults"];
    throw Error(found->second.message);
  }
}

void kill(Graph* graph, const char* api) {
  if (!graph->invalid) {
    ++counters_["captures_killed"];
    ++counters_[std::string("killed_by:") + api];
  }
  graph->invalid = true;
}

// Calls that CUDA forbids while a capture is open: in global mode to every thread that has not exchanged its own mode for the relaxed one.
void unsafe(const char* api) {
  const bool all = settings_[kQueryKillsAll] != 0;
  bool bad = false;
  for (Graph* graph : captures_) {
    const bool forbidden = (graph->mode == kGlobal && mode_ == kGlobal) || (graph->mode != kRelaxed && graph->owner == tid() && mode_ != kRelaxed);
    if (!forbidden && !all) continue;
    kill(graph, api);
    bad = true;
  }
  if (bad) throw Error(std::string("SIM error: operation not permitted when stream is capturing (") + api + ")");
}

int64_t transfer_ns(int64_t bytes, Setting bandwidth) {
  return static_cast<int64_t>(settings_[bandwidth == kPaged ? kPagedCost : kCopyCost] + static_cast<double>(bytes) / settings_[bandwidth] * 1e9);
}

int64_t take_turn(Card& card, int64_t earliest, int64_t duration) {
  int64_t seen = card.busy;
  int64_t start = std::max(earliest, seen);
  while (!card.busy.compare_exchange_weak(seen, start + duration)) start = std::max(earliest, seen);
  card.total += duration;
  return start;
}

Operation enqueue(int device, int stream, Kind kind, int32_t name, int64_t duration, int64_t bytes, int32_t flags, int64_t issue) {
  Stream& queue = devices_[device].streams[stream];
  int64_t start = std::max(issue + launch_delay(), queue.busy);
  if (cards_ != nullptr && kind == kKernel) start = take_turn(cards_[device], start, duration);
  queue.busy = start + duration;
  return {issue, start, queue.busy, issue, bytes, kind, device, stream, tid(), name, flags};
}

// A transfer that could start at once takes its turn on the engine; one behind other work of its stream does not hold the engine meanwhile.
Operation transfer(int device, int stream, Kind kind, int64_t bytes, bool pageable, int64_t issue) {
  Stream& queue = devices_[device].streams[stream];
  const bool staged = pageable && kind == kH2D;
  const Setting bandwidth = pageable ? kPaged : kind == kH2D ? kToDevice : kind == kD2H ? kToHost : kInside;
  int64_t& lane = devices_[device].lane[staged ? 0 : kind == kD2H ? 2 : 1];
  int64_t start = issue + launch_delay();
  const bool ready = queue.busy <= start || staged;
  start = std::max(start, queue.busy);
  if (ready && kind != kD2D) start = std::max(start, lane);
  queue.busy = start + transfer_ns(bytes, bandwidth);
  if (ready && kind != kD2D) lane = queue.busy;
  return {issue, start, queue.busy, issue, bytes, kind, device, stream, tid(), intern("copy"), 0};
}

int64_t device_clock(int64_t instant) {
  const double drift = static_cast<double>(instant - drift_from_) * settings_[kDrift] / 1e6;
  const double reading = static_cast<double>(instant - drift_from_) + drift + settings_[kOffset];
  const double resolution = std::max(1.0, settings_[kResolution]);
  return static_cast<int64_t>(std::floor(reading / resolution) * resolution);
}

}  // namespace

void share(const char* path) {
  unshare();
  const int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) throw Error(std::string("SIM error: cannot open ") + path);
  void* mapped = MAP_FAILED;
  if (ftruncate(file, sizeof(Card) * kDevices) == 0) mapped = mmap(nullptr, sizeof(Card) * kDevices, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) throw Error(std::string("SIM error: cannot map ") + path);
  std::lock_guard<std::mutex> held(lock_);
  cards_ = static_cast<Card*>(mapped);
}

void unshare() {
  std::lock_guard<std::mutex> held(lock_);
  if (cards_ != nullptr) munmap(cards_, sizeof(Card) * kDevices);
  cards_ = nullptr;
}

int64_t now() { return virtual_ ? virtual_now_.load() : monotonic(); }

void check(Api api) {
  std::lock_guard<std::mutex> held(lock_);
  planted(api);
}

void kernel(int device, int stream, const std::string& name, int64_t duration_ns) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiLaunch);
  const int64_t issue = called();
  if (Graph* graph = devices_[device].streams[stream].graph) {
    graph->nodes.push_back({kKernel, intern(name), duration_ns, 0});
    return;
  }
  note(enqueue(device, stream, kKernel, intern(name), duration_ns, 0, 0, issue));
}

void launch(int device, int stream, const std::string& name) {
  int64_t duration;
  {
    std::lock_guard<std::mutex> held(lock_);
    const auto found = costs_.find(name);
    duration = found != costs_.end() ? found->second : static_cast<int64_t>(settings_[kOperator]);
  }
  kernel(device, stream, name, duration);
}

Operation copy(int device, int stream, Kind kind, int64_t bytes, bool pageable, bool non_blocking) {
  const bool blocking = kind != kD2D && (pageable || !non_blocking);
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiCopy);
  const int64_t issue = called();
  if (Graph* graph = devices_[device].streams[stream].graph) {
    if (blocking) {
      kill(graph, "copy");
      throw Error("SIM error: a blocking copy is not permitted when stream is capturing");
    }
    graph->nodes.push_back({kind, intern("copy"), transfer_ns(bytes, kind == kH2D ? kToDevice : kToHost), bytes});
    return {};
  }
  Operation issued = transfer(device, stream, kind, bytes, pageable, issue);
  issued.flags = (pageable ? kPageable : 0) | (blocking ? kBlocking : 0);
  return issued;
}

void finish(Operation copy) {
  if (copy.end == 0) return;  // it went into a capture
  if (copy.flags & kBlocking) wait_until(copy.end);
  copy.returned = now();
  std::lock_guard<std::mutex> held(lock_);
  note(copy);
}

void scalar(int device, int stream, int64_t bytes) {
  Operation done;
  {
    std::lock_guard<std::mutex> held(lock_);
    planted(kApiCopy);
    ++counters_["implicit_syncs"];
    done = transfer(device, stream, kD2H, bytes, true, called());
  }
  wait_until(done.end);
  done.returned = now();
  done.kind = kScalar;
  done.flags = kPageable | kBlocking;
  std::lock_guard<std::mutex> held(lock_);
  note(done);
}

void synchronize_stream(int device, int stream) {
  int64_t until;
  {
    std::lock_guard<std::mutex> held(lock_);
    planted(kApiSynchronize);
    unsafe("synchronize");
    ++counters_["synchronizations"];
    called();
    until = devices_[device].streams[stream].busy;
  }
  wait_until(until);
}

void synchronize_device(int device) {
  int64_t until = 0;
  {
    std::lock_guard<std::mutex> held(lock_);
    planted(kApiSynchronize);
    unsafe("synchronize");
    ++counters_["synchronizations"];
    called();
    for (const Stream& stream : devices_[device].streams) until = std::max(until, stream.busy);
  }
  wait_until(until);
}

bool query_stream(int device, int stream) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiQuery);
  unsafe("query");
  return called() >= devices_[device].streams[stream].busy;
}

int new_stream(int device) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiStreamCreate);
  Device& owner = devices_[device];
  if (owner.next_stream >= kStreams) owner.next_stream = 1;  // as on CUDA: a pool, round and round
  return owner.next_stream++;
}

Event* record(Event* event, int device, int stream) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiRecord);
  if (event == nullptr) {
    planted(kApiEventCreate);
    event = new Event();
    ++counters_["events_created"];
  }
  const int64_t issue = called();
  Stream& queue = devices_[device].streams[stream];
  event->device = device;
  event->stream = stream;
  event->captured = queue.graph != nullptr;
  if (event->captured) return event;
  const Operation mark = enqueue(device, stream, kEvent, 0, 0, 0, 0, issue);
  event->instant = mark.end;
  if (settings_[kLogEvents] != 0) note(mark);
  return event;
}

void destroy(Event* event) {
  std::lock_guard<std::mutex> held(lock_);
  ++counters_["events_destroyed"];
  delete event;
}

bool query(Event* event) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiQuery);
  unsafe("query");
  if (event->captured) throw Error("SIM error: operation not permitted on an event last recorded in a capturing stream");
  return called() >= event->instant;
}

void synchronize(Event* event) {
  int64_t until;
  {
    std::lock_guard<std::mutex> held(lock_);
    planted(kApiSynchronize);
    unsafe("synchronize");
    ++counters_["synchronizations"];
    called();
    until = event->instant;
  }
  wait_until(until);
}

void wait(Event* event, int device, int stream) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiWait);
  called();
  int64_t& busy = devices_[device].streams[stream].busy;
  busy = std::max(busy, event->instant);
}

double elapsed_ms(Event* first, Event* second) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiElapsed);
  if (first->captured || second->captured) throw Error("SIM error: invalid argument: an event was recorded in a capture");
  if (first->device != second->device) throw Error("SIM error: events of different devices");
  called();
  return static_cast<float>(static_cast<double>(device_clock(second->instant) - device_clock(first->instant)) / 1e6);
}

bool capturing(int device, int stream) {
  std::lock_guard<std::mutex> held(lock_);
  return devices_[device].streams[stream].graph != nullptr;
}

Graph* capture_begin(int device, int stream, Mode mode) {
  std::lock_guard<std::mutex> held(lock_);
  Stream& queue = devices_[device].streams[stream];
  if (stream == 0) throw Error("SIM error: the default stream cannot be captured");
  if (queue.graph != nullptr) throw Error("SIM error: the stream is already capturing");
  Graph* graph = new Graph();
  graph->device = device;
  graph->stream = stream;
  graph->mode = mode;
  graph->owner = tid();
  graph->open = true;
  queue.graph = graph;
  captures_.push_back(graph);
  ++counters_["captures"];
  return graph;
}

void capture_end(Graph* graph) {
  std::lock_guard<std::mutex> held(lock_);
  if (!graph->open) throw Error("SIM error: no capture is open");
  graph->open = false;
  devices_[graph->device].streams[graph->stream].graph = nullptr;
  captures_.erase(std::remove(captures_.begin(), captures_.end(), graph), captures_.end());
  if (graph->invalid) throw Error("SIM error: operation failed due to a previous error during capture");
}

void replay(Graph* graph, int device, int stream) {
  std::lock_guard<std::mutex> held(lock_);
  planted(kApiLaunch);
  if (graph->open || graph->invalid) throw Error("SIM error: the graph was not captured");
  int64_t issue = called();
  for (const Node& node : graph->nodes) {
    Operation operation = enqueue(device, stream, node.kind, node.name, node.duration, node.bytes, kReplayed, issue);
    note(operation);
    issue = std::min(issue, operation.start);
  }
}

void destroy(Graph* graph) {
  std::lock_guard<std::mutex> held(lock_);
  if (graph->open) devices_[graph->device].streams[graph->stream].graph = nullptr;
  captures_.erase(std::remove(captures_.begin(), captures_.end(), graph), captures_.end());
  delete graph;
}

}  // namespace sim
