/* Names: columns, series, (kind, name) definitions and request classes. All grow only, all bounded. */
#include "core.h"

PyObject *clean_name(PyObject *name) {
    PyObject *text = PyUnicode_CheckExact(name) ? Py_NewRef(name) : PyUnicode_Check(name) ? PyUnicode_FromObject(name) : PyObject_Str(name);
    if (text != NULL && PyUnicode_GET_LENGTH(text) > NAME_LIMIT)
        Py_SETREF(text, PyUnicode_Substring(text, 0, NAME_LIMIT));
    if (text == NULL)
        PyErr_Clear();
    return text;
}

/* The int stored under `key`, or -1 (also on error, which is cleared). */
static int index_lookup(PyObject *dict, PyObject *key) {
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == NULL) {
        PyErr_Clear();
        return -1;
    }
    return (int)PyLong_AsLong(found);
}

static int index_store(PyObject *dict, PyObject *key, int index) {
    PyObject *value = PyLong_FromLong(index);
    int rc = value == NULL ? -1 : PyDict_SetItem(dict, key, value);
    Py_XDECREF(value);
    return rc;
}

static int column_of(Recorder *rec, PyObject *key) {
    int index = index_lookup(rec->column_index, key);
    if (index >= 0)
        return index;
    if (rec->column_count >= COLUMN_LIMIT) {
        rec->column_overflow++;
        return COLUMN_OTHER;
    }
    index = rec->column_count;
    if (PyList_Append(rec->columns, key) < 0 || index_store(rec->column_index, key, index) < 0) {
        PyErr_Clear();
        rec->internal_errors++;
        return COLUMN_OTHER;
    }
    rec->column_count++;
    return index;
}

static Series *series_add(Recorder *rec, PyObject *kind, PyObject *labels, int digits, int64_t lowest) {
    Series *s = series_new(kind, labels, digits, lowest);
    if (s == NULL) {
        rec->internal_errors++;
        return NULL;
    }
    s->index = rec->series_count;
    rec->series[rec->series_count++] = s;
    return s;
}

static Def *def_add(Recorder *rec, PyObject *kind, PyObject *name, int column, Series *series) {
    if (rec->def_count == rec->def_room) {
        int room = rec->def_room ? rec->def_room * 2 : 64;
        Def **grown = PyMem_RawRealloc(rec->defs, (size_t)room * sizeof(Def *));
        if (grown == NULL)
            return NULL;
        rec->defs = grown;
        rec->def_room = room;
    }
    Def *def = PyMem_RawCalloc(1, sizeof(Def));
    if (def == NULL)
        return NULL;
    def->kind = Py_NewRef(kind);
    def->name = Py_NewRef(name);
    def->column = column;
    def->series = series;
    rec->defs[rec->def_count++] = def;
    return def;
}

/* Where everything goes that finds no room in the series table. */
static Def *other_def(Recorder *rec) {
    rec->series_overflow++;
    if (rec->other == NULL) {
        PyObject *labels = PyTuple_Pack(1, str_other);
        Series *s = labels == NULL ? NULL : series_add(rec, str_other, labels, 2, 1);
        Py_XDECREF(labels);
        rec->other = def_add(rec, str_other, str_other, COLUMN_OTHER, s);
        PyErr_Clear();
    }
    return rec->other;
}

/* How an interval's kind is split: "lock" and "lock.wait" are the wait series and the lock's column; holds, what a device did, and the
 * time to a stream's first byte overlap with everything else the request does, so they own no column. */
static void kind_parts(PyObject *kind, PyObject **series_kind, PyObject **column_kind) {
    *series_kind = *column_kind = kind;
    if (PyUnicode_Compare(kind, str_lock) == 0 || PyUnicode_Compare(kind, str_lock_wait) == 0) {
        *series_kind = str_lock_wait;
        *column_kind = str_lock;
    } else if (PyUnicode_Compare(kind, str_lock_hold) == 0 || PyUnicode_CompareWithASCIIString(kind, "device") == 0 ||
               PyUnicode_CompareWithASCIIString(kind, "device.queue") == 0 || PyUnicode_Compare(kind, str_first_byte) == 0) {
        *column_kind = NULL;
    }
}

static Def *def_make(Recorder *rec, PyObject *key, PyObject *kind, PyObject *name) {
    PyObject *series_kind, *column_kind;
    if (rec->series_count >= SERIES_LIMIT)
        return other_def(rec);
    kind_parts(kind, &series_kind, &column_kind);
    int column = -1;
    if (column_kind != NULL) {
        PyObject *column_key = PyTuple_Pack(2, column_kind, name);
        if (column_key == NULL)
            return NULL;
        column = column_of(rec, column_key);
        Py_DECREF(column_key);
    }
    PyObject *labels = PyTuple_Pack(1, name);
    if (labels == NULL)
        return NULL;
    Series *s = series_add(rec, series_kind, labels, 2, 1);
    Py_DECREF(labels);
    Def *def = def_add(rec, column_kind == NULL ? kind : column_kind, name, column, s);
    if (def != NULL && index_store(rec->def_index, key, rec->def_count - 1) < 0)
        PyErr_Clear(); /* usable now, made anew next time */
    return def;
}

/* The definition for (kind, name), made on first use. NULL, with no error set, only when memory is short. */
Def *registry_def(Recorder *rec, PyObject *kind, PyObject *name) {
    PyObject *k = clean_name(kind), *n = clean_name(name);
    PyObject *key = NULL;
    Def *def = NULL;
    if (k != NULL && PyUnicode_Compare(k, str_lock_wait) == 0)
        Py_SETREF(k, Py_NewRef(str_lock)); /* one definition for both spellings */
    if (k != NULL && n != NULL && (key = PyTuple_Pack(2, k, n)) != NULL) {
        int index = index_lookup(rec->def_index, key);
        def = index >= 0 ? rec->defs[index] : def_make(rec, key, k, n);
    }
    if (def == NULL) {
        PyErr_Clear();
        rec->internal_errors++;
    }
    Py_XDECREF(key);
    Py_XDECREF(k);
    Py_XDECREF(n);
    return def;
}

/* Misses of the pointer cache in core.h. Only interned names enter it: a name built anew for each call would only evict others. */
Def *registry_stage_slow(Recorder *rec, PyObject *name) {
    Def *def = registry_def(rec, str_stage, name);
    if (def != NULL && def != rec->other && PyUnicode_CheckExact(name) && is_interned(name)) {
        StageCache *c = &rec->stage_cache[((uintptr_t)name >> 4) & (STAGE_CACHE - 1)];
        Py_XSETREF(c->name, Py_NewRef(name));
        c->def = def;
    }
    return def;
}

/* A column without a series: a request inside another one. Kept by the class, not in def_index. */
Def *registry_column(Recorder *rec, PyObject *kind, PyObject *name) {
    PyObject *key = PyTuple_Pack(2, kind, name);
    if (key == NULL) {
        PyErr_Clear();
        return NULL;
    }
    Def *def = def_add(rec, kind, name, column_of(rec, key), NULL);
    Py_DECREF(key);
    return def;
}

/* Index of a column, made when there is room; `kind` and `name` are str. */
int registry_column_index(Recorder *rec, PyObject *kind, PyObject *name) {
    PyObject *k = clean_name(kind), *n = clean_name(name);
    PyObject *key = k == NULL || n == NULL ? NULL : PyTuple_Pack(2, k, n);
    int index = key == NULL ? COLUMN_OTHER : column_of(rec, key);
    PyErr_Clear();
    Py_XDECREF(key);
    Py_XDECREF(k);
    Py_XDECREF(n);
    return index;
}

static void class_free(Class *c) {
    if (c == NULL)
        return;
    Py_XDECREF(c->request);
    Py_XDECREF(c->model);
    Py_XDECREF(c->cls);
    PyMem_RawFree(c->band_sums);
    PyMem_RawFree(c);
}

static Class *class_add(Recorder *rec, PyObject *name, PyObject *model, PyObject *cls) {
    Class *c = PyMem_RawCalloc(1, sizeof(Class));
    if (c == NULL)
        return NULL;
    c->band_sums = PyMem_RawCalloc((size_t)BAND_LIMIT * COLUMN_LIMIT, sizeof(int64_t));
    PyObject *labels = PyTuple_Pack(3, name, model != NULL ? model : str_empty, cls != NULL ? cls : str_empty);
    if (c->band_sums == NULL || labels == NULL || (c->series = series_add(rec, str_request, labels, 3, 1000)) == NULL) {
        Py_XDECREF(labels);
        PyErr_Clear();
        class_free(c);
        return NULL;
    }
    Py_DECREF(labels);
    c->request = Py_NewRef(name);
    c->model = Py_XNewRef(model);
    c->cls = Py_XNewRef(cls);
    c->index = rec->class_count;
    rec->classes[rec->class_count++] = c;
    PyObject *edges = PyDict_GetItemWithError(rec->edges, name);
    if (edges != NULL)
        class_set_edges(rec, c, edges);
    PyErr_Clear();
    return c;
}

/* The last place of the class table is shared by everything that comes later. */
static Class *class_other(Recorder *rec) {
    rec->series_overflow++;
    if (rec->class_count == CLASS_LIMIT)
        return rec->classes[CLASS_LIMIT - 1];
    return class_add(rec, str_other, NULL, NULL);
}

static Class *class_make(Recorder *rec, PyObject *key, PyObject *name, PyObject *model, PyObject *cls) {
    if (rec->class_count >= CLASS_LIMIT - 1)
        return class_other(rec);
    Class *c = class_add(rec, name, model, cls);
    if (c != NULL && index_store(rec->class_index, key, c->index) < 0)
        PyErr_Clear();
    return c;
}

static PyObject *clean_label(PyObject *value) {
    return value == NULL || value == Py_None ? NULL : clean_name(value);
}

static Class *class_find(Recorder *rec, PyObject *name, PyObject *model, PyObject *cls) {
    PyObject *n = clean_name(name), *m = clean_label(model), *k = clean_label(cls);
    Class *c = NULL;
    PyObject *key = n == NULL ? NULL : PyTuple_Pack(3, n, m != NULL ? m : Py_None, k != NULL ? k : Py_None);
    if (key != NULL) {
        int index = index_lookup(rec->class_index, key);
        c = index >= 0 ? rec->classes[index] : class_make(rec, key, n, m, k);
    }
    if (c == NULL) {
        PyErr_Clear();
        rec->internal_errors++;
    }
    Py_XDECREF(key);
    Py_XDECREF(n);
    Py_XDECREF(m);
    Py_XDECREF(k);
    return c;
}

static int cacheable(PyObject *s) {
    return s == NULL || s == Py_None || (PyUnicode_CheckExact(s) && is_interned(s));
}

/* `model` and `cls` may be NULL or None. NULL, with no error set, only when memory is short. */
Class *registry_class(Recorder *rec, PyObject *name, PyObject *model, PyObject *cls) {
    uintptr_t hash = ((uintptr_t)name >> 4) ^ ((uintptr_t)model >> 5) ^ ((uintptr_t)cls >> 6);
    ClassCache *cached = &rec->class_cache[hash & (CLASS_CACHE - 1)];
    if (LIKELY(cached->name == name && cached->model == model && cached->cls == cls))
        return cached->class_;
    int64_t refused = rec->series_overflow;
    Class *c = class_find(rec, name, model, cls);
    if (c != NULL && refused == rec->series_overflow && PyUnicode_CheckExact(name) && cacheable(name) && cacheable(model) && cacheable(cls)) {
        Py_XSETREF(cached->name, Py_NewRef(name));
        Py_XSETREF(cached->model, Py_XNewRef(model));
        Py_XSETREF(cached->cls, Py_XNewRef(cls));
        cached->class_ = c;
    }
    return c;
}

/* Folds the rows of the old edges into the bands they split, so that changed edges lose no time. */
static void class_drop_edges(Class *c) {
    for (int i = 0; i < c->edge_count; i++) {
        int from = BASE_BANDS + i, to = c->edge_band[i];
        c->band_counts[to] += c->band_counts[from];
        c->band_counts[from] = 0;
        for (int k = 0; k < COLUMN_LIMIT; k++) {
            c->band_sums[to * COLUMN_LIMIT + k] += c->band_sums[from * COLUMN_LIMIT + k];
            c->band_sums[from * COLUMN_LIMIT + k] = 0;
        }
        c->seen[from] = 0;
    }
    c->edge_count = 0;
}

/* `edges`: ascending tuple of at most EDGE_LIMIT ints. Violations of an edge that stays are kept. */
void class_set_edges(Recorder *rec, Class *c, PyObject *edges) {
    int64_t fresh[EDGE_LIMIT], violations[EDGE_LIMIT] = {0}, overdue[EDGE_LIMIT] = {0};
    int n = (int)PyTuple_GET_SIZE(edges), same = n == c->edge_count;
    for (int i = 0; i < n; i++) {
        fresh[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(edges, i));
        same = same && fresh[i] == c->edges[i];
        for (int j = 0; j < c->edge_count; j++)
            if (c->edges[j] == fresh[i]) {
                violations[i] = c->violations[j];
                overdue[i] = c->overdue[j];
            }
    }
    if (same)
        return;
    pins_refold(rec, c);
    class_drop_edges(c);
    for (int i = 0; i < n; i++) {
        c->edges[i] = fresh[i];
        c->edge_band[i] = band_of(fresh[i]);
        c->violations[i] = violations[i];
        c->overdue[i] = overdue[i];
    }
    c->edge_count = n;
}

int registry_setup(Recorder *rec) {
    if ((rec->columns = PyList_New(0)) == NULL || (rec->column_index = PyDict_New()) == NULL || (rec->def_index = PyDict_New()) == NULL ||
        (rec->class_index = PyDict_New()) == NULL || (rec->edges = PyDict_New()) == NULL || (rec->site_index = PyDict_New()) == NULL)
        return -1;
    PyObject *first = PyTuple_Pack(2, str_unattributed, str_unattributed), *second = PyTuple_Pack(2, str_other, str_other);
    if (first == NULL || second == NULL)
        return -1;
    column_of(rec, first);
    column_of(rec, second);
    Py_DECREF(first);
    Py_DECREF(second);
    return rec->column_count == 2 ? 0 : -1;
}

void registry_free(Recorder *rec) {
    for (int i = 0; i < STAGE_CACHE; i++)
        Py_CLEAR(rec->stage_cache[i].name);
    for (int i = 0; i < CLASS_CACHE; i++) {
        Py_CLEAR(rec->class_cache[i].name);
        Py_CLEAR(rec->class_cache[i].model);
        Py_CLEAR(rec->class_cache[i].cls);
    }
    for (int i = 0; i < rec->def_count; i++) {
        if (rec->defs[i]->spare != NULL)
            span_orphan(rec->defs[i]->spare);
        Py_DECREF(rec->defs[i]->kind);
        Py_DECREF(rec->defs[i]->name);
        PyMem_RawFree(rec->defs[i]);
    }
    PyMem_RawFree(rec->defs);
    for (int i = 0; i < rec->series_count; i++)
        series_free(rec->series[i]);
    for (int i = 0; i < rec->class_count; i++)
        class_free(rec->classes[i]);
    class_free(rec->hidden);
    Py_CLEAR(rec->columns);
    Py_CLEAR(rec->column_index);
    Py_CLEAR(rec->def_index);
    Py_CLEAR(rec->class_index);
    Py_CLEAR(rec->edges);
    Py_CLEAR(rec->site_index);
}
