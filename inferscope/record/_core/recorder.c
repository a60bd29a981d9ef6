/* Recorder: the Python object through which everything is recorded. The reader's half is in reader.c. */
#include "core.h"

PyObject *recorder_stage(PyObject *self, PyObject *name);
PyObject *attach_new(Recorder *rec, PyObject *request);

/* --- recording --- */

static PyObject *recorder_request(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return request_parse((Recorder *)self, args, nargs, kwnames);
}

static PyObject *recorder_lock(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "lock() takes a name and a lock");
        return NULL;
    }
    PyObject *lock = lock_new((Recorder *)self, args[0], args[1]);
    if (lock != NULL)
        return lock;
    swallow_error();
    ((Recorder *)self)->internal_errors++;
    return Py_NewRef(args[1]);
}

void record_interval(Recorder *rec, const Def *def, Request *r, int64_t start, int64_t end, int flags, int64_t aux) {
    if (def->series != NULL)
        series_record2(def->series, end - start);
    if (r == NULL || def->column < 0)
        return;
    if (!r->open) {
        rec->late_spans++;
        r->class_->late_spans++;
        return;
    }
    if (start < r->root.start)
        start = r->root.start;
    if (end >= start)
        request_interval(r, def->column, start, end, flags, aux);
}

static int64_t as_int64(PyObject *value, int *ok) {
    PyObject *index = PyNumber_Index(value);
    int64_t n = index == NULL ? -1 : PyLong_AsLongLong(index);
    Py_XDECREF(index);
    if (n == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        *ok = 0;
    }
    return n;
}

/* interval(kind, name, start_ns, end_ns, /, *, flags=0, aux=0, request=None). Never raises. */
static PyObject *recorder_interval(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    Recorder *rec = (Recorder *)self;
    PyObject *request = Py_None;
    int64_t flags = 0, aux = 0;
    int ok = nargs == 4;
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (!rec->enabled)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; ok && i < keywords; i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i), *value = args[nargs + i];
        if (PyUnicode_Compare(key, str_flags) == 0)
            flags = as_int64(value, &ok);
        else if (PyUnicode_Compare(key, str_aux) == 0)
            aux = as_int64(value, &ok);
        else if (PyUnicode_Compare(key, str_request) == 0)
            request = value;
        else
            ok = 0;
    }
    int64_t start = ok ? as_int64(args[2], &ok) : 0, end = ok ? as_int64(args[3], &ok) : 0;
    Def *def = ok ? registry_def(rec, args[0], args[1]) : NULL;
    if (def == NULL) {
        rec->internal_errors++;
        Py_RETURN_NONE;
    }
    int given = Py_IS_TYPE(request, TYPE(Request)) && ((Request *)request)->rec == rec;
    Request *r = given ? (Request *)Py_NewRef(request) : request_current(rec);
    record_interval(rec, def, NULL, start, end, 0, 0); /* the series keeps the true duration */
    if (r != NULL && def->column >= 0) {
        const Def only_column = {.kind = def->kind, .name = def->name, .series = NULL, .column = def->column};
        int64_t now = rec_now(rec); /* what lies in the future cannot be part of the request yet */
        record_interval(rec, &only_column, r, start, end < now ? end : now, (int)flags, aux);
    }
    Py_XDECREF((PyObject *)r);
    Py_RETURN_NONE;
}

static PyObject *recorder_current(PyObject *self, PyObject *unused) {
    Request *r = request_current((Recorder *)self);
    (void)unused;
    if (r != NULL && r->open)
        return (PyObject *)r;
    Py_XDECREF((PyObject *)r);
    Py_RETURN_NONE;
}

static PyObject *recorder_attach(PyObject *self, PyObject *request) {
    PyObject *made = attach_new((Recorder *)self, request);
    if (made != NULL)
        return made;
    swallow_error();
    ((Recorder *)self)->internal_errors++;
    return Py_NewRef(noop_object);
}

/* --- settings --- */

/* A tuple of the first EDGE_LIMIT distinct positive edges, ascending. */
static PyObject *clean_edges(PyObject *values) {
    PyObject *set = PySet_New(values), *list = set == NULL ? NULL : PySequence_List(set), *edges = NULL;
    Py_XDECREF(set);
    if (list != NULL && PyList_Sort(list) == 0) {
        Py_ssize_t n = PyList_GET_SIZE(list);
        PyObject *head = PyList_GetSlice(list, 0, n < EDGE_LIMIT ? n : EDGE_LIMIT);
        edges = head == NULL ? NULL : PyList_AsTuple(head);
        Py_XDECREF(head);
    }
    Py_XDECREF(list);
    for (Py_ssize_t i = 0; edges != NULL && i < PyTuple_GET_SIZE(edges); i++) {
        (void)PyLong_AsLongLong(PyTuple_GET_ITEM(edges, i));
        if (PyErr_Occurred())
            Py_CLEAR(edges);
    }
    return edges;
}

static PyObject *recorder_set_edges(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Recorder *rec = (Recorder *)self;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "set_edges() takes a request name and its edges");
        return NULL;
    }
    PyObject *name = clean_name(args[0]), *edges = clean_edges(args[1]);
    if (name == NULL || edges == NULL || PyDict_SetItem(rec->edges, name, edges) < 0) {
        Py_XDECREF(name);
        Py_XDECREF(edges);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    for (int i = 0; i < rec->class_count; i++)
        if (PyUnicode_Compare(rec->classes[i]->request, name) == 0)
            class_set_edges(rec, rec->classes[i], edges);
    Py_DECREF(name);
    Py_DECREF(edges);
    Py_RETURN_NONE;
}

static PyObject *recorder_set_hooks(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"on_start", "on_enter", "on_exit", "on_finish", NULL};
    Recorder *rec = (Recorder *)self;
    PyObject *given[4] = {NULL, NULL, NULL, NULL};
    PyObject **fields[4] = {&rec->on_start, &rec->on_enter, &rec->on_exit, &rec->on_finish};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:set_hooks", names, &given[0], &given[1], &given[2], &given[3]))
        return NULL;
    for (int i = 0; i < 4; i++)
        Py_XSETREF(*fields[i], given[i] == NULL || given[i] == Py_None ? NULL : Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

static void class_zero(Class *c) {
    memset(c->violations, 0, sizeof c->violations);
    memset(c->overdue, 0, sizeof c->overdue);
    memset(c->band_counts, 0, sizeof c->band_counts);
    memset(c->band_sums, 0, (size_t)BAND_LIMIT * COLUMN_LIMIT * sizeof(int64_t));
    memset(c->seen, 0, sizeof c->seen);
    c->count = c->errors = c->items = c->excluded = c->shed = c->cancelled = c->late_spans = c->truncated = 0;
    c->wall_ns = c->cpu_ns = c->cpu_wall_ns = c->cpu_requests = c->ewma_ns = c->begun = 0;
    c->heap_len = 0;
}

/* In a forked child: names stay, everything counted and everything open goes. */
static PyObject *recorder_after_fork(PyObject *self, PyObject *unused) {
    Recorder *rec = (Recorder *)self;
    (void)unused;
    inferscope_thread.tid = 0;
    while (rec->open_head != NULL) {
        Request *r = (Request *)Py_NewRef((PyObject *)rec->open_head);
        request_close_uncounted(r);
        Py_DECREF(r);
    }
    PyObject *token = PyContextVar_Set(rec->var, Py_None);
    PyErr_Clear();
    Py_XDECREF(token);
    pins_clear(rec);
    retained_clear(rec);
    sites_zero(rec);
    for (int i = 0; i < rec->series_count; i++) {
        memset(rec->series[i]->counts, 0, (size_t)rec->series[i]->counts_len * sizeof(int64_t));
        rec->series[i]->sum = rec->series[i]->clamped = 0;
    }
    for (int i = 0; i < rec->class_count; i++)
        class_zero(rec->classes[i]);
    rec->breach_left = rec->breach_budget;
    rec->late_spans = rec->truncated = rec->column_overflow = rec->series_overflow = 0;
    rec->retained_dropped = rec->hook_errors = rec->internal_errors = 0;
    rec->device_incomplete = rec->pins_refused = rec->settles_refused = 0;
    rec->rng ^= (uint64_t)clock_system() << 1; /* siblings sample differently */
    Py_RETURN_NONE;
}

/* _site(lock, site, stage, request) -> id and _blame(id, wait_ns, hold_ns): for locks that are instrumented in Python. */
static PyObject *recorder_site(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Recorder *rec = (Recorder *)self;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "_site() takes lock, site, stage and request");
        return NULL;
    }
    int index = site_find(rec, args[0], args[1], args[2] == Py_None ? NULL : args[2], args[3] == Py_None ? NULL : args[3]);
    return PyLong_FromLong(index < 0 ? 0 : rec->site_ids[index]);
}

static PyObject *recorder_blame(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Recorder *rec = (Recorder *)self;
    int ok = nargs == 3;
    int64_t id = ok ? as_int64(args[0], &ok) : 0, wait = ok ? as_int64(args[1], &ok) : 0, hold = ok ? as_int64(args[2], &ok) : 0;
    int index = ok ? site_by_id(rec, id) : -1;
    if (index >= 0)
        site_blame(rec, index, wait, hold);
    Py_RETURN_NONE;
}

/* Name of the innermost stage that a request is in, or None. */
/* _within(ident, wanted) -> key: which of the functions `wanted` (a dict's keys) thread `ident` is in. */
static PyObject *recorder_within(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    if (nargs != 2 || !PyLong_Check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "_within() takes a thread's ident and a dict");
        return NULL;
    }
    return thread_within(PyLong_AsUnsignedLongMask(args[0]), args[1]);
}

static PyObject *recorder_stage_of(PyObject *self, PyObject *request) {
    (void)self;
    const Def *def = Py_IS_TYPE(request, TYPE(Request)) && ((Request *)request)->open ? ((Request *)request)->top->def : NULL;
    return Py_NewRef(def != NULL ? def->name : Py_None);
}

/* _record_values(kind, name, int64 buffer) -> ns it took: durations that were measured elsewhere, in bulk and into the series only. */
static PyObject *recorder_record_values(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Recorder *rec = (Recorder *)self;
    Py_buffer view;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "_record_values() takes kind, name and a buffer of int64");
        return NULL;
    }
    Def *def = registry_def(rec, args[0], args[1]);
    if (def == NULL || def->series == NULL)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(args[2], &view, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    int64_t start = clock_system();
    for (Py_ssize_t i = 0; i < view.len / (Py_ssize_t)sizeof(int64_t); i++)
        series_record2(def->series, ((const int64_t *)view.buf)[i]);
    int64_t took = clock_system() - start;
    PyBuffer_Release(&view);
    return PyLong_FromLongLong(took);
}

/* _check_clock(path): for tests. */
static PyObject *recorder_check_clock(PyObject *self, PyObject *path) {
    const char *name = PyUnicode_AsUTF8(path);
    if (name == NULL)
        return NULL;
    clock_check((Recorder *)self, name);
    Py_RETURN_NONE;
}

/* _read_clock(times) -> ns it took: what the clock alone costs, for the benchmark's floor. */
static PyObject *recorder_read_clock(PyObject *self, PyObject *times) {
    long n = PyLong_AsLong(times);
    if (n == -1 && PyErr_Occurred())
        return NULL;
    int64_t start = thread_cpu_ns();
    volatile int64_t last = 0;
    for (long i = 0; i < n; i++)
        last = rec_now((Recorder *)self);
    (void)last;
    return PyLong_FromLongLong(thread_cpu_ns() - start);
}

static PyMethodDef recorder_methods[] = {
    {"stage", recorder_stage, METH_O, "stage($self, name, /)\n--\n\nTime a region: `with recorder.stage(name):` or `@recorder.stage(name)`."},
    {"request", (PyCFunction)(void (*)(void))recorder_request, METH_FASTCALL | METH_KEYWORDS,
     "request($self, name, /, *, size=None, items=1, model=None, cls=None, started_ns=None)\n--\n\nOne unit that the objective judges."},
    {"lock", (PyCFunction)(void (*)(void))recorder_lock, METH_FASTCALL, "lock($self, name, lock, /)\n--\n\nName a lock; use what this returns."},
    {"interval", (PyCFunction)(void (*)(void))recorder_interval, METH_FASTCALL | METH_KEYWORDS,
     "interval($self, kind, name, start_ns, end_ns, /, *, flags=0, aux=0, request=None)\n--\n\nAn interval measured elsewhere. Never raises."},
    {"current", recorder_current, METH_NOARGS, "current($self, /)\n--\n\nThe open request of this context, or None."},
    {"attach", recorder_attach, METH_O, "attach($self, request, /)\n--\n\nContext manager: makes the request current in this thread or task."},
    {"set_edges", (PyCFunction)(void (*)(void))recorder_set_edges, METH_FASTCALL,
     "set_edges($self, request_name, edges_ns, /)\n--\n\nExact objective edges, at most four, for all classes of that request name."},
    {"set_hooks", (PyCFunction)(void (*)(void))recorder_set_hooks, METH_VARARGS | METH_KEYWORDS,
     "set_hooks($self, /, *, on_start=None, on_enter=None, on_exit=None, on_finish=None)\n--\n\nReplace all four hooks."},
    {"after_fork", recorder_after_fork, METH_NOARGS, "after_fork($self, /)\n--\n\nDrop everything counted or open; call in the child."},
    {"_within", (PyCFunction)(void (*)(void))recorder_within, METH_FASTCALL,
     "_within($self, ident, wanted, /)\n--\n\nInnermost function of a thread's stack that is a key of `wanted`, or None."},
    {"_stage_of", recorder_stage_of, METH_O, "_stage_of($self, request, /)\n--\n\nInnermost stage of a request."},
    {"_record_values", (PyCFunction)(void (*)(void))recorder_record_values, METH_FASTCALL,
     "_record_values($self, kind, name, values, /)\n--\n\nRecord an int64 buffer in a series; returns the ns it took."},
    {"_check_clock", recorder_check_clock, METH_O, "_check_clock($self, path, /)\n--\n\nLook at the kernel's clocksource there; drain() does."},
    {"_read_clock", recorder_read_clock, METH_O, "_read_clock($self, times, /)\n--\n\nCPU time of so many clock readings, ns."},
    {"_site", (PyCFunction)(void (*)(void))recorder_site, METH_FASTCALL, "_site($self, lock, site, stage, request, /)\n--\n\nId of a lock site."},
    {"_blame", (PyCFunction)(void (*)(void))recorder_blame, METH_FASTCALL,
     "_blame($self, site_id, wait_ns, hold_ns, /)\n--\n\nCharge a wait to a site; a negative wait only updates its longest hold."},
    {NULL, NULL, 0, NULL},
};

/* --- attributes --- */

static PyObject *get_flag(PyObject *self, void *closure) {
    return PyBool_FromLong(*((char *)self + (intptr_t)closure));
}

static int set_flag(PyObject *self, PyObject *value, void *closure) {
    int truth = value == NULL ? 0 : PyObject_IsTrue(value);
    if (truth < 0)
        return -1;
    *((char *)self + (intptr_t)closure) = (char)truth;
    return 0;
}

static const char *const cpu_modes[] = {"auto", "on", "off"};

static PyObject *get_cpu_mode(PyObject *self, void *closure) {
    (void)closure;
    return PyUnicode_FromString(cpu_modes[(int)((Recorder *)self)->cpu_mode]);
}

static int set_cpu_mode(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    for (char i = 0; value != NULL && PyUnicode_Check(value) && i < 3; i++) {
        if (PyUnicode_CompareWithASCIIString(value, cpu_modes[(int)i]) == 0) {
            ((Recorder *)self)->cpu_mode = i;
            return 0;
        }
    }
    PyErr_SetString(PyExc_ValueError, "cpu_mode is \"auto\", \"on\" or \"off\"");
    return -1;
}

static PyObject *get_clock(PyObject *self, void *closure) {
    static const char *const names[] = {"monotonic", "tsc", "custom"};
    (void)closure;
    return PyUnicode_FromString(names[(int)((Recorder *)self)->clock_mode]);
}

static PyObject *get_trace_context(PyObject *self, void *closure) {
    PyObject *asked = ((Recorder *)self)->trace_context;
    (void)closure;
    return Py_NewRef(asked != NULL ? asked : Py_None);
}

static int set_trace_context(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    Py_XSETREF(((Recorder *)self)->trace_context, value == NULL || value == Py_None ? NULL : Py_NewRef(value));
    return 0;
}

static PyGetSetDef recorder_getset[] = {
    {"clock_source", get_clock, NULL, "What instants come from: monotonic, tsc or custom.", NULL},
    {"enabled", get_flag, set_flag, "Hot switch; False hands out no-op objects.", (void *)offsetof(Recorder, enabled)},
    {"armed", get_flag, set_flag, "Whether on_start is called at each request start.", (void *)offsetof(Recorder, armed)},
    {"lock_holds", get_flag, set_flag, "Whether locks time their holds too.", (void *)offsetof(Recorder, lock_holds)},
    {"trace_context", get_trace_context, set_trace_context, "Called when a request is kept; returns the ids of the application's span.", NULL},
    {"cpu_mode", get_cpu_mode, set_cpu_mode, "When thread CPU and context switches are read: auto, on or off.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* --- life --- */

static PyObject *recorder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"clock", NULL};
    PyObject *clock = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$O:Recorder", names, &clock))
        return NULL;
    Recorder *rec = (Recorder *)PyType_GenericAlloc(type, 0);
    if (rec == NULL)
        return NULL;
    rec->enabled = rec->lock_holds = 1;
    rec->clock_mode = (char)(clock == Py_None ? clock_default_mode() : CLOCK_PYTHON);
    rec->clock = clock == Py_None ? NULL : Py_NewRef(clock);
    rec->breach_left = rec->breach_budget = 2048;
    rec->reservoir = 64;
    rec->slowest = 32;
    rec->rng = (uint64_t)clock_system() ^ ((uint64_t)(uintptr_t)rec << 20) ^ 1;
    rec->var = PyContextVar_New("inferscope.request", NULL);
    rec->retained = PyMem_RawCalloc(RETAINED_LIMIT, sizeof(Retained *));
    if (rec->var == NULL || rec->retained == NULL || registry_setup(rec) < 0) {
        Py_DECREF(rec);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    context_setup(rec);
    return (PyObject *)rec;
}

static int recorder_traverse(PyObject *self, visitproc visit, void *arg) {
    Recorder *rec = (Recorder *)self;
    VISIT_TYPE(self);
    Py_VISIT(rec->clock);
    Py_VISIT(rec->on_start);
    Py_VISIT(rec->on_enter);
    Py_VISIT(rec->on_exit);
    Py_VISIT(rec->on_finish);
    Py_VISIT(rec->trace_context);
    return 0;
}

/* The clock stays: spans that a cycle keeps alive may still read it, and it cannot be part of a cycle through rec->clock alone. */
static int recorder_clear(PyObject *self) {
    Recorder *rec = (Recorder *)self;
    Py_CLEAR(rec->on_start);
    Py_CLEAR(rec->on_enter);
    Py_CLEAR(rec->on_exit);
    Py_CLEAR(rec->on_finish);
    Py_CLEAR(rec->trace_context);
    rec->clock_mode = CLOCK_SYSTEM;
    Py_CLEAR(rec->clock);
    return 0;
}

static void recorder_dealloc(PyObject *self) {
    Recorder *rec = (Recorder *)self;
    PyObject_GC_UnTrack(self);
    if (rec->weakrefs != NULL)
        PyObject_ClearWeakRefs(self);
    recorder_clear(self);
    pins_clear(rec);
    PyMem_RawFree(rec->pins);
    if (rec->retained != NULL)
        retained_clear(rec);
    PyMem_RawFree(rec->retained);
    sites_free(rec);
    registry_free(rec);
    Py_CLEAR(rec->var);
    object_gc_free(self);
}

DEFINE_TYPE(Recorder, "Recorder", sizeof(Recorder),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
            WEAKREFS_AT(Recorder, weakrefs),
            SLOT(tp_doc, "Recorder(*, clock=None)\n--\n\nCounts, records and hands over; see inferscope.record.core.")
            SLOT(tp_new, recorder_new)
            SLOT(tp_dealloc, recorder_dealloc)
            SLOT(tp_traverse, recorder_traverse)
            SLOT(tp_clear, recorder_clear)
            SLOT(tp_methods, recorder_methods)
            SLOT(tp_getset, recorder_getset))

/* tp_methods holds one table; those of other files are added to the type once it is ready. */
int recorder_add_reader(void) {
    PyMethodDef *const tables[] = {reader_methods, splice_methods, entry_methods, settle_methods};
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++) {
        for (PyMethodDef *m = tables[t]; m->ml_name != NULL; m++) {
            PyObject *descriptor = PyDescr_NewMethod(TYPE(Recorder), m);
            int rc = descriptor == NULL ? -1 : type_set(TYPE(Recorder), m->ml_name, descriptor);
            Py_XDECREF(descriptor);
            if (rc < 0)
                return -1;
        }
    }
    return 0;
}
