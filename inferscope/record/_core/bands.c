/* What finish keeps of a request: histogram, exact violations, band sums, and now and then the whole record. */
#include "core.h"

/* 8 bands an octave from 1.024 us up. */
int band_of(int64_t wall) {
    if (wall < 1024)
        return 0;
    int bits = 64 - __builtin_clzll((uint64_t)wall);
    int band = (bits - 11) * 8 + (int)((wall >> (bits - 4)) & 7);
    return band < BASE_BANDS ? band : BASE_BANDS - 1;
}

/* An objective's edge splits the band that it lies in: what is above it goes to a row of its own, so that tails cut exactly there. */
int class_band(const Class *c, int64_t wall) {
    int band = band_of(wall);
    for (int i = c->edge_count - 1; i >= 0; i--)
        if (c->edge_band[i] == band && wall > c->edges[i])
            return BASE_BANDS + i;
    return band;
}

uint64_t random_u64(Recorder *rec) { /* xorshift64* */
    uint64_t x = rec->rng;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    rec->rng = x;
    return x * UINT64_C(2685821657736338717);
}

/* True when `wall` is among the slowest of this epoch so far; keeps those in a min-heap. */
static int heap_offer(Class *c, int64_t wall, int limit) {
    int64_t *h = c->heap;
    int i;
    if (limit <= 0)
        return 0;
    if (c->heap_len < limit) {
        for (i = c->heap_len++; i > 0 && h[(i - 1) / 2] > wall; i = (i - 1) / 2)
            h[i] = h[(i - 1) / 2];
        h[i] = wall;
        return 1;
    }
    if (wall <= h[0])
        return 0;
    for (i = 0;;) {
        int child = 2 * i + 1;
        if (child >= c->heap_len)
            break;
        if (child + 1 < c->heap_len && h[child + 1] < h[child])
            child++;
        if (h[child] >= wall)
            break;
        h[i] = h[child];
        i = child;
    }
    h[i] = wall;
    return 1;
}

static int reservoir_offer(Recorder *rec, Class *c, int band) {
    uint32_t seen = ++c->seen[band];
    if (rec->reservoir <= 0)
        return 0;
    return seen <= (uint32_t)rec->reservoir || (random_u64(rec) >> 11) * 0x1p-53 * seen < rec->reservoir;
}

static int retention_reasons(Recorder *rec, const Request *r, int band) {
    Class *c = r->class_;
    int breach = c->edge_count > 0 && r->wall > c->edges[0];
    int reasons = 0;
    if (breach && rec->breach_left > 0) {
        rec->breach_left--;
        reasons = REASON_BREACH;
    }
    if (r->profiled) /* a place among the slowest or in a reservoir would go to the profiler's own cost */
        return reasons | REASON_PROFILED;
    if (heap_offer(c, r->wall, rec->slowest))
        reasons |= REASON_SLOWEST;
    if (reservoir_offer(rec, c, band))
        reasons |= REASON_RESERVOIR;
    return reasons;
}

/* The application's span, looked up for kept requests alone: on the thread and in the context that finish the request. */
static void ask_trace(Recorder *rec, Request *r) {
    PyObject *ids = PyObject_CallNoArgs(rec->trace_context);
    if (ids == NULL) {
        swallow_error();
        rec->hook_errors++;
    } else if (PyTuple_Check(ids)) {
        Py_XSETREF(r->trace, Py_NewRef(ids));
    }
    Py_XDECREF(ids);
}

/* A pinned request may yet get columns that are made later. Returns NULL when there is no room. */
static Retained *retain(Recorder *rec, const Request *r, int band, int reasons) {
    int room = r->pin != NULL ? COLUMN_LIMIT : rec->column_count;
    size_t vector_bytes = (size_t)room * sizeof(int64_t), slot_bytes = (size_t)r->slot_count * sizeof(Slot);
    Retained *k = NULL;
    if (rec->retained_count < RETAINED_LIMIT)
        k = PyMem_RawMalloc(sizeof(Retained) + vector_bytes + slot_bytes);
    if (k == NULL) {
        rec->retained_dropped++;
        return NULL;
    }
    *k = (Retained){
        .id = r->id, .start = r->root.start, .wall = r->wall, .items = r->items, .cpu_ns = r->cpu_ns, .nvcsw = r->nvcsw,
        .nivcsw = r->nivcsw, .size = r->size, .error = Py_XNewRef(r->error), .trace = Py_XNewRef(r->trace), .thread = r->tid,
        .class_index = r->class_->index, .band = band, .reasons = reasons, .columns = rec->column_count, .room = room, .spans = r->slot_count,
        .has_size = r->has_size, .has_cpu = r->has_cpu, .truncated = r->truncated,
    };
    memcpy(k->payload, r->vector, vector_bytes);
    memcpy((char *)k->payload + vector_bytes, r->slots, slot_bytes);
    return rec->retained[rec->retained_count++] = k;
}

static void count_unprofiled(Recorder *rec, const Request *r, int band) {
    Class *c = r->class_;
    series_record3(c->series, r->wall);
    c->band_counts[band]++;
    int64_t *row = c->band_sums + band * COLUMN_LIMIT;
    for (int i = 0; i < rec->column_count; i++)
        row[i] += r->vector[i];
    if (r->has_cpu) {
        c->cpu_ns += r->cpu_measured * r->cpu_ns;
        c->cpu_wall_ns += r->cpu_measured * r->wall;
        c->cpu_requests++;
    }
}

enum { SERVED, FAILED, OVERDUE, CANCELLED, SHED };

/* What became of a request, from the word that its `error` is; detect/counting.py says what follows. */
static int outcome_of(PyObject *error) {
    if (error == NULL)
        return SERVED;
    if (PyUnicode_CompareWithASCIIString(error, "shed") == 0)
        return SHED;
    if (PyUnicode_CompareWithASCIIString(error, "deadline") == 0)
        return OVERDUE;
    static const char *const given_up[] = {"cancelled", "CancelledError", "GeneratorExit"};
    for (int i = 0; i < 3; i++)
        if (PyUnicode_CompareWithASCIIString(error, given_up[i]) == 0)
            return CANCELLED;
    return FAILED;
}

/* Counts a request that nobody judges: it was refused, or its caller gave up before it was late. */
static void fold_withheld(Recorder *rec, Request *r, int outcome) {
    Class *c = r->class_;
    c->count++;
    c->wall_ns += r->wall;
    *(outcome == SHED ? &c->shed : &c->cancelled) += 1;
    if (r->pin != NULL)
        pin_hold(rec, r, -1, NULL);
}

static void count_violations(Class *c, const Request *r, int overdue) {
    for (int i = 0; i < c->edge_count; i++) {
        int above = r->wall > c->edges[i];
        c->violations[i] += above || overdue;
        c->overdue[i] += overdue && !above && !r->profiled;
    }
}

/* Counts a finished request whose wall time and vector are fixed. */
void class_fold(Recorder *rec, Request *r) {
    Class *c = r->class_;
    int outcome = outcome_of(r->error);
    if (UNLIKELY(outcome >= CANCELLED) && (outcome == SHED || c->edge_count == 0 || r->wall <= c->edges[0])) {
        fold_withheld(rec, r, outcome);
        return;
    }
    int band = class_band(c, r->wall);
    c->count++;
    c->items += r->items;
    c->wall_ns += r->wall;
    c->errors += outcome == FAILED || outcome == OVERDUE;
    c->ewma_ns += c->ewma_ns == 0 ? r->wall : (r->wall - c->ewma_ns) >> 4;
    count_violations(c, r, outcome == OVERDUE);
    if (r->truncated) {
        c->truncated++;
        rec->truncated++;
    }
    if (r->profiled)
        c->excluded++;
    else
        count_unprofiled(rec, r, band);
    int reasons = retention_reasons(rec, r, band);
    if (UNLIKELY(rec->trace_context != NULL) && r->trace == NULL && (reasons & ~REASON_RESERVOIR))
        ask_trace(rec, r);
    Retained *k = reasons != 0 ? retain(rec, r, band, reasons) : NULL;
    if (UNLIKELY(r->pin != NULL))
        pin_hold(rec, r, r->profiled ? -1 : band, k);
}

void retained_free(Retained *k) {
    Py_XDECREF(k->error);
    Py_XDECREF(k->trace);
    PyMem_RawFree(k);
}

void retained_clear(Recorder *rec) {
    int n = rec->retained_count;
    rec->retained_count = 0;
    for (int i = 0; i < n; i++)
        retained_free(rec->retained[i]);
}

static PyObject *optional_int(int present, int64_t value) {
    return present ? PyLong_FromLongLong(value) : Py_NewRef(Py_None);
}

static PyObject *retained_tuple(const Retained *k) {
    Py_ssize_t vector_bytes = k->columns * (Py_ssize_t)sizeof(int64_t);
    PyObject *size = k->has_size ? PyFloat_FromDouble(k->size) : Py_NewRef(Py_None);
    return Py_BuildValue("(LiLLiiINLONNNNy#y#OO)", (long long)k->id, k->class_index, (long long)k->start, (long long)k->wall, k->band,
                         k->reasons, (unsigned int)k->thread, size, (long long)k->items, k->error != NULL ? k->error : Py_None,
                         optional_int(k->has_cpu, k->cpu_ns), optional_int(k->has_cpu, k->nvcsw), optional_int(k->has_cpu, k->nivcsw),
                         PyBool_FromLong(k->truncated), (const char *)k->payload, vector_bytes,
                         (const char *)(k->payload + k->room), k->spans * (Py_ssize_t)sizeof(Slot),
                         k->trace != NULL ? k->trace : Py_None, k->incomplete ? Py_True : Py_False);
}

/* Takes the queue first, but for what waits for device data: building tuples may run a collection, whose finalizers may finish requests. */
PyObject *retained_drain(Recorder *rec) {
    pins_expire(rec);
    int found = rec->retained_count, n = 0;
    Retained **fresh = PyMem_RawCalloc(RETAINED_LIMIT, sizeof(Retained *));
    if (fresh == NULL)
        return PyErr_NoMemory();
    Retained **taken = rec->retained;
    rec->retained = fresh;
    rec->retained_count = 0;
    for (int i = 0; i < found; i++) {
        if (taken[i]->withheld)
            fresh[rec->retained_count++] = taken[i];
        else
            taken[n++] = taken[i];
    }
    PyObject *list = PyList_New(n);
    for (int i = 0; i < n; i++) {
        PyObject *item = list == NULL ? NULL : retained_tuple(taken[i]);
        if (item != NULL)
            PyList_SET_ITEM(list, i, item);
        else
            Py_CLEAR(list);
        retained_free(taken[i]);
    }
    PyMem_RawFree(taken);
    return list;
}
