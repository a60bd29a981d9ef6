"""What this process may use, as the kernel and the libraries say it; None is what they do not say."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from inferscope.host.cgroup import cpu_quota

__all__ = ["cpu_quota", "facts"]


def facts() -> dict[str, Any]:
    """CPUs, threads and thread pools of this process."""
    torch = sys.modules.get("torch")
    pool = None
    if torch is not None:
        try:
            pool = int(torch.get_num_threads())
        except Exception:  # noqa: BLE001  (a torch that is still being imported has no such function yet)
            pool = None
    return {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_quota": cpu_quota(),
        "threads": threading.active_count(),
        "torch_threads": pool,
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }
