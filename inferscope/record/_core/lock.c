/* InstrumentedLock: delegates to the wrapped lock, never replaces it.
 *
 * Try first: an uncontended acquire reads no clock for its wait and counts as a wait of 0. Only a contended one is timed, always.
 * Everything under "hold" is written by the holder alone, between its acquire and its release.
 *
 * Root blame: a waiter charges its wait to the code that was holding the lock, but a holder that itself had waited more than twice as
 * long as it then held is only one link of a queue: what waited for it is charged to the root that it had waited for.
 */
#include "core.h"
#include <pythread.h>

enum { RECENT_HOLDS = 16, PERMITS = 64 };
#define PEEK_EVERY_NS 100000

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Recorder *rec;
    PyObject *name, *wrapped, *acquire, *release, *weakrefs;
    const Def *def; /* series lock.wait, column lock:NAME */
    Series *holds;
    char plain;   /* one holder at a time, whoever releases: threading.Lock */
    char counted; /* re-entry by the owner is possible: RLock, Condition */
    struct Permit {
        unsigned long holder;
        int64_t since;
    } *permits; /* of a semaphore: who took what when, oldest first; NULL for other locks */
    int permit_count;
    /* the hold in progress; of a semaphore, the latest */
    unsigned long holder; /* thread ident, 0: nobody that we know of */
    int depth;
    int64_t since, waited;
    int waited_root, site;
    const Def *stage;
    const Class *class_;
    uint32_t sequence;
    int64_t last_peek;
    struct {
        uint32_t sequence;
        int root;
    } recent[RECENT_HOLDS]; /* who waiters of the last holds should charge */
} Lock;

static PyObject *false_args = NULL; /* (False,) */

/* The stage and the request that the holder is in, if any. */
static void note_holder(Lock *l) {
    Request *r = request_current(l->rec);
    int open = r != NULL && r->open;
    l->stage = open ? r->top->def : NULL; /* the root frame has none */
    l->class_ = open ? r->class_ : NULL;
    Py_XDECREF((PyObject *)r);
}

static void hold_begin(Lock *l, int64_t since, int64_t waited, int root) {
    unsigned long me = PyThread_get_thread_ident();
    if (l->counted && l->holder == me) {
        l->depth++;
        return;
    }
    l->depth = 0;
    l->since = since != 0 ? since : rec_now(l->rec);
    l->waited = waited;
    l->waited_root = root;
    l->site = -1;
    note_holder(l);
    l->sequence++;
    l->holder = me;
    if (UNLIKELY(l->permits != NULL) && l->permit_count < PERMITS)
        l->permits[l->permit_count++] = (struct Permit){me, l->since};
}

/* The latest holder is about to release for good. */
static void hold_end(Lock *l, int64_t hold) {
    if (l->holds != NULL)
        series_record2(l->holds, hold);
    int inherits = l->waited > 2 * hold && l->waited_root >= 0;
    if (l->site >= 0)
        site_blame(l->rec, l->site, -1, hold);
    l->recent[l->sequence % RECENT_HOLDS].sequence = l->sequence;
    l->recent[l->sequence % RECENT_HOLDS].root = inherits ? l->waited_root : l->site;
    l->holder = 0;
}

/* A permit counts as held from its acquire to a release by the same thread; released by another thread, the oldest is forgotten. */
static void permit_release(Lock *l) {
    unsigned long me = PyThread_get_thread_ident();
    int i = l->permit_count - 1, n = l->permit_count;
    while (i >= 0 && l->permits[i].holder != me)
        i--;
    struct Permit mine = {0, 0};
    if (i >= 0)
        mine = l->permits[i];
    if (n > 0) {
        i = i >= 0 ? i : 0;
        memmove(l->permits + i, l->permits + i + 1, (size_t)(n - i - 1) * sizeof *l->permits);
        l->permit_count--;
    }
    if (mine.holder == 0)
        return;
    int64_t hold = rec_now(l->rec) - mine.since;
    if (l->holder == me && l->since == mine.since)
        hold_end(l, hold);
    else if (l->holds != NULL)
        series_record2(l->holds, hold);
}

static void before_release(Lock *l, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (UNLIKELY(l->permits != NULL)) {
        long n = nargs + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames)) == 1 && PyLong_Check(args[0]) ? PyLong_AsLong(args[0]) : 1;
        PyErr_Clear();
        while (n-- > 0 && l->permit_count > 0)
            permit_release(l);
        return;
    }
    if (l->holder == 0 || l->holder != PyThread_get_thread_ident())
        return;
    if (l->depth > 0)
        l->depth--;
    else
        hold_end(l, rec_now(l->rec) - l->since);
}

/* --- contended acquire --- */

typedef struct {
    int64_t start;
    uint32_t sequence;
    int site;
} Wait;

static Wait wait_begin(Lock *l) {
    Wait w = {.start = rec_now(l->rec), .sequence = l->sequence, .site = l->site};
    if (l->holder == 0) { /* whoever has it has not got the GIL back yet, and will be the next hold */
        w.sequence++;
        w.site = -1;
    } else if (l->site < 0) {
        if (w.start - l->last_peek >= PEEK_EVERY_NS) {
            l->last_peek = w.start;
            l->site = site_of_thread(l->rec, l->name, l->holder, l->stage, l->class_);
        }
        if (l->site < 0)
            l->site = site_of_holder(l->rec, l->name, str_unknown, l->stage, l->class_);
        w.site = l->site;
    }
    return w;
}

static void wait_end(Lock *l, const Wait *w) {
    Recorder *rec = l->rec;
    int64_t now = rec_now(rec);
    int root = w->site;
    if (l->recent[w->sequence % RECENT_HOLDS].sequence == w->sequence)
        root = l->recent[w->sequence % RECENT_HOLDS].root;
    if (root < 0)
        root = site_find(rec, l->name, str_unknown, NULL, NULL);
    if (root >= 0)
        site_blame(rec, root, now - w->start, 0);
    Request *r = request_current(rec);
    record_interval(rec, l->def, r, w->start, now, FLAG_CONTENDED, root >= 0 ? rec->site_ids[root] : 0);
    Py_XDECREF((PyObject *)r);
    if (rec->lock_holds)
        hold_begin(l, now, now - w->start, root);
}

static int truth(PyObject *value) {
    int t = value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
    if (t < 0)
        PyErr_Clear();
    return t > 0;
}

static void acquired_at_once(Lock *l) {
    if (l->counted && l->holder != 0 && l->holder == PyThread_get_thread_ident()) {
        l->depth++;
        return;
    }
    if (l->def->series != NULL)
        COUNT_ADD(l->def->series->counts[0], 1);
    if (LIKELY(l->rec->lock_holds))
        hold_begin(l, 0, 0, -1);
}

/* `args` are the caller's own; a blocking acquire. */
static PyObject *acquire_blocking(Lock *l, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *result = PyObject_Call(l->acquire, false_args, NULL);
    if (result == NULL)
        return NULL;
    if (LIKELY(result == Py_True || truth(result))) {
        acquired_at_once(l);
        return result;
    }
    Py_DECREF(result);
    Wait w = wait_begin(l);
    result = PyObject_Vectorcall(l->acquire, args, (size_t)nargs, kwnames);
    if (result != NULL && truth(result))
        wait_end(l, &w);
    return result;
}

/* Whether a timeout is one that every attempt accepts; anything else is the wrapped lock's to judge, before it is tried. */
static int timeout_is_plain(const Lock *l, PyObject *timeout) {
    if (timeout == Py_None)
        return l->permits != NULL; /* "for ever" to a semaphore, an error to a lock */
    if (!PyFloat_CheckExact(timeout) && !PyLong_CheckExact(timeout))
        return 0;
    double seconds = PyFloat_AsDouble(timeout);
    PyErr_Clear();
    return (seconds >= 0 && seconds < 9e9) || (seconds == -1 && l->permits == NULL);
}

/* Whether this is a valid call that waits: those are tried first without waiting. */
static int asks_to_block(const Lock *l, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *given[2] = {nargs > 0 ? args[0] : NULL, nargs > 1 ? args[1] : NULL}; /* blocking, timeout */
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (nargs + keywords > 2)
        return 0;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i);
        int place = PyUnicode_Compare(key, str_blocking) == 0 ? 0 : PyUnicode_Compare(key, str_timeout) == 0 ? 1 : -1;
        if (place < 0 || given[place] != NULL)
            return 0;
        given[place] = args[nargs + i];
    }
    if (given[0] != NULL && (!PyLong_Check(given[0]) || !truth(given[0])))
        return 0;
    return given[1] == NULL || timeout_is_plain(l, given[1]);
}

static PyObject *lock_acquire(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    Lock *l = (Lock *)self;
    if (UNLIKELY(!l->rec->enabled))
        return PyObject_Vectorcall(l->acquire, args, (size_t)nargs, kwnames);
    if ((nargs == 0 && kwnames == NULL) || asks_to_block(l, args, nargs, kwnames))
        return acquire_blocking(l, args, nargs, kwnames);
    PyObject *result = PyObject_Vectorcall(l->acquire, args, (size_t)nargs, kwnames);
    if (result != NULL && truth(result))
        acquired_at_once(l);
    return result;
}

static PyObject *release_with(Lock *l, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    before_release(l, args, nargs, kwnames);
    PyObject *result = PyObject_Vectorcall(l->release, args, (size_t)nargs, kwnames);
    if (UNLIKELY(l->plain && l->holder != 0) && result != NULL && PyThread_get_thread_ident() != l->holder)
        l->holder = 0; /* handed over: released by another thread than the holder */
    return result;
}

static PyObject *lock_release(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    return release_with((Lock *)self, args, nargs, kwnames);
}

/* with lock: no argument acquires, three release (see span.c). */
static PyObject *lock_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Lock *l = (Lock *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    (void)args;
    if (LIKELY(kwnames == NULL && n == 0)) {
        if (LIKELY(l->rec->enabled))
            return acquire_blocking(l, NULL, 0, NULL);
        return PyObject_CallNoArgs(l->acquire);
    }
    if (LIKELY(kwnames == NULL && n == 3)) {
        PyObject *result = release_with(l, NULL, 0, NULL);
        if (result == NULL)
            return NULL;
        Py_DECREF(result);
        Py_RETURN_NONE;
    }
    PyErr_SetString(PyExc_TypeError, "a lock is a context manager");
    return NULL;
}

/* --- the rest of the protocol, where it changes who holds --- */

static PyObject *call_wrapped(Lock *l, PyObject *method, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *bound = PyObject_GetAttr(l->wrapped, method);
    PyObject *result = bound == NULL ? NULL : PyObject_Vectorcall(bound, args, (size_t)nargs, kwnames);
    Py_XDECREF(bound);
    return result;
}

/* Gives up the hold whatever its depth; returns the depth, or -1 when this thread held nothing. */
static int hold_suspend(Lock *l) {
    if (l->holder == 0 || l->holder != PyThread_get_thread_ident())
        return -1;
    int depth = l->depth;
    hold_end(l, rec_now(l->rec) - l->since);
    return depth;
}

static void hold_resume(Lock *l, int depth) {
    if (depth < 0 || !l->rec->lock_holds)
        return;
    l->holder = 0;
    hold_begin(l, 0, 0, -1);
    l->depth = depth;
}

static PyObject *lock_wait(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    int depth = hold_suspend((Lock *)self);
    PyObject *result = call_wrapped((Lock *)self, str_wait, args, nargs, kwnames), *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    hold_resume((Lock *)self, depth);
    PyErr_Restore(type, value, traceback);
    return result;
}

static PyObject *lock_wait_for(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    int depth = hold_suspend((Lock *)self);
    PyObject *result = call_wrapped((Lock *)self, str_wait_for, args, nargs, kwnames), *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    hold_resume((Lock *)self, depth);
    PyErr_Restore(type, value, traceback);
    return result;
}

/* A Condition over an instrumented RLock: (wrapped state, our depth). */
static PyObject *lock_release_save(PyObject *self, PyObject *unused) {
    (void)unused;
    int depth = hold_suspend((Lock *)self);
    PyObject *state = call_wrapped((Lock *)self, str__release_save, NULL, 0, NULL);
    return state == NULL ? NULL : Py_BuildValue("(Ni)", state, depth);
}

static PyObject *lock_acquire_restore(PyObject *self, PyObject *saved) {
    Lock *l = (Lock *)self;
    PyObject *state;
    int depth;
    if (!PyTuple_Check(saved) || !PyArg_ParseTuple(saved, "Oi", &state, &depth))
        return NULL;
    PyObject *free_now = l->rec->enabled ? PyObject_Call(l->acquire, false_args, NULL) : NULL;
    int contended = free_now != NULL && !truth(free_now);
    if (free_now != NULL && !contended)
        Py_XDECREF(PyObject_CallNoArgs(l->release));
    Py_XDECREF(free_now);
    PyErr_Clear();
    Wait w = {0};
    if (contended)
        w = wait_begin(l);
    PyObject *args[] = {state}, *result = call_wrapped(l, str__acquire_restore, args, 1, NULL);
    if (result != NULL && contended)
        wait_end(l, &w);
    else if (result != NULL)
        hold_resume(l, depth);
    if (result != NULL && depth > 0)
        l->depth = depth;
    return result;
}

static PyObject *lock_at_fork_reinit(PyObject *self, PyObject *unused) {
    (void)unused;
    ((Lock *)self)->holder = 0;
    return call_wrapped((Lock *)self, str__at_fork_reinit, NULL, 0, NULL);
}

#define KEYWORDS(f) ((PyCFunction)(void (*)(void))(f)), METH_FASTCALL | METH_KEYWORDS
static PyMethodDef lock_methods[] = {
    {"acquire", KEYWORDS(lock_acquire), "acquire($self, blocking=True, timeout=-1)\n--\n\nAs the wrapped lock's."},
    {"release", KEYWORDS(lock_release), "release($self)\n--\n\nAs the wrapped lock's."},
    {"wait", KEYWORDS(lock_wait), "wait($self, timeout=None)\n--\n\nAs the wrapped condition's."},
    {"wait_for", KEYWORDS(lock_wait_for), "wait_for($self, predicate, timeout=None)\n--\n\nAs the wrapped condition's."},
    {"_release_save", lock_release_save, METH_NOARGS, NULL},
    {"_acquire_restore", lock_acquire_restore, METH_O, NULL},
    {"_at_fork_reinit", lock_at_fork_reinit, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *get_object(PyObject *self, void *closure) {
    return Py_NewRef(*(PyObject **)((char *)self + (intptr_t)closure));
}

static PyGetSetDef lock_getset[] = {
    {"name", get_object, NULL, "The name given to lock().", (void *)offsetof(Lock, name)},
    {"wrapped", get_object, NULL, "The lock that does the work.", (void *)offsetof(Lock, wrapped)},
    {NULL, NULL, NULL, NULL, NULL},
};

/* Ours where we must see the call, and only if the wrapped lock has it too; else the wrapped lock's. */
static PyObject *lock_getattro(PyObject *self, PyObject *name) {
    PyObject *const always[] = {str_acquire, str_release, str_name, str_wrapped};
    PyObject *const mirrored[] = {str_wait, str_wait_for, str__release_save, str__acquire_restore, str__at_fork_reinit};
    for (size_t i = 0; i < sizeof always / sizeof *always; i++)
        if (PyUnicode_Compare(name, always[i]) == 0)
            return PyObject_GenericGetAttr(self, name);
    if (PyUnicode_CompareWithASCIIString(name, "__enter__") == 0 || PyUnicode_CompareWithASCIIString(name, "__exit__") == 0)
        return PyObject_GenericGetAttr(self, name);
    PyObject *found = PyObject_GetAttr(((Lock *)self)->wrapped, name);
    for (size_t i = 0; found != NULL && i < sizeof mirrored / sizeof *mirrored; i++) {
        if (PyUnicode_Compare(name, mirrored[i]) == 0) {
            Py_DECREF(found);
            return PyObject_GenericGetAttr(self, name);
        }
    }
    return found;
}

static int lock_setattro(PyObject *self, PyObject *name, PyObject *value) {
    return PyObject_SetAttr(((Lock *)self)->wrapped, name, value);
}

static PyObject *lock_repr(PyObject *self) {
    return PyUnicode_FromFormat("<inferscope lock %R around %R>", ((Lock *)self)->name, ((Lock *)self)->wrapped);
}

/* --- life --- */

static int lock_traverse(PyObject *self, visitproc visit, void *arg) {
    Lock *l = (Lock *)self;
    VISIT_TYPE(self);
    Py_VISIT(l->wrapped);
    Py_VISIT(l->acquire);
    Py_VISIT(l->release);
    Py_VISIT(l->rec);
    return 0;
}

/* No tp_clear: a lock must stay usable to its last moment, and what it refers to breaks cycles itself. */
static void lock_dealloc(PyObject *self) {
    Lock *l = (Lock *)self;
    PyObject_GC_UnTrack(self);
    if (l->weakrefs != NULL)
        PyObject_ClearWeakRefs(self);
    Py_XDECREF(l->name);
    Py_XDECREF(l->wrapped);
    Py_XDECREF(l->acquire);
    Py_XDECREF(l->release);
    Py_XDECREF(l->rec);
    PyMem_RawFree(l->permits);
    object_gc_free(self);
}

DEFINE_TYPE(Lock, "InstrumentedLock", sizeof(Lock),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            VECTORCALL_AT(Lock, vectorcall) WEAKREFS_AT(Lock, weakrefs),
            SLOT(tp_doc, "A named lock that times waits and holds; made by Recorder.lock().")
            SLOT(tp_dealloc, lock_dealloc)
            SLOT(tp_traverse, lock_traverse)
            SLOT(tp_call, PyVectorcall_Call)
            SLOT(tp_getattro, lock_getattro)
            SLOT(tp_setattro, lock_setattro)
            SLOT(tp_repr, lock_repr)
            SLOT(tp_methods, lock_methods)
            SLOT(tp_getset, lock_getset))

/* asyncio's locks: `acquire` is a coroutine function. They are wrapped in Python. */
static int acquires_asynchronously(PyObject *acquire) {
    PyObject *code = PyObject_GetAttr(acquire, str___code__);
    int async = code != NULL && (code_object_flags(code) & CO_COROUTINE) != 0;
    Py_XDECREF(code);
    PyErr_Clear();
    return async;
}

static PyObject *wrap_async(Recorder *rec, PyObject *name, PyObject *wrapped) {
    PyObject *module = PyImport_ImportModule("inferscope.record.locks");
    PyObject *result = module == NULL ? NULL : PyObject_CallMethodObjArgs(module, str_wrap_async, rec, name, wrapped, NULL);
    Py_XDECREF(module);
    return result;
}

PyObject *lock_new(Recorder *rec, PyObject *name, PyObject *wrapped) {
    if (Py_IS_TYPE(wrapped, TYPE(Lock)))
        return Py_NewRef(wrapped);
    if (false_args == NULL && (false_args = PyTuple_Pack(1, Py_False)) == NULL)
        return NULL;
    PyObject *acquire = PyObject_GetAttr(wrapped, str_acquire), *release = PyObject_GetAttr(wrapped, str_release), *text = NULL;
    Lock *l = NULL;
    if (acquire == NULL || release == NULL) { /* no lock: nothing to instrument */
        PyErr_Clear();
        Py_XDECREF(acquire);
        Py_XDECREF(release);
        return Py_NewRef(wrapped);
    }
    if (acquires_asynchronously(acquire)) {
        Py_DECREF(acquire);
        Py_DECREF(release);
        return wrap_async(rec, name, wrapped);
    }
    Def *def = (text = clean_name(name)) == NULL ? NULL : registry_def(rec, str_lock, text);
    Def *holds = def == NULL ? NULL : registry_def(rec, str_lock_hold, text);
    if (holds == NULL || (l = PyObject_GC_New(Lock, TYPE(Lock))) == NULL)
        goto failed;
    memset((char *)l + offsetof(Lock, vectorcall), 0, sizeof(Lock) - offsetof(Lock, vectorcall));
    l->vectorcall = lock_vectorcall;
    l->rec = (Recorder *)Py_NewRef((PyObject *)rec);
    l->name = text;
    l->wrapped = Py_NewRef(wrapped);
    l->acquire = acquire;
    l->release = release;
    l->def = def;
    l->holds = holds->series;
    l->plain = (char)type_is_named(Py_TYPE(wrapped), "_thread.lock");
    l->counted = (char)PyObject_HasAttr(wrapped, str__is_owned);
    l->site = l->waited_root = -1;
    if (!l->counted && (PyObject_HasAttr(wrapped, str__value) || PyObject_HasAttr(wrapped, str_counter)))
        l->permits = PyMem_RawCalloc(PERMITS, sizeof *l->permits);
    PyObject_GC_Track(l);
    return (PyObject *)l;
failed:
    Py_XDECREF(acquire);
    Py_XDECREF(release);
    Py_XDECREF(text);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}
