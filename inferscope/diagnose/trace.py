"""Kineto and Chrome traces, read as a stream: a trace of 500 MB needs less than 200, because only numbers are kept of each event.

Plain or gzip, CPU only, CUDA, ROCm and others, from our captures or from anybody's `torch.profiler`; torch is not needed. `TraceSummary`
answers what a diagnosis asks: which operators and kernels took the time, which copies were pageable, who waited for the device and where,
what the device waited for, whether shapes keep changing, and to which stage each operator belongs. A pageable copy that is followed by a
stream synchronise on the same thread is a synchronous copy, whatever `non_blocking` said.
"""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from inferscope.diagnose.stream import open_trace, stream
from inferscope.diagnose.traces.host import TOLERANCE_NS
from inferscope.diagnose.traces.reader import Reader
from inferscope.diagnose.traces.values import Operator, StageSpan, TraceSummary, Transfer, head
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["TOLERANCE_NS", "Operator", "StageSpan", "TraceSummary", "Transfer", "head", "read_trace"]


def read_trace(path: Path, spans: Sequence[StageSpan] = ()) -> TraceSummary:
    """Read one trace, plain or gzip.

    Args:
        path: The trace.
        spans: Our own spans of the captured request; without any, the trace's annotations are the stages.

    Raises:
        EvidenceError: The file is empty, truncated, damaged, no trace, or one without events; the message is one line.
    """
    reader = Reader()
    try:
        with open_trace(path) as text:
            for event in stream(text, reader.header):
                reader.add(event)
    except EvidenceError as error:
        msg = f"{path.name}: {error}" + (f" after {reader.elements} events" if reader.elements else "")
        raise EvidenceError(msg) from error
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        msg = f"{path.name}: damaged or truncated ({error}) after {reader.elements} events"
        raise EvidenceError(msg) from error
    except OSError as error:
        msg = f"{path.name}: cannot be read ({error.strerror or error})"
        raise EvidenceError(msg) from error
    if not reader.events:
        msg = f"{path.name}: a trace without events: nothing ran while it was recorded"
        raise EvidenceError(msg)
    return reader.summary(spans)
