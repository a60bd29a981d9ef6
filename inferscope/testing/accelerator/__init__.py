"""A simulated accelerator for tests and demonstrations: a real torch device with streams, events and copies, and no hardware.

    from inferscope.testing import accelerator

    sim = accelerator.load()                      # compiles once (about 15 s), then torch knows the device "sim"
    sim.configure(pageable_gb_s=1.0, drift_ppm=80)
    x = torch.ones(1024, device="sim")            # operators run on the CPU, and take the time that was configured on the device
    sim.kernel(5.0)                               # 5 ms of work on the current stream
    torch.accelerator.synchronize()
    print(sim.operations()[-1])                   # what truly happened

Completion is asynchronous on the real clock; on the virtual clock (`sim.virtual_clock()`) time passes only when somebody waits or
`sim.advance_ms()` is called, and a single-threaded run is the same every time. Results of operators are computed when they are issued, and a
graph's replay takes its time but computes nothing anew. There is one such device a process: torch offers one slot for foreign backends.
"""

from __future__ import annotations

from inferscope.testing.accelerator._build import AcceleratorUnavailableError
from inferscope.testing.accelerator._device import Accelerator, Operation, load

__all__ = ["Accelerator", "AcceleratorUnavailableError", "Operation", "load"]
