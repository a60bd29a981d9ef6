/* Lock sites: who held the lock that others waited for. Sites are bounded, and named by function, file and line. */
#include "core.h"

static int next_site_id = 1; /* unique in the process, so that records of several recorders never mix */

static int site_add(Recorder *rec, PyObject *key, PyObject *lock, PyObject *site, PyObject *stage, PyObject *request) {
    Site **sites = PyMem_RawRealloc(rec->sites, (size_t)(rec->site_count + 1) * sizeof(Site *));
    if (sites == NULL)
        return -1;
    rec->sites = sites;
    int *ids = PyMem_RawRealloc(rec->site_ids, (size_t)(rec->site_count + 1) * sizeof(int));
    if (ids == NULL)
        return -1;
    rec->site_ids = ids;
    Site *s = PyMem_RawCalloc(1, sizeof(Site));
    PyObject *index = s == NULL ? NULL : PyLong_FromLong(rec->site_count);
    if (index == NULL || PyDict_SetItem(rec->site_index, key, index) < 0) {
        Py_XDECREF(index);
        PyMem_RawFree(s);
        return -1;
    }
    Py_DECREF(index);
    s->lock = Py_NewRef(lock);
    s->site = Py_NewRef(site);
    s->stage = Py_XNewRef(stage);
    s->request = Py_XNewRef(request);
    rec->sites[rec->site_count] = s;
    rec->site_ids[rec->site_count] = next_site_id++;
    return rec->site_count++;
}

/* Index of a site, made on first use; past the limit everything of a lock goes to its site "other". -1 when memory is short. */
int site_find(Recorder *rec, PyObject *lock, PyObject *site, PyObject *stage, PyObject *request) {
    PyObject *key = PyTuple_Pack(4, lock, site, stage != NULL ? stage : Py_None, request != NULL ? request : Py_None);
    PyObject *found = key == NULL ? NULL : PyDict_GetItemWithError(rec->site_index, key);
    int index = -1;
    if (found != NULL)
        index = (int)PyLong_AsLong(found);
    else if (key != NULL && rec->site_count < SITE_LIMIT)
        index = site_add(rec, key, lock, site, stage, request);
    else if (key != NULL && site != str_other)
        index = site_find(rec, lock, str_other, NULL, NULL);
    else if (key != NULL && rec->site_count < SITE_LIMIT + SERIES_LIMIT)
        index = site_add(rec, key, lock, site, stage, request);
    Py_XDECREF(key);
    PyErr_Clear();
    return index;
}

/* A site where a holder's request and stage are known, with the request as people see it: its name, and its class in brackets. */
int site_of_holder(Recorder *rec, PyObject *lock, PyObject *site, const Def *stage, const Class *c) {
    PyObject *request = NULL;
    if (c != NULL)
        request = c->cls != NULL ? PyUnicode_FromFormat("%U (%U)", c->request, c->cls) : Py_NewRef(c->request);
    int index = site_find(rec, lock, site, stage != NULL ? stage->name : NULL, request);
    Py_XDECREF(request);
    return index;
}

/* --- reading another thread's stack --- */

static int is_ours(PyFrameObject *frame) {
    PyObject *globals = PyObject_GetAttr((PyObject *)frame, str_f_globals);
    PyObject *module = globals != NULL && PyDict_Check(globals) ? PyDict_GetItemWithError(globals, str___name__) : NULL;
    int ours = 0;
    if (module != NULL && PyUnicode_Check(module)) {
        static const char *const machinery[] = {"inferscope", "inferscope_integrations", "threading", "asyncio", "contextlib", "gevent"};
        const char *name = PyUnicode_AsUTF8(module);
        for (size_t i = 0; name != NULL && !ours && i < sizeof machinery / sizeof *machinery; i++) {
            size_t n = strlen(machinery[i]);
            ours = strncmp(name, machinery[i], n) == 0 && (name[n] == 0 || name[n] == '.');
        }
    }
    Py_XDECREF(globals);
    PyErr_Clear();
    return ours;
}

static SiteCache *cached_site(Recorder *rec, PyObject *lock, PyCodeObject *code, int position, const Def *stage, const Class *c) {
    uintptr_t hash = ((uintptr_t)code >> 5) ^ ((uintptr_t)lock >> 4) ^ ((uintptr_t)stage >> 4) ^ ((uintptr_t)c >> 6) ^ (uintptr_t)position;
    return &rec->site_cache[hash % SITE_CACHE];
}

/* "function (file:line)" of the innermost frame that belongs to the application; NULL when there is none. */
static PyObject *describe(PyFrameObject *frame) {
    Py_XINCREF(frame);
    while (frame != NULL && is_ours(frame)) {
        PyFrameObject *back = frame_back(frame);
        Py_DECREF(frame);
        frame = back;
    }
    if (frame == NULL)
        return NULL;
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *name = code_name(code), *text = NULL;
    const char *file = code_path(code), *slash = file == NULL ? NULL : strrchr(file, '/');
    if (name != NULL)
        text = PyUnicode_FromFormat("%U (%s:%d)", name, slash != NULL ? slash + 1 : file != NULL ? file : "?", PyFrame_GetLineNumber(frame));
    Py_XDECREF(name);
    Py_DECREF(code);
    Py_DECREF(frame);
    return text;
}

/* The site where thread `ident` is now: what sys._current_frames() tells, for one thread. The GIL keeps that thread still. */
static int site_of_stack(Recorder *rec, PyObject *lock, unsigned long ident, const Def *stage, const Class *c) {
    PyFrameObject *frame = frame_of_thread(ident);
    if (frame == NULL)
        return -1;
    PyCodeObject *code = PyFrame_GetCode(frame);
    int position = frame_position(frame);
    SiteCache *cached = cached_site(rec, lock, code, position, stage, c);
    int index = cached->site;
    if (cached->lock != lock || cached->code != (PyObject *)code || cached->stage != stage || cached->class_ != c ||
        cached->position != position) {
        PyObject *text = describe(frame);
        index = text == NULL ? -1 : site_of_holder(rec, lock, text, stage, c);
        Py_XDECREF(text);
        if (index >= 0 && !is_ours(frame)) { /* below a frame of ours lies a caller that may be another one next time */
            Py_XSETREF(cached->lock, Py_NewRef(lock));
            Py_XSETREF(cached->code, Py_NewRef((PyObject *)code));
            cached->stage = stage;
            cached->class_ = c;
            cached->position = position;
            cached->site = index;
        }
    }
    Py_DECREF(code);
    Py_DECREF(frame);
    PyErr_Clear();
    return index;
}

int site_of_thread(Recorder *rec, PyObject *lock, unsigned long ident, const Def *stage, const Class *c) {
    int collecting = PyGC_Disable(); /* what a collection frees can run Python code, which lets go of the GIL and lets that thread move */
    int index = site_of_stack(rec, lock, ident, stage, c);
    if (collecting)
        PyGC_Enable();
    return index;
}

#define SEARCH_DEPTH 24

/* (qualified name, name of the file) of a function, as keys of `thread_within` are. */
static PyObject *code_key(PyCodeObject *code) {
    PyObject *name = code_name(code);
    const char *path = code_path(code), *slash = path == NULL ? NULL : strrchr(path, '/');
    PyObject *file = PyUnicode_FromString(slash != NULL ? slash + 1 : path != NULL ? path : "?");
    PyObject *key = name == NULL || file == NULL ? NULL : PyTuple_Pack(2, name, file);
    Py_XDECREF(name);
    Py_XDECREF(file);
    return key;
}

/* The innermost function on the stack of thread `ident` that is a key of the dict `wanted`; None when there is none.
 *
 * The whole walk is one call that never lets go of the GIL, so that the stack stands still: walked from Python, frames of 3.11 can lose
 * the frame below them between two steps, and reading `f_back` then crashes. The collector rests meanwhile, because what it frees can run
 * Python code, which lets go of the GIL. */
PyObject *thread_within(unsigned long ident, PyObject *wanted) {
    int collecting = PyGC_Disable();
    PyFrameObject *frame = frame_of_thread(ident);
    PyObject *found = NULL;
    for (int depth = 0; frame != NULL && found == NULL && depth < SEARCH_DEPTH; depth++) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyObject *key = code_key(code);
        if (key != NULL && PyDict_Contains(wanted, key) > 0)
            found = Py_NewRef(key);
        Py_XDECREF(key);
        Py_DECREF(code);
        PyFrameObject *back = frame_back(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    if (collecting)
        PyGC_Enable();
    PyErr_Clear();
    return found != NULL ? found : Py_NewRef(Py_None);
}

int site_by_id(Recorder *rec, int64_t id) {
    for (int i = 0; i < rec->site_count; i++)
        if (rec->site_ids[i] == id)
            return i;
    return -1;
}

/* A negative wait only updates the longest hold. */
void site_blame(Recorder *rec, int index, int64_t wait_ns, int64_t hold_ns) {
    Site *s = rec->sites[index];
    if (wait_ns >= 0) {
        s->waits++;
        s->wait_ns += wait_ns;
    }
    if (hold_ns > s->longest_hold_ns)
        s->longest_hold_ns = hold_ns;
}

/* Ids stay: locks remember them. */
void sites_zero(Recorder *rec) {
    for (int i = 0; i < rec->site_count; i++)
        rec->sites[i]->waits = rec->sites[i]->wait_ns = rec->sites[i]->longest_hold_ns = 0;
}

void sites_free(Recorder *rec) {
    for (int i = 0; i < rec->site_count; i++) {
        Py_DECREF(rec->sites[i]->lock);
        Py_DECREF(rec->sites[i]->site);
        Py_XDECREF(rec->sites[i]->stage);
        Py_XDECREF(rec->sites[i]->request);
        PyMem_RawFree(rec->sites[i]);
    }
    PyMem_RawFree(rec->sites);
    PyMem_RawFree(rec->site_ids);
    for (int i = 0; i < SITE_CACHE; i++) {
        Py_CLEAR(rec->site_cache[i].lock);
        Py_CLEAR(rec->site_cache[i].code);
    }
}

PyObject *sites_list(Recorder *rec) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < rec->site_count; i++) {
        const Site *s = rec->sites[i];
        PyObject *item = Py_BuildValue("(OiOOLLLO)", s->lock, rec->site_ids[i], s->site, s->stage != NULL ? s->stage : Py_None,
                                       (long long)s->waits, (long long)s->wait_ns, (long long)s->longest_hold_ns,
                                       s->request != NULL ? s->request : Py_None);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}
