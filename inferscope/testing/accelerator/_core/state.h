// What the simulator remembers; `lock_` guards everything but the atomics. Containers are never destroyed: events die later than statics.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "simulator.h"

namespace sim {

struct Node {
  Kind kind;
  int32_t name;
  int64_t duration, bytes;
};

struct Graph {
  int device = 0, stream = 0;
  Mode mode = kGlobal;
  int32_t owner = 0;
  bool open = false, invalid = false;
  std::vector<Node> nodes;
};

struct Fault {
  long times;  // -1: until healed
  std::string message;
};

struct Stream {
  int64_t busy = 0;
  Graph* graph = nullptr;
};

struct Device {
  Stream streams[kStreams];
  int next_stream = 1;
  int64_t lane[3] = {0, 0, 0};  // staging of pageable copies, engine to the device, engine to the host
};

enum Setting {
  kLaunch,
  kJitter,
  kOperator,
  kCopyCost,
  kPagedCost,
  kCall,
  kToDevice,
  kToHost,
  kInside,
  kPaged,
  kDrift,
  kOffset,
  kResolution,
  kCapacity,
  kLogEvents,
  kLogLimit,
  kQueryKillsAll,
  kSettings
};

struct Default {
  const char* name;
  double value;
};

inline constexpr Default kDefaults[kSettings] = {
    {"launch_ns", 5000},
    {"jitter_ns", 0},
    {"operator_ns", 10000},
    {"copy_ns", 5000},
    {"pageable_ns", 5000},
    {"call_ns", 0},
    {"h2d_bytes_s", 12e9},
    {"d2h_bytes_s", 12e9},
    {"d2d_bytes_s", 500e9},
    {"pageable_bytes_s", 3e9},
    {"drift_ppm", 0},
    {"offset_ns", 0},
    {"resolution_ns", 500},
    {"memory_bytes", 8e9},
    {"log_events", 0},
    {"log_limit", 1e6},
    {"query_kills_all", 0}};

inline constexpr const char* kApis[kApiCount] = {"launch", "copy", "record", "query", "elapsed", "synchronize", "wait", "event_create", "stream_create", "allocate"};

inline std::mutex lock_;
inline Device devices_[kDevices];
inline double settings_[kSettings];
inline int64_t calls_[kApiCount];
inline bool faulty_ = false;
inline std::unordered_map<std::string, int64_t>& costs_ = *new std::unordered_map<std::string, int64_t>();
inline std::map<std::string, Fault>& faults_ = *new std::map<std::string, Fault>();
inline std::map<std::string, int64_t>& counters_ = *new std::map<std::string, int64_t>();
inline std::vector<Graph*>& captures_ = *new std::vector<Graph*>();
inline std::vector<Operation>& log_ = *new std::vector<Operation>();
inline std::vector<std::string>& names_ = *new std::vector<std::string>();
inline std::unordered_map<std::string, int32_t>& name_ids_ = *new std::unordered_map<std::string, int32_t>();
inline std::mt19937_64 random_{1};
inline std::atomic<bool> virtual_{false};
inline std::atomic<int64_t> virtual_now_{0};
inline int64_t drift_from_ = 0;
inline thread_local Mode mode_ = kGlobal;
inline thread_local std::string error_;

// One for each device, in a file that processes share.
struct Card {
  std::atomic<int64_t> busy{0};   // until when kernels of any process hold it
  std::atomic<int64_t> total{0};  // how long they did in all
};
inline Card* cards_ = nullptr;

int64_t monotonic();
void wait_until(int64_t instant);

}  // namespace sim
