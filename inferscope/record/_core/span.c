/* Span, and the small context managers: attach() and the no-op that a disabled recorder hands out.
 *
 * The descriptor trick. For `with`, CPython looks __enter__ and __exit__ up on the type and binds them; a C type with plain methods
 * pays two allocated bound-method objects for that (74 ns for an empty block). Here both names hold one EnterExit descriptor whose
 * __get__ returns the instance itself, and the instance is a vectorcall callable that tells the two apart by their argument count:
 * none enters, three leave, one decorates. An empty block falls to about 31 ns. contextlib.ExitStack takes the attributes from the
 * type and calls them with the instance in front, which is what EnterExit's own call is for.
 */
#include "frame.h"

enum { SPAN_NEW, SPAN_ENTERED, SPAN_NESTED, SPAN_ORPHAN }; /* NESTED: entered, and entered again; ORPHAN: outlived its recorder */

typedef struct Span {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Recorder *rec;
    Frame frame;
    struct Span *inner; /* of a NESTED one the innermost re-entry; each knows the one before it as its own `inner` */
    char state;
    char owns; /* whether `rec` is a reference; not that of a spare, which its recorder owns */
} Span;

enum { FREE_SPANS = 256 };
static Span *free_spans[FREE_SPANS];
static int free_span_count = 0;

/* --- EnterExit --- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
} EnterExit;

static PyObject *enter_exit_get(PyObject *self, PyObject *instance, PyObject *type) {
    (void)type;
    return Py_NewRef(instance != NULL ? instance : self);
}

static PyObject *enter_exit_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    (void)self;
    if ((n == 1 || n == 4) && kwnames == NULL && PyType_HasFeature(Py_TYPE(args[0]), Py_TPFLAGS_HAVE_VECTORCALL) &&
        PyObject_HasAttrString((PyObject *)Py_TYPE(args[0]), "__exit__"))
        return PyObject_Vectorcall(args[0], args + 1, (size_t)(n - 1), NULL);
    PyErr_SetString(PyExc_TypeError, "expected a context manager of inferscope, then nothing or (type, value, traceback)");
    return NULL;
}

DEFINE_TYPE(EnterExit, "EnterExit", sizeof(EnterExit),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            VECTORCALL_AT(EnterExit, vectorcall),
            SLOT(tp_doc, "Shared __enter__/__exit__ descriptor that binds to the instance itself.")
            SLOT(tp_call, PyVectorcall_Call)
            SLOT(tp_descr_get, enter_exit_get))

/* Puts the one descriptor under both names of a ready type. */
int enter_exit_install(PyTypeObject *type) {
    static EnterExit *shared = NULL;
    if (shared == NULL) {
        shared = PyObject_New(EnterExit, TYPE(EnterExit));
        if (shared == NULL)
            return -1;
        shared->vectorcall = enter_exit_call;
    }
    return type_set(type, "__enter__", (PyObject *)shared) < 0 || type_set(type, "__exit__", (PyObject *)shared) < 0 ? -1 : 0;
}

/* --- Span --- */

static PyObject *span_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames);

/* Dropped while entered. */
SLOW_PATH static void span_abandon(Span *s) {
    int nested = s->state == SPAN_NESTED;
    s->state = SPAN_NEW;
    frame_abandon(s->rec, &s->frame);
    if (nested)
        Py_CLEAR(s->inner);
}

static inline PyObject *span_new(Recorder *rec, const Def *def) {
    Span *s;
    if (LIKELY(free_span_count > 0)) {
        s = free_spans[--free_span_count];
        revive((PyObject *)s, TYPE(Span));
    } else {
        s = PyObject_New(Span, TYPE(Span));
        if (s == NULL)
            return NULL;
        s->vectorcall = span_vectorcall;
    }
    Py_INCREF(rec);
    s->rec = rec;
    s->frame.def = def;
    s->state = SPAN_NEW;
    s->owns = 1;
    return (PyObject *)s;
}

/* The stage's spare span is on loan while anybody but its Def refers to it: another open span of that name is made anew. What was entered
 * and dropped without an exit ends now. */
static PyObject *span_lend(Recorder *rec, Def *def) {
#ifndef Py_GIL_DISABLED
    Span *spare = (Span *)def->spare;
    if (LIKELY(spare != NULL && Py_REFCNT((PyObject *)spare) == 1)) {
        if (UNLIKELY(spare->state != SPAN_NEW))
            span_abandon(spare);
        return Py_NewRef((PyObject *)spare);
    }
    PyObject *made = span_new(rec, def);
    if (spare == NULL && made != NULL) {
        ((Span *)made)->owns = 0;
        Py_DECREF(rec);
        def->spare = Py_NewRef(made);
    }
    return made;
#else
    return span_new(rec, def);
#endif
}

/* Its recorder goes. Whoever still has the span may call it; nothing happens then. */
void span_orphan(PyObject *spare) {
    Span *s = (Span *)spare;
    if (s->state != SPAN_NEW)
        span_abandon(s);
    s->state = SPAN_ORPHAN;
    s->rec = NULL;
    s->frame.def = NULL;
    Py_DECREF(spare);
}

/* Recorder.stage(); here so that the compiler can inline what it calls. */
PyObject *recorder_stage(PyObject *self, PyObject *name) {
    Recorder *rec = (Recorder *)self;
    if (UNLIKELY(!rec->enabled))
        return Py_NewRef(noop_object);
    Def *def = registry_stage(rec, name);
    PyObject *span = LIKELY(def != NULL) ? span_lend(rec, def) : NULL;
    if (UNLIKELY(span == NULL)) {
        PyErr_Clear();
        return Py_NewRef(noop_object);
    }
    return span;
}

static void span_dealloc(PyObject *self) {
    Span *s = (Span *)self;
    if (UNLIKELY(s->state == SPAN_ENTERED || s->state == SPAN_NESTED))
        span_abandon(s);
    if (s->owns)
        Py_DECREF(s->rec);
    if (LIKELY(free_span_count < FREE_SPANS)) {
        rest(self);
        free_spans[free_span_count++] = s;
    } else {
        object_free(self);
    }
}

/* The same object entered again while open: a fresh span, last in first out. */
SLOW_PATH static void span_enter_again(Span *s) {
    Span *again = (Span *)span_new(s->rec, s->frame.def);
    if (again == NULL) {
        PyErr_Clear();
        s->rec->internal_errors++;
        return;
    }
    again->inner = s->state == SPAN_NESTED ? s->inner : NULL;
    again->state = SPAN_NESTED;
    s->inner = again;
    s->state = SPAN_NESTED;
    frame_enter(again->rec, &again->frame, HOOK_WITH);
}

SLOW_PATH static void span_leave_again(Span *s, int error) {
    Span *again = s->inner;
    s->inner = again->inner;
    s->state = s->inner != NULL ? SPAN_NESTED : SPAN_ENTERED;
    again->state = SPAN_NEW;
    frame_exit(again->rec, &again->frame, error, HOOK_WITH);
    Py_DECREF(again);
}

__attribute__((noinline)) static PyObject *span_enter(Span *s) {
    if (LIKELY(s->state == SPAN_NEW)) {
        s->state = SPAN_ENTERED;
        frame_enter(s->rec, &s->frame, HOOK_WITH);
    } else if (s->state != SPAN_ORPHAN) {
        span_enter_again(s);
    }
    return Py_NewRef((PyObject *)s);
}

__attribute__((noinline)) static PyObject *span_leave(Span *s, int error) {
    if (LIKELY(s->state == SPAN_ENTERED)) {
        s->state = SPAN_NEW;
        frame_exit(s->rec, &s->frame, error, HOOK_WITH);
    } else if (s->state == SPAN_NESTED) {
        span_leave_again(s, error);
    }
    Py_RETURN_NONE;
}

SLOW_PATH static PyObject *span_decorate(Span *s, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
    if (n == 1 && kwnames == NULL && s->state == SPAN_ORPHAN)
        return Py_NewRef(args[0]);
    if (n == 1 && kwnames == NULL)
        return decorate(s->rec, (Def *)s->frame.def, NULL, args[0]);
    PyErr_SetString(PyExc_TypeError, "a stage is a context manager or decorates one function");
    return NULL;
}

static PyObject *span_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (LIKELY(kwnames == NULL)) {
        if (n == 0)
            return span_enter((Span *)self);
        if (n == 3)
            return span_leave((Span *)self, args[0] != Py_None);
    }
    return span_decorate((Span *)self, args, n, kwnames);
}

static PyObject *span_label(const Span *s) { /* borrowed */
    return s->frame.def != NULL ? s->frame.def->name : str_empty;
}

static PyObject *span_repr(PyObject *self) {
    return PyUnicode_FromFormat("<inferscope stage %R>", span_label((Span *)self));
}

static PyObject *span_name(PyObject *self, void *closure) {
    (void)closure;
    return Py_NewRef(span_label((Span *)self));
}

static PyGetSetDef span_getset[] = {{"name", span_name, NULL, "The stage's name.", NULL}, {NULL, NULL, NULL, NULL, NULL}};

DEFINE_TYPE(Span, "Span", sizeof(Span),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            VECTORCALL_AT(Span, vectorcall),
            SLOT(tp_doc, "One timed region: a context manager and a decorator; made by Recorder.stage().")
            SLOT(tp_dealloc, span_dealloc)
            SLOT(tp_repr, span_repr)
            SLOT(tp_call, PyVectorcall_Call)
            SLOT(tp_getset, span_getset))

/* --- no-op --- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
} Noop;

PyObject *noop_object = NULL;

static PyObject *noop_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    (void)kwnames;
    if (n == 0)
        return Py_NewRef(self);
    if (n == 1)
        return Py_NewRef(args[0]); /* decorating: the function itself */
    Py_RETURN_NONE;
}

static PyObject *noop_method(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    (void)self, (void)args, (void)nargs, (void)kwnames;
    Py_RETURN_NONE;
}

static PyMethodDef noop_methods[] = {
    {"discard", (PyCFunction)(void (*)(void))noop_method, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"finish", (PyCFunction)(void (*)(void))noop_method, METH_FASTCALL | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

/* closure: 0 None, 1 False, 2 the int 0, 3 the int 1, 4 "" */
static PyObject *noop_get(PyObject *self, void *closure) {
    (void)self;
    switch ((intptr_t)closure) {
    case 1:
        Py_RETURN_FALSE;
    case 2:
    case 3:
        return PyLong_FromLong((long)(intptr_t)closure - 2);
    case 4:
        return Py_NewRef(str_empty);
    default:
        Py_RETURN_NONE;
    }
}

static int noop_set(PyObject *self, PyObject *value, void *closure) {
    (void)self, (void)value, (void)closure;
    return 0;
}

static PyGetSetDef noop_getset[] = {
    {"id", noop_get, noop_set, NULL, (void *)2},       {"name", noop_get, noop_set, NULL, (void *)4},
    {"model", noop_get, noop_set, NULL, (void *)0},    {"cls", noop_get, noop_set, NULL, (void *)0},
    {"size", noop_get, noop_set, NULL, (void *)0},     {"items", noop_get, noop_set, NULL, (void *)3},
    {"error", noop_get, noop_set, NULL, (void *)0},    {"trace", noop_get, noop_set, NULL, (void *)0},
    {"start_ns", noop_get, noop_set, NULL, (void *)2}, {"open", noop_get, noop_set, NULL, (void *)1},
    {"wanted", noop_get, noop_set, NULL, (void *)1},   {"profiled", noop_get, noop_set, NULL, (void *)1},
    {"packed", noop_get, noop_set, NULL, (void *)0},
    {NULL, NULL, NULL, NULL, NULL},
};

DEFINE_TYPE(Noop, "Noop", sizeof(Noop),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            VECTORCALL_AT(Noop, vectorcall),
            SLOT(tp_doc, "Stands for a stage or a request while the recorder is disabled.")
            SLOT(tp_call, PyVectorcall_Call)
            SLOT(tp_methods, noop_methods)
            SLOT(tp_getset, noop_getset))

int noop_setup(void) {
    if (noop_object == NULL) {
        Noop *n = PyObject_New(Noop, TYPE(Noop));
        if (n == NULL)
            return -1;
        n->vectorcall = noop_vectorcall;
        noop_object = (PyObject *)n;
    }
    return 0;
}

/* --- attach --- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Recorder *rec;
    PyObject *request;
    PyObject *before; /* list used as a stack, so that one object may be entered again */
} Attach;

static PyObject *attach_enter(Attach *a) {
    PyObject *before = NULL;
    if (a->before == NULL)
        a->before = PyList_New(0);
    if (a->before == NULL || PyContextVar_Get(a->rec->var, NULL, &before) < 0 ||
        PyList_Append(a->before, before != NULL ? before : Py_None) < 0) {
        PyErr_Clear();
        a->rec->internal_errors++;
    } else {
        PyObject *token = PyContextVar_Set(a->rec->var, a->request);
        if (token == NULL)
            PyErr_Clear();
        Py_XDECREF(token);
    }
    Py_XDECREF(before);
    return Py_NewRef(a->request);
}

static void attach_leave(Attach *a) {
    Py_ssize_t depth = a->before == NULL ? 0 : PyList_GET_SIZE(a->before);
    if (depth == 0)
        return;
    PyObject *before = Py_NewRef(PyList_GET_ITEM(a->before, depth - 1));
    PyObject *token = PyList_SetSlice(a->before, depth - 1, depth, NULL) < 0 ? NULL : PyContextVar_Set(a->rec->var, before);
    if (token == NULL)
        PyErr_Clear();
    Py_XDECREF(token);
    Py_DECREF(before);
}

static PyObject *attach_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    (void)args;
    if (kwnames == NULL && n == 0)
        return attach_enter((Attach *)self);
    if (kwnames == NULL && n == 3) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        attach_leave((Attach *)self);
        PyErr_Restore(type, value, traceback);
        Py_RETURN_NONE;
    }
    PyErr_SetString(PyExc_TypeError, "attach() gives a context manager");
    return NULL;
}

PyObject *attach_new(Recorder *rec, PyObject *request) {
    Attach *a = PyObject_New(Attach, TYPE(Attach));
    if (a == NULL)
        return NULL;
    a->vectorcall = attach_vectorcall;
    a->rec = (Recorder *)Py_NewRef((PyObject *)rec);
    a->request = Py_NewRef(Py_IS_TYPE(request, TYPE(Request)) && ((Request *)request)->rec == rec ? request : Py_None);
    a->before = NULL;
    return (PyObject *)a;
}

static void attach_dealloc(PyObject *self) {
    Attach *a = (Attach *)self;
    Py_XDECREF(a->before);
    Py_DECREF(a->request);
    Py_DECREF(a->rec);
    object_free(self);
}

DEFINE_TYPE(Attach, "Attach", sizeof(Attach),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            VECTORCALL_AT(Attach, vectorcall),
            SLOT(tp_doc, "Makes a request current in this thread or task; made by Recorder.attach().")
            SLOT(tp_dealloc, attach_dealloc)
            SLOT(tp_call, PyVectorcall_Call))
