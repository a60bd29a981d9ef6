"""The rules, one file a family; `ALL` is the order in which they are asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.rules.copies import small_copies, synchronous_copies, waiting_copies
from inferscope.diagnose.rules.locks import lock_contention
from inferscope.diagnose.rules.model import model_stage, slow_stage, unattributed
from inferscope.diagnose.rules.scheduling import gc_pauses, interpreter_lock, queueing, run_queue

if TYPE_CHECKING:
    from inferscope.diagnose.findings import Rule

__all__ = ["ALL"]

ALL: Final[tuple[Rule, ...]] = (
    synchronous_copies,
    waiting_copies,
    small_copies,
    lock_contention,
    queueing,
    gc_pauses,
    run_queue,
    interpreter_lock,
    slow_stage,
    model_stage,
    unattributed,
)
