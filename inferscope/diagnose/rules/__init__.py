"""The rules, one file a family; `ALL` is the order in which they are asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.rules.card import clock_throttle, device_queue, memory_pressure
from inferscope.diagnose.rules.copies import reads_in_loop, small_copies, synchronous_copies, waiting_copies
from inferscope.diagnose.rules.cpu import interpreter_lock, run_queue, telemetry
from inferscope.diagnose.rules.device import capture_under_overload, low_utilisation
from inferscope.diagnose.rules.inputs import input_size, io_in_request, new_shapes, retries
from inferscope.diagnose.rules.load import batching, cold_start, head_of_line, saturation
from inferscope.diagnose.rules.locks import lock_contention, slow_holder
from inferscope.diagnose.rules.model import model_stage, slow_stage, unattributed
from inferscope.diagnose.rules.ranks import stragglers
from inferscope.diagnose.rules.scheduling import gc_pauses, queueing
from inferscope.diagnose.rules.traces import bounds, copies_alone, launch_bound, matrix_units, shape_churn, waits
from inferscope.diagnose.rules.triton import async_sleep, json_tensors, large_tensors, server_queue

if TYPE_CHECKING:
    from inferscope.diagnose.findings import Rule

__all__ = ["ALL"]

ALL: Final[tuple[Rule, ...]] = (
    synchronous_copies,
    waiting_copies,
    small_copies,
    reads_in_loop,
    lock_contention,
    slow_holder,
    saturation,
    head_of_line,
    batching,
    queueing,
    cold_start,
    gc_pauses,
    run_queue,
    interpreter_lock,
    telemetry,
    input_size,
    new_shapes,
    retries,
    io_in_request,
    slow_stage,
    model_stage,
    clock_throttle,
    memory_pressure,
    device_queue,
    waits,
    launch_bound,
    shape_churn,
    matrix_units,
    bounds,
    copies_alone,
    stragglers,
    async_sleep,
    json_tensors,
    large_tensors,
    server_queue,
    low_utilisation,
    capture_under_overload,
    unattributed,
)
