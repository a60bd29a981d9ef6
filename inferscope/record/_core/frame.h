/* Entering and leaving a timed region: what every `with stage()`, decorated call and nested request runs.
 *
 * Exclusive time needs no events: each frame sums its finished children, and at its end puts (duration - children) in its column.
 * Those sums telescope to the request's wall time. When frames do not nest (tasks, threads), request.overlapping is set instead and
 * fold.c recomputes the vector from positions.
 */
#ifndef INFERSCOPE_FRAME_H
#define INFERSCOPE_FRAME_H
#include "core.h"

/* What a context variable looks like in every CPython from 3.10 to 3.14 with the GIL, up to the value that it read last. context.c tries
 * once whether this one does too; where not, it is asked in the documented way. */
typedef struct VarCache {
    PyObject_HEAD
    PyObject *name, *fallback, *value; /* value: borrowed */
    uint64_t thread, version;
} VarCache;

#ifdef INFERSCOPE_ABI3
#define CONTEXT_IS_CACHED 0
#elif PY_VERSION_HEX >= 0x030D0000
#define THREAD_STATE() PyThreadState_GetUnchecked()
#else
#define THREAD_STATE() _PyThreadState_UncheckedGet()
#endif
#ifndef CONTEXT_IS_CACHED
#ifdef Py_GIL_DISABLED
#define CONTEXT_IS_CACHED 0
#else
#define CONTEXT_IS_CACHED (PY_VERSION_HEX < 0x030F0000)
#endif
#endif

/* The context's request, borrowed, when it was entered by this thread and when that is known without a call; else NULL. */
ALWAYS_INLINE Request *context_request_of_thread(const Recorder *rec) {
#if CONTEXT_IS_CACHED
    const VarCache *cache = rec->cache;
    const PyThreadState *thread = THREAD_STATE();
    Request *r = (Request *)cache->value;
    uint64_t id = thread->id;
    if (LIKELY(r != NULL && cache->thread == id && cache->version == thread->context_ver && Py_IS_TYPE(r, TYPE(Request)) &&
               r->thread_state == id))
        return r;
#endif
    return NULL;
}

/* The same when that request is open, has room and calls no hook. Little-endian, as Slot is: an open, unwanted request's `state` is
 * 1 + 65536 * slot_count. */
ALWAYS_INLINE Request *context_request(const Recorder *rec) {
    Request *r = context_request_of_thread(rec);
    return LIKELY(r != NULL && (r->state & 0xffff) == 1 && r->state < (uint32_t)SLOT_LIMIT << 16) ? r : NULL;
}

/* Hangs `f` on the open request `r` (whose reference the frame takes over). */
static inline void frame_link(Frame *f, Request *r) {
    uint32_t tid = thread_id();
    f->request = r;
    f->generation = r->generation;
    f->prev = r->top;
    r->top = f;
    f->child_ns = 0;
    f->last_end = 0;
    if (LIKELY(r->slot_count < SLOT_LIMIT)) {
        Slot *s = &r->slots[r->slot_count];
        uint8_t flags = 0;
        f->slot = r->slot_count++;
        if (UNLIKELY(tid != r->tid)) {
            flags = FLAG_OTHER_THREAD;
            r->foreign_thread = 1;
        }
        /* one store for thread, column, parent and flags, in the order that Slot has them */
        uint64_t packed = tid | (uint64_t)(uint16_t)f->def->column << 32 | (uint64_t)f->prev->slot << 48 | (uint64_t)flags << 56;
        s->aux = 0;
        memcpy(&s->thread, &packed, sizeof packed);
    } else {
        f->slot = NO_SLOT;
        r->truncated = 1;
        if (tid != r->tid)
            r->foreign_thread = 1;
    }
}

static inline void frame_started(Frame *f, int64_t now) {
    f->start = now;
    if (f->request != NULL && f->slot != NO_SLOT)
        f->request->slots[f->slot].start = now;
}

/* Ends a linked or unlinked frame at `end`. */
static inline void frame_end(Recorder *rec, Frame *f, int64_t end, int64_t duration, int error) {
    Request *r = f->request;
    if (LIKELY(f->generation == r->generation)) {
        if (LIKELY(r->top == f))
            r->top = f->prev;
        else
            request_unlink_slow(r, f);
        r->vector[f->def->column] += duration - f->child_ns;
        f->prev->child_ns += duration;
        f->prev->last_end = end;
        if (LIKELY(f->slot != NO_SLOT)) {
            Slot *s = &r->slots[f->slot];
            s->end = end;
            if (UNLIKELY(error))
                s->flags |= FLAG_ERROR;
        }
    } else {
        rec->late_spans++;
        r->class_->late_spans++;
    }
}

/* What hooks are told of a region: nothing of one that may suspend. */
typedef enum { HOOK_NONE, HOOK_WITH, HOOK_CALL } HookKind;

SLOW_PATH void frame_enter_slow(Recorder *rec, Frame *f, HookKind kind);
SLOW_PATH void frame_exit_slow(Recorder *rec, Frame *f, int64_t end, int error, HookKind kind);

/* What frame_link() does when nothing is unusual; gives the frame's position. */
ALWAYS_INLINE Slot *frame_link_plain(Frame *f, Request *r) {
    uint32_t state = r->state;
    Frame *top = r->top;
    Slot *s = &r->slots[state >> 16];
    Py_INCREF(r);
    r->state = state + 65536;
    r->top = f;
    f->prev = top;
    f->request = r;
    f->child_ns = 0;
    f->last_end = 0;
    f->generation = r->generation;
    f->slot = (uint8_t)(state >> 16);
    /* one store for thread, column, parent and flags, in the order that Slot has them */
    uint64_t packed = r->tid | (uint64_t)(uint16_t)f->def->column << 32 | (uint64_t)top->slot << 48;
    s->aux = 0;
    memcpy(&s->thread, &packed, sizeof packed);
    return s;
}

/* `f->def` is set. The clock is read first, because the time-stamp counter waits for what comes before it; but a clock in Python may end
 * the request, so that one is read last. */
ALWAYS_INLINE void frame_enter(Recorder *rec, Frame *f, HookKind kind) {
    int64_t now;
    Request *r = context_request(rec);
    if (UNLIKELY(r == NULL)) {
        frame_enter_slow(rec, f, kind);
        return;
    }
    if (UNLIKELY(!clock_quick(rec, &now))) {
        Slot *s = frame_link_plain(f, r);
        s->start = f->start = clock_slow(rec);
        return;
    }
    Slot *s = frame_link_plain(f, r);
    s->start = f->start = now;
}

ALWAYS_INLINE void frame_exit(Recorder *rec, Frame *f, int error, HookKind kind) {
    int64_t end = rec_now(rec), duration = end - f->start;
    Request *r = f->request;
    const Def *def = f->def;
    /* on top: then the request is open and the frame its own */
    if (UNLIKELY(r == NULL || r->top != f || r->wanted || f->slot == NO_SLOT || error || def->series == NULL ||
                 (uint64_t)duration > (uint64_t)HIGHEST_NS)) {
        frame_exit_slow(rec, f, end, error, kind);
        return;
    }
    Frame *prev = f->prev;
    series_record2(def->series, duration);
    r->slots[f->slot].end = end;
    r->top = prev;
    r->vector[def->column] += duration - f->child_ns;
    prev->child_ns += duration;
    prev->last_end = end;
    Py_DECREF(r);
}

/* A region dropped without its end (a coroutine never finished): its time stays in the request, no value goes to the series. */
static inline void frame_abandon(Recorder *rec, Frame *f) {
    Request *r = f->request;
    if (r == NULL)
        return;
    if (f->generation == r->generation) {
        int64_t end = rec_now(rec);
        if (end < f->start)
            end = f->start;
        frame_end(rec, f, end, end - f->start, 0);
    }
    f->request = NULL;
    Py_DECREF(r);
}
#endif
