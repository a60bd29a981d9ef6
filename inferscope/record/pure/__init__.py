"""The pure-Python twin of the C core: what records where nothing could be compiled, and the readable statement of what the core does.

Exact under the GIL: each counter is a single `x += 1` statement, which no other thread can split there.
"""
