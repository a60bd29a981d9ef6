/* What other threads are at: stacks and open requests, for evidence while an objective is broken. Read by threads of ours only. */
#include "core.h"

#define STACK_DEPTH 64

PyObject *reader_stack(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *reader_open(PyObject *self, PyObject *unused);

/* The last two parts of a path: enough to find a file, without the directories that name people and machines. */
static const char *short_path(const char *path) {
    const char *last = path == NULL ? NULL : strrchr(path, '/');
    if (last == NULL)
        return path != NULL ? path : "?";
    const char *at = last;
    while (at > path && at[-1] != '/')
        at--;
    return at > path ? at : last + 1;
}

static PyObject *place_of(PyFrameObject *frame) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *name = code_name(code);
    const char *path = code_path(code);
    if (path == NULL)
        PyErr_Clear();
    PyObject *place = name == NULL ? NULL : Py_BuildValue("(Nsi)", name, short_path(path), PyFrame_GetLineNumber(frame));
    Py_DECREF(code);
    return place;
}

/* _stack(ident, depth) -> ((function, file, line), ...), innermost first; None when there is no such thread.
 *
 * One call that never lets go of the GIL, with the collector at rest, for the reasons of `thread_within`. */
PyObject *reader_stack(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    (void)self;
    unsigned long ident = nargs == 2 ? PyLong_AsUnsignedLongMask(args[0]) : 0;
    long depth = nargs == 2 ? PyLong_AsLong(args[1]) : -1;
    if (PyErr_Occurred() || depth < 1 || depth > STACK_DEPTH) {
        PyErr_Format(PyExc_TypeError, "_stack() takes a thread's ident and a depth from 1 to %d", STACK_DEPTH);
        return NULL;
    }
    int collecting = PyGC_Disable();
    PyFrameObject *frame = frame_of_thread(ident);
    PyObject *list = frame == NULL ? NULL : PyList_New(0);
    for (long n = 0; frame != NULL && list != NULL && n < depth; n++) {
        PyObject *place = place_of(frame);
        if (place == NULL || PyList_Append(list, place) < 0)
            Py_CLEAR(list);
        Py_XDECREF(place);
        PyFrameObject *back = frame_back(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    PyErr_Clear();
    PyObject *found = list == NULL ? Py_NewRef(Py_None) : PyList_AsTuple(list);
    Py_XDECREF(list);
    if (collecting)
        PyGC_Enable();
    return found;
}

/* _open() -> [(id, name, innermost stage or None, start ns, native thread id, whether it is a carrier, itself), ...], youngest first. */
PyObject *reader_open(PyObject *self, PyObject *unused) {
    (void)unused;
    int collecting = PyGC_Disable(); /* what a collection frees may close a request, and the list with it */
    PyObject *list = PyList_New(0);
    for (Request *r = ((Recorder *)self)->open_head; r != NULL && list != NULL; r = r->open_next) {
        const Def *stage = r->top != NULL ? r->top->def : NULL;
        PyObject *name = is_carrier(r) ? r->root.def->name : r->class_->request;
        PyObject *item = Py_BuildValue("(LOOLkOO)", (long long)r->id, name, stage != NULL ? stage->name : Py_None, (long long)r->root.start,
                                       (unsigned long)r->tid, is_carrier(r) ? Py_True : Py_False, (PyObject *)r);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    if (collecting)
        PyGC_Enable();
    return list;
}
