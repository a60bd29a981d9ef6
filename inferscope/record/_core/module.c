/* inferscope.record._native: the compiled recorder.
 *
 * Built from all .c files of this folder, compiled separately and linked into one extension, with hidden visibility and -O3:
 *     cc -O3 -shared -fPIC -fvisibility=hidden -I<python include> *.c -o ../_native<EXT_SUFFIX>
 *
 * Types are static and state is the process's, so the module refuses sub-interpreters; importing falls back to the pure recorder then.
 * It needs the GIL (see core.h): a free-threaded interpreter switches it on when it imports this, so record/core.py does not import it
 * where the GIL is off.
 */
#include "core.h"

int enter_exit_install(PyTypeObject *type);
int noop_setup(void);
int recorder_add_reader(void);
int stand_in_setup(void);

#define DEFINE_NAME(n) PyObject *str_##n = NULL;
FOR_EACH_NAME(DEFINE_NAME)
#undef DEFINE_NAME
PyObject *str_with = NULL, *str_lock_wait = NULL, *str_lock_hold = NULL, *str_empty = NULL;

static int intern(PyObject **name, const char *text) {
    if (*name == NULL)
        *name = PyUnicode_InternFromString(text);
    return *name == NULL ? -1 : 0;
}

static int intern_names(void) {
#define INTERN_NAME(n)                                                                                                              \
    if (intern(&str_##n, #n) < 0)                                                                                                   \
        return -1;
    FOR_EACH_NAME(INTERN_NAME)
#undef INTERN_NAME
    return intern(&str_with, "with") < 0 || intern(&str_lock_wait, "lock.wait") < 0 || intern(&str_lock_hold, "lock.hold") < 0 ||
                   intern(&str_empty, "") < 0
               ? -1
               : 0;
}

static int ready_types(void) {
    static int done = 0; /* the module may be executed again after it was dropped from sys.modules */
    if (done)
        return 0;
#define READY_TYPE(T)                                                                                                               \
    if (TYPE_READY(T) < 0)                                                                                                          \
        return -1;
    FOR_EACH_TYPE(READY_TYPE)
#undef READY_TYPE
    PyTypeObject *const managers[] = {TYPE(Request), TYPE(Span), TYPE(Noop), TYPE(Attach), TYPE(Lock)};
    for (size_t i = 0; i < sizeof managers / sizeof *managers; i++)
        if (enter_exit_install(managers[i]) < 0)
            return -1;
    done = 1;
    return stand_in_setup() < 0 ? -1 : recorder_add_reader();
}

static int module_exec(PyObject *module) {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError, "inferscope.record._native works in the main interpreter only");
        return -1;
    }
    if (compat_setup() < 0 || intern_names() < 0 || ready_types() < 0 || noop_setup() < 0 || clock_setup() < 0)
        return -1;
    if (PyModule_AddObjectRef(module, "Recorder", (PyObject *)TYPE(Recorder)) < 0 ||
        PyModule_AddObjectRef(module, "Request", (PyObject *)TYPE(Request)) < 0 ||
        PyModule_AddObjectRef(module, "Span", (PyObject *)TYPE(Span)) < 0 ||
        PyModule_AddObjectRef(module, "InstrumentedLock", (PyObject *)TYPE(Lock)) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "noop", noop_object);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "inferscope.record._native",
    .m_doc = "The compiled recorder; its pure-Python twin is inferscope.record.fallback.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&module_def);
}
