/* Clocks and thread identity. */
#define _GNU_SOURCE
#include "core.h"
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

__thread ThreadState inferscope_thread __attribute__((tls_model("initial-exec")));

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
        PyErr_Clear();
        rec->internal_errors++;
        now = clock_system();
    }
    PyErr_Restore(type, value, traceback);
    return now;
}

int64_t clock_slow(Recorder *rec) {
    return clock_python(rec);
}

int clock_default_mode(void) {
    return CLOCK_SYSTEM;
}

uint32_t thread_id_slow(void) {
    inferscope_thread.tid = (uint32_t)syscall(SYS_gettid);
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
