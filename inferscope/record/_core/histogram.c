/* Series: counts in exactly HdrHistogram's index layout (checked against the `hdrhistogram` package in the tests).
 *
 *   2 digits, lowest 1:     sub-bucket count 256, unit magnitude 0, 29 buckets  -> (29 + 1) * 128  =  3840 counts
 *   3 digits, lowest 1000:  sub-bucket count 2048, unit magnitude 9, 17 buckets -> (17 + 1) * 1024 = 18432 counts
 */
#include "core.h"

Series *series_new(PyObject *kind, PyObject *labels, int digits, int64_t lowest) {
    Series *s = PyMem_RawCalloc(1, sizeof(Series));
    if (s == NULL)
        return NULL;
    s->counts_len = digits == 3 ? 18432 : 3840;
    s->counts = PyMem_RawCalloc((size_t)s->counts_len, sizeof(int64_t)); /* pages that are never touched cost nothing */
    if (s->counts == NULL) {
        PyMem_RawFree(s);
        return NULL;
    }
    s->digits = digits;
    s->lowest = lowest;
    s->kind = Py_NewRef(kind);
    s->labels = Py_NewRef(labels);
    return s;
}

void series_free(Series *s) {
    if (s == NULL)
        return;
    Py_DECREF(s->kind);
    Py_DECREF(s->labels);
    PyMem_RawFree(s->counts);
    PyMem_RawFree(s);
}

static inline int index3(int64_t v) {
    int b = 44 - __builtin_clzll((uint64_t)v | (UINT64_C(2047) << 9)); /* bit_length - 20 */
    return (b << 10) + (int)(v >> (b + 9));
}

/* Below 0 counts as 0; above the highest value counts as the highest, and as clamped. The sum keeps the true value. */
void series_clamped(Series *s, int64_t v) {
    int64_t kept = v < 0 ? 0 : HIGHEST_NS;
    if (v > 0) {
        COUNT_ADD(s->clamped, 1);
        COUNT_ADD(s->sum, v);
    }
    if (s->digits == 3) {
        COUNT_ADD(s->counts[index3(kept)], 1);
    } else {
        int b = 56 - __builtin_clzll((uint64_t)kept | 255);
        COUNT_ADD(s->counts[(b << 7) + (kept >> b)], 1);
    }
}

void series_record3(Series *s, int64_t v) {
    if (UNLIKELY((uint64_t)v > (uint64_t)HIGHEST_NS)) {
        series_clamped(s, v);
        return;
    }
    COUNT_ADD(s->counts[index3(v)], 1);
    COUNT_ADD(s->sum, v);
}

/* Copies the counts to a buffer, maybe unaligned, and returns the number of values. That is not kept beside the counts: one store less a
 * record, a few microseconds a read. */
int64_t series_read(const Series *s, void *counts) {
    int64_t n = 0;
    for (int i = 0; i < s->counts_len; i++) {
        int64_t count = COUNT_READ(s->counts[i]);
        memcpy((char *)counts + (size_t)i * sizeof count, &count, sizeof count);
        n += count;
    }
    return n;
}
