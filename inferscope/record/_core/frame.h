/* Entering and leaving a timed region: what every `with stage()`, decorated call and nested request runs.
 *
 * Exclusive time needs no events: each frame sums its finished children, and at its end puts (duration - children) in its column.
 * Those sums telescope to the request's wall time. When frames do not nest (tasks, threads), request.overlapping is set instead and
 * fold.c recomputes the vector from positions.
 */
#ifndef INFERSCOPE_FRAME_H
#define INFERSCOPE_FRAME_H
#include "core.h"

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

/* `hook_kind`: "with", "call", or NULL for regions that may suspend. */
static inline void frame_enter(Recorder *rec, const Def *def, Frame *f, PyObject *hook_kind) {
    PyObject *current = NULL;
    f->def = def;
    f->request = NULL;
    f->slot = NO_SLOT;
    if (UNLIKELY(PyContextVar_Get(rec->var, NULL, &current) < 0)) {
        PyErr_Clear();
        rec->internal_errors++;
    }
    if (current != NULL) {
        if (LIKELY(Py_IS_TYPE(current, &Request_Type))) {
            Request *r = (Request *)current;
            if (UNLIKELY(r->wanted) && r->open && hook_kind != NULL)
                hook_call(rec, rec->on_enter, r, def->name, hook_kind);
            if (LIKELY(r->open)) {
                frame_link(f, r);
                f->start = rec_now(rec);
                if (LIKELY(f->slot != NO_SLOT))
                    r->slots[f->slot].start = f->start;
                return;
            }
            f->request = r; /* closed: the end of this frame will be late */
            f->generation = 0;
        } else {
            Py_DECREF(current);
        }
    }
    f->start = rec_now(rec);
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

static inline void frame_exit(Recorder *rec, Frame *f, int error, PyObject *hook_kind) {
    int64_t end = rec_now(rec);
    int64_t duration = end - f->start;
    Request *r = f->request;
    if (UNLIKELY(duration < 0)) {
        duration = 0;
        end = f->start;
    }
    if (LIKELY(f->def->series != NULL))
        series_record2(f->def->series, duration);
    if (r != NULL) {
        frame_end(rec, f, end, duration, error);
        f->request = NULL;
        if (UNLIKELY(r->wanted) && hook_kind != NULL) /* also after its end: what was entered is left */
            hook_call(rec, rec->on_exit, r, f->def->name, hook_kind);
        Py_DECREF(r);
    }
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
