/* Coroutines, generators and async generators of decorated functions: timed from the first resume to the end, like a `with` block
 * around the body. Each delegates every step to the inner object and looks only at how the step ended. */
#include "wrapper.h"

enum { FREE_WRAPPED = 64 };
static Wrapped *free_wrapped[FREE_WRAPPED]; /* of all three types */
static int free_wrapped_count = 0;

static Wrapped *wrapped_new(PyTypeObject *type) {
    if (free_wrapped_count == 0)
        return PyObject_GC_New(Wrapped, type);
    Wrapped *w = free_wrapped[--free_wrapped_count];
    revive((PyObject *)w, type);
    return w;
}

PyObject *wrap_result(PyTypeObject *type, PyObject *owner, PyObject *inner) {
    Wrapped *w = wrapped_new(type);
    if (w == NULL) {
        PyErr_Clear();
        return inner;
    }
    w->inner = inner;
    w->owner = (Decorated *)Py_NewRef(owner);
    w->frame.request = NULL;
    w->request = NULL;
    w->weakrefs = NULL;
    w->state = WRAPPED_NEW;
    w->handed = 0;
    PyObject_GC_Track(w);
    return (PyObject *)w;
}

static int wrapped_traverse(PyObject *self, visitproc visit, void *arg) {
    VISIT_TYPE(self);
    Py_VISIT(((Wrapped *)self)->inner);
    Py_VISIT(((Wrapped *)self)->owner);
    return 0;
}

/* Dropped before its end: a stage leaves its time in the request; a request is not counted. */
static void wrapped_drop(Wrapped *w) {
    if (w->state != WRAPPED_OPEN)
        return;
    w->state = WRAPPED_DONE;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    frame_abandon(w->owner->rec, &w->frame);
    if (w->request != NULL) {
        request_close_uncounted(w->request);
        request_end(w->request, NULL);
        Py_CLEAR(w->request);
    }
    PyErr_Restore(type, value, traceback);
}

static int wrapped_clear(PyObject *self) {
    Wrapped *w = (Wrapped *)self;
    wrapped_drop(w);
    Py_XSETREF(w->inner, Py_NewRef(Py_None));
    return 0;
}

static void wrapped_dealloc(PyObject *self) {
    Wrapped *w = (Wrapped *)self;
    PyObject_GC_UnTrack(self);
    if (w->weakrefs != NULL)
        PyObject_ClearWeakRefs(self);
    wrapped_drop(w);
    Py_XDECREF(w->inner);
    Py_XDECREF(w->owner);
    if (free_wrapped_count < FREE_WRAPPED) {
        rest(self);
        free_wrapped[free_wrapped_count++] = w;
    } else {
        object_gc_free(self);
    }
}

/* Everything that is not ours is the inner object's: cr_frame, gi_code, __name__, __class__ (so that inspect tells the truth). */
static PyObject *wrapped_getattro(PyObject *self, PyObject *name) {
    if (PyUnicode_Compare(name, str___class__) != 0) {
        PyObject *own = PyObject_GenericGetAttr(self, name);
        if (own != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
            return own;
        PyErr_Clear();
    }
    return PyObject_GetAttr(((Wrapped *)self)->inner, name);
}

static PyObject *wrapped_repr(PyObject *self) {
    return PyObject_Repr(((Wrapped *)self)->inner);
}

/* --- steps --- */

/* A stream hands out a value: the first one of a request is what objectives "until the first byte" judge. The exception in flight stays. */
static void wrapped_handed(Wrapped *w) {
    if (LIKELY(w->request == NULL || w->handed || w->owner->flavor == FLAVOR_COROUTINE)) /* what a coroutine yields is for its loop */
        return;
    w->handed = 1;
    if (!w->request->open || !w->owner->rec->enabled)
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Recorder *rec = w->owner->rec;
    Def *def = registry_def(rec, str_first_byte, w->request->class_->request);
    if (def == NULL)
        rec->internal_errors++;
    else
        record_interval(rec, def, NULL, w->request->root.start, rec_now(rec), 0, 0);
    PyErr_Restore(type, value, traceback);
}

/* As a generator's send() ends: the value, or StopIteration carrying it. */
static PyObject *step_result(PySendResult status, PyObject *value) {
    if (status == PYGEN_NEXT || status == PYGEN_ERROR)
        return status == PYGEN_NEXT ? value : NULL;
    if (value == Py_None) {
        PyErr_SetNone(PyExc_StopIteration);
    } else { /* made by hand: a tuple or an exception would be unpacked as the arguments */
        PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, value);
        if (stop != NULL)
            PyErr_SetObject(PyExc_StopIteration, stop);
        Py_XDECREF(stop);
    }
    Py_DECREF(value);
    return NULL;
}

static PySendResult wrapped_am_send(PyObject *self, PyObject *arg, PyObject **result) {
    Wrapped *w = (Wrapped *)self;
    if (UNLIKELY(w->state == WRAPPED_NEW))
        wrapped_begin(w);
    PySendResult status = PyIter_Send(w->inner, arg, result);
    if (status != PYGEN_NEXT)
        wrapped_finish(w, status == PYGEN_ERROR ? PyErr_Occurred() : NULL);
    else
        wrapped_handed(w);
    return status;
}

static PyObject *wrapped_send(PyObject *self, PyObject *arg) {
    PyObject *value = NULL;
    PySendResult status = wrapped_am_send(self, arg, &value);
    return step_result(status, value);
}

/* tp_iternext: without an exception it means that None was returned, and that spares making a StopIteration. */
static PyObject *next_result(PySendResult status, PyObject *value) {
    if (status != PYGEN_RETURN || value != Py_None)
        return step_result(status, value);
    Py_DECREF(value);
    return NULL;
}

static PyObject *wrapped_next(PyObject *self) {
    PyObject *value = NULL;
    PySendResult status = wrapped_am_send(self, Py_None, &value);
    return next_result(status, value);
}

static PyObject *call_inner(PyObject *inner, PyObject *method, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *bound = PyObject_GetAttr(inner, method);
    PyObject *result = bound == NULL ? NULL : PyObject_Vectorcall(bound, args, (size_t)nargs, NULL);
    Py_XDECREF(bound);
    return result;
}

/* throw() raises StopIteration when the body returned. */
static PyObject *error_of_throw(void) {
    return PyErr_ExceptionMatches(PyExc_StopIteration) ? NULL : PyErr_Occurred();
}

static PyObject *wrapped_throw(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Wrapped *w = (Wrapped *)self;
    if (w->state == WRAPPED_NEW)
        w->state = WRAPPED_DONE; /* the body never ran */
    PyObject *result = call_inner(w->inner, str_throw, args, nargs);
    if (result == NULL)
        wrapped_finish(w, error_of_throw());
    return result;
}

static PyObject *wrapped_close(PyObject *self, PyObject *unused) {
    Wrapped *w = (Wrapped *)self;
    (void)unused;
    if (w->state == WRAPPED_NEW)
        w->state = WRAPPED_DONE;
    PyObject *result = call_inner(w->inner, str_close, NULL, 0);
    wrapped_finish(w, result == NULL ? PyErr_Occurred() : PyExc_GeneratorExit);
    return result;
}

static PyObject *self_iter(PyObject *self) {
    return Py_NewRef(self);
}

static PyMethodDef step_methods[] = {
    {"send", wrapped_send, METH_O, NULL},
    {"throw", (PyCFunction)(void (*)(void))wrapped_throw, METH_FASTCALL, NULL},
    {"close", wrapped_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};



#define WRAPPED_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION)
#define WRAPPED_SLOTS                                                                                                               \
    SLOT(tp_dealloc, wrapped_dealloc) SLOT(tp_traverse, wrapped_traverse) SLOT(tp_clear, wrapped_clear)                              \
    SLOT(tp_getattro, wrapped_getattro) SLOT(tp_repr, wrapped_repr)

DEFINE_TYPE(Coroutine, "Coroutine", sizeof(Wrapped),
            WRAPPED_FLAGS,
            WEAKREFS_AT(Wrapped, weakrefs),
            WRAPPED_SLOTS
            ASYNC_SLOTS(SLOT(am_await, self_iter) SLOT(am_send, wrapped_am_send))
            SLOT(tp_iternext, wrapped_next) /* 3.12 and later step anything but their own coroutines through this */
            SLOT(tp_methods, step_methods))

DEFINE_TYPE(Generator, "Generator", sizeof(Wrapped),
            WRAPPED_FLAGS,
            WEAKREFS_AT(Wrapped, weakrefs),
            WRAPPED_SLOTS
            ASYNC_SLOTS(SLOT(am_send, wrapped_am_send))
            SLOT(tp_iter, self_iter)
            SLOT(tp_iternext, wrapped_next)
            SLOT(tp_methods, step_methods))

/* --- async generators: each step is an awaitable of its own --- */

typedef struct {
    PyObject_HEAD
    PyObject *inner; /* async_generator_asend or _athrow */
    Wrapped *generator;
    char closing; /* aclose(): its return is the generator's end */
} AsyncStep;

static PyObject *async_step(PyObject *self, PyObject *inner, char closing) {
    if (inner == NULL)
        return NULL;
    AsyncStep *s = PyObject_GC_New(AsyncStep, TYPE(AsyncStep));
    if (s == NULL) {
        PyErr_Clear();
        return inner;
    }
    s->inner = inner;
    s->generator = (Wrapped *)Py_NewRef(self);
    s->closing = closing;
    PyObject_GC_Track(s);
    return (PyObject *)s;
}

static int async_step_traverse(PyObject *self, visitproc visit, void *arg) {
    VISIT_TYPE(self);
    Py_VISIT(((AsyncStep *)self)->inner);
    Py_VISIT(((AsyncStep *)self)->generator);
    return 0;
}

static void async_step_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((AsyncStep *)self)->inner);
    Py_XDECREF((PyObject *)((AsyncStep *)self)->generator);
    object_gc_free(self);
}

static void async_step_failed(AsyncStep *s) {
    wrapped_finish(s->generator, PyErr_ExceptionMatches(PyExc_StopAsyncIteration) ? NULL : PyErr_Occurred());
}

static PySendResult async_step_am_send(PyObject *self, PyObject *arg, PyObject **result) {
    AsyncStep *s = (AsyncStep *)self;
    if (s->generator->state == WRAPPED_NEW && !s->closing)
        wrapped_begin(s->generator);
    PySendResult status = PyIter_Send(s->inner, arg, result);
    if (status == PYGEN_ERROR)
        async_step_failed(s);
    else if (status == PYGEN_RETURN && s->closing)
        wrapped_finish(s->generator, PyExc_GeneratorExit);
    else if (status == PYGEN_RETURN)
        wrapped_handed(s->generator);
    return status;
}

static PyObject *async_step_send(PyObject *self, PyObject *arg) {
    PyObject *value = NULL;
    PySendResult status = async_step_am_send(self, arg, &value);
    return step_result(status, value);
}

static PyObject *async_step_next(PyObject *self) {
    PyObject *value = NULL;
    PySendResult status = async_step_am_send(self, Py_None, &value);
    return next_result(status, value);
}

static PyObject *async_step_throw(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    AsyncStep *s = (AsyncStep *)self;
    PyObject *result = call_inner(s->inner, str_throw, args, nargs);
    if (result == NULL && !PyErr_ExceptionMatches(PyExc_StopIteration)) /* StopIteration: the step ended with a value */
        async_step_failed(s);
    else if (result == NULL && !s->closing)
        wrapped_handed(s->generator);
    return result;
}

static PyObject *async_step_close(PyObject *self, PyObject *unused) {
    (void)unused;
    return call_inner(((AsyncStep *)self)->inner, str_close, NULL, 0);
}

static PyMethodDef async_step_methods[] = {
    {"send", async_step_send, METH_O, NULL},
    {"throw", (PyCFunction)(void (*)(void))async_step_throw, METH_FASTCALL, NULL},
    {"close", async_step_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

DEFINE_TYPE(AsyncStep, "AsyncStep", sizeof(AsyncStep),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            ,
            SLOT(tp_dealloc, async_step_dealloc)
            SLOT(tp_traverse, async_step_traverse)
            ASYNC_SLOTS(SLOT(am_await, self_iter) SLOT(am_send, async_step_am_send))
            SLOT(tp_iternext, async_step_next)
            SLOT(tp_iter, self_iter)
            SLOT(tp_methods, async_step_methods))

static PyObject *agen_anext(PyObject *self) {
    PyObject *inner = ((Wrapped *)self)->inner;
    unaryfunc anext = (unaryfunc)PyType_GetSlot(Py_TYPE(inner), Py_am_anext);
    if (anext == NULL)
        return PyErr_Format(PyExc_TypeError, "%R is not an async iterator", inner);
    return async_step(self, anext(inner), 0);
}

static PyObject *agen_asend(PyObject *self, PyObject *value) {
    PyObject *args[] = {value};
    return async_step(self, call_inner(((Wrapped *)self)->inner, str_asend, args, 1), 0);
}

static PyObject *agen_athrow(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    return async_step(self, call_inner(((Wrapped *)self)->inner, str_athrow, args, nargs), 0);
}

static PyObject *agen_aclose(PyObject *self, PyObject *unused) {
    (void)unused;
    return async_step(self, call_inner(((Wrapped *)self)->inner, str_aclose, NULL, 0), 1);
}

static PyMethodDef agen_methods[] = {
    {"asend", agen_asend, METH_O, NULL},
    {"athrow", (PyCFunction)(void (*)(void))agen_athrow, METH_FASTCALL, NULL},
    {"aclose", agen_aclose, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

DEFINE_TYPE(AsyncGenerator, "AsyncGenerator", sizeof(Wrapped),
            WRAPPED_FLAGS,
            WEAKREFS_AT(Wrapped, weakrefs),
            WRAPPED_SLOTS
            ASYNC_SLOTS(SLOT(am_aiter, self_iter) SLOT(am_anext, agen_anext))
            SLOT(tp_methods, agen_methods))
