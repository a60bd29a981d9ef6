"""Evidence from the interpreter and the kernel: GC pauses, scheduling, container limits."""
