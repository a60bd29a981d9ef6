/* Whether the value of a context variable can be read where CPython caches it. */
#include "frame.h"

static const VarCache never = {0};

#if CONTEXT_IS_CACHED

/* Compares the cache with what the variable says, in this thread and context; any difference is the end of it. */
static int cache_tells_truth(PyObject *var) {
    const VarCache *cache = (const VarCache *)var;
    PyObject *value = PyFloat_FromDouble(1.5), *token = value == NULL ? NULL : PyContextVar_Set(var, value), *told = NULL;
    const PyThreadState *thread = PyThreadState_Get();
    int same = token != NULL && PyContextVar_Get(var, NULL, &told) == 0 && told == value && cache->value == value &&
               cache->thread == thread->id && cache->version == thread->context_ver;
    if (token != NULL && PyContextVar_Reset(var, token) < 0)
        same = 0;
    PyErr_Clear();
    Py_XDECREF(told);
    Py_XDECREF(token);
    Py_XDECREF(value);
    return same && cache->value == NULL;
}
#endif

/* Tried once, with the first recorder's variable. */
void context_setup(Recorder *rec) {
#if CONTEXT_IS_CACHED
    static int direct = -1;
    if (direct < 0)
        direct = (size_t)Py_TYPE(rec->var)->tp_basicsize >= sizeof(VarCache) && cache_tells_truth(rec->var);
    rec->cache = direct ? (const VarCache *)rec->var : &never;
#else
    rec->cache = &never;
#endif
}
