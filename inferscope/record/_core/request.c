/* A request's life: begin, intervals, finish. The Python type is in request_type.c. */
#include "frame.h"

/* Calls hook(request, name, kind). Nothing that it raises reaches the application. */
void hook_call(Recorder *rec, PyObject *hook, Request *r, PyObject *name, PyObject *kind) {
    if (hook == NULL)
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Py_INCREF(hook); /* it may replace itself */
    Py_INCREF(r);
    PyObject *args[] = {(PyObject *)r, name, kind};
    PyObject *result = PyObject_Vectorcall(hook, args, name == NULL ? 1 : 3, NULL);
    if (result == NULL) {
        swallow_error();
        rec->hook_errors++;
    }
    Py_XDECREF(result);
    Py_DECREF(r);
    Py_DECREF(hook);
    PyErr_Restore(type, value, traceback);
}

static Request *nearest_open(Request *r) {
    while (r != NULL && !r->open)
        r = r->outer;
    return r;
}

/* What the context holds now; any open or closed Request of this recorder, else NULL. New reference. */
Request *request_current(Recorder *rec) {
    PyObject *current = NULL;
    if (PyContextVar_Get(rec->var, NULL, &current) < 0) {
        PyErr_Clear();
        rec->internal_errors++;
    }
    if (current != NULL && !Py_IS_TYPE(current, TYPE(Request)))
        Py_CLEAR(current);
    return (Request *)current;
}

static void set_current(Recorder *rec, PyObject *value) {
    PyObject *token = PyContextVar_Set(rec->var, value);
    if (token == NULL) {
        PyErr_Clear();
        rec->internal_errors++;
    }
    Py_XDECREF(token);
}

/* --- CPU and context switches: two system calls at each end, so only where they are small against the request --- */

static int caller_may_suspend(void) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL)
        return 0;
    PyCodeObject *code = PyFrame_GetCode(frame);
    int flags = code_object_flags((PyObject *)code) & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE);
    Py_DECREF(code);
    return flags != 0;
}

/* For how many requests the next one of a class stands when it is measured; 0 when it is not. Short ones: one of each 64, drawn, because
 * every 64th would be the same one of traffic that comes in turns. Of the first 64 it is the first: nobody knows yet how long they take. */
static int cpu_weight(Recorder *rec, Class *c) {
    if (rec->cpu_mode != CPU_AUTO)
        return rec->cpu_mode == CPU_ON;
    int64_t n = c->begun++;
    if (n % 64 == 0)
        c->cpu_drawn = n == 0 ? 0 : (int)(random_u64(rec) >> 58);
    if (n == 0 || c->ewma_ns >= 1000000)
        return 1;
    return n % 64 == c->cpu_drawn ? 64 : 0;
}

/* Whether a request that is not around this one is open on this thread; so many open ones that looking is dear count as yes. */
static int thread_is_shared(const Request *r) {
    int looked = 0;
    for (const Request *q = r->rec->open_head; q != NULL; q = q->open_next) {
        const Request *outer = r->outer;
        while (outer != NULL && outer != q)
            outer = outer->outer;
        if ((outer == NULL && q->tid == r->tid) || ++looked > 64)
            return 1;
    }
    return 0;
}

static void cpu_begin(Request *r, int caller_known) {
    int weight = cpu_weight(r->rec, r->class_);
    r->cpu_measured = 0;
    if (weight && caller_known >= 0 && (caller_known > 0 || !caller_may_suspend()) && !thread_is_shared(r)) {
        r->cpu_measured = (char)weight;
        thread_switches(&r->nvcsw, &r->nivcsw);
        r->cpu_begin = thread_cpu_ns();
    }
}

/* Valid only when the thread did nothing for other requests in between. */
static void cpu_end(Request *r, int alone) {
    if (!r->cpu_measured)
        return;
    if (!alone || r->foreign_thread)
        return;
    int64_t voluntary, involuntary, cpu = thread_cpu_ns() - r->cpu_begin;
    thread_switches(&voluntary, &involuntary);
    r->cpu_ns = cpu < r->wall ? cpu : r->wall; /* it is read just outside the wall's two clock readings */
    r->nvcsw = voluntary - r->nvcsw;
    r->nivcsw = involuntary - r->nivcsw;
    r->has_cpu = 1;
}

/* --- begin --- */

static void open_list_add(Recorder *rec, Request *r) {
    r->open_prev = NULL;
    r->open_next = rec->open_head;
    if (rec->open_head != NULL)
        rec->open_head->open_prev = r;
    rec->open_head = r;
}

static void open_list_remove(Recorder *rec, Request *r) {
    if (r->open_prev != NULL)
        r->open_prev->open_next = r->open_next;
    else
        rec->open_head = r->open_next;
    if (r->open_next != NULL)
        r->open_next->open_prev = r->open_prev;
    r->open_next = r->open_prev = NULL;
}

/* The same object may be entered again after its end: everything of the old request goes. */
static void reset(Request *r) {
    if (r->used) {
        Py_CLEAR(r->error);
        Py_CLEAR(r->trace);
        Py_CLEAR(r->packed);
        r->profiled = 0;
    }
    r->used = 1;
    r->wanted = r->overlapping = r->truncated = r->foreign_thread = r->has_cpu = r->in_forward = 0;
    r->slot_count = 0;
    r->nested_activity = 0;
    r->top = &r->root;
    r->root.slot = NO_SLOT;
    r->root.child_ns = r->root.last_end = 0;
    memset(r->vector, 0, sizeof r->vector);
}

/* The request around this one sees it as one region. */
static void link_to_outer(Recorder *rec, Request *r) {
    Request *current = request_current(rec);
    Request *outer = nearest_open(current);
    Py_XSETREF(r->outer, (Request *)Py_XNewRef((PyObject *)outer));
    Py_XDECREF(current);
    r->link.request = NULL;
    if (outer == NULL || is_carrier(r)) /* its spans go to requests, this one too, by splicing */
        return;
    if (r->class_->nested == NULL)
        r->class_->nested = registry_column(rec, str_stage, r->class_->request);
    if (r->class_->nested == NULL)
        return;
    r->link.def = r->class_->nested;
    Py_INCREF(outer);
    frame_link(&r->link, outer);
}

static void backlog(Recorder *rec, Request *r, int64_t now) {
    if (rec->backlog == NULL)
        rec->backlog = registry_def(rec, str_queue, str_backlog);
    if (rec->backlog == NULL)
        return;
    r->root.start = r->started_ns;
    record_interval(rec, rec->backlog, r, r->started_ns, now, 0, 0);
}

static PyObject *hook_kind_of(const Request *r) {
    return r->in_call == 0 ? str_with : r->in_call > 0 ? str_call : NULL;
}

/* `caller_known`: 1 the caller is a plain synchronous call of ours, 0 unknown (looked at when it matters), -1 it may suspend. */
void request_begin(Request *r, int caller_known) {
    Recorder *rec = r->rec;
    if (r->entered) {
        r->depth++;
        return;
    }
    reset(r);
    link_to_outer(rec, r);
    r->id = ++rec->next_id;
    r->tid = thread_id();
    r->thread_state = thread_state_id();
    r->activity = ++inferscope_thread.activity;
    set_current(rec, (PyObject *)r);
    if (!is_carrier(r))
        cpu_begin(r, caller_known);
    int64_t now = rec_now(rec);
    r->root.start = now;
    r->entered = r->open = 1;
    open_list_add(rec, r);
    if (r->link.request != NULL)
        frame_started(&r->link, now);
    if (UNLIKELY(r->has_started) && r->started_ns < now)
        backlog(rec, r, now);
    if (UNLIKELY(rec->armed) && rec->on_start != NULL && !is_carrier(r)) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *answer = PyObject_CallOneArg(rec->on_start, (PyObject *)r);
        if (answer == Py_True)
            r->wanted = 1;
        if (answer == NULL) {
            swallow_error();
            rec->hook_errors++;
        }
        Py_XDECREF(answer);
        PyErr_Restore(type, value, traceback);
    }
    if (UNLIKELY(r->wanted) && hook_kind_of(r) != NULL)
        hook_call(rec, rec->on_enter, r, r->class_->request, hook_kind_of(r));
}

/* --- intervals --- */

/* Places a measured interval, which lies inside the open request, under the innermost open frame that covers its start. */
void request_interval(Request *r, int column, int64_t start, int64_t end, int flags, int64_t aux) {
    Frame *f = r->top, *above = NULL;
    for (; f != &r->root && f->start > start; f = f->prev)
        above = f;
    if (start < f->last_end || (above != NULL && above->start < end))
        r->overlapping = 1;
    r->vector[column] += end - start;
    f->child_ns += end - start;
    if (end > f->last_end)
        f->last_end = end;
    uint32_t tid = thread_id();
    if (tid != r->tid)
        r->foreign_thread = 1;
    if (r->slot_count == SLOT_LIMIT) {
        r->truncated = 1;
        return;
    }
    r->slots[r->slot_count++] = (Slot){
        .start = start, .end = end, .aux = aux, .thread = tid, .column = (uint16_t)column, .parent = f->slot,
        .flags = (uint8_t)(flags | (tid != r->tid ? FLAG_OTHER_THREAD : 0)),
    };
}

/* A frame ends that is not on top: tasks or threads interleave. What hangs on it outlives it, so it was never a part of it and moves
 * down to its parent. */
void request_unlink_slow(Request *r, Frame *f) {
    r->overlapping = 1;
    for (Frame *g = r->top; g != &r->root; g = g->prev) {
        if (g->prev == f) {
            g->prev = f->prev;
            if (g->slot != NO_SLOT)
                r->slots[g->slot].parent = f->prev->slot;
            return;
        }
    }
}

/* --- finish --- */

/* Closes without counting. Returns whether this thread served nobody else since the request began here. */
static int request_close(Request *r) {
    uint32_t tid = thread_id();
    int alone = tid == r->tid && inferscope_thread.activity == r->activity + r->nested_activity;
    inferscope_thread.activity++;
    if (r->outer != NULL && tid == r->tid && r->outer->tid == tid)
        r->outer->nested_activity += 2 + r->nested_activity;
    r->open = 0;
    if (++r->generation == 0) /* 0 marks frames that were never linked */
        r->generation = 1;
    open_list_remove(r->rec, r);
    r->top = &r->root;
    Py_XSETREF(r->outer, (Request *)Py_XNewRef((PyObject *)nearest_open(r->outer)));
    return alone;
}

static void end_link(Recorder *rec, Request *r, int64_t end) {
    if (r->link.request == NULL)
        return;
    Request *outer = r->link.request;
    if (end < r->link.start)
        end = r->link.start;
    frame_end(rec, &r->link, end, end - r->link.start, 0);
    r->link.request = NULL;
    Py_DECREF(outer);
}

void request_close_uncounted(Request *r) {
    if (!r->open)
        return;
    request_close(r);
    if (r->pin != NULL)
        pin_forget(r);
    end_link(r->rec, r, rec_now(r->rec));
}

/* Anything that names an error: a str as it is, a true value, an exception or its type. Never fails. */
void request_set_error(Request *r, PyObject *error) {
    PyObject *name = NULL;
    if (error == NULL || error == Py_None || error == Py_False) {
        Py_CLEAR(r->error);
        return;
    }
    if (PyUnicode_Check(error))
        name = clean_name(error);
    else if (error == Py_True)
        name = Py_NewRef(str_error);
    else
        name = PyObject_GetAttr(PyType_Check(error) ? error : (PyObject *)Py_TYPE(error), str___qualname__);
    if (name == NULL || !PyUnicode_Check(name)) {
        PyErr_Clear();
        Py_XDECREF(name);
        name = Py_NewRef(str_error);
    }
    Py_XSETREF(r->error, name);
}

static void finish(Request *r, PyObject *error) {
    Recorder *rec = r->rec;
    int64_t end = rec_now(rec);
    PyObject *type, *value, *traceback;
    if (end < r->root.start)
        end = r->root.start;
    PyErr_Fetch(&type, &value, &traceback);
    if (error != NULL && error != Py_None && r->error == NULL)
        request_set_error(r, error);
    fold_vector(r, end);
    if (UNLIKELY(r->pin != NULL))
        pin_apply(r);
    int alone = request_close(r);
    cpu_end(r, alone);
    end_link(rec, r, end);
    if (UNLIKELY(is_carrier(r))) {
        carrier_finish(r);
        PyErr_Restore(type, value, traceback);
        return;
    }
    if (UNLIKELY(r->wanted)) {
        if (hook_kind_of(r) != NULL)
            hook_call(rec, rec->on_exit, r, r->class_->request, hook_kind_of(r));
        if (rec->on_finish != NULL) {
            PyObject *wall = PyLong_FromLongLong(r->wall), *args[] = {(PyObject *)r, wall};
            PyObject *answer = wall == NULL ? NULL : PyObject_Vectorcall(rec->on_finish, args, 2, NULL);
            if (answer == NULL) {
                swallow_error();
                rec->hook_errors++;
            }
            Py_XDECREF(answer);
            Py_XDECREF(wall);
        }
    }
    class_fold(rec, r);
    PyErr_Restore(type, value, traceback);
}

/* Ends the request if it is still open, and gives the context back to the nearest open one around it. */
static void leave(Request *r) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    r->entered = 0;
    Request *current = request_current(r->rec);
    if (current == r) {
        Request *outer = nearest_open(r->outer);
        set_current(r->rec, outer != NULL ? (PyObject *)outer : Py_None);
    }
    Py_XDECREF(current);
    PyErr_Restore(type, value, traceback);
}

void request_end(Request *r, PyObject *exc_type) {
    if (!r->entered)
        return;
    if (r->depth > 0) {
        r->depth--;
        return;
    }
    Py_INCREF(r);
    if (r->open)
        finish(r, exc_type);
    leave(r);
    Py_DECREF(r);
}

/* Request.finish(): counts now, wherever it is called; the later __exit__ only restores the context. */
void request_finish_now(Request *r, PyObject *error) {
    if (r->open)
        finish(r, error);
}
