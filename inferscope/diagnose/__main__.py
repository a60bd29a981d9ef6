"""The child process: `python -m inferscope.diagnose DIRECTORY` writes `diagnosis-<n>.json` into the incident.

It prints nothing when all is well. Exit codes: 0 well, 1 the evidence cannot be used (one line on stderr), 64 usage.
"""

from __future__ import annotations

import atexit
import os
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["limit_self", "main", "pace_self"]

_MEMORY: Final = 3 << 30
"""Address space, bytes; resident memory stays far below."""
_CPU_SECONDS: Final = 300
_SHARE: Final = "INFERSCOPE_CHILD_CPU"
"""Part of a CPU that whoever started this allows it."""
_SLICE_S: Final = 0.002
"""CPU time after which it rests: far less than the 100 ms over which a quota counts."""


def limit_self() -> None:
    """Run only when the machine is idle, within bounds, and be the first to go when memory ends; what the system refuses is left out."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with suppress(OSError, AttributeError):
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for name, limit in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _CPU_SECONDS), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(name)[1]
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(name, (bound, hard))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def pace_self(share: float) -> None:
    """Use no more than that part of a CPU: a quota counts what runs on idle CPUs too, and stops the whole group when it is used up."""
    rests = 1.0 / min(max(share, 0.01), 1.0) - 1.0
    if rests <= 0.0 or not hasattr(signal, "setitimer"):
        return
    rested_at_s = time.process_time()

    def rest(_number: int, _frame: object) -> None:
        nonlocal rested_at_s
        now_s = time.process_time()
        used_s, rested_at_s = max(0.0, now_s - rested_at_s), now_s  # a signal in between has rested until after `now_s`
        time.sleep(used_s * rests)  # by what was used, because the kernel's own tick may be longer than the slice

    signal.signal(signal.SIGPROF, rest)
    signal.setitimer(signal.ITIMER_PROF, _SLICE_S, _SLICE_S)
    # The interpreter takes its handlers out before it ends, and the signal's own effect is the end.
    atexit.register(signal.setitimer, signal.ITIMER_PROF, 0.0)


def main(arguments: list[str]) -> int:
    """Diagnose one directory and return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        sys.stderr.write("usage: python -m inferscope.diagnose INCIDENT_DIRECTORY\n")
        return 64
    limit_self()
    with suppress(ValueError):
        pace_self(float(os.environ.get(_SHARE, "1")))
    from inferscope.diagnose import profiles
    from inferscope.diagnose.incident import load_directory, save
    from inferscope.errors import EvidenceError

    directory = Path(arguments[0])
    try:
        save(load_directory(directory), directory)
        with suppress(EvidenceError, OSError):  # the diagnosis stands without them
            profiles.write(directory)
    except EvidenceError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (OSError, MemoryError) as error:
        sys.stderr.write(f"{directory}: diagnosis failed: {type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
