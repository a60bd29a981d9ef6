/* A tool for tests: NVTX loads it through NVTX_INJECTION64_PATH, and it writes what it is told, a line an event, to $FAKE_NVTX_LOG. The
 * numbers of modules and calls are those of nvtxDetail/nvtxTypes.h, which tools are built against. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*function)(void);
typedef function **table;
typedef struct {
    size_t size;
    int (*module_table)(int module, table *out, unsigned *size);
} callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    union { const char *text; void *registered; } message;
} attributes;

enum { CALLBACKS = 1, CORE2 = 5 };
enum { START = 2, END = 3, PUSH = 4, POP = 5, REGISTER = 10, CREATE = 12 };
enum { TEXT = 1, REGISTERED = 3 };

static FILE *log_;
static uint64_t next_ = 1;

static const char *said(const attributes *event) {
    if (event->message_type == REGISTERED) return (const char *)event->message.registered;
    return event->message_type == TEXT ? event->message.text : "?";
}
static const char *how(const attributes *event) { return event->message_type == REGISTERED ? "registered" : "text"; }

static uint64_t start(void *domain, const attributes *event) {
    fprintf(log_, "start %s %s %s %llu\n", (char *)domain, how(event), said(event), (unsigned long long)next_);
    return next_++;
}
static void end(void *domain, uint64_t range) { fprintf(log_, "end %s %llu\n", (char *)domain, (unsigned long long)range); }
static int push(void *domain, const attributes *event) {
    fprintf(log_, "push %s %s %s\n", (char *)domain, how(event), said(event));
    return 0;
}
static int pop(void *domain) {
    fprintf(log_, "pop %s\n", (char *)domain);
    return 0;
}
static void *registered(void *domain, const char *text) {
    (void)domain;
    return strdup(text);
}
static void *create(const char *name) { return strdup(name); }

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const callbacks *offered = export_table(CALLBACKS);
    table entries = NULL;
    unsigned size = 0;
    log_ = fopen(getenv("FAKE_NVTX_LOG"), "w");
    if (offered == NULL || log_ == NULL || !offered->module_table(CORE2, &entries, &size)) return 0;
    setvbuf(log_, NULL, _IOLBF, 0);
    *entries[START] = (function)start;
    *entries[END] = (function)end;
    *entries[PUSH] = (function)push;
    *entries[POP] = (function)pop;
    *entries[REGISTER] = (function)registered;
    *entries[CREATE] = (function)create;
    return 1;
}
