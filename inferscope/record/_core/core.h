/* Shared declarations of the native recorder.
 *
 * Reading order: core.h (the data), frame.h (entering and leaving a timed region: the hot path), request.c (begin and finish),
 * fold.c (exclusive vector), bands.c (what finish keeps), settle.c (what comes later), recorder.c and reader.c (the Python face).
 *
 * Threads: every function runs under the GIL. Nothing here gives it up except a call into Python (hooks, test clocks, wrapped
 * functions and locks), so a Frame list or a counter is never seen half written. The module does not claim free-threading support: what
 * is counted in series would be right without the GIL (COUNTS_ATOMIC), a request's frames and a class's sums would not.
 */
#ifndef INFERSCOPE_CORE_H
#define INFERSCOPE_CORE_H

#include "compat.h"
#include <stdint.h>
#include <time.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records are copied out as little-endian bytes; use the pure-Python recorder on this machine"
#endif

#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define SLOW_PATH __attribute__((noinline, cold))
#define ALWAYS_INLINE static inline __attribute__((always_inline))

enum {
    COLUMN_LIMIT = 64,
    COLUMN_UNATTRIBUTED = 0,
    COLUMN_OTHER = 1,
    SLOT_LIMIT = 64,
    SERIES_LIMIT = 512,
    CLASS_LIMIT = 64,
    NAME_LIMIT = 120,
    EDGE_LIMIT = 4,
    BASE_BANDS = 216,
    BAND_LIMIT = BASE_BANDS + EDGE_LIMIT,
    RETAINED_LIMIT = 8192,
    SITE_LIMIT = 1024,
    HEAP_LIMIT = 256,
    NO_SLOT = 255,
};

enum { FLAG_ERROR = 8, FLAG_OTHER_THREAD = 16, FLAG_CONTENDED = 32 };
enum { REASON_BREACH = 1, REASON_SLOWEST = 2, REASON_RESERVOIR = 4, REASON_PROFILED = 8 };

#define HIGHEST_NS INT64_C(60000000000)

/* Counts in HdrHistogram's index layout; `counts` only ever grows, so that a window is a difference of two copies. */
typedef struct {
    PyObject *kind;
    PyObject *labels; /* tuple of str */
    int64_t *counts;
    int64_t sum;
    int64_t clamped;
    int64_t lowest;
    int counts_len;
    int digits;
    int index;
} Series;

/* What a (kind, name) means: where its time goes. Lives as long as its Recorder, so frames borrow it. */
typedef struct {
    PyObject *kind;
    PyObject *name;
    Series *series; /* NULL: owns a column only */
    int column;     /* -1: owns a series only */
    PyObject *spare; /* a span for whoever opens this stage next; see span.c */
} Def;

typedef struct Request Request;
typedef struct Recorder Recorder;
typedef struct Pin Pin; /* settle.c */

/* One open timed region. Frames of a request form a list from `top` down to the request's own root frame. */
typedef struct Frame {
    struct Frame *prev;
    Request *request; /* strong; NULL outside any request */
    const Def *def;
    int64_t start;
    int64_t child_ns; /* time of finished children */
    int64_t last_end; /* latest end among them */
    uint32_t generation; /* the request's when linked; differs once that request is closed */
    uint8_t slot;
} Frame;

/* One position of a request's record, laid out as it leaves: struct "<qqqIHBB". */
typedef struct {
    int64_t start, end, aux;
    uint32_t thread;
    uint16_t column;
    uint8_t parent;
    uint8_t flags;
} Slot;
_Static_assert(sizeof(Slot) == 32 && offsetof(Slot, thread) == 24, "Slot is copied out as <qqqIHBB");

typedef struct {
    PyObject *request, *model, *cls; /* model and cls: NULL for None */
    Series *series;
    const Def *nested; /* column of this request inside another one */
    int index;
    int edge_count;
    int64_t edges[EDGE_LIMIT];
    int edge_band[EDGE_LIMIT];
    int64_t violations[EDGE_LIMIT];
    int64_t overdue[EDGE_LIMIT]; /* past their deadline, though not above the edge */
    int64_t count, errors, items, excluded, shed, cancelled, late_spans, truncated;
    int64_t wall_ns, cpu_ns, cpu_wall_ns, cpu_requests; /* cpu_*ns: sums with weights */
    int64_t ewma_ns, begun;
    int cpu_drawn; /* which of the present 64 requests is measured when they are short */
    int64_t band_counts[BAND_LIMIT];
    int64_t *band_sums; /* BAND_LIMIT x COLUMN_LIMIT */
    uint32_t seen[BAND_LIMIT];
    int64_t heap[HEAP_LIMIT]; /* min-heap of this epoch's slowest walls */
    int heap_len;
} Class;

/* A retained request on its way to the reader; `payload` is the vector, then the slots. */
typedef struct {
    int64_t id, start, wall, items, cpu_ns, nvcsw, nivcsw;
    double size;
    PyObject *error, *trace;
    uint32_t thread;
    int class_index, band, reasons, columns, room, spans; /* room: columns that fit before the slots */
    char has_size, has_cpu, truncated, withheld, incomplete;
    int64_t payload[];
} Retained;

/* Where a hold began that others waited for. */
typedef struct {
    PyObject *lock, *site, *stage, *request; /* of the holder, NULL for None */
    int64_t waits, wait_ns, longest_hold_ns;
} Site;

struct Request {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Recorder *rec;
    Class *class_;
    Frame *top;
    Frame root;
    Frame link;     /* this request as a region of the one around it */
    Request *outer; /* strong */
    Request *open_next, *open_prev;
    PyObject *error, *trace, *weakrefs;
    PyObject *packed; /* of a carrier that ended; see splice.c */
    Pin *pin;         /* while open and a device span is pending */
    int64_t id, started_ns, items, wall;
    double size;
    int64_t cpu_begin, nvcsw, nivcsw, cpu_ns;
    uint64_t activity, nested_activity;
    uint64_t thread_state; /* id of the interpreter's thread state at entry */
    uint32_t generation, tid;
    int depth;
    char used, entered, has_size, has_started, has_cpu;
    union {
        uint32_t state; /* all of it at once, for frame.h */
        struct {
            char open, wanted;
            uint8_t slot_count, unused;
        };
    };
    signed char in_call; /* 0 with statement, 1 decorated function, -1 decorated function that may suspend */
    char overlapping, truncated, profiled, foreign_thread;
    char cpu_measured; /* for how many requests it stands; 0 when it is not measured */
    char in_forward;   /* a module's forward runs on this request's thread; see stand_in.c */
    int64_t vector[COLUMN_LIMIT];
    Slot slots[SLOT_LIMIT];
};

typedef struct {
    PyObject *name;
    Def *def;
} StageCache;

typedef struct {
    PyObject *name, *model, *cls;
    Class *class_;
} ClassCache;

/* Where a holder was seen before, so that a look need not format text; an entry is only a shortcut. */
typedef struct {
    PyObject *lock, *code; /* strong */
    const Def *stage;
    const Class *class_;
    int position, site;
} SiteCache;

enum { STAGE_CACHE = 128, CLASS_CACHE = 64, SITE_CACHE = 32 };
enum { CLOCK_SYSTEM = 0, CLOCK_TSC = 1, CLOCK_PYTHON = 2 };
enum { CPU_AUTO, CPU_ON, CPU_OFF };

struct Recorder {
    PyObject_HEAD
    char enabled, armed, lock_holds, cpu_mode, clock_mode;
    PyObject *clock;
    PyObject *var; /* ContextVar holding the current Request */
    const struct VarCache *cache; /* where that keeps what it read last; see frame.h */
    PyObject *on_start, *on_enter, *on_exit, *on_finish;
    PyObject *trace_context; /* asked for the application's span when a request is kept; NULL for nobody */
    StageCache stage_cache[STAGE_CACHE];
    ClassCache class_cache[CLASS_CACHE];
    PyObject *columns;      /* list of (kind, name) */
    PyObject *column_index; /* {(kind, name): int} */
    PyObject *def_index;    /* {(kind, name): index into defs} */
    PyObject *class_index;  /* {(name, model, cls): int} */
    PyObject *edges;        /* {request name: tuple of int} */
    Def **defs;
    int def_count, def_room, column_count, series_count, class_count;
    Def *other, *backlog;
    Series *series[SERIES_LIMIT + CLASS_LIMIT + 1]; /* requests and "other" always find room */
    Class *classes[CLASS_LIMIT];
    Class *hidden; /* of carriers */
    Request *open_head;
    Retained **retained;
    int retained_count;
    int64_t next_id;
    int breach_left, breach_budget, reservoir, slowest;
    uint64_t rng;
    Site **sites;
    int *site_ids;
    int site_count;
    SiteCache site_cache[SITE_CACHE];
    PyObject *site_index; /* {(lock, site, stage, request): index into sites} */
    PyObject *weakrefs;
    Pin **pins;
    int pin_count;
    int64_t late_spans, truncated, column_overflow, series_overflow, retained_dropped, hook_errors, internal_errors;
    int64_t device_incomplete, pins_refused, settles_refused;
};

/* Per thread: native id (a system call otherwise) and how many requests began or ended here. */
typedef struct {
    uint64_t activity;
    uint32_t tid;
} ThreadState;
#if defined(__linux__)
#define THREAD_LOCAL __thread __attribute__((tls_model("initial-exec"))) /* no call to find it; 16 bytes fit the loader's reserve */
#else
#define THREAD_LOCAL __thread
#endif
extern THREAD_LOCAL ThreadState inferscope_thread;

#define FOR_EACH_TYPE(X)                                                                                                            \
    X(EnterExit) X(Recorder) X(Request) X(Span) X(Noop) X(Attach) X(Lock) X(Decorated) X(Coroutine) X(Generator) X(AsyncGenerator)     \
    X(AsyncStep)
FOR_EACH_TYPE(DECLARE_TYPE)

/* Interned strings, made once in module.c. */
#define FOR_EACH_NAME(X)                                                                                                            \
    X(stage) X(request) X(lock) X(queue) X(other) X(unattributed) X(backlog) X(size) X(items) X(model) X(cls) X(started_ns)         \
    X(call) X(acquire) X(release) X(blocking) X(timeout) X(wait) X(wait_for) X(send) X(throw) X(close) X(asend) X(athrow)           \
    X(aclose) X(__qualname__) X(__name__) X(__code__) X(__wrapped__) X(__reduce__) X(__reduce_ex__) X(__func__) X(__class__)        \
    X(_torchdynamo_inline) X(f_globals) X(flags) X(aux) X(wrap_async) X(locked) X(_is_owned) X(_release_save) X(_acquire_restore)   \
    X(_at_fork_reinit) X(error) X(wrapped) X(name) X(co_flags) X(unknown)                                              \
    X(n) X(_value) X(counter) X(batch) X(first_byte)
#define DECLARE_NAME(n) extern PyObject *str_##n;
FOR_EACH_NAME(DECLARE_NAME)
#undef DECLARE_NAME
extern PyObject *str_with, *str_lock_wait, *str_lock_hold, *str_empty;

/* context.c */
void context_setup(Recorder *rec);

/* clock.c */
void swallow_error(void);
#define CLOCKSOURCE "/sys/devices/system/clocksource/clocksource0/current_clocksource"
void clock_check(Recorder *rec, const char *path);
SLOW_PATH int64_t clock_slow(Recorder *rec);
SLOW_PATH uint32_t thread_id_slow(void);
int clock_setup(void);
int clock_default_mode(void);
int64_t thread_cpu_ns(void);
void thread_switches(int64_t *voluntary, int64_t *involuntary);

/* The clock of time.perf_counter_ns(). */
#if defined(__APPLE__)
#define SYSTEM_CLOCK CLOCK_UPTIME_RAW
#else
#define SYSTEM_CLOCK CLOCK_MONOTONIC
#endif

static inline int64_t clock_system(void) {
    struct timespec t;
    clock_gettime(SYSTEM_CLOCK, &t);
    return (int64_t)t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

#if defined(__x86_64__)
#include <x86intrin.h>
#define HAVE_TSC 1
#else
#define HAVE_TSC 0
#define __rdtsc() UINT64_C(0)
#endif

/* Nanoseconds from the time-stamp counter: ns + (ticks since tsc) * rate, for `valid` ticks; then clock_slow() anchors anew. */
typedef struct {
    uint64_t tsc, rate /* ns a tick, times 2^32 */, valid;
    int64_t ns;
} ClockAnchor;
extern ClockAnchor clock_anchor;

/* A reading that needs no call into Python nor a new anchor; 0 when this one does, and nothing was read. */
ALWAYS_INLINE int clock_quick(const Recorder *rec, int64_t *now) {
    if (LIKELY(rec->clock_mode == CLOCK_SYSTEM)) {
        *now = clock_system();
        return 1;
    }
    if (LIKELY(rec->clock_mode == CLOCK_TSC)) {
        uint64_t ticks = __rdtsc() - clock_anchor.tsc;
        if (LIKELY(ticks < clock_anchor.valid)) {
            *now = clock_anchor.ns + (int64_t)(((unsigned __int128)ticks * clock_anchor.rate) >> 32);
            return 1;
        }
    }
    return 0;
}

static inline int64_t rec_now(Recorder *rec) {
    int64_t now;
    return LIKELY(clock_quick(rec, &now)) ? now : clock_slow(rec);
}

static inline uint32_t thread_id(void) {
    uint32_t tid = inferscope_thread.tid;
    return LIKELY(tid != 0) ? tid : thread_id_slow();
}

/* Counts are added to and read by threads at once where nothing else keeps them apart; tests/native/counts.c tries both ways. */
#ifndef COUNTS_ATOMIC
#ifdef Py_GIL_DISABLED
#define COUNTS_ATOMIC 1
#else
#define COUNTS_ATOMIC 0
#endif
#endif
#if COUNTS_ATOMIC
#define COUNT_ADD(place, n) (void)__atomic_fetch_add(&(place), n, __ATOMIC_RELAXED)
#define COUNT_READ(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)
#else
#define COUNT_ADD(place, n) (void)((place) += (n))
#define COUNT_READ(place) (place)
#endif

/* histogram.c */
Series *series_new(PyObject *kind, PyObject *labels, int digits, int64_t lowest);
void series_free(Series *s);
SLOW_PATH void series_clamped(Series *s, int64_t v);
void series_record3(Series *s, int64_t v);
int64_t series_read(const Series *s, void *counts);

/* 2 digits, lowest 1 ns: 128 steps an octave above 256 ns; unsigned comparison catches negatives too. */
static inline void series_record2(Series *s, int64_t v) {
    if (UNLIKELY((uint64_t)v > (uint64_t)HIGHEST_NS)) {
        series_clamped(s, v);
        return;
    }
    int b = 56 - __builtin_clzll((uint64_t)v | 255);
    COUNT_ADD(s->counts[(b << 7) + (v >> b)], 1);
    COUNT_ADD(s->sum, v);
}

/* registry.c */
PyObject *clean_name(PyObject *name); /* new reference to an exact str of at most NAME_LIMIT characters, or NULL with no error set */
Def *registry_def(Recorder *rec, PyObject *kind, PyObject *name);
SLOW_PATH Def *registry_stage_slow(Recorder *rec, PyObject *name);
Def *registry_column(Recorder *rec, PyObject *kind, PyObject *name);
int registry_column_index(Recorder *rec, PyObject *kind, PyObject *name);
Class *registry_class(Recorder *rec, PyObject *name, PyObject *model, PyObject *cls);
int registry_setup(Recorder *rec);
void registry_free(Recorder *rec);
void class_set_edges(Recorder *rec, Class *c, PyObject *edges);

static inline Def *registry_stage(Recorder *rec, PyObject *name) {
    StageCache *c = &rec->stage_cache[((uintptr_t)name >> 4) & (STAGE_CACHE - 1)];
    return LIKELY(c->name == name) ? c->def : registry_stage_slow(rec, name);
}

/* bands.c */
int band_of(int64_t wall);
uint64_t random_u64(Recorder *rec);
int class_band(const Class *c, int64_t wall);
void class_fold(Recorder *rec, Request *r);
void retained_free(Retained *k);
void retained_clear(Recorder *rec);
PyObject *retained_drain(Recorder *rec);

/* fold.c */
void fold_vector(Request *r, int64_t end);

/* request.c */
PyObject *request_new(Recorder *rec, Class *c);
PyObject *request_parse(Recorder *rec, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *request_clone(const Request *template_);
void request_begin(Request *r, int caller_known);
void request_end(Request *r, PyObject *exc_type);
void request_finish_now(Request *r, PyObject *error);
void request_close_uncounted(Request *r);
Request *request_current(Recorder *rec); /* new reference to the current request, open or not, or NULL */
void request_set_error(Request *r, PyObject *error);
void request_interval(Request *r, int column, int64_t start, int64_t end, int flags, int64_t aux);
SLOW_PATH void request_unlink_slow(Request *r, Frame *f);
SLOW_PATH void hook_call(Recorder *rec, PyObject *hook, Request *r, PyObject *name, PyObject *kind);
extern PyObject *noop_object;

/* decorator.c, awaitable.c */
PyObject *decorate(Recorder *rec, Def *def, Request *template_, PyObject *func);
PyObject *wrap_result(PyTypeObject *type, PyObject *owner, PyObject *inner);

/* lock.c, blame.c */
PyObject *lock_new(Recorder *rec, PyObject *name, PyObject *wrapped);
int site_find(Recorder *rec, PyObject *lock, PyObject *site, PyObject *stage, PyObject *request);
int site_of_holder(Recorder *rec, PyObject *lock, PyObject *site, const Def *stage, const Class *c); /* index, or -1 */
int site_of_thread(Recorder *rec, PyObject *lock, unsigned long ident, const Def *stage, const Class *c);
int site_by_id(Recorder *rec, int64_t id);
PyObject *thread_within(unsigned long ident, PyObject *wanted);
void site_blame(Recorder *rec, int index, int64_t wait_ns, int64_t hold_ns);
void sites_zero(Recorder *rec);
void sites_free(Recorder *rec);
PyObject *sites_list(Recorder *rec);

/* settle.c */
extern PyMethodDef settle_methods[];
void pin_apply(Request *r);
void pin_hold(Recorder *rec, Request *r, int band, Retained *k);
void pin_forget(Request *r);
void pin_carry(Request *r);
void pin_inherit(Recorder *rec, int64_t carrier, Request *r);
void pins_expire(Recorder *rec);
void pins_clear(Recorder *rec);
void pins_refold(Recorder *rec, const Class *c);

/* splice.c */
extern PyMethodDef splice_methods[];
void carrier_finish(Request *r);

static inline int is_carrier(const Request *r) {
    return r->root.def != NULL;
}

/* span.c */
void span_orphan(PyObject *spare);

/* entry.c */
extern PyMethodDef entry_methods[];

/* reader.c */
extern PyMethodDef reader_methods[];

/* recorder.c: an interval for series and, when `r` is not NULL, for the request */
void record_interval(Recorder *rec, const Def *def, Request *r, int64_t start, int64_t end, int flags, int64_t aux);
#endif
