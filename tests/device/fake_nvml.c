/* A driver's library for tests: two cards whose answers are set through fake_set(). */
#include <stdio.h>
#include <string.h>

typedef int status;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_info_v2;

static long values[2][8]; /* 0 utilisation, 1 used MiB, 2 clock MHz, 3 reasons */
static int failures[2][8];
static int calls, failing_init;

static int card(void *handle) { return handle == (void *)&values[1]; }

#define ANSWER(field) \
    calls++; \
    if (failures[card(handle)][field]) return failures[card(handle)][field]

void fake_set(int which, int field, long value, int failure) {
    values[which][field] = value;
    failures[which][field] = failure;
}
void fake_init_fails(int failure) { failing_init = failure; }
int fake_calls(void) { return calls; }

status nvmlInit_v2(void) { return failing_init; }
status nvmlInitWithFlags(unsigned flags) { (void)flags; return failing_init; }
status nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(status result) { (void)result; return "planted"; }
status nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
status nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)&values[index]; return 0; }
status nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
    snprintf(text, length, "GPU-0000000%d-aaaa-bbbb-cccc-dddddddddddd", card(handle) + 1);
    return 0;
}
status nvmlDeviceGetUtilizationRates(void *handle, utilization *found) {
    ANSWER(0);
    found->gpu = (unsigned)values[card(handle)][0];
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
    (void)kind;
    *found = (unsigned)values[card(handle)][2];
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
