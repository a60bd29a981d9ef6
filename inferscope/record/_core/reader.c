/* The reader's half of Recorder: snapshots for the aggregator's thread. Copies are short and never make a writer wait beyond them. */
#include "core.h"

PyObject *reader_stack(PyObject *self, PyObject *const *args, Py_ssize_t nargs); /* look.c */
PyObject *reader_open(PyObject *self, PyObject *unused);

static PyObject *reader_columns(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyList_GetSlice(((Recorder *)self)->columns, 0, PY_SSIZE_T_MAX);
}

static PyObject *reader_series(PyObject *self, PyObject *unused) {
    Recorder *rec = (Recorder *)self;
    PyObject *list = PyList_New(0);
    (void)unused;
    for (int i = 0; list != NULL && i < rec->series_count; i++) {
        const Series *s = rec->series[i];
        PyObject *item = Py_BuildValue("(iOOiLi)", s->index, s->kind, s->labels, s->digits, (long long)s->lowest, s->counts_len);
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static Class *class_at(Recorder *rec, PyObject *index) {
    long i = PyLong_AsLong(index);
    if (i == -1 && PyErr_Occurred())
        return NULL;
    if (i < 0 || i >= rec->class_count) {
        PyErr_Format(PyExc_IndexError, "no request class %ld", i);
        return NULL;
    }
    return rec->classes[i];
}

static PyObject *reader_read_counts(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Recorder *rec = (Recorder *)self;
    long i = nargs == 2 ? PyLong_AsLong(args[0]) : -1;
    if (i == -1 && PyErr_Occurred())
        return NULL;
    if (i < 0 || i >= rec->series_count)
        return PyErr_Format(PyExc_IndexError, "read_counts() takes the index of a series and a buffer");
    const Series *s = rec->series[i];
    Py_buffer view;
    if (PyObject_GetBuffer(args[1], &view, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0)
        return NULL;
    if (view.len < s->counts_len * (Py_ssize_t)sizeof(int64_t)) {
        PyBuffer_Release(&view);
        return PyErr_Format(PyExc_ValueError, "series %ld needs a buffer of %d int64", i, s->counts_len);
    }
    int64_t count = series_read(s, view.buf), sum = COUNT_READ(s->sum), clamped = COUNT_READ(s->clamped);
    PyBuffer_Release(&view);
    return Py_BuildValue("(LLL)", (long long)count, (long long)sum, (long long)clamped);
}

static PyObject *int_tuple(const int64_t *values, int n) {
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple != NULL && i < n; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

static PyObject *reader_classes(PyObject *self, PyObject *unused) {
    Recorder *rec = (Recorder *)self;
    PyObject *list = PyList_New(0);
    (void)unused;
    for (int i = 0; list != NULL && i < rec->class_count; i++) {
        const Class *c = rec->classes[i];
        PyObject *item = Py_BuildValue("(iOOOiN)", c->index, c->request, c->model != NULL ? c->model : Py_None,
                                       c->cls != NULL ? c->cls : Py_None, c->series->index, int_tuple(c->edges, c->edge_count));
        if (item == NULL || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *reader_read_class(PyObject *self, PyObject *index) {
    const Class *c = class_at((Recorder *)self, index);
    if (c == NULL)
        return NULL;
    return Py_BuildValue("{sL sL sL sL sL sL sL sL sN sN sL sL sL sL}", "count", (long long)c->count, "errors", (long long)c->errors, "items",
                         (long long)c->items, "excluded", (long long)c->excluded, "shed", (long long)c->shed,
                         "cancelled", (long long)c->cancelled, "late_spans", (long long)c->late_spans, "truncated",
                         (long long)c->truncated, "violations", int_tuple(c->violations, c->edge_count), "overdue",
                         int_tuple(c->overdue, c->edge_count), "wall_ns", (long long)c->wall_ns,
                         "cpu_ns", (long long)c->cpu_ns, "cpu_wall_ns", (long long)c->cpu_wall_ns, "cpu_requests",
                         (long long)c->cpu_requests);
}

/* Rows that occur, by latency: the row of an edge follows the band that it splits. Returns their number. */
static int rows_in_order(const Class *c, int32_t *rows) {
    int n = 0;
    for (int band = 0; band < BASE_BANDS; band++) {
        if (c->band_counts[band] > 0)
            rows[n++] = band;
        for (int i = 0; i < c->edge_count; i++)
            if (c->edge_band[i] == band && c->band_counts[BASE_BANDS + i] > 0)
                rows[n++] = BASE_BANDS + i;
    }
    return n;
}

static PyObject *reader_read_bands(PyObject *self, PyObject *index) {
    Recorder *rec = (Recorder *)self;
    const Class *c = class_at(rec, index);
    int32_t rows[BAND_LIMIT];
    if (c == NULL)
        return NULL;
    int n = rows_in_order(c, rows), columns = rec->column_count;
    PyObject *ids = PyBytes_FromStringAndSize((char *)rows, n * (Py_ssize_t)sizeof(int32_t));
    PyObject *counts = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(int64_t));
    PyObject *sums = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n * columns * (Py_ssize_t)sizeof(int64_t));
    if (ids != NULL && counts != NULL && sums != NULL) {
        int64_t *to_counts = (int64_t *)PyBytes_AS_STRING(counts);
        int64_t *to_sums = (int64_t *)PyBytes_AS_STRING(sums);
        for (int i = 0; i < n; i++) {
            memcpy(to_counts + i, &c->band_counts[rows[i]], sizeof(int64_t));
            memcpy(to_sums + (size_t)i * columns, c->band_sums + rows[i] * COLUMN_LIMIT, (size_t)columns * sizeof(int64_t));
        }
    } else {
        Py_CLEAR(sums);
    }
    if (sums == NULL) {
        Py_XDECREF(ids);
        Py_XDECREF(counts);
        return NULL;
    }
    return Py_BuildValue("(NNN)", ids, counts, sums);
}

static PyObject *reader_drain(PyObject *self, PyObject *unused) {
    (void)unused;
    clock_check((Recorder *)self, CLOCKSOURCE); /* once a window, as the reader comes */
    return retained_drain((Recorder *)self);
}

static PyObject *reader_begin_epoch(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"breaching", "reservoir", "slowest", NULL};
    Recorder *rec = (Recorder *)self;
    int breaching = 2048, reservoir = 64, slowest = 32;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$iii:begin_epoch", names, &breaching, &reservoir, &slowest))
        return NULL;
    rec->breach_left = rec->breach_budget = breaching;
    rec->reservoir = reservoir;
    rec->slowest = slowest < HEAP_LIMIT ? slowest : HEAP_LIMIT;
    for (int i = 0; i < rec->class_count; i++) {
        Class *c = rec->classes[i];
        c->heap_len = 0;
        for (int band = 0; band < BAND_LIMIT; band++)
            c->seen[band] /= 2;
    }
    Py_RETURN_NONE;
}

static PyObject *reader_lock_sites(PyObject *self, PyObject *unused) {
    (void)unused;
    return sites_list((Recorder *)self);
}

static PyObject *reader_counters(PyObject *self, PyObject *unused) {
    const Recorder *rec = (Recorder *)self;
    int64_t clamped = 0;
    (void)unused;
    for (int i = 0; i < rec->series_count; i++)
        clamped += COUNT_READ(rec->series[i]->clamped);
    return Py_BuildValue("{sL sL sL sL sL sL sL sL sL sL sL}", "late_spans", (long long)rec->late_spans, "truncated", (long long)rec->truncated,
                         "column_overflow", (long long)rec->column_overflow, "series_overflow", (long long)rec->series_overflow, "clamped",
                         (long long)clamped, "retained_dropped", (long long)rec->retained_dropped, "hook_errors",
                         (long long)rec->hook_errors, "internal_errors", (long long)rec->internal_errors, "device_incomplete",
                         (long long)rec->device_incomplete, "pins_refused", (long long)rec->pins_refused, "settles_refused",
                         (long long)rec->settles_refused);
}

PyMethodDef reader_methods[] = {
    {"columns", reader_columns, METH_NOARGS, "columns($self, /)\n--\n\n(kind, name) of each column; grows only."},
    {"series", reader_series, METH_NOARGS, "series($self, /)\n--\n\n(index, kind, labels, digits, lowest_ns, counts_len) of each series."},
    {"read_counts", (PyCFunction)(void (*)(void))reader_read_counts, METH_FASTCALL,
     "read_counts($self, index, buffer, /)\n--\n\nCopy int64 counts to a writable buffer; returns (count, sum_ns, clamped)."},
    {"classes", reader_classes, METH_NOARGS, "classes($self, /)\n--\n\n(index, request, model, cls, series index, edges_ns) of each class."},
    {"read_class", reader_read_class, METH_O, "read_class($self, index, /)\n--\n\nRunning totals of a class."},
    {"read_bands", reader_read_bands, METH_O,
     "read_bands($self, index, /)\n--\n\nBand ids (int32), counts and sums (int64) that occur, ordered by latency."},
    {"drain", reader_drain, METH_NOARGS, "drain($self, /)\n--\n\nRetained requests since the last drain."},
    {"begin_epoch", (PyCFunction)(void (*)(void))reader_begin_epoch, METH_VARARGS | METH_KEYWORDS,
     "begin_epoch($self, /, *, breaching=2048, reservoir=64, slowest=32)\n--\n\nReset the retention budgets."},
    {"lock_sites", reader_lock_sites, METH_NOARGS,
     "lock_sites($self, /)\n--\n\n(lock, site_id, site, stage, waits, wait_ns, longest_hold_ns, request) of each root site."},
    {"_stack", (PyCFunction)(void (*)(void))reader_stack, METH_FASTCALL,
     "_stack($self, ident, depth, /)\n--\n\n(function, file, line) of a thread's frames, innermost first; None without such a thread."},
    {"_open", reader_open, METH_NOARGS, "_open($self, /)\n--\n\n(id, name, stage, start_ns, thread, carrier, itself) of each open request."},
    {"counters", reader_counters, METH_NOARGS, "counters($self, /)\n--\n\nEverything dropped, refused or failed."},
    {NULL, NULL, 0, NULL},
};
