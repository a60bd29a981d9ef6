/* Makes the n-th internal call of the core fail: included before every source by tests/native/test_injection.py, never part of a build.
 *
 * What is wrapped is what the core calls for its own sake: allocations, objects, dictionaries, the context. Calls that it makes in the
 * application's name (the decorated function, the wrapped lock, attributes that it passes on) are not: their failures are the application's.
 */
#ifndef INFERSCOPE_INJECT_H
#define INFERSCOPE_INJECT_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

extern long inject_left;  /* calls until one fails; negative: none */
extern long inject_calls; /* calls since armed */

static inline int inject(void) {
    inject_calls++;
    return inject_left >= 0 && inject_left-- == 0;
}
static inline void *inject_null(void) {
    PyErr_NoMemory();
    return NULL;
}
static inline int inject_error(void) {
    PyErr_NoMemory();
    return -1;
}

#define FAILING(call) (inject() ? inject_null() : (call))
#define FAILING_RAW(call) (inject() ? NULL : (call))
#define FAILING_INT(call) (inject() ? inject_error() : (call))
/* Attributes are the core's own business in these files only. */
#define OWN_ATTRIBUTE (strstr(__BASE_FILE__, "blame.c") || strstr(__BASE_FILE__, "request.c"))

#define PyMem_RawMalloc(n) FAILING_RAW(PyMem_RawMalloc(n))
#define PyMem_RawCalloc(n, s) FAILING_RAW(PyMem_RawCalloc(n, s))
#define PyMem_RawRealloc(p, n) FAILING_RAW(PyMem_RawRealloc(p, n))
#define _PyObject_New(t) FAILING(_PyObject_New(t))
#define _PyObject_GC_New(t) FAILING(_PyObject_GC_New(t))
#define PyTuple_Pack(...) FAILING(PyTuple_Pack(__VA_ARGS__))
#define PyTuple_New(n) FAILING(PyTuple_New(n))
#define PyList_New(n) FAILING(PyList_New(n))
#define PyList_Append(l, o) FAILING_INT(PyList_Append(l, o))
#define PyList_AsTuple(l) FAILING(PyList_AsTuple(l))
#define PyList_SetSlice(l, a, b, v) FAILING_INT(PyList_SetSlice(l, a, b, v))
#define PyDict_New() FAILING(PyDict_New())
#define PyDict_SetItem(d, k, v) FAILING_INT(PyDict_SetItem(d, k, v))
#define PyDict_GetItemWithError(d, k) FAILING(PyDict_GetItemWithError(d, k))
/* The interpreter keeps small ints. */
#define PyLong_FromLong(n) ((n) >= 0 && (n) <= 256 ? PyLong_FromLong(n) : FAILING(PyLong_FromLong(n)))
#define PyLong_FromLongLong(n) ((n) >= 0 && (n) <= 256 ? PyLong_FromLongLong(n) : FAILING(PyLong_FromLongLong(n)))
#define PyFloat_FromDouble(x) FAILING(PyFloat_FromDouble(x))
#define PyBytes_FromStringAndSize(s, n) FAILING(PyBytes_FromStringAndSize(s, n))
#define PyUnicode_FromObject(o) FAILING(PyUnicode_FromObject(o))
#define PyUnicode_FromString(s) FAILING(PyUnicode_FromString(s))
#define PyUnicode_FromFormat(...) FAILING(PyUnicode_FromFormat(__VA_ARGS__))
#define PyUnicode_Substring(o, a, b) FAILING(PyUnicode_Substring(o, a, b))
#define PyObject_Str(o) FAILING(PyObject_Str(o))
#define PyImport_ImportModule(n) FAILING(PyImport_ImportModule(n))
#define PyNumber_Index(o) FAILING(PyNumber_Index(o))
#define PyContextVar_Get(v, d, p) FAILING_INT(PyContextVar_Get(v, d, p))
#define PyContextVar_Set(v, o) FAILING(PyContextVar_Set(v, o))
#define PyObject_GetAttr(o, n) (OWN_ATTRIBUTE && inject() ? inject_null() : PyObject_GetAttr(o, n))
#define PyObject_GetAttrString(o, n) FAILING(PyObject_GetAttrString(o, n))
#undef Py_BuildValue
#ifdef PY_SSIZE_T_CLEAN
#if PY_VERSION_HEX < 0x030D0000
#define Py_BuildValue(...) FAILING(_Py_BuildValue_SizeT(__VA_ARGS__))
#else
#define Py_BuildValue(...) FAILING((Py_BuildValue)(__VA_ARGS__))
#endif
#endif
#endif
