/* The switches of inject.h, for ctypes. */
#include "inject.h"

long inject_left = -1, inject_calls = 0;

__attribute__((visibility("default"))) void inject_arm(long left) {
    inject_left = left;
    inject_calls = 0;
}

/* Calls since it was armed; arms it no more. */
__attribute__((visibility("default"))) long inject_disarm(void) {
    inject_left = -1;
    return inject_calls;
}
