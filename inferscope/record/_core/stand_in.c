/* Stand-ins for methods of torch: what an integration puts into a class, without a Python frame around each call.
 *
 * A stand-in passes for the method as a decorated function passes for the function that it wraps, to torch.compile too: dynamo reads
 * `_torchdynamo_inline` and traces the method itself. `forward` opens a stage around the outermost call of a module; `move` looks at what
 * `Tensor.to` and its like return, and tells of a copy when that lies elsewhere; `make` tells when what `torch.tensor` made lies on a device; `read`
 * hands a call on to `slow`, which is Python, only when its tensor lies on a device; `call` always does. Whatever needs the device's clock runs in `slow`.
 */
#include "wrapper.h"

PyObject *recorder_stage(PyObject *self, PyObject *name);

/* Of Decorated.extra; a name that a kind has no use for is None. */
enum { PATCH, TIMER, SLOW, NOTE, INSIDE, NAMES, NAME, SHAPES, EXTRAS };

static PyObject *str_active = NULL, *str_enabled = NULL, *str_is_cpu = NULL, *str_shape = NULL;

static inline PyObject *extra(const Decorated *d, int index) {
    return PyTuple_GET_ITEM(d->extra, index);
}

/* Whether an attribute is True; 0 also when it cannot be read. */
static inline int says(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (UNLIKELY(value == NULL)) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(value);
    return value == Py_True;
}

/* The stage of a module: that which `watch` gave it, or the common one; borrowed. */
static inline PyObject *stage_name(const Decorated *d, PyObject *module) {
    PyObject *names = extra(d, NAMES), *name = NULL;
    if (UNLIKELY(PyDict_GET_SIZE(names) > 0)) {
        PyObject *key = PyLong_FromVoidPtr(module), *entry = key == NULL ? NULL : PyDict_GetItemWithError(names, key);
        Py_XDECREF(key);
        if (entry != NULL && PyTuple_CheckExact(entry) && PyTuple_GET_SIZE(entry) == 2)
            name = PyTuple_GET_ITEM(entry, 1);
        PyErr_Clear();
    }
    return name != NULL ? name : extra(d, NAME);
}

/* Whether `request_forward` times a forward around this call, in a request of this thread or in one around that. */
static inline int request_says_inside(const Request *r) {
    for (const Request *q = r; q != NULL; q = q->outer)
        if (LIKELY(q->in_forward) && q->thread_state == r->thread_state)
            return 1;
    return 0;
}

static inline int context_says_inside(const Decorated *d) {
    PyObject *inside = NULL;
    if (UNLIKELY(PyContextVar_Get(extra(d, INSIDE), NULL, &inside) < 0))
        PyErr_Clear();
    Py_XDECREF(inside);
    return inside == Py_True;
}

static inline int is_inside(const Decorated *d) {
    Request *r = context_request_of_thread(d->rec);
    if (LIKELY(request_says_inside(r)) || context_says_inside(d))
        return 1;
    if (r != NULL || CONTEXT_IS_CACHED == 0)
        return 0;
    r = request_current(d->rec); /* the context changed meanwhile, say */
    int inside = r != NULL && r->thread_state == thread_state_id() && request_says_inside(r);
    Py_XDECREF((PyObject *)r);
    return inside;
}

/* note(began_ns, result, self, *args, **kwargs); what it raises is dropped unless it is an interrupt. */
SLOW_PATH static int tell(const Decorated *d, int64_t began, PyObject *result, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
    Py_ssize_t total = n + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    PyObject **all = PyMem_Malloc((size_t)(total + 2) * sizeof *all), *start = PyLong_FromLongLong(began), *told = NULL;
    if (all != NULL && start != NULL) {
        all[0] = start;
        all[1] = result;
        memcpy(all + 2, args, (size_t)total * sizeof *all);
        told = PyObject_Vectorcall(extra(d, NOTE), all, (size_t)n + 2, kwnames);
    }
    PyMem_Free(all);
    Py_XDECREF(start);
    Py_XDECREF(told);
    if (told != NULL)
        return 0;
    if (PyErr_Occurred() != NULL && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Clear();
    return 0;
}

/* Numbers alone: while torch traces, they are tensors or symbols, which nobody may hold nor compare. */
static inline int is_plain_shape(PyObject *shape) {
    if (!PyTuple_Check(shape))
        return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++)
        if (UNLIKELY(!PyLong_CheckExact(PyTuple_GET_ITEM(shape, i))))
            return 0;
    return 1;
}

/* What copied.record_shape() does with a shape that was met before. */
static int note_known(Request *r, PyObject *recent, PyObject *shape, double size) {
    Py_ssize_t room = PyList_GET_SIZE(recent), place = room == 0 ? 0 : (Py_ssize_t)(r->id % room);
    PyObject *before = room == 0 ? NULL : PyList_GET_ITEM(recent, place), *entry = NULL;
    PyObject *id = before == NULL ? NULL : PyLong_FromLongLong(r->id);
    if (id != NULL && PyTuple_CheckExact(before) && PyTuple_GET_SIZE(before) == 3 && PyLong_AsLongLong(PyTuple_GET_ITEM(before, 0)) == r->id) {
        Py_DECREF(id); /* the first model of several is the one that the input is of */
        return 1;
    }
    if (id != NULL)
        entry = PyTuple_Pack(3, id, shape, Py_False);
    Py_XDECREF(id);
    if (UNLIKELY(entry == NULL || PyList_SetItem(recent, place, entry) < 0)) {
        PyErr_Clear();
        return 0;
    }
    if (!r->has_size) {
        r->size = size;
        r->has_size = 1;
    }
    return 1;
}

/* Nearly always the first input is a tensor of a shape that was met before; 0 when it is not, and NOTE must look; -1 for an interrupt. */
static int note_shape(const Decorated *d, Request *r, PyObject *first) {
    PyObject *tables = extra(d, SHAPES); /* None, or what met shapes hold and the list of recent requests */
    if (tables == Py_None || PyList_CheckExact(first) || PyTuple_CheckExact(first) || PyDict_CheckExact(first))
        return 0;
    PyObject *shape = PyObject_GetAttr(first, str_shape), *size = NULL;
    if (LIKELY(shape != NULL && is_plain_shape(shape)))
        size = PyDict_GetItemWithError(PyTuple_GET_ITEM(tables, 0), shape);
    int told = LIKELY(size != NULL && PyFloat_CheckExact(size)) ? note_known(r, PyTuple_GET_ITEM(tables, 1), shape, PyFloat_AsDouble(size)) : 0;
    Py_XDECREF(shape);
    if (UNLIKELY(told == 0 && PyErr_Occurred() != NULL)) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
    }
    return told;
}

/* Of a forward that ended well in `current`, which may be NULL. */
static int note(const Decorated *d, Request *current, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
    int told = extra(d, NOTE) == Py_None || current == NULL || !current->open ? 1 : n > 1 ? note_shape(d, current, args[1]) : 0;
    return LIKELY(told != 0) ? told : tell(d, 0, Py_None, args, n, kwnames);
}

/* In a request of this thread that needs no hook, the request notes that a forward runs: setting a context variable and setting it back
 * would cost more than all the rest. */
static PyObject *request_forward(Decorated *d, Request *r, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Def *def = registry_stage(d->rec, stage_name(d, args[0]));
    Frame *f = LIKELY(def != NULL) ? frame_new() : NULL;
    if (UNLIKELY(f == NULL)) {
        PyErr_Clear();
        return PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    }
    Py_INCREF((PyObject *)r);
    r->in_forward = 1;
    f->def = def;
    frame_enter(d->rec, f, HOOK_WITH);
    PyObject *result = PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    r->in_forward = 0;
    frame_exit(d->rec, f, result == NULL, HOOK_WITH);
    frame_free(f);
    if (LIKELY(result != NULL) && UNLIKELY(note(d, r, args, PyVectorcall_NARGS(nargsf), kwnames) < 0))
        Py_CLEAR(result);
    Py_DECREF((PyObject *)r);
    return result;
}

static PyObject *context_forward(Decorated *d, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    PyObject *span = recorder_stage((PyObject *)d->rec, stage_name(d, args[0]));
    PyObject *token = PyContextVar_Set(extra(d, INSIDE), Py_True);
    if (UNLIKELY(token == NULL))
        PyErr_Clear();
    PyObject *entered = PyObject_Vectorcall(span, NULL, 0, NULL);
    if (UNLIKELY(entered == NULL))
        PyErr_Clear();
    PyObject *result = PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (UNLIKELY(result == NULL))
        PyErr_Fetch(&type, &value, &traceback);
    PyObject *const left[] = {type != NULL ? type : Py_None, Py_None, Py_None};
    PyObject *ended = entered == NULL ? NULL : PyObject_Vectorcall(span, left, 3, NULL);
    if (UNLIKELY(ended == NULL || (token != NULL && PyContextVar_Reset(extra(d, INSIDE), token) < 0)))
        PyErr_Clear();
    Py_XDECREF(ended);
    Py_XDECREF(entered);
    Py_XDECREF(token);
    Py_DECREF(span);
    if (UNLIKELY(result == NULL)) {
        PyErr_Restore(type, value, traceback);
        return NULL;
    }
    Request *current = request_current(d->rec);
    if (UNLIKELY(note(d, current, args, PyVectorcall_NARGS(nargsf), kwnames) < 0))
        Py_CLEAR(result);
    Py_XDECREF((PyObject *)current);
    return result;
}

static PyObject *call_forward(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    if (LIKELY(is_inside(d)) || UNLIKELY(!d->rec->enabled || PyVectorcall_NARGS(nargsf) < 1 || !says(extra(d, PATCH), str_active)))
        return PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    if (UNLIKELY(says(extra(d, TIMER), str_enabled)))
        return PyObject_Vectorcall(extra(d, SLOW), args, nargsf, kwnames);
    Request *r = context_request(d->rec);
    return LIKELY(r != NULL) ? request_forward(d, r, args, nargsf, kwnames) : context_forward(d, args, nargsf, kwnames);
}

static PyObject *call_move(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (UNLIKELY(!d->rec->enabled || n < 1))
        return PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    if (UNLIKELY(says(extra(d, TIMER), str_enabled)))
        return PyObject_Vectorcall(extra(d, SLOW), args, nargsf, kwnames);
    int64_t began = rec_now(d->rec);
    PyObject *result = PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    if (result == NULL || LIKELY(result == args[0]) || says(result, str_is_cpu) == says(args[0], str_is_cpu))
        return result;
    if (says(extra(d, PATCH), str_active) && tell(d, began, result, args, n, kwnames) < 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *call_read(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    int here = UNLIKELY(!d->rec->enabled || PyVectorcall_NARGS(nargsf) < 1) || says(args[0], str_is_cpu);
    return PyObject_Vectorcall(here ? d->func : extra(d, SLOW), args, nargsf, kwnames);
}

static PyObject *call_make(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    if (UNLIKELY(!d->rec->enabled))
        return PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    if (UNLIKELY(says(extra(d, TIMER), str_enabled)))
        return PyObject_Vectorcall(extra(d, SLOW), args, nargsf, kwnames);
    int64_t began = rec_now(d->rec);
    PyObject *result = PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    if (result == NULL || LIKELY(says(result, str_is_cpu)))
        return result;
    if (says(extra(d, PATCH), str_active) && tell(d, began, result, args, PyVectorcall_NARGS(nargsf), kwnames) < 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *call_slow(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    return PyObject_Vectorcall(LIKELY(d->rec->enabled) ? extra(d, SLOW) : d->func, args, nargsf, kwnames);
}

static vectorcallfunc kind_of(PyObject *kind) {
    static const struct {
        const char *name;
        vectorcallfunc call;
    } kinds[] = {{"forward", call_forward}, {"move", call_move}, {"read", call_read}, {"make", call_make}, {"call", call_slow}};
    for (size_t i = 0; PyUnicode_Check(kind) && i < sizeof kinds / sizeof *kinds; i++)
        if (PyUnicode_CompareWithASCIIString(kind, kinds[i].name) == 0)
            return kinds[i].call;
    return NULL;
}

static int are_tables(PyObject *shapes) {
    return shapes == Py_None || (PyTuple_CheckExact(shapes) && PyTuple_GET_SIZE(shapes) == 2 && PyDict_CheckExact(PyTuple_GET_ITEM(shapes, 0)) &&
                                 PyList_CheckExact(PyTuple_GET_ITEM(shapes, 1)));
}

/* _stand_in(kind, method, extras); see `inferscope.integration.stand_in`. */
static PyObject *recorder_stand_in(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    vectorcallfunc call = nargs == 3 ? kind_of(args[0]) : NULL;
    if (call == NULL || !PyTuple_CheckExact(args[2]) || PyTuple_GET_SIZE(args[2]) != EXTRAS || !PyDict_CheckExact(PyTuple_GET_ITEM(args[2], NAMES)) ||
        !are_tables(PyTuple_GET_ITEM(args[2], SHAPES))) {
        PyErr_SetString(PyExc_TypeError, "_stand_in() takes 'forward', 'move', 'read', 'make' or 'call', a method and a tuple of eight");
        return NULL;
    }
    return decorated_new((Recorder *)self, args[1], args[1], args[2], call);
}

static PyMethodDef stand_in_method = {"_stand_in", (PyCFunction)(void (*)(void))recorder_stand_in, METH_FASTCALL, NULL};

int stand_in_setup(void) {
    str_active = PyUnicode_InternFromString("active");
    str_enabled = PyUnicode_InternFromString("enabled");
    str_is_cpu = PyUnicode_InternFromString("is_cpu");
    str_shape = PyUnicode_InternFromString("shape");
    PyObject *descriptor = PyDescr_NewMethod(TYPE(Recorder), &stand_in_method);
    int rc = str_active == NULL || str_enabled == NULL || str_is_cpu == NULL || str_shape == NULL || descriptor == NULL
                 ? -1
                 : type_set(TYPE(Recorder), stand_in_method.ml_name, descriptor);
    Py_XDECREF(descriptor);
    return rc;
}
