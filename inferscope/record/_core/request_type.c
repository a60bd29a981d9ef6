/* The Python face of a request: context manager, decorator, attributes. */
#include "core.h"

static Request *free_requests[64];
static int free_request_count = 0;

static PyObject *request_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    Request *r = (Request *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    if (kwnames == NULL || PyTuple_GET_SIZE(kwnames) == 0) {
        if (n == 0) {
            request_begin(r, 0);
            return Py_NewRef(self);
        }
        if (n == 3) {
            request_end(r, args[0]);
            Py_RETURN_NONE;
        }
        if (n == 1)
            return is_carrier(r) ? Py_NewRef(args[0]) : decorate(r->rec, NULL, r, args[0]);
    }
    PyErr_SetString(PyExc_TypeError, "a request is a context manager or decorates one function");
    return NULL;
}

PyObject *request_new(Recorder *rec, Class *c) {
    Request *r;
    if (free_request_count > 0) {
        r = free_requests[--free_request_count];
        revive((PyObject *)r, TYPE(Request));
    } else {
        r = PyObject_New(Request, TYPE(Request));
        if (r == NULL)
            return NULL;
    }
    memset((char *)r + offsetof(Request, rec), 0, offsetof(Request, vector) - offsetof(Request, rec));
    r->vectorcall = request_vectorcall;
    r->rec = (Recorder *)Py_NewRef((PyObject *)rec);
    r->class_ = c;
    r->top = &r->root;
    r->items = 1;
    r->generation = 1;
    return (PyObject *)r;
}

/* A fresh request like the one a decorator was made with. */
PyObject *request_clone(const Request *template_) {
    Request *r = (Request *)request_new(template_->rec, template_->class_);
    if (r != NULL) {
        r->items = template_->items;
        r->size = template_->size;
        r->has_size = template_->has_size;
    }
    return (PyObject *)r;
}

static void set_size(Request *r, PyObject *value) {
    double size = value == Py_None ? -1.0 : PyFloat_AsDouble(value);
    if (value == Py_None || (size == -1.0 && PyErr_Occurred())) {
        PyErr_Clear();
        r->has_size = 0;
        return;
    }
    r->size = size;
    r->has_size = 1;
}

static int set_int(int64_t *field, PyObject *value) {
    long long n = PyLong_Check(value) ? PyLong_AsLongLong(value) : -1;
    if (!PyLong_Check(value) || (n == -1 && PyErr_Occurred())) {
        PyObject *index = PyErr_Occurred() ? NULL : PyNumber_Index(value);
        n = index == NULL ? -1 : PyLong_AsLongLong(index);
        Py_XDECREF(index);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
    }
    *field = n;
    return 1;
}

/* The keywords of Recorder.request(); a value of the wrong type is ignored, an unknown name is a TypeError like any other. */
PyObject *request_parse(Recorder *rec, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    PyObject *size = NULL, *items = NULL, *model = NULL, *cls = NULL, *started = NULL;
    if (nargs != 1) {
        PyErr_SetString(PyExc_TypeError, "request() takes exactly one positional argument, the name");
        return NULL;
    }
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i), *value = args[1 + i];
        PyObject *known[] = {str_size, str_items, str_model, str_cls, str_started_ns};
        PyObject **slots[] = {&size, &items, &model, &cls, &started};
        int k = 0;
        while (k < 5 && key != known[k])
            k++;
        for (int j = 0; k == 5 && j < 5; j++)
            if (PyUnicode_Compare(key, known[j]) == 0)
                k = j;
        if (k >= 5) {
            PyErr_Format(PyExc_TypeError, "request() got an unexpected keyword argument %R", key);
            return NULL;
        }
        *slots[k] = value;
    }
    Class *c = rec->enabled ? registry_class(rec, args[0], model, cls) : NULL;
    if (c == NULL)
        return Py_NewRef(noop_object);
    Request *r = (Request *)request_new(rec, c);
    if (r == NULL) {
        PyErr_Clear();
        return Py_NewRef(noop_object);
    }
    if (size != NULL)
        set_size(r, size);
    if (items != NULL)
        set_int(&r->items, items);
    if (started != NULL && started != Py_None)
        r->has_started = (char)set_int(&r->started_ns, started);
    return (PyObject *)r;
}

static void request_dealloc(PyObject *self) {
    Request *r = (Request *)self;
    if (r->weakrefs != NULL)
        PyObject_ClearWeakRefs(self);
    if (r->open) { /* dropped without its end */
        Py_SET_REFCNT(self, 1); /* closing may hand it to a test clock */
        request_close_uncounted(r);
        Py_SET_REFCNT(self, 0);
    }
    Py_CLEAR(r->error);
    Py_CLEAR(r->trace);
    Py_CLEAR(r->packed);
    Py_CLEAR(r->outer);
    Py_CLEAR(r->rec);
    if (free_request_count < (int)(sizeof free_requests / sizeof *free_requests)) {
        rest(self);
        free_requests[free_request_count++] = r;
    } else {
        object_free(self);
    }
}

/* --- methods and attributes --- */

static PyObject *request_discard(PyObject *self, PyObject *unused) {
    (void)unused;
    request_close_uncounted((Request *)self);
    Py_RETURN_NONE;
}

static PyObject *request_finish(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (nargs + keywords > 1 || (keywords == 1 && PyUnicode_Compare(PyTuple_GET_ITEM(kwnames, 0), str_error) != 0)) {
        PyErr_SetString(PyExc_TypeError, "finish() takes one argument, error");
        return NULL;
    }
    request_finish_now((Request *)self, nargs + keywords == 1 ? args[0] : NULL);
    Py_RETURN_NONE;
}

static PyMethodDef request_methods[] = {
    {"discard", request_discard, METH_NOARGS, "discard($self, /)\n--\n\nClose the request without counting it."},
    {"finish", (PyCFunction)(void (*)(void))request_finish, METH_FASTCALL | METH_KEYWORDS,
     "finish($self, error=None)\n--\n\nClose and count the request now; the end of the with block then only restores the context."},
    {NULL, NULL, 0, NULL},
};

static PyObject *or_none(PyObject *value) {
    return Py_NewRef(value != NULL ? value : Py_None);
}

static PyObject *get_name(PyObject *self, void *closure) {
    const Class *c = ((Request *)self)->class_;
    switch ((intptr_t)closure) {
    case 0:
        return Py_NewRef(is_carrier((Request *)self) ? ((Request *)self)->root.def->name : c->request);
    case 1:
        return or_none(c->model);
    default:
        return or_none(c->cls);
    }
}

static PyObject *get_size(PyObject *self, void *closure) {
    const Request *r = (Request *)self;
    (void)closure;
    return r->has_size ? PyFloat_FromDouble(r->size) : Py_NewRef(Py_None);
}

static int set_size_attr(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    set_size((Request *)self, value != NULL ? value : Py_None);
    return 0;
}

static PyObject *get_items(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(((Request *)self)->items);
}

static int set_items_attr(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    if (value != NULL)
        set_int(&((Request *)self)->items, value);
    return 0;
}

static PyObject *get_object(PyObject *self, void *closure) {
    return or_none(*(PyObject **)((char *)self + (intptr_t)closure));
}

static int set_trace(PyObject *self, PyObject *value, void *closure) {
    Request *r = (Request *)self;
    (void)closure;
    Py_XSETREF(r->trace, value != NULL && PyTuple_Check(value) ? Py_NewRef(value) : NULL);
    return 0;
}

static int set_error_attr(PyObject *self, PyObject *value, void *closure) {
    (void)closure;
    request_set_error((Request *)self, value);
    return 0;
}

static PyObject *get_flag(PyObject *self, void *closure) {
    return PyBool_FromLong(*((char *)self + (intptr_t)closure));
}

static int set_flag(PyObject *self, PyObject *value, void *closure) {
    int truth = value == NULL ? 0 : PyObject_IsTrue(value);
    if (truth < 0) {
        PyErr_Clear();
        truth = 0;
    }
    *((char *)self + (intptr_t)closure) = (char)truth;
    return 0;
}

static PyObject *get_start(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(((Request *)self)->root.start);
}

static PyObject *get_id(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(((Request *)self)->id);
}

#define OFFSET(field) ((void *)offsetof(Request, field))
static PyGetSetDef request_getset[] = {
    {"id", get_id, NULL, "Increasing number, given at entry.", NULL},
    {"name", get_name, NULL, NULL, (void *)0},
    {"model", get_name, NULL, NULL, (void *)1},
    {"cls", get_name, NULL, NULL, (void *)2},
    {"size", get_size, set_size_attr, "Whatever makes work larger: tokens, rows, pixels.", NULL},
    {"items", get_items, set_items_attr, "Items served, for throughput.", NULL},
    {"error", get_object, set_error_attr, "Type name of what went wrong, or None.", OFFSET(error)},
    {"trace", get_object, set_trace, "Trace and span id in hex, or None.", OFFSET(trace)},
    {"packed", get_object, NULL, "What a carrier recorded, once it ended, for Recorder.splice(); None for a request.", OFFSET(packed)},
    {"start_ns", get_start, NULL, NULL, NULL},
    {"open", get_flag, NULL, NULL, OFFSET(open)},
    {"wanted", get_flag, set_flag, "Whether hooks are called for this request.", OFFSET(wanted)},
    {"profiled", get_flag, set_flag, "Whether a capture was tried: keeps the request out of the percentiles.", OFFSET(profiled)},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *request_repr(PyObject *self) {
    const Request *r = (Request *)self;
    return PyUnicode_FromFormat("<inferscope request %R id=%lld%s>", r->class_->request, (long long)r->id, r->open ? " open" : "");
}

DEFINE_TYPE(Request, "Request", sizeof(Request),
            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
            VECTORCALL_AT(Request, vectorcall) WEAKREFS_AT(Request, weakrefs),
            SLOT(tp_doc, "One request: a context manager and a decorator; made by Recorder.request().")
            SLOT(tp_dealloc, request_dealloc)
            SLOT(tp_repr, request_repr)
            SLOT(tp_call, PyVectorcall_Call)
            SLOT(tp_methods, request_methods)
            SLOT(tp_getset, request_getset))
