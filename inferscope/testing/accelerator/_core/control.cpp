// What the Python side calls through ctypes; 0 or a value, -1 with `sim_error()` on failure.
#include <algorithm>
#include <cstring>

#include "state.h"

using namespace sim;

extern "C" {

const char* sim_error() { return error_.c_str(); }

int64_t sim_now() { return now(); }

void sim_clock(int is_virtual, int64_t start) {
  std::lock_guard<std::mutex> held(lock_);
  virtual_now_ = start;
  virtual_ = is_virtual != 0;
  drift_from_ = now();
  for (Device& device : devices_) {
    for (Stream& stream : device.streams) stream.busy = 0;
    std::fill(std::begin(device.lane), std::end(device.lane), 0);
  }
}

void sim_advance(int64_t nanoseconds) { virtual_now_ += nanoseconds; }

void sim_advance_to(int64_t instant) {
  if (virtual_) wait_until(instant);
}

int sim_set(const char* name, double value) {
  std::lock_guard<std::mutex> held(lock_);
  for (int index = 0; index < kSettings; ++index) {
    if (std::strcmp(kDefaults[index].name, name) != 0) continue;
    settings_[index] = value;
    if (index == kCapacity) set_capacity(static_cast<size_t>(value));
    return 0;
  }
  return -1;
}

void sim_cost(const char* name, int64_t nanoseconds) {
  std::lock_guard<std::mutex> held(lock_);
  costs_[name] = nanoseconds;
}

void sim_fail(const char* api, long times, const char* message) {
  std::lock_guard<std::mutex> held(lock_);
  faults_[api] = {times, message};
  faulty_ = true;
}

void sim_heal() {
  std::lock_guard<std::mutex> held(lock_);
  faults_.clear();
  faulty_ = false;
}

int sim_share(const char* path) {
  try {
    share(path);
    return 0;
  } catch (const Error& error) {
    error_ = error.what();
    return -1;
  }
}

int64_t sim_card_total(int device) {
  std::lock_guard<std::mutex> held(lock_);
  return cards_ == nullptr ? -1 : cards_[device].total.load();
}

void sim_reset(uint64_t seed) {
  unshare();
  std::lock_guard<std::mutex> held(lock_);
  for (int index = 0; index < kSettings; ++index) settings_[index] = kDefaults[index].value;
  set_capacity(static_cast<size_t>(settings_[kCapacity]));
  std::fill(std::begin(calls_), std::end(calls_), 0);
  faulty_ = false;
  costs_.clear();
  faults_.clear();
  counters_.clear();
  log_.clear();
  random_.seed(seed);
  virtual_ = false;
  drift_from_ = monotonic();
  for (Device& device : devices_) {
    for (Stream& stream : device.streams) stream.busy = 0;
    std::fill(std::begin(device.lane), std::end(device.lane), 0);
  }
}

int sim_relax(int mode) {
  const int before = mode_;
  mode_ = static_cast<Mode>(mode);
  return before;
}

int64_t sim_log_size() {
  std::lock_guard<std::mutex> held(lock_);
  return static_cast<int64_t>(log_.size());
}

int64_t sim_log_copy(Operation* into, int64_t from, int64_t most) {
  std::lock_guard<std::mutex> held(lock_);
  const int64_t count = std::max<int64_t>(0, std::min<int64_t>(most, static_cast<int64_t>(log_.size()) - from));
  std::copy_n(log_.begin() + from, count, into);
  return count;
}

void sim_log_clear() {
  std::lock_guard<std::mutex> held(lock_);
  log_.clear();
}

const char* sim_name(int32_t index) {
  std::lock_guard<std::mutex> held(lock_);
  return index >= 0 && index < static_cast<int32_t>(names_.size()) ? names_[index].c_str() : "";
}

int64_t sim_counters(char* into, int64_t size) {  // lines of "name value"
  std::lock_guard<std::mutex> held(lock_);
  std::string text;
  for (int api = 0; api < kApiCount; ++api) text += std::string("calls:") + kApis[api] + " " + std::to_string(calls_[api]) + "\n";
  for (const auto& [name, value] : counters_) text += name + " " + std::to_string(value) + "\n";
  if (static_cast<int64_t>(text.size()) < size) std::memcpy(into, text.c_str(), text.size() + 1);
  return static_cast<int64_t>(text.size());
}

int sim_kernel(int device, int stream, const char* name, int64_t nanoseconds) {
  try {
    kernel(device, stream, name, nanoseconds);
    return 0;
  } catch (const Error& error) {
    error_ = error.what();
    return -1;
  }
}

}  // extern "C"
