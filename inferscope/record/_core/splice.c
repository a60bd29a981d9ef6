/* Work done for several requests at once, or for a request in another process.
 *
 * A carrier is a Request that is counted nowhere: spans find it as the current one, and at its end its positions are packed into a
 * plain tuple that pickles. splice() hangs such a tuple into open requests. What the two pass on: (process id, columns, spans,
 * truncated); span 0 is the carrier itself, parents are indices into the spans, columns into the table beside them.
 */
#include "core.h"
#include <unistd.h>

enum { PACKED_LIMIT = SLOT_LIMIT + 1 };

/* --- carrier --- */

/* Takes what is counted by class, late spans say, and is read by nobody. */
static Class *hidden_class(Recorder *rec) {
    if (rec->hidden == NULL && (rec->hidden = PyMem_RawCalloc(1, sizeof(Class))) != NULL) {
        rec->hidden->request = Py_NewRef(str_batch);
        rec->hidden->index = -1;
    }
    return rec->hidden;
}

static PyObject *recorder_carrier(PyObject *self, PyObject *name) {
    Recorder *rec = (Recorder *)self;
    Def *def = rec->enabled ? registry_def(rec, str_batch, name) : NULL;
    Class *hidden = def == NULL ? NULL : hidden_class(rec);
    PyObject *made = hidden == NULL ? NULL : request_new(rec, hidden);
    if (made == NULL) {
        PyErr_Clear();
        return Py_NewRef(noop_object);
    }
    ((Request *)made)->root.def = def;
    return made;
}

/* Columns by the order of their first use, so that the table holds no others. */
static PyObject *pack_columns(const Recorder *rec, Slot *out, int count) {
    int place[COLUMN_LIMIT];
    PyObject *table = PyList_New(0), *frozen;
    memset(place, -1, sizeof place);
    for (int i = 0; table != NULL && i < count; i++) {
        int column = out[i].column;
        if (place[column] < 0) {
            place[column] = (int)PyList_GET_SIZE(table);
            if (PyList_Append(table, PyList_GET_ITEM(rec->columns, column)) < 0)
                Py_CLEAR(table);
        }
        out[i].column = (uint16_t)place[column];
    }
    frozen = table == NULL ? NULL : PyList_AsTuple(table);
    Py_XDECREF(table);
    return frozen;
}

/* The carrier has ended and its frames with it: counts the work once and packs its positions. */
void carrier_finish(Request *r) {
    Slot out[PACKED_LIMIT];
    int count = r->slot_count + 1;
    if (r->root.def->series != NULL)
        series_record2(r->root.def->series, r->wall);
    out[0] = (Slot){
        .start = r->root.start, .end = r->root.start + r->wall, .aux = r->id, .thread = r->tid, .column = (uint16_t)r->root.def->column,
        .parent = NO_SLOT, .flags = r->error != NULL ? FLAG_ERROR : 0,
    };
    memcpy(out + 1, r->slots, (size_t)r->slot_count * sizeof(Slot));
    for (int i = 1; i < count; i++)
        out[i].parent = out[i].parent == NO_SLOT ? 0 : (uint8_t)(out[i].parent + 1);
    PyObject *columns = pack_columns(r->rec, out, count);
    PyObject *packed = columns == NULL ? NULL
                                       : Py_BuildValue("(lNy#O)", (long)getpid(), columns, (const char *)out,
                                                       count * (Py_ssize_t)sizeof(Slot), r->truncated ? Py_True : Py_False);
    if (packed == NULL) {
        PyErr_Clear();
        r->rec->internal_errors++;
    }
    Py_XSETREF(r->packed, packed);
    if (r->pin != NULL)
        pin_carry(r);
}

/* --- splice --- */

/* A position of the request that was open when the spliced work ended, and so waited for it. */
typedef struct {
    int64_t start;
    Frame *frame; /* NULL when it is closed by now */
    int slot;
} Waiter;

typedef struct {
    Request *r;
    Slot in[PACKED_LIMIT];
    int count;
    int64_t carrier; /* id, 0 when it is of another process */
    int64_t start, end;
    Waiter waiters[SLOT_LIMIT]; /* from the outermost in */
    int waiter_count;
} Splice;

static void waiter_add(Splice *s, int64_t start, Frame *frame, int slot) {
    int k = s->waiter_count++;
    for (; k > 0 && (s->waiters[k - 1].start > start || (s->waiters[k - 1].start == start && s->waiters[k - 1].slot > slot)); k--)
        s->waiters[k] = s->waiters[k - 1];
    s->waiters[k] = (Waiter){start, frame, slot};
}

/* Whoever was open at the end waited. Other regions of the time spent ran beside the work, and the critical path decides. */
static void find_waiters(Splice *s) {
    Request *r = s->r;
    char open[SLOT_LIMIT] = {0};
    for (Frame *f = r->top; f != &r->root; f = f->prev) {
        if (f->slot == NO_SLOT)
            continue;
        open[f->slot] = 1;
        if (f->start < s->end)
            waiter_add(s, f->start, f, f->slot);
    }
    for (int i = 0; i < r->slot_count; i++) {
        const Slot *slot = &r->slots[i];
        if (open[i] || slot->start >= s->end || slot->end <= s->start || slot->end == slot->start)
            continue;
        if (slot->end >= s->end && !(slot->flags & FLAG_OTHER_THREAD))
            waiter_add(s, slot->start, NULL, i);
        else
            r->overlapping = 1;
    }
}

/* The region around a piece gives up the time that the piece takes. */
static void take_from(Request *r, const Waiter *w, int64_t duration, int64_t end) {
    Frame *f = w == NULL ? &r->root : w->frame;
    if (f == NULL) {
        r->vector[r->slots[w->slot].column] -= duration;
        return;
    }
    f->child_ns += duration;
    if (end > f->last_end)
        f->last_end = end;
}

/* Hangs what lies in [low, high) under one waiter (NULL: the request itself). */
static void splice_piece(Splice *s, const Waiter *w, int64_t low, int64_t high) {
    Request *r = s->r;
    int64_t from[PACKED_LIMIT], to[PACKED_LIMIT], latest[PACKED_LIMIT];
    uint8_t slots[PACKED_LIMIT];
    for (int i = 0; i < s->count; i++) {
        Slot piece = s->in[i];
        int parent = piece.parent; /* in[0]: none */
        int64_t least = i == 0 ? low : from[parent], most = i == 0 ? high : to[parent];
        from[i] = latest[i] = piece.start > least ? piece.start : least;
        to[i] = piece.end < most ? piece.end : most;
        slots[i] = NO_SLOT;
        if (from[i] >= to[i]) {
            to[i] = from[i];
            continue;
        }
        r->vector[piece.column] += to[i] - from[i];
        if (i == 0) {
            take_from(r, w, to[i] - from[i], to[i]);
        } else {
            r->vector[s->in[parent].column] -= to[i] - from[i];
            if (from[i] < latest[parent])
                r->overlapping = 1;
            if (to[i] > latest[parent])
                latest[parent] = to[i];
        }
        if (r->slot_count == SLOT_LIMIT) {
            r->truncated = 1;
            continue;
        }
        piece.start = from[i];
        piece.end = to[i];
        piece.parent = i > 0 ? slots[parent] : w != NULL ? (uint8_t)w->slot : NO_SLOT;
        if (piece.thread != r->tid) {
            piece.flags |= FLAG_OTHER_THREAD;
            r->foreign_thread = 1;
        }
        slots[i] = r->slot_count;
        r->slots[r->slot_count++] = piece;
    }
}

static void splice_into(Splice *s) {
    Request *r = s->r;
    int64_t now = rec_now(r->rec);
    s->start = s->in[0].start > r->root.start ? s->in[0].start : r->root.start;
    s->end = s->in[0].end < now ? s->in[0].end : now;
    if (!r->open || s->start >= s->end)
        return;
    find_waiters(s);
    if (r->truncated) /* a region without a position may be the one that waited: only positions can tell what is left of it */
        r->overlapping = 1;
    int64_t low = s->start;
    for (int k = -1; k < s->waiter_count; k++) {
        int64_t high = k + 1 < s->waiter_count ? s->waiters[k + 1].start : s->end;
        if (high > low) {
            splice_piece(s, k < 0 ? NULL : &s->waiters[k], low, high);
            low = high;
        }
    }
}

/* Reads the spans of a packed tuple, columns as this recorder numbers them. Returns 0 when it is none. */
static int unpack_spans(Recorder *rec, PyObject *packed, Splice *s) {
    if (!PyTuple_Check(packed) || PyTuple_GET_SIZE(packed) != 4)
        return 0;
    PyObject *pid = PyTuple_GET_ITEM(packed, 0), *columns = PyTuple_GET_ITEM(packed, 1), *spans = PyTuple_GET_ITEM(packed, 2);
    if (!PyLong_Check(pid) || !PyTuple_Check(columns) || !PyBytes_Check(spans))
        return 0;
    Py_ssize_t size = PyBytes_GET_SIZE(spans), named = PyTuple_GET_SIZE(columns);
    if (size == 0 || size % (Py_ssize_t)sizeof(Slot) != 0 || size > (Py_ssize_t)sizeof s->in || named > COLUMN_LIMIT)
        return 0;
    int map[COLUMN_LIMIT], is_lock[COLUMN_LIMIT];
    int foreign = PyLong_AsLong(pid) != (long)getpid();
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *key = PyTuple_GET_ITEM(columns, i);
        if (!PyTuple_Check(key) || PyTuple_GET_SIZE(key) != 2 || !PyUnicode_Check(PyTuple_GET_ITEM(key, 0)) ||
            !PyUnicode_Check(PyTuple_GET_ITEM(key, 1)))
            return 0;
        map[i] = registry_column_index(rec, PyTuple_GET_ITEM(key, 0), PyTuple_GET_ITEM(key, 1));
        is_lock[i] = PyUnicode_Compare(PyTuple_GET_ITEM(key, 0), str_lock) == 0;
    }
    s->count = (int)(size / (Py_ssize_t)sizeof(Slot));
    memcpy(s->in, PyBytes_AS_STRING(spans), (size_t)size);
    for (int i = 0; i < s->count; i++) {
        Slot *slot = &s->in[i];
        if (slot->column >= named || slot->end < slot->start || (i > 0 && slot->parent >= i))
            return 0;
        if (foreign && is_lock[slot->column])
            slot->aux = 0; /* a site of that process */
        slot->column = (uint16_t)map[slot->column];
    }
    s->carrier = foreign ? 0 : s->in[0].aux;
    s->in[0].aux = 0;
    return 1;
}

/* splice(packed, request). Never raises. */
static PyObject *recorder_splice(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    Recorder *rec = (Recorder *)self;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "splice() takes what a carrier packed and a request");
        return NULL;
    }
    if (!rec->enabled || args[0] == Py_None || !Py_IS_TYPE(args[1], TYPE(Request)) || ((Request *)args[1])->rec != rec)
        Py_RETURN_NONE;
    Splice s = {.r = (Request *)args[1]};
    int readable = unpack_spans(rec, args[0], &s);
    if (!readable) {
        PyErr_Clear();
        rec->internal_errors++;
    } else if (!s.r->open) {
        rec->late_spans++;
        s.r->class_->late_spans++;
    } else {
        if (PyTuple_GET_ITEM(args[0], 3) == Py_True)
            s.r->truncated = 1;
        splice_into(&s);
        if (s.carrier > 0)
            pin_inherit(rec, s.carrier, s.r);
    }
    Py_RETURN_NONE;
}

/* idle_since(request) -> when it last began or ended a region: since then it waits, or works on what has no name. 0 when closed. */
static PyObject *recorder_idle_since(PyObject *self, PyObject *request) {
    (void)self;
    if (!Py_IS_TYPE(request, TYPE(Request)) || !((Request *)request)->open)
        return PyLong_FromLong(0);
    const Frame *top = ((Request *)request)->top;
    return PyLong_FromLongLong(top->last_end > top->start ? top->last_end : top->start);
}

PyMethodDef splice_methods[] = {
    {"carrier", recorder_carrier, METH_O,
     "carrier($self, name, /)\n--\n\nContext manager for work that belongs to several requests or another process's; see `packed`."},
    {"splice", (PyCFunction)(void (*)(void))recorder_splice, METH_FASTCALL,
     "splice($self, packed, request, /)\n--\n\nHang what a carrier packed into an open request. Never raises."},
    {"idle_since", recorder_idle_since, METH_O, "idle_since($self, request, /)\n--\n\nWhen a request last began or ended a region."},
    {NULL, NULL, 0, NULL},
};
