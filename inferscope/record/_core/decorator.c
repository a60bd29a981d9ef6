/* Decorated functions.
 *
 * The object passes for the function it wraps: `__class__`, `__code__`, signature, name, defaults and attributes are the function's
 * own, it binds as a method, has weak references, pickles by qualified name. torch.compile sees through it because of
 * `_torchdynamo_inline` (torch/_dynamo/variables/builder.py: a private name, so the tests check that it still works).
 */
#include "wrapper.h"

Frame *free_frames[FREE_FRAMES];
int free_frame_count = 0;

/* --- calls --- */

static PyObject *call_stage(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    Recorder *rec = d->rec;
    Frame *f = LIKELY(rec->enabled) ? frame_new() : NULL;
    if (UNLIKELY(f == NULL))
        return PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    f->def = d->def;
    frame_enter(rec, f, HOOK_CALL);
    PyObject *result = PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    frame_exit(rec, f, result == NULL, HOOK_CALL);
    frame_free(f);
    return result;
}

static PyObject *call_request(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    Request *r = d->rec->enabled ? (Request *)request_clone(d->template_) : NULL;
    if (r == NULL) {
        PyErr_Clear();
        return PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    }
    r->in_call = 1;
    request_begin(r, 1);
    PyObject *result = PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    request_end(r, result == NULL ? PyErr_Occurred() : NULL);
    Py_DECREF(r);
    return result;
}

/* Coroutine functions and generators: the call only makes the object; it is timed from its first resume. */
static PyObject *call_wrapping(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Decorated *d = (Decorated *)self;
    PyTypeObject *type = d->flavor == FLAVOR_COROUTINE ? TYPE(Coroutine) : d->flavor == FLAVOR_GENERATOR ? TYPE(Generator) : TYPE(AsyncGenerator);
    PyObject *inner = PyObject_Vectorcall(d->func, args, nargsf, kwnames);
    return inner == NULL || !d->rec->enabled ? inner : wrap_result(type, self, inner);
}

/* --- making --- */

static int code_flags(PyObject *func) {
    PyObject *code = PyObject_GetAttr(func, str___code__), *flags = code == NULL ? NULL : PyObject_GetAttr(code, str_co_flags);
    long value = flags == NULL || !PyLong_Check(flags) ? 0 : PyLong_AsLong(flags);
    PyErr_Clear();
    Py_XDECREF(code);
    Py_XDECREF(flags);
    return (int)value;
}

/* What the call gives; looks through functools.partial. */
static char flavor_of(PyObject *func) {
    PyObject *f = Py_NewRef(func), *functools = PyImport_ImportModule("functools");
    PyObject *partial = functools == NULL ? NULL : PyObject_GetAttrString(functools, "partial");
    for (int depth = 0; depth < 16 && partial != NULL && PyObject_IsInstance(f, partial) == 1; depth++) {
        PyObject *next = PyObject_GetAttrString(f, "func");
        if (next == NULL)
            break;
        Py_SETREF(f, next);
    }
    PyErr_Clear();
    int flags = code_flags(f);
    PyObject *call = flags == 0 ? PyObject_GetAttrString(f, "__call__") : NULL; /* an object whose __call__ is a coroutine function */
    if (call != NULL)
        flags = code_flags(call);
    PyErr_Clear();
    Py_XDECREF(call);
    Py_XDECREF(partial);
    Py_XDECREF(functools);
    Py_DECREF(f);
    if (flags & (CO_COROUTINE | CO_ITERABLE_COROUTINE))
        return FLAVOR_COROUTINE;
    if (flags & CO_ASYNC_GENERATOR)
        return FLAVOR_ASYNC_GENERATOR;
    return flags & CO_GENERATOR ? FLAVOR_GENERATOR : FLAVOR_SYNC;
}

/* A method with default values, in a process that has torch: see methods.py. The price is a Python call. */
static int needs_function(PyObject *func) {
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed */
    if (!is_function(func) || modules == NULL || PyDict_GetItemString(modules, "torch") == NULL || !has_defaults(func))
        return 0;
    PyObject *qualified = PyObject_GetAttr(func, str___qualname__);
    const char *name = qualified == NULL ? NULL : PyUnicode_AsUTF8(qualified), *dot = name == NULL ? NULL : strrchr(name, '.');
    int method = dot != NULL && (dot - name < 8 || strncmp(dot - 8, "<locals>", 8) != 0);
    PyErr_Clear();
    Py_XDECREF(qualified);
    return method;
}

static PyObject *as_function(PyObject *decorated, PyObject *func) {
    PyObject *module = PyImport_ImportModule("inferscope.record.methods");
    PyObject *call = module == NULL ? NULL : PyObject_CallMethod(module, "as_function", "OO", decorated, func);
    Py_XDECREF(module);
    if (call == NULL) { /* torch.compile may stumble, everything else works */
        PyErr_Clear();
        return decorated;
    }
    Py_DECREF(decorated);
    return call;
}

/* @stage above @staticmethod or @classmethod: decorate the function inside. */
static PyObject *decorate_method_object(Recorder *rec, Def *def, Request *template_, PyObject *func) {
    PyObject *inner = PyObject_GetAttr(func, str___func__);
    PyObject *wrapped = inner == NULL ? NULL : decorate(rec, def, template_, inner);
    PyObject *again = wrapped == NULL ? NULL : PyObject_CallOneArg((PyObject *)Py_TYPE(func), wrapped);
    Py_XDECREF(inner);
    Py_XDECREF(wrapped);
    return again;
}

PyObject *decorated_new(Recorder *rec, PyObject *func, PyObject *traced, PyObject *extra, vectorcallfunc call) {
    Decorated *d = PyObject_GC_New(Decorated, TYPE(Decorated));
    if (d == NULL)
        return NULL;
    d->func = Py_NewRef(func);
    d->rec = (Recorder *)Py_NewRef((PyObject *)rec);
    d->def = NULL;
    d->template_ = NULL;
    d->weakrefs = NULL;
    d->flavor = FLAVOR_SYNC;
    d->vectorcall = call;
    d->extra = Py_XNewRef(extra);
    d->dict = Py_BuildValue("{OOOO}", str___wrapped__, func, str__torchdynamo_inline, traced);
    PyObject_GC_Track(d);
    if (d->dict == NULL)
        Py_CLEAR(d);
    return (PyObject *)d;
}

static PyObject *decorate_new(Recorder *rec, Def *def, Request *template_, PyObject *func) {
    if (is_method_object(func))
        return decorate_method_object(rec, def, template_, func);
    if (!PyCallable_Check(func) || PyType_Check(func)) /* a class must stay the class that it is */
        return Py_NewRef(func);
    char flavor = flavor_of(func);
    Decorated *d = (Decorated *)decorated_new(rec, func, func, NULL, flavor != FLAVOR_SYNC ? call_wrapping : def != NULL ? call_stage : call_request);
    if (d == NULL)
        return NULL;
    d->def = def;
    d->template_ = template_ == NULL ? NULL : (Request *)request_clone(template_);
    d->flavor = flavor;
    if (def == NULL && d->template_ == NULL)
        Py_CLEAR(d);
    if (d != NULL && d->flavor == FLAVOR_SYNC && needs_function(func))
        return as_function((PyObject *)d, func);
    return (PyObject *)d;
}

/* What cannot be wrapped for want of memory stays as it is: the application must not fail for that. */
PyObject *decorate(Recorder *rec, Def *def, Request *template_, PyObject *func) {
    PyObject *made = decorate_new(rec, def, template_, func);
    if (made != NULL)
        return made;
    swallow_error();
    rec->internal_errors++;
    return Py_NewRef(func);
}

static int decorated_traverse(PyObject *self, visitproc visit, void *arg) {
    VISIT_TYPE(self);
    Py_VISIT(((Decorated *)self)->func);
    Py_VISIT(((Decorated *)self)->rec);
    Py_VISIT(((Decorated *)self)->dict);
    Py_VISIT(((Decorated *)self)->extra);
    return 0;
}

static int decorated_clear(PyObject *self) {
    Decorated *d = (Decorated *)self;
    Py_CLEAR(d->dict);
    Py_XSETREF(d->func, Py_NewRef(Py_None)); /* never NULL: the object may still be called */
    return 0;
}

static void decorated_dealloc(PyObject *self) {
    Decorated *d = (Decorated *)self;
    PyObject_GC_UnTrack(self);
    if (d->weakrefs != NULL)
        PyObject_ClearWeakRefs(self);
    Py_XDECREF(d->dict);
    Py_XDECREF(d->extra);
    Py_XDECREF(d->func);
    Py_XDECREF(d->rec);
    Py_XDECREF((PyObject *)d->template_);
    object_gc_free(self);
}

/* --- passing for the function --- */

static int is_name(PyObject *name, PyObject *known) {
    return name == known || (PyUnicode_Check(name) && PyUnicode_Compare(name, known) == 0);
}

static PyObject *decorated_getattro(PyObject *self, PyObject *name) {
    Decorated *d = (Decorated *)self;
    if (is_name(name, str___wrapped__) || is_name(name, str__torchdynamo_inline) || is_name(name, str___reduce__) ||
        is_name(name, str___reduce_ex__))
        return PyObject_GenericGetAttr(self, name);
    return PyObject_GetAttr(d->func, name);
}

static int decorated_setattro(PyObject *self, PyObject *name, PyObject *value) {
    return PyObject_SetAttr(((Decorated *)self)->func, name, value);
}

static PyObject *decorated_get(PyObject *self, PyObject *instance, PyObject *type) {
    (void)type;
    return instance == NULL || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

static PyObject *decorated_repr(PyObject *self) {
    return PyObject_Repr(((Decorated *)self)->func);
}

/* A stand-in equals what it stands for: torch keeps tables that are keyed by its functions, some built before and some after. */
static Py_hash_t decorated_hash(PyObject *self) {
    Decorated *d = (Decorated *)self;
    return d->extra != NULL ? PyObject_Hash(d->func) : (Py_hash_t)((uintptr_t)self >> 4);
}

static PyObject *decorated_compare(PyObject *self, PyObject *other, int op) {
    Decorated *d = (Decorated *)self;
    if (d->extra == NULL || (op != Py_EQ && op != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    if (Py_TYPE(other) == Py_TYPE(self) && ((Decorated *)other)->extra != NULL)
        other = ((Decorated *)other)->func;
    return PyObject_RichCompare(d->func, other, op);
}

/* What a stand-in becomes: the method itself, which a method of a C type says how to find, and a function through its own name. */
static PyObject *stand_in_reduce(PyObject *func) {
    if (Py_IS_TYPE(func, &PyMethodDescr_Type))
        return PyObject_CallMethodNoArgs(func, str___reduce__);
    PyObject *module = PyImport_ImportModule("operator"), *first = module == NULL ? NULL : PyObject_GetAttrString(module, "getitem");
    Py_XDECREF(module);
    return first == NULL ? NULL : Py_BuildValue("N((O)i)", first, func, 0);
}

/* A str: pickle looks that qualified name up in the module, and finds this object there. */
static PyObject *decorated_reduce(PyObject *self, PyObject *args) {
    Decorated *d = (Decorated *)self;
    (void)args;
    return d->extra != NULL ? stand_in_reduce(d->func) : PyObject_GetAttr(d->func, str___qualname__);
}

static PyMethodDef decorated_methods[] = {
    {"__reduce__", decorated_reduce, METH_VARARGS, NULL},
    {"__reduce_ex__", decorated_reduce, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* The object's own dict is for inspect.getattr_static(), with which dynamo looks; everybody else who asks sees the function's. */
static PyGetSetDef decorated_getset[] = {
    {"__dict__", PyObject_GenericGetDict, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

DEFINE_TYPE(Decorated, "Decorated", sizeof(Decorated),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            VECTORCALL_AT(Decorated, vectorcall) WEAKREFS_AT(Decorated, weakrefs) DICT_AT(Decorated, dict),
            SLOT(tp_doc, "A decorated function.")
            SLOT(tp_dealloc, decorated_dealloc)
            SLOT(tp_traverse, decorated_traverse)
            SLOT(tp_clear, decorated_clear)
            SLOT(tp_call, PyVectorcall_Call)
            SLOT(tp_getattro, decorated_getattro)
            SLOT(tp_setattro, decorated_setattro)
            SLOT(tp_descr_get, decorated_get)
            SLOT(tp_repr, decorated_repr)
            SLOT(tp_hash, decorated_hash)
            SLOT(tp_richcompare, decorated_compare)
            SLOT(tp_methods, decorated_methods)
            SLOT(tp_getset, decorated_getset))
