/* The same as frame.h's fast paths for everything that they leave out: no request, another thread's, a closed or a wanted one, a full
 * record, an error, regions that do not nest. */
#include "frame.h"

static PyObject *name_of(HookKind kind) {
    return kind == HOOK_WITH ? str_with : str_call;
}

void frame_enter_slow(Recorder *rec, Frame *f, HookKind kind) {
    Request *r = request_current(rec);
    f->request = NULL;
    f->slot = NO_SLOT;
    if (r != NULL && r->wanted && r->open && kind != HOOK_NONE)
        hook_call(rec, rec->on_enter, r, f->def->name, name_of(kind));
    if (r != NULL && r->open) {
        frame_link(f, r);
    } else if (r != NULL) { /* closed: the end of this frame will be late */
        f->request = r;
        f->generation = 0;
    }
    frame_started(f, rec_now(rec));
}

void frame_exit_slow(Recorder *rec, Frame *f, int64_t end, int error, HookKind kind) {
    int64_t duration = end - f->start;
    Request *r = f->request;
    if (duration < 0) {
        duration = 0;
        end = f->start;
    }
    if (f->def->series != NULL)
        series_record2(f->def->series, duration);
    if (r == NULL)
        return;
    frame_end(rec, f, end, duration, error);
    if (r->wanted && kind != HOOK_NONE) /* also after its end: what was entered is left */
        hook_call(rec, rec->on_exit, r, f->def->name, name_of(kind));
    Py_DECREF(r);
}
