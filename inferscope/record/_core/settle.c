/* Late device data: time that moves between the columns of a request, after its end if need be.
 *
 * pin() says that a device span of a request is pending. What settle() moves before the request's end is noted and applied to its vector
 * there; after the end it moves in the vector that is kept for it, and in the band that the request was counted in. Both keep their sums,
 * because no column gives more than it holds. The retained record waits for the last unpin(), for at most two seconds; then it leaves as
 * it is, marked incomplete. A pin is found by the request's id, so that nothing refers to a request object that may live again.
 *
 * A carrier has no vector: what moves in it moves in every request that it is spliced into, and those wait for its device data too.
 */
#include "core.h"

enum { PIN_BUCKETS = 256, PIN_LIMIT = 4096, MOVE_LIMIT = 16 };
#define PIN_NS INT64_C(2000000000)

typedef struct {
    int from, to;
    int64_t ns;
} Move;

struct Pin {
    Pin *next;
    int64_t id, until; /* until: of the ended request; 0 while it is open */
    Request *request;  /* borrowed; NULL once it ended */
    Class *class_;
    Retained *retained; /* NULL when the request is counted in its band only */
    int64_t *vector;    /* the retained record's, else our own; NULL while the request is open */
    int64_t *heirs;     /* of a carrier: ids of the requests that it was spliced into */
    int pending, band, move_count, heir_count, carries; /* band: -1 when the request is in none */
    Move moves[MOVE_LIMIT];
};

static Pin **place_of(Recorder *rec, int64_t id) {
    Pin **place = &rec->pins[(uint64_t)id % PIN_BUCKETS];
    while (*place != NULL && (*place)->id != id)
        place = &(*place)->next;
    return place;
}

/* Lets the record go, and forgets the pin that `place` points to. */
static void pin_drop(Recorder *rec, Pin **place) {
    Pin *p = *place;
    *place = p->next;
    if (p->request != NULL)
        p->request->pin = NULL;
    if (p->retained != NULL)
        p->retained->withheld = 0;
    else
        PyMem_RawFree(p->vector);
    PyMem_RawFree(p->heirs);
    PyMem_RawFree(p);
    rec->pin_count--;
}

static int64_t move(int64_t *vector, const Move *m) {
    int64_t ns = m->ns < vector[m->from] ? m->ns : vector[m->from];
    if (ns <= 0)
        return 0;
    vector[m->from] -= ns;
    vector[m->to] += ns;
    return ns;
}

/* Before the request's end: the vector is not known yet. */
static int64_t note(Recorder *rec, Pin *p, Move m) {
    for (int i = 0; i < p->move_count; i++) {
        if (p->moves[i].from == m.from && p->moves[i].to == m.to) {
            if (__builtin_add_overflow(p->moves[i].ns, m.ns, &p->moves[i].ns))
                p->moves[i].ns = INT64_MAX;
            return m.ns;
        }
    }
    if (p->move_count == MOVE_LIMIT) {
        rec->settles_refused++;
        return 0;
    }
    p->moves[p->move_count++] = m;
    return m.ns;
}

/* The vector of the ending request is final but for what was noted. */
void pin_apply(Request *r) {
    for (int i = 0; i < r->pin->move_count; i++)
        move(r->vector, &r->pin->moves[i]);
}

/* The request was counted: `band` is -1 when in no band, `k` NULL when it was not retained. */
void pin_hold(Recorder *rec, Request *r, int band, Retained *k) {
    Pin *p = r->pin;
    if (p->pending > 0 && k == NULL && band >= 0 && (p->vector = PyMem_RawMalloc(sizeof r->vector)) != NULL)
        memcpy(p->vector, r->vector, sizeof r->vector);
    if (p->pending > 0 && k != NULL) {
        p->vector = k->payload;
        p->retained = k;
        k->withheld = 1;
    }
    if (p->vector == NULL) { /* nothing is pending, or nowhere to move it */
        pin_forget(r);
        return;
    }
    p->request = NULL;
    r->pin = NULL;
    p->band = band;
    p->until = rec_now(rec) + PIN_NS;
}

/* The request ended without being counted. */
void pin_forget(Request *r) {
    pin_drop(r->rec, place_of(r->rec, r->pin->id));
}

static Pin *pin_new(Recorder *rec, Request *r) {
    if (rec->pins == NULL)
        rec->pins = PyMem_RawCalloc(PIN_BUCKETS, sizeof(Pin *));
    Pin *p = rec->pins == NULL || rec->pin_count >= PIN_LIMIT ? NULL : PyMem_RawCalloc(1, sizeof(Pin));
    if (p == NULL)
        return NULL;
    Pin **place = place_of(rec, r->id);
    p->id = r->id;
    p->request = r;
    p->class_ = r->class_;
    p->carries = is_carrier(r);
    p->band = -1;
    *place = p;
    rec->pin_count++;
    return r->pin = p;
}

static void unpin(Recorder *rec, Pin **place) {
    Pin *p = *place;
    p->pending -= p->pending > 0;
    if (p->pending > 0 || p->until == 0)
        return;
    if (!p->carries) {
        pin_drop(rec, place);
        return;
    }
    for (int i = 0; i < p->heir_count; i++) { /* it stays for whoever is spliced later, until the next drain */
        Pin **heir = place_of(rec, p->heirs[i]);
        if (*heir != NULL)
            unpin(rec, heir);
    }
    p->heir_count = 0;
}

/* The carrier ended; what it holds goes to the requests that it is spliced into from now on. */
void pin_carry(Request *r) {
    r->pin->until = rec_now(r->rec) + PIN_NS;
    r->pin->request = NULL;
    r->pin = NULL;
}

/* A carrier of this id was spliced into an open request. */
void pin_inherit(Recorder *rec, int64_t carrier, Request *r) {
    Pin *p = rec->pins == NULL ? NULL : *place_of(rec, carrier);
    if (p == NULL || !p->carries || (p->pending == 0 && p->move_count == 0))
        return;
    int64_t *heirs = PyMem_RawRealloc(p->heirs, (size_t)(p->heir_count + 1) * sizeof *heirs);
    if (heirs == NULL || (r->pin == NULL && pin_new(rec, r) == NULL)) {
        p->heirs = heirs != NULL ? heirs : p->heirs;
        rec->pins_refused++;
        return;
    }
    p->heirs = heirs;
    for (int i = 0; i < p->move_count; i++)
        note(rec, r->pin, p->moves[i]);
    if (p->pending > 0) {
        r->pin->pending++;
        p->heirs[p->heir_count++] = r->id;
    }
}

/* Ended requests whose device data did not come in time. */
void pins_expire(Recorder *rec) {
    int64_t now = rec->pin_count > 0 ? rec_now(rec) : 0;
    for (int i = 0; rec->pin_count > 0 && i < PIN_BUCKETS; i++) {
        for (Pin **place = &rec->pins[i]; *place != NULL;) {
            Pin *p = *place;
            if (p->until == 0 || (p->until > now && !(p->carries && p->pending == 0))) {
                place = &p->next;
                continue;
            }
            rec->device_incomplete += !p->carries; /* its requests count */
            if (p->retained != NULL)
                p->retained->incomplete = 1;
            pin_drop(rec, place);
        }
    }
}

void pins_clear(Recorder *rec) {
    for (int i = 0; rec->pins != NULL && i < PIN_BUCKETS; i++)
        while (rec->pins[i] != NULL)
            pin_drop(rec, &rec->pins[i]);
}

/* The rows of a class's edges return to the bands that they were cut from. */
void pins_refold(Recorder *rec, const Class *c) {
    for (int i = 0; rec->pin_count > 0 && i < PIN_BUCKETS; i++)
        for (Pin *p = rec->pins[i]; p != NULL; p = p->next)
            if (p->class_ == c && p->band >= BASE_BANDS)
                p->band = c->edge_band[p->band - BASE_BANDS];
}

/* An int, 0 when memory is too short for it: nothing here raises. */
static PyObject *number(int64_t n) {
    PyObject *made = PyLong_FromLongLong(n);
    if (made != NULL)
        return made;
    PyErr_Clear();
    return PyLong_FromLong(0); /* always there */
}

/* pin(request) -> reference, 0 for none. Never raises. */
static PyObject *recorder_pin(PyObject *self, PyObject *request) {
    Recorder *rec = (Recorder *)self;
    Request *r = (Request *)request;
    if (!Py_IS_TYPE(request, TYPE(Request)) || r->rec != rec || !r->open)
        return PyLong_FromLong(0);
    if (r->pin == NULL && pin_new(rec, r) == NULL) {
        rec->pins_refused++;
        return PyLong_FromLong(0);
    }
    r->pin->pending++;
    return number(r->id);
}

/* The pin of a reference that the caller gives, or NULL. */
static Pin **pin_of(Recorder *rec, PyObject *ref) {
    long long id = PyLong_Check(ref) ? PyLong_AsLongLong(ref) : 0;
    PyErr_Clear();
    Pin **place = id <= 0 || rec->pins == NULL ? NULL : place_of(rec, id);
    return place == NULL || *place == NULL ? NULL : place;
}

/* unpin(ref). Never raises. */
static PyObject *recorder_unpin(PyObject *self, PyObject *ref) {
    Pin **place = pin_of((Recorder *)self, ref);
    if (place != NULL)
        unpin((Recorder *)self, place);
    Py_RETURN_NONE;
}

static int64_t settle(Recorder *rec, Pin *p, Move m) {
    if (p->until == 0)
        return note(rec, p, m);
    if (p->carries) {
        int64_t noted = note(rec, p, m);
        for (int i = 0; noted > 0 && i < p->heir_count; i++) {
            Pin *heir = *place_of(rec, p->heirs[i]);
            if (heir != NULL)
                settle(rec, heir, m);
        }
        return noted;
    }
    m.ns = move(p->vector, &m);
    if (p->retained != NULL && p->retained->columns <= m.to)
        p->retained->columns = m.to + 1;
    if (p->band >= 0) {
        int64_t *row = p->class_->band_sums + p->band * COLUMN_LIMIT;
        row[m.from] -= m.ns;
        row[m.to] += m.ns;
    }
    return m.ns;
}

static int column_arg(const Recorder *rec, PyObject *value) {
    long column = PyLong_Check(value) ? PyLong_AsLong(value) : -1;
    PyErr_Clear();
    return column >= 0 && column < rec->column_count ? (int)column : -1;
}

/* settle(ref, from_column, to_column, ns) -> ns moved. Never raises. */
static PyObject *recorder_settle(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Recorder *rec = (Recorder *)self;
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "settle() takes a reference, two columns and nanoseconds");
        return NULL;
    }
    Pin **place = pin_of(rec, args[0]);
    long long ns = PyLong_Check(args[3]) ? PyLong_AsLongLong(args[3]) : 0;
    PyErr_Clear();
    Move m = {column_arg(rec, args[1]), column_arg(rec, args[2]), ns};
    if (place == NULL || m.from < 0 || m.to < 0 || m.from == m.to || m.ns <= 0)
        return PyLong_FromLong(0);
    return number(settle(rec, *place, m));
}

/* column(kind, name) -> index. Never raises. */
static PyObject *recorder_column(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "column() takes kind and name");
        return NULL;
    }
    return number(registry_column_index((Recorder *)self, args[0], args[1]));
}

PyMethodDef settle_methods[] = {
    {"pin", recorder_pin, METH_O, "pin($self, request, /)\n--\n\nA device span of this open request is pending; returns a reference, 0 for none."},
    {"unpin", recorder_unpin, METH_O, "unpin($self, ref, /)\n--\n\nOne pending device span less."},
    {"settle", (PyCFunction)(void (*)(void))recorder_settle, METH_FASTCALL,
     "settle($self, ref, from_column, to_column, ns, /)\n--\n\nMove time between columns of a pinned request; returns the ns moved."},
    {"column", (PyCFunction)(void (*)(void))recorder_column, METH_FASTCALL,
     "column($self, kind, name, /)\n--\n\nIndex of a column, made when there is room; 1 (other) when there is none."},
    {NULL, NULL, 0, NULL},
};
