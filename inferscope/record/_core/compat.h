/* CPython's API as this core uses it, in two builds of the same sources.
 *
 * One interpreter's own wheel uses everything that this interpreter offers. With INFERSCOPE_ABI3 there is one extension for every CPython
 * from 3.12 on: only what the limited API of 3.12 has, so that it loads where no wheel of that interpreter's own fits. It costs more,
 * because macros become calls and the context variable is asked through its methods; it records the same.
 *
 * Types are written once, as a table of slots: DEFINE_TYPE() makes a static type of it, or the specification of a heap type.
 */
#ifndef INFERSCOPE_COMPAT_H
#define INFERSCOPE_COMPAT_H

#if defined(INFERSCOPE_ABI3) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030C0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h> /* PyFrame_GetBack before 3.11 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- types --- */

#ifdef INFERSCOPE_ABI3
#define TYPE(T) T##_Type
#define DECLARE_TYPE(T)                                                                                                             \
    extern PyTypeObject *T##_Type;                                                                                                  \
    extern PyType_Spec T##_spec;
#define SLOT(slot, value) {Py_##slot, (void *)(value)},
#define ASYNC_SLOTS(...) __VA_ARGS__
#define VECTORCALL_AT(T, field) {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(T, field), Py_READONLY, NULL},
#define WEAKREFS_AT(T, field) {"__weaklistoffset__", Py_T_PYSSIZET, offsetof(T, field), Py_READONLY, NULL},
#define DICT_AT(T, field) {"__dictoffset__", Py_T_PYSSIZET, offsetof(T, field), Py_READONLY, NULL},
#define DEFINE_TYPE(T, type_name, size, type_flags, offsets, slots)                                                                 \
    PyTypeObject *T##_Type = NULL;                                                                                                  \
    static PyMemberDef T##_offsets[] = {offsets{NULL, 0, 0, 0, NULL}};                                                              \
    static PyType_Slot T##_slots[] = {slots{Py_tp_members, T##_offsets}, {0, NULL}};                                                \
    PyType_Spec T##_spec = {"inferscope.record._native." type_name, (int)(size), 0, (type_flags), T##_slots};
#else
#define TYPE(T) (&T##_Type)
#define DECLARE_TYPE(T) extern PyTypeObject T##_Type;
#define SLOT(slot, value) .slot = value,
#define ASYNC_SLOTS(...) .tp_as_async = &(PyAsyncMethods){__VA_ARGS__},
#define VECTORCALL_AT(T, field) .tp_vectorcall_offset = offsetof(T, field),
#define WEAKREFS_AT(T, field) .tp_weaklistoffset = offsetof(T, field),
#define DICT_AT(T, field) .tp_dictoffset = offsetof(T, field),
#define DEFINE_TYPE(T, type_name, size, type_flags, offsets, slots)                                                                 \
    PyTypeObject T##_Type = {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "inferscope.record._native." type_name,                       \
                             .tp_basicsize = (size), .tp_flags = (type_flags), offsets slots};
#endif

/* Once for each type, before anything is made of it. A heap type is a reference that the process keeps. */
#ifdef INFERSCOPE_ABI3
#define TYPE_READY(T) (T##_Type != NULL || (T##_Type = (PyTypeObject *)PyType_FromSpec(&T##_spec)) != NULL ? 0 : -1)
#else
#define TYPE_READY(T) PyType_Ready(&T##_Type)
#endif

/* Puts an attribute on a ready type of ours. */
static inline int type_set(PyTypeObject *type, const char *name, PyObject *value) {
#ifdef INFERSCOPE_ABI3
    return PyObject_SetAttrString((PyObject *)type, name, value);
#else
    int rc = PyDict_SetItemString(type->tp_dict, name, value);
    PyType_Modified(type);
    return rc;
#endif
}

/* --- objects: one of a heap type refers to its type --- */

#ifdef INFERSCOPE_ABI3
#define VISIT_TYPE(self) Py_VISIT(Py_TYPE(self))
#define LEAVE_TYPE(self) Py_DECREF(Py_TYPE(self))
#else
#define VISIT_TYPE(self) (void)(self)
#define LEAVE_TYPE(self) (void)(self)
#endif

static inline void object_free(PyObject *self) {
#ifdef INFERSCOPE_ABI3
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
#else
    PyObject_Free(self);
#endif
}

static inline void object_gc_free(PyObject *self) {
#ifdef INFERSCOPE_ABI3
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_Del(self);
    Py_DECREF((PyObject *)type);
#else
    PyObject_GC_Del(self);
#endif
}

/* A dead object goes to a freelist, and lives again as one of `type`; PyObject_Init() would be a call for two stores. */
static inline void rest(PyObject *object) {
    LEAVE_TYPE(object);
    (void)object;
}

static inline void revive(PyObject *object, PyTypeObject *type) {
#if defined(INFERSCOPE_ABI3) || defined(Py_REF_DEBUG) || defined(Py_TRACE_REFS) || defined(Py_GIL_DISABLED)
    (void)PyObject_Init(object, type);
#else
    Py_SET_TYPE(object, type);
    Py_SET_REFCNT(object, 1);
#endif
}

/* --- what the limited API lacks, or has as functions only --- */

#ifdef INFERSCOPE_ABI3
#ifndef Py_INCREF
#define Py_INCREF(o) Py_INCREF((PyObject *)(o))
#endif
#ifndef Py_XINCREF
#define Py_XINCREF(o) Py_XINCREF((PyObject *)(o))
#endif
#ifndef Py_DECREF
#define Py_DECREF(o) Py_DECREF((PyObject *)(o))
#endif
#ifndef Py_XDECREF
#define Py_XDECREF(o) Py_XDECREF((PyObject *)(o))
#endif
#ifndef Py_IS_TYPE
#define Py_IS_TYPE(o, t) Py_IS_TYPE((PyObject *)(o), t)
#endif
#define Py_SETREF(target, value)                                                                                                    \
    do {                                                                                                                            \
        PyObject *before_ = (PyObject *)(target);                                                                                   \
        (target) = (value);                                                                                                         \
        Py_DECREF(before_);                                                                                                         \
    } while (0)
#define Py_XSETREF(target, value)                                                                                                   \
    do {                                                                                                                            \
        PyObject *before_ = (PyObject *)(target);                                                                                   \
        (target) = (value);                                                                                                         \
        Py_XDECREF(before_);                                                                                                        \
    } while (0)
#define PyTuple_GET_SIZE(t) PyTuple_Size(t)
#define PyTuple_GET_ITEM(t, i) PyTuple_GetItem(t, i)
#define PyTuple_SET_ITEM(t, i, o) (void)PyTuple_SetItem(t, i, o)
#define PyList_GET_SIZE(l) PyList_Size(l)
#define PyList_GET_ITEM(l, i) PyList_GetItem(l, i)
#define PyList_SET_ITEM(l, i, o) (void)PyList_SetItem(l, i, o)
#define PyDict_GET_SIZE(d) PyDict_Size(d)
#define PyBytes_GET_SIZE(b) PyBytes_Size(b)
#define PyBytes_AS_STRING(b) PyBytes_AsString(b)
#define PyUnicode_GET_LENGTH(s) PyUnicode_GetLength(s)
#define PyUnicode_AsUTF8(s) PyUnicode_AsUTF8AndSize(s, NULL)
#define PyMem_RawMalloc(n) malloc(n)
#define PyMem_RawCalloc(n, size) calloc(n, size)
#define PyMem_RawRealloc(p, n) realloc(p, n)
#define PyMem_RawFree(p) free(p)
#define CO_GENERATOR 0x20
#define CO_COROUTINE 0x80
#define CO_ITERABLE_COROUTINE 0x100
#define CO_ASYNC_GENERATOR 0x200
#define PyContextVar_New(name, value) compat_var_new(name)
#define PyContextVar_Get(var, fallback, value) compat_var_get(var, value)
#define PyContextVar_Set(var, value) compat_var_set(var, value)
#define PyContextVar_Reset(var, token) compat_var_reset(var, token)
#define PyMethod_New(function, self) compat_method(function, self)
PyObject *compat_var_new(const char *name);
int compat_var_get(PyObject *var, PyObject **value);
PyObject *compat_var_set(PyObject *var, PyObject *value);
int compat_var_reset(PyObject *var, PyObject *token);
PyObject *compat_method(PyObject *function, PyObject *self);

static inline PyObject *PyObject_CallOneArg(PyObject *callable, PyObject *arg) {
    PyObject *args[] = {arg};
    return PyObject_Vectorcall(callable, args, 1, NULL);
}

static inline PyObject *PyObject_CallMethodNoArgs(PyObject *object, PyObject *name) {
    PyObject *args[] = {object};
    return PyObject_VectorcallMethod(name, args, 1, NULL);
}
#endif

/* compat.c */
int compat_setup(void);
int is_interned(PyObject *text);
int is_function(PyObject *object);                       /* a Python function, not a method of it */
int is_method_object(PyObject *object);                  /* a staticmethod or classmethod */
int has_defaults(PyObject *function);                    /* of a Python function */
int type_is_named(PyTypeObject *type, const char *name); /* "module.name", as a type of C says it */
int code_object_flags(PyObject *code); /* 0 of anything but a code object */
PyObject *code_name(PyCodeObject *code);   /* qualified where the interpreter knows that; new reference, NULL with an error set */
const char *code_path(PyCodeObject *code); /* borrowed from `code`; NULL with an error set */
uint64_t thread_state_id(void);
/* Innermost frame of a thread of this interpreter; new reference, NULL without an error. For callers that never let go of the GIL. */
PyFrameObject *frame_of_thread(unsigned long ident);
PyFrameObject *frame_back(PyFrameObject *frame); /* new reference, or NULL */
int frame_position(PyFrameObject *frame);        /* tells two places of one function apart */
#endif
