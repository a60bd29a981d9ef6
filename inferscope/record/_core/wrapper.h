/* What a decorated function is, and what its coroutines and generators are wrapped in. */
#ifndef INFERSCOPE_WRAPPER_H
#define INFERSCOPE_WRAPPER_H
#include "frame.h"

enum { FLAVOR_SYNC, FLAVOR_COROUTINE, FLAVOR_GENERATOR, FLAVOR_ASYNC_GENERATOR };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *func;
    Recorder *rec;
    const Def *def;     /* of a stage, or NULL */
    Request *template_; /* of a request, or NULL */
    PyObject *weakrefs, *dict;
    PyObject *extra; /* of a stand-in (stand_in.c), or NULL */
    char flavor;
} Decorated;

/* One that passes for `func` and, in dynamo's eyes, for `traced`; `extra` may be NULL. */
PyObject *decorated_new(Recorder *rec, PyObject *func, PyObject *traced, PyObject *extra, vectorcallfunc call);

/* Frames of running calls are not on the C stack: greenlets move that away while other code still walks the request's frame list. */
enum { FREE_FRAMES = 128 };
extern Frame *free_frames[FREE_FRAMES];
extern int free_frame_count;

static inline Frame *frame_new(void) {
    return LIKELY(free_frame_count > 0) ? free_frames[--free_frame_count] : PyMem_RawMalloc(sizeof(Frame));
}

static inline void frame_free(Frame *f) {
    if (LIKELY(free_frame_count < FREE_FRAMES))
        free_frames[free_frame_count++] = f;
    else
        PyMem_RawFree(f);
}

enum { WRAPPED_NEW, WRAPPED_OPEN, WRAPPED_DONE };

typedef struct {
    PyObject_HEAD
    PyObject *inner;
    Decorated *owner;
    Frame frame;      /* of a stage */
    Request *request; /* of a request */
    PyObject *weakrefs;
    char state, handed; /* handed: the first value is out */
} Wrapped;

static inline void wrapped_begin(Wrapped *w) {
    Decorated *d = w->owner;
    w->state = WRAPPED_OPEN;
    if (LIKELY(d->def != NULL)) {
        w->frame.def = d->def;
        frame_enter(d->rec, &w->frame, HOOK_NONE);
        return;
    }
    w->request = (Request *)request_clone(d->template_);
    if (w->request == NULL) {
        PyErr_Clear();
        return;
    }
    w->request->in_call = -1;
    request_begin(w->request, -1);
}

/* `error`: the exception type, or NULL. The exception in flight stays. */
static inline void wrapped_finish(Wrapped *w, PyObject *error) {
    if (w->state != WRAPPED_OPEN)
        return;
    w->state = WRAPPED_DONE;
    if (LIKELY(w->owner->def != NULL)) {
        frame_exit(w->owner->rec, &w->frame, error != NULL, HOOK_NONE);
    } else if (w->request != NULL) {
        request_end(w->request, error);
        Py_CLEAR(w->request);
    }
}
#endif
