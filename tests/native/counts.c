/* Counts as a build without the interpreter's lock makes them: threads add to one series, none is lost. Exits 0 when all are there.
 *
 * Built by test_counts.py with COUNTS_ATOMIC=1, and with 0 to see that the test would tell; needs no interpreter.
 */
#include "histogram.c"
#include <pthread.h>

/* What series_new() and series_free() call; nobody calls those here. */
void *PyMem_RawCalloc(size_t n, size_t size) { return calloc(n, size); }
void PyMem_RawFree(void *p) { free(p); }
void _Py_Dealloc(PyObject *object) { (void)object; }

enum { THREADS = 4, RECORDS = 1000000 };
#define BEYOND (HIGHEST_NS + 1)
static Series two, three;

static void *record(void *unused) {
    for (int i = 0; i < RECORDS; i++) {
        series_record2(&two, i & 255);
        series_record3(&three, (i & 1023) * 1000);
        if (i % 1000 == 0)
            series_record2(&two, BEYOND); /* out of range */
    }
    return unused;
}

static void *watch(void *unused) {
    int64_t last = 0;
    for (int i = 0; i < 200; i++) {
        int64_t counts[3840], now = series_read(&two, counts);
        if (now < last)
            _Exit(2);
        last = now;
    }
    return unused;
}

int main(void) {
    pthread_t threads[THREADS + 1];
    two = (Series){.digits = 2, .counts_len = 3840, .counts = calloc(3840, sizeof(int64_t))};
    three = (Series){.digits = 3, .counts_len = 18432, .counts = calloc(18432, sizeof(int64_t))};
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, record, NULL);
    pthread_create(&threads[THREADS], NULL, watch, NULL);
    for (int i = 0; i <= THREADS; i++)
        pthread_join(threads[i], NULL);
    static int64_t counts[18432];
    int64_t clamped = THREADS * (RECORDS / 1000), in_range = 0, sum = 0;
    for (int i = 0; i < RECORDS; i++) {
        in_range += i & 255;
        sum += (i & 1023) * 1000;
    }
    int64_t beyond = BEYOND * clamped;
    int right = series_read(&two, counts) == (int64_t)THREADS * RECORDS + clamped && two.clamped == clamped &&
                two.sum == THREADS * in_range + beyond && series_read(&three, counts) == (int64_t)THREADS * RECORDS &&
                three.sum == THREADS * sum && three.clamped == 0;
    return right ? 0 : 1;
}
