/* Clocks and thread identity. */
#include "core.h"
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

THREAD_LOCAL ThreadState inferscope_thread;

/* Drops an error of a callback. Ctrl-C must not get lost with it: it is raised again, where Python looks for signals next. */
void swallow_error(void) {
    if (PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        PyErr_SetInterrupt();
    PyErr_Clear();
}

/* A test clock: any callable that returns nanoseconds. Its failures count, and must not disturb the exception in flight. */
static int64_t clock_python(Recorder *rec) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int64_t now = 0;
    PyObject *result = PyObject_CallNoArgs(rec->clock);
    if (result != NULL) {
        now = PyLong_AsLongLong(result);
        Py_DECREF(result);
    }
    if (PyErr_Occurred()) {
        swallow_error();
        rec->internal_errors++;
        now = clock_system();
    }
    PyErr_Restore(type, value, traceback);
    return now;
}

/* --- the time-stamp counter: 10 ns a reading instead of 24 --- */

ClockAnchor clock_anchor = {0};
static struct {
    uint64_t tsc;
    int64_t ns;
} first = {0, 0}; /* the oldest pair: the longer the base, the better the rate */

static int broken = 0;

enum { CALIBRATION_NS = 2000000, LONGEST_ANCHOR_NS = 100000000, BROKEN_NS = 50000000 };

/* Both clocks at one instant: the tightest of a few tries. */
static void read_pair(uint64_t *tsc, int64_t *ns) {
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 5; i++) {
        uint64_t before = __rdtsc();
        int64_t now = clock_system();
        uint64_t after = __rdtsc();
        if (after - before < best) {
            best = after - before;
            *tsc = before + best / 2;
            *ns = now;
        }
    }
}

static uint64_t rate_since_first(uint64_t tsc, int64_t ns) {
    return (uint64_t)(((unsigned __int128)(uint64_t)(ns - first.ns) << 32) / (tsc - first.tsc));
}

/* Starts a new stretch where the old one ends, bent so that it meets CLOCK_MONOTONIC at its own end: no steps, no turning back. After
 * a long pause in which nobody looked, it may step forward. */
static int64_t anchor_again(void) {
    uint64_t tsc = 0;
    int64_t ns = 0;
    read_pair(&tsc, &ns);
    uint64_t ticks = tsc > clock_anchor.tsc ? tsc - clock_anchor.tsc : 0;
    int64_t told = clock_anchor.ns + (int64_t)(((unsigned __int128)ticks * clock_anchor.rate) >> 32);
    int64_t stretch = ns - first.ns < LONGEST_ANCHOR_NS ? (ns - first.ns) : LONGEST_ANCHOR_NS, ahead = told - ns;
    uint64_t rate = rate_since_first(tsc, ns);
    if (ahead > BROKEN_NS) { /* the counter jumped: a migrated virtual machine, say */
        broken = 1;
        return ns;
    }
    if (ahead < -stretch / 100)
        told = ns, ahead = 0;
    if (ahead > stretch / 2)
        ahead = stretch / 2;
    clock_anchor.tsc = tsc;
    clock_anchor.ns = told;
    clock_anchor.valid = (uint64_t)(((unsigned __int128)(uint64_t)stretch << 32) / rate);
    clock_anchor.rate = (uint64_t)((unsigned __int128)rate * (uint64_t)(stretch - ahead) / (uint64_t)stretch);
    return told;
}

/* The kernel trusts the counter (constant rate, the same on all cores) when it keeps its own time with it. */
static int kernel_uses_tsc(const char *path) {
    char name[16] = "";
    FILE *f = fopen(path, "r");
    if (f != NULL) {
        if (fgets(name, sizeof name, f) == NULL)
            name[0] = 0;
        fclose(f);
    }
    return strcmp(name, "tsc\n") == 0;
}

static int tsc_ready(void) {
    static int state = -1; /* not tried, unusable, usable */
    if (state >= 0)
        return state;
    state = HAVE_TSC && kernel_uses_tsc(CLOCKSOURCE);
    if (!state)
        return 0;
    uint64_t tsc = 0;
    int64_t ns = 0;
    read_pair(&first.tsc, &first.ns);
    do
        read_pair(&tsc, &ns);
    while (ns - first.ns < CALIBRATION_NS);
    if (tsc <= first.tsc)
        return state = 0;
    clock_anchor = (ClockAnchor){.tsc = tsc, .ns = ns, .rate = rate_since_first(tsc, ns), .valid = tsc - first.tsc};
    return 1;
}

/* The kernel stops trusting the counter when it finds it unstable: then so do we, for good. Both clocks tell the same time, so that what
 * is open goes on. */
void clock_check(Recorder *rec, const char *path) {
    if (rec->clock_mode == CLOCK_TSC && !kernel_uses_tsc(path)) {
        broken = 1;
        rec->clock_mode = CLOCK_SYSTEM;
    }
}

int64_t clock_slow(Recorder *rec) {
    if (rec->clock_mode == CLOCK_PYTHON)
        return clock_python(rec);
    int64_t now = broken ? clock_system() : anchor_again();
    if (broken)
        rec->clock_mode = CLOCK_SYSTEM;
    return now;
}

/* INFERSCOPE_CLOCK: `monotonic` (default), or `tsc` or `auto`: the time-stamp counter where it can be trusted. */
int clock_default_mode(void) {
    const char *wanted = getenv("INFERSCOPE_CLOCK");
    if (wanted == NULL || (strcmp(wanted, "tsc") != 0 && strcmp(wanted, "auto") != 0))
        return CLOCK_SYSTEM;
    return tsc_ready() && !broken ? CLOCK_TSC : CLOCK_SYSTEM;
}

uint32_t thread_id_slow(void) {
#if defined(__linux__)
    inferscope_thread.tid = (uint32_t)syscall(SYS_gettid);
#elif defined(__APPLE__)
    uint64_t tid = 0;
    pthread_threadid_np(NULL, &tid);
    inferscope_thread.tid = (uint32_t)tid;
#else
    inferscope_thread.tid = (uint32_t)(uintptr_t)pthread_self();
#endif
    return inferscope_thread.tid;
}

/* The forking thread keeps its thread-local block, and with it the parent's id. */
static void forget_thread_id(void) {
    inferscope_thread.tid = 0;
}

int clock_setup(void) {
    static int registered = 0;
    if (!registered) {
        registered = 1;
        pthread_atfork(NULL, NULL, forget_thread_id);
    }
    return 0;
}

int64_t thread_cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

void thread_switches(int64_t *voluntary, int64_t *involuntary) {
#ifdef RUSAGE_THREAD
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) == 0) {
        *voluntary = usage.ru_nvcsw;
        *involuntary = usage.ru_nivcsw;
        return;
    }
#endif
    *voluntary = *involuntary = 0;
}
