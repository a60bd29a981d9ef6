/* The exclusive vector of a finished request: it sums to the wall time, to the nanosecond. */
#include "core.h"

typedef struct {
    Request *r;
    int order[SLOT_LIMIT]; /* slots, latest end first; equal ends: the later slot first */
    int count;
} Walk;

static int column_at(const Request *r, int node) {
    return node == NO_SLOT ? COLUMN_UNATTRIBUTED : r->slots[node].column;
}

static void sort_by_end(Walk *w) {
    const Slot *slots = w->r->slots;
    for (int i = 0; i < w->count; i++) {
        int k = i;
        for (; k > 0 && slots[w->order[k - 1]].end <= slots[i].end; k--)
            w->order[k] = w->order[k - 1];
        w->order[k] = i;
    }
}

/* Backward critical path over [lo, hi]: what finished last is what the end waited for, back to its own start; then what ran before
 * that. Time that no child covers is the node's own. Recursion is as deep as spans nest, so at most SLOT_LIMIT. */
static void walk(Walk *w, int node, int64_t lo, int64_t hi) {
    const Slot *slots = w->r->slots;
    int64_t cursor = hi, own = 0;
    for (int k = 0; k < w->count; k++) {
        int child = w->order[k];
        if (slots[child].parent != node)
            continue;
        int64_t top = slots[child].end < cursor ? slots[child].end : cursor;
        int64_t bottom = slots[child].start > lo ? slots[child].start : lo;
        if (bottom >= top)
            continue;
        own += cursor - top;
        walk(w, child, bottom, top);
        cursor = bottom;
    }
    w->r->vector[column_at(w->r, node)] += own + cursor - lo;
}

static void critical_path(Request *r, int64_t end) {
    Walk w;
    w.r = r;
    w.count = r->slot_count;
    sort_by_end(&w);
    memset(r->vector, 0, sizeof r->vector);
    walk(&w, NO_SLOT, r->root.start, end);
}

/* Fixes wall and vector at `end`. Frames still open end here for the vector; their real end will be late. */
void fold_vector(Request *r, int64_t end) {
    for (Frame *f = r->top; f != &r->root; f = f->prev) {
        int64_t duration = end > f->start ? end - f->start : 0;
        r->vector[f->def->column] += duration - f->child_ns;
        f->prev->child_ns += duration;
        if (f->slot != NO_SLOT)
            r->slots[f->slot].end = f->start + duration;
    }
    r->top = &r->root;
    r->wall = end - r->root.start;
    if (UNLIKELY(r->overlapping))
        critical_path(r, end);
    else
        r->vector[COLUMN_UNATTRIBUTED] += r->wall - r->root.child_ns;
}
