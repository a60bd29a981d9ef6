/* What differs between an interpreter's own build and the one for every interpreter from 3.12 on; see compat.h. */
#include "core.h"

#ifdef INFERSCOPE_ABI3

/* Kept for the process: types and functions that the limited API has no name for. */
static PyObject *function_type = NULL, *method_type = NULL, *static_method_type = NULL, *class_method_type = NULL;
static PyObject *context_var_type = NULL, *current_frames = NULL, *told_interned = NULL;
static PyObject *str_get = NULL, *str_set = NULL, *str_reset = NULL, *str_f_back = NULL, *str_f_lasti = NULL;
static PyObject *str_co_name = NULL, *str_co_qualname = NULL, *str_co_filename = NULL, *str_defaults = NULL, *str_kwdefaults = NULL;

static int keep(PyObject **place, const char *module, const char *name) {
    PyObject *owner = *place != NULL ? NULL : PyImport_ImportModule(module);
    if (owner != NULL)
        *place = PyObject_GetAttrString(owner, name);
    Py_XDECREF(owner);
    return *place == NULL ? -1 : 0;
}

static int keep_name(PyObject **place, const char *name) {
    if (*place == NULL)
        *place = PyUnicode_InternFromString(name);
    return *place == NULL ? -1 : 0;
}

int compat_setup(void) {
    if (keep(&function_type, "types", "FunctionType") < 0 || keep(&method_type, "types", "MethodType") < 0 ||
        keep(&static_method_type, "builtins", "staticmethod") < 0 || keep(&class_method_type, "builtins", "classmethod") < 0 ||
        keep(&context_var_type, "_contextvars", "ContextVar") < 0 || keep(&current_frames, "sys", "_current_frames") < 0)
        return -1;
    if (keep(&told_interned, "sys", "_is_interned") < 0) /* 3.13 and later */
        PyErr_Clear();
    return keep_name(&str_get, "get") < 0 || keep_name(&str_set, "set") < 0 || keep_name(&str_reset, "reset") < 0 ||
                   keep_name(&str_f_back, "f_back") < 0 || keep_name(&str_f_lasti, "f_lasti") < 0 ||
                   keep_name(&str_co_name, "co_name") < 0 || keep_name(&str_co_qualname, "co_qualname") < 0 ||
                   keep_name(&str_co_filename, "co_filename") < 0 || keep_name(&str_defaults, "__defaults__") < 0 ||
                   keep_name(&str_kwdefaults, "__kwdefaults__") < 0
               ? -1
               : 0;
}

PyObject *compat_var_new(const char *name) {
    PyObject *text = PyUnicode_FromString(name), *var = text == NULL ? NULL : PyObject_CallOneArg(context_var_type, text);
    Py_XDECREF(text);
    return var;
}

/* As PyContextVar_Get() without a default, but for None, which every caller takes for nothing. */
int compat_var_get(PyObject *var, PyObject **value) {
    PyObject *args[] = {var, Py_None};
    *value = PyObject_VectorcallMethod(str_get, args, 2, NULL);
    return *value == NULL ? -1 : 0;
}

PyObject *compat_var_set(PyObject *var, PyObject *value) {
    PyObject *args[] = {var, value};
    return PyObject_VectorcallMethod(str_set, args, 2, NULL);
}

int compat_var_reset(PyObject *var, PyObject *token) {
    PyObject *args[] = {var, token}, *done = PyObject_VectorcallMethod(str_reset, args, 2, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *compat_method(PyObject *function, PyObject *self) {
    PyObject *args[] = {function, self};
    return PyObject_Vectorcall(method_type, args, 2, NULL);
}

/* Before 3.13 nobody tells, but there an interned string is immortal, and one made at run time is not. */
int is_interned(PyObject *text) {
    if (told_interned == NULL)
        return Py_REFCNT(text) > INT32_MAX / 4;
    PyObject *told = PyObject_CallOneArg(told_interned, text);
    int yes = told == Py_True;
    if (told == NULL)
        PyErr_Clear();
    Py_XDECREF(told);
    return yes;
}

int is_function(PyObject *object) {
    return Py_IS_TYPE(object, (PyTypeObject *)function_type);
}

int is_method_object(PyObject *object) {
    return PyObject_TypeCheck(object, (PyTypeObject *)static_method_type) || PyObject_TypeCheck(object, (PyTypeObject *)class_method_type);
}

static int is_set(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    int set = value != NULL && value != Py_None;
    PyErr_Clear();
    Py_XDECREF(value);
    return set;
}

int has_defaults(PyObject *function) {
    return is_set(function, str_defaults) || is_set(function, str_kwdefaults);
}

int type_is_named(PyTypeObject *type, const char *name) {
    PyObject *module = PyObject_GetAttrString((PyObject *)type, "__module__"), *own = PyType_GetName(type);
    PyObject *full = module == NULL || own == NULL ? NULL : PyUnicode_FromFormat("%S.%U", module, own);
    int same = full != NULL && PyUnicode_CompareWithASCIIString(full, name) == 0;
    PyErr_Clear();
    Py_XDECREF(module);
    Py_XDECREF(own);
    Py_XDECREF(full);
    return same;
}

int code_object_flags(PyObject *code) {
    PyObject *flags = PyObject_GetAttr(code, str_co_flags);
    long value = flags == NULL || !PyLong_Check(flags) ? 0 : PyLong_AsLong(flags);
    PyErr_Clear();
    Py_XDECREF(flags);
    return (int)value;
}

PyObject *code_name(PyCodeObject *code) {
    PyObject *name = PyObject_GetAttr((PyObject *)code, str_co_qualname);
    if (name != NULL)
        return name;
    PyErr_Clear();
    return PyObject_GetAttr((PyObject *)code, str_co_name);
}

const char *code_path(PyCodeObject *code) {
    PyObject *path = PyObject_GetAttr((PyObject *)code, str_co_filename);
    const char *text = path == NULL ? NULL : PyUnicode_AsUTF8(path);
    Py_XDECREF(path); /* the code has it */
    return text;
}

uint64_t thread_state_id(void) {
    return PyThreadState_GetID(PyThreadState_Get());
}

/* Frames of all threads are made for it; they are walked from here, so nothing lets go of the GIL in between. */
PyFrameObject *frame_of_thread(unsigned long ident) {
    PyObject *all = PyObject_CallNoArgs(current_frames), *key = all == NULL ? NULL : PyLong_FromUnsignedLong(ident);
    PyObject *frame = key == NULL ? NULL : PyDict_GetItemWithError(all, key);
    Py_XINCREF(frame);
    PyErr_Clear();
    Py_XDECREF(key);
    Py_XDECREF(all);
    return (PyFrameObject *)frame;
}

PyFrameObject *frame_back(PyFrameObject *frame) {
    PyObject *back = PyObject_GetAttr((PyObject *)frame, str_f_back);
    if (back == NULL)
        PyErr_Clear();
    if (back == Py_None)
        Py_SETREF(back, NULL);
    return (PyFrameObject *)back;
}

int frame_position(PyFrameObject *frame) {
    PyObject *last = PyObject_GetAttr((PyObject *)frame, str_f_lasti);
    long position = last == NULL ? -1 : PyLong_AsLong(last);
    PyErr_Clear();
    Py_XDECREF(last);
    return (int)position;
}

#else

int compat_setup(void) {
    return 0;
}

int is_interned(PyObject *text) {
    return PyUnicode_CHECK_INTERNED(text) != 0;
}

int is_function(PyObject *object) {
    return PyFunction_Check(object);
}

int is_method_object(PyObject *object) {
    return PyObject_TypeCheck(object, &PyStaticMethod_Type) || PyObject_TypeCheck(object, &PyClassMethod_Type);
}

int has_defaults(PyObject *function) {
    return PyFunction_GetDefaults(function) != NULL || PyFunction_GetKwDefaults(function) != NULL;
}

int type_is_named(PyTypeObject *type, const char *name) {
    return strcmp(type->tp_name, name) == 0;
}

int code_object_flags(PyObject *code) {
    return PyCode_Check(code) ? ((PyCodeObject *)code)->co_flags : 0;
}

PyObject *code_name(PyCodeObject *code) {
    PyObject *name = PyObject_GetAttrString((PyObject *)code, "co_qualname"); /* 3.11 and later */
    if (name != NULL)
        return name;
    PyErr_Clear();
    return Py_NewRef(code->co_name);
}

const char *code_path(PyCodeObject *code) {
    return PyUnicode_AsUTF8(code->co_filename);
}

uint64_t thread_state_id(void) {
    return ((PyThreadState *)PyThreadState_Get())->id;
}

PyFrameObject *frame_of_thread(unsigned long ident) {
    PyThreadState *t = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    while (t != NULL && t->thread_id != ident)
        t = PyThreadState_Next(t);
    return t == NULL ? NULL : PyThreadState_GetFrame(t);
}

PyFrameObject *frame_back(PyFrameObject *frame) {
    return PyFrame_GetBack(frame);
}

int frame_position(PyFrameObject *frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(frame);
#else
    return PyFrame_GetLineNumber(frame);
#endif
}
#endif
