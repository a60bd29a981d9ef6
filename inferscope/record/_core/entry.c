/* `inferscope.stage` and `inferscope.request`: as fast as the recorder's methods, and torch.compile sees through them.
 *
 * To dynamo each passes for a Python function that opens nothing (see record/compiled.py), in the way in which a decorated function
 * passes for the one it wraps; so code that is compiled keeps its one graph, and nothing has to wait for torch to be imported.
 */
#include "wrapper.h"

PyObject *recorder_stage(PyObject *self, PyObject *name);

static PyObject *refuse(PyObject *self, const char *what) {
    PyErr_Format(PyExc_TypeError, "%s", what);
    (void)self;
    return NULL;
}

static PyObject *entry_stage(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    if (LIKELY(PyVectorcall_NARGS(nargsf) == 1 && kwnames == NULL))
        return recorder_stage((PyObject *)((Decorated *)self)->rec, args[0]);
    return refuse(self, "stage() takes exactly one positional argument, the name");
}

static PyObject *entry_request(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    return request_parse(((Decorated *)self)->rec, args, PyVectorcall_NARGS(nargsf), kwnames);
}

/* entry(function, traced): the recorder's method of the function's name; passes for `function`, and in dynamo's eyes for `traced`. */
static PyObject *recorder_entry(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2)
        return refuse(self, "entry() takes two functions");
    PyObject *function = args[0], *traced = args[1];
    PyObject *name = PyObject_GetAttr(function, str___name__);
    int is_request = name != NULL && PyUnicode_Check(name) && PyUnicode_Compare(name, str_request) == 0;
    if (name == NULL)
        return NULL;
    Py_DECREF(name);
    return decorated_new((Recorder *)self, function, traced, NULL, is_request ? entry_request : entry_stage);
}

PyMethodDef entry_methods[] = {
    {"entry", (PyCFunction)(void (*)(void))recorder_entry, METH_FASTCALL,
     "entry($self, function, traced, /)\n--\n\nstage() or request() as a function that torch.compile sees through."},
    {NULL, NULL, 0, NULL},
};
