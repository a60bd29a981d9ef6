/* A driver's library for tests: two cards whose answers are set through fake_set(), the second of which may hold a MIG instance. fake_follow()
 * takes the utilisation of the cards from the file that simulated accelerators share. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int status;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_info_v2;

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci;
typedef struct { void *device; unsigned long long type, data; unsigned instance, compute; } event;

/* 0 utilisation, 1 used MiB, 2 clock MHz, 3 reasons, 4 power mW, 5 temperature, 6 performance monitoring, 7 busy multiprocessors; the third card
 * is the instance */
static long values[3][8];
static int failures[3][8];
static int calls, failing_init, instances, subscribed[3];
static struct { int card; unsigned long long xid; } events[8];
static int event_count;
static const int64_t *shared;
static int64_t seen_total[2], seen_at[2];

static int card(void *handle) {
    for (int index = 0; index < 3; index++)
        if (handle == (void *)&values[index]) return index;
    return 0;
}

#define ANSWER(field) \
    calls++; \
    if (failures[card(handle)][field]) return failures[card(handle)][field]

void fake_set(int which, int field, long value, int failure) {
    values[which][field] = value;
    failures[which][field] = failure;
}
void fake_init_fails(int failure) { failing_init = failure; }
void fake_divide(int into) { instances = into; }
void fake_xid(int which, unsigned long long xid) {
    if (event_count < 8) {
        events[event_count].card = which;
        events[event_count++].xid = xid;
    }
}
int fake_follow(const char *path) {
    int file = open(path, O_RDONLY);
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, 2 * 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    shared = mapped == MAP_FAILED ? NULL : mapped;
    return shared != NULL;
}
/* Percent since the last call, as a driver tells it; -1 at the first one. */
static int followed(int which) {
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    int64_t now = moment.tv_sec * 1000000000LL + moment.tv_nsec, total = shared[2 * which + 1];
    int percent = seen_at[which] == 0 || now == seen_at[which] ? -1 : (int)(100 * (total - seen_total[which]) / (now - seen_at[which]));
    seen_total[which] = total;
    seen_at[which] = now;
    return percent > 100 ? 100 : percent;
}
int fake_calls(void) { return calls; }

status nvmlInit_v2(void) { return failing_init; }
status nvmlInitWithFlags(unsigned flags) { (void)flags; return failing_init; }
status nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(status result) { (void)result; return "planted"; }
status nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
status nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)&values[index]; return 0; }
status nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    const char *kind = card(handle) == 2 ? "MIG" : "GPU";
    snprintf(text, length, "%s-0000000%d-aaaa-bbbb-cccc-dddddddddddd", kind, card(handle) + 1);
    return 0;
}
status nvmlDeviceGetPciInfo_v3(void *handle, pci *found) {
    memset(found, 0, sizeof *found);
    found->bus = 0x3b + (unsigned)card(handle);
    return 0;
}
status nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    if (card(handle) != 1) return 3;
    *now = *pending = instances > 0;
    return 0;
}
status nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) { (void)handle; *count = 7; return 0; }
status nvmlDeviceGetMigDeviceHandleByIndex(void *parent, unsigned index, void **handle) {
    (void)parent;
    if (index != 0) return 6; /* not found */
    *handle = (void *)&values[2];
    return 0;
}
status nvmlEventSetCreate(void **set) { *set = (void *)events; return 0; }
status nvmlEventSetFree(void *set) { (void)set; memset(subscribed, 0, sizeof subscribed); return 0; }
status nvmlDeviceRegisterEvents(void *handle, unsigned long long kinds, void *set) {
    (void)set;
    if (kinds != 8) return 2;
    if (card(handle) == 2) return 3; /* an instance has none of its own */
    subscribed[card(handle)] = 1;
    return 0;
}
status nvmlEventSetWait_v2(void *set, event *found, unsigned timeout) {
    (void)set;
    (void)timeout;
    if (event_count == 0) return 10; /* timeout */
    if (!subscribed[events[0].card]) return 999;
    memset(found, 0, sizeof *found);
    found->device = (void *)&values[events[0].card];
    found->type = 8;
    found->data = events[0].xid;
    memmove(events, events + 1, sizeof events[0] * (size_t)--event_count);
    return 0;
}
status nvmlDeviceGetPowerUsage(void *handle, unsigned *found) {
    ANSWER(4);
    *found = (unsigned)values[card(handle)][4];
    return 0;
}
status nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *found) {
    ANSWER(5);
    (void)sensor;
    *found = (unsigned)values[card(handle)][5];
    return 0;
}
status nvmlDeviceGetUtilizationRates(void *handle, utilization *found) {
    ANSWER(0);
    int percent = shared != NULL && card(handle) < 2 ? followed(card(handle)) : (int)values[card(handle)][0];
    if (percent < 0) return 999;
    found->gpu = (unsigned)percent;
    found->memory = 0;
    return 0;
}
status nvmlDeviceGetMemoryInfo(void *handle, memory_info *found) {
    ANSWER(1);
    found->total = 80ULL << 30;
    found->used = (unsigned long long)values[card(handle)][1] << 20;
    found->free = found->total - found->used;
    return 0;
}
status nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *found) {
    ANSWER(2);
    *found = kind == 2 ? 2619 : (unsigned)values[card(handle)][2];
    return 0;
}
#ifndef OLD_DRIVER
status nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *found) {
    ANSWER(3);
    *found = (unsigned long long)values[card(handle)][3];
    return 0;
}
#endif
status nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *found) {
    calls++;
    *found = 0x8;
    (void)handle;
    return 0;
}
#ifndef OLD_DRIVER
typedef struct { unsigned version, supported; } gpm_support;
typedef struct { int card, serial; long busy; } gpm_sample;
typedef struct { unsigned id; int result; double value; const char *names[3]; } gpm_metric;
typedef struct { unsigned version, count; gpm_sample *first, *second; gpm_metric metrics[]; } gpm_request;
static int gpm_serial, gpm_samples;
int fake_samples(void) { return gpm_samples; }
status nvmlGpmQueryDeviceSupport(void *handle, gpm_support *found) {
    if (failures[card(handle)][6]) return failures[card(handle)][6];
    found->supported = values[card(handle)][6] != 0;
    return found->version == 1 ? 0 : 7; /* a size that does not fit */
}
status nvmlGpmSampleAlloc(gpm_sample **made) { gpm_samples++; *made = calloc(1, sizeof **made); return 0; }
status nvmlGpmSampleFree(gpm_sample *sample) { gpm_samples--; free(sample); return 0; }
status nvmlGpmSampleGet(void *handle, gpm_sample *into) {
    if (failures[card(handle)][7]) return failures[card(handle)][7];
    *into = (gpm_sample){card(handle), ++gpm_serial, values[card(handle)][7]};
    return 0;
}
status nvmlGpmMetricsGet(gpm_request *asked) {
    if (asked->version != 1 || asked->first->serial >= asked->second->serial || asked->first->card != asked->second->card) return 2;
    for (unsigned index = 0; index < asked->count; index++) {
        gpm_metric *metric = &asked->metrics[index];
        metric->result = metric->id == 5 ? 3 : 0; /* tensor cores are not told */
        metric->value = metric->id == 2 ? (double)asked->second->busy : metric->id == 20 ? 100.0 : metric->id == 21 ? 2000.0 : 50.0;
    }
    return 0;
}
#endif
