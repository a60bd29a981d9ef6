"""Strings that may stay in a trace: what is not on the list is replaced before the trace gets its name.

A trace names operators, kernels and runtime calls, which are code. It also holds text that people chose at run time: annotation names
(a user id, say), scalar arguments ("Concrete Inputs"), keyword values, the host's name, paths with a home directory in them. Of these,
nothing passes: a name becomes `annotation-1`, the same one for the same text, an argument that is not listed goes.

The file is read and written event by event, in pieces, and leaves the interpreter to others in between.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from inferscope.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["ARGUMENTS", "Scrubber", "short_path"]

_CHUNK: Final = 1 << 18
_LONGEST: Final = 1 << 22
"""Characters of one event; what is longer is none of Kineto's."""
_EVENTS: Final = re.compile(r'"traceEvents"\s*:\s*\[')
_GAP: Final = re.compile(r"[\s,]*")
_HEADER: Final = frozenset(
    {"schemaVersion", "displayTimeUnit", "baseTimeNanoseconds", "deviceProperties", "cuda_runtime_version", "cuda_driver_version"}
)
_OPERATOR: Final = re.compile(
    r"(?:inferscope::[\w/:#.\-]{1,120}|autograd::engine::evaluate_function: [\w:]+|\w{1,80}Backward\d*|torch::autograd::\w+"
    r"|TorchDynamo Cache Lookup|Torch-Compiled Region: \d+/\d+)\Z"
)
_ANNOTATION: Final = re.compile(r"(?:inferscope::[\w/:#.\-]{1,120}|ProfilerStep#\d+)\Z")
_PYTHON: Final = re.compile(r"(?:nn\.Module: \w+|<built-in (?:method|function) [\w.]+(?: of [\w.]+ object at 0x[0-9a-f]+)?>)\Z")
_FUNCTION: Final = re.compile(r"(.+)\((\d+)\): ([\w.<>]+)\Z")
_WINDOW: Final = frozenset({"Record Window End", "Iteration Start: PyTorch Profiler"})
_NAMES: Final = 4096
_CODE: Final = frozenset(
    {
        *(
            "kernel",
            "gpu_memcpy",
            "gpu_memset",
            "cuda_runtime",
            "cuda_driver",
            "cuda_sync",
            "overhead",
            "fwdbwd",
            "ac2g",
            "async_cpu_to_gpu",
        ),
        *("hip_runtime", "hip_driver", "privateuse1_runtime", "privateuse1_driver", "xpu_runtime", "mtia_runtime", "python_gc", "trace"),
        *("memcpy", "memset", "runtime", "driver"),
    }
)
"""Categories whose names come from code alone."""
ARGUMENTS: Final = frozenset(
    {
        *("Input Dims", "Input type", "Input Strides", "External id", "Sequence number", "Fwd thread id", "Record function id", "Ev Idx"),
        *("Op count", "Python id", "Python parent id", "Python module id", "device", "context", "stream", "correlation", "bytes", "grid"),
        *("block", "registers per thread", "shared memory", "blocks per SM", "warps per SM", "est. achieved occupancy %", "queued", "kind"),
        *(
            "memory bandwidth (GB/s)",
            "cbid",
            "cid",
            "cuda_sync_kind",
            "wait_on_stream",
            "wait_on_cuda_event_record_corr_id",
            "wait_on_cuda_event_id",
            "flow id",
        ),
        *(
            "graph id",
            "graph node id",
            "sort_index",
            "labels",
            "name",
            "ptr",
            "src",
            "dst",
            "size",
            "Collection",
            "Device Id",
            "Device Type",
        ),
        *("Total Allocated", "Total Reserved", "Bytes", "Addr"),
    }
)
"""Arguments of events that stay; any other one may hold a value of the application's."""


def short_path(path: str) -> str:
    """The last two parts: enough to find a file, without directories that name people and machines."""
    return "/".join(path.replace("\\", "/").split("/")[-2:])


class _Reader:
    """The file as a moving piece of text."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.text = ""
        self.at = 0
        self.ended = False

    def more(self) -> bool:
        """Read on; False at the end of the file."""
        chunk = self._file.read(_CHUNK)
        self.text, self.at = self.text[self.at :] + chunk, 0
        self.ended = not chunk
        return not self.ended

    def head(self) -> str | None:
        """Everything before the events; None when there are none."""
        while (found := _EVENTS.search(self.text)) is None:
            if len(self.text) > _LONGEST or not self.more():
                return None
        self.at = found.end()
        return self.text[: found.start()]

    def events(self) -> Iterator[Any]:
        """Each event; ends before what is none."""
        decoder = json.JSONDecoder(strict=False)
        while True:
            self.at = cast("re.Match[str]", _GAP.match(self.text, self.at)).end()
            left = len(self.text) - self.at
            if left and self.text[self.at] == "]":
                return
            try:
                event, self.at = decoder.raw_decode(self.text, self.at)
            except (ValueError, RecursionError):
                if left > _LONGEST or not self.more():
                    return
                continue
            yield event

    def tail(self) -> str:
        """What is left."""
        while self.more() and len(self.text) < _LONGEST:
            pass
        return self.text


class Scrubber:
    """Copies one trace, and counts while it is at it.

    Args:
        is_operator: Whether a name is that of an operator that is registered with torch.
    """

    def __init__(self, is_operator: Callable[[str], bool]) -> None:
        self.events = self.kernels = self.launches = self.replaced = 0
        """Complete events, kernels among them, launches of kernels and graphs, and strings that were replaced or left out."""
        self.threads: set[int] = set()
        """Native ids of the threads with operators."""
        self._is_operator = is_operator
        self._names: dict[str, str] = {}
        self._passed: dict[tuple[str, str], str] = {}

    def copy(self, source: Path, target: TextIO) -> bool:
        """Read `source`, write what may stay; False when `source` is not a whole trace.

        Raises:
            OSError: Either file fails.
        """
        pace = Pace()
        with source.open(encoding="utf-8", errors="replace") as file:
            reader = _Reader(file)
            head = reader.head()
            if head is None:
                return False
            target.write(self._head(head))
            separator = "\n"
            for event in reader.events():
                if isinstance(event, dict):
                    kept = self._event(cast("dict[str, Any]", event))
                    target.write(separator + json.dumps(kept, separators=(", ", ": ")))
                    separator = ",\n"
                pace()
            target.write("\n]}\n")
            tail = reader.tail().strip()
        return tail.startswith("]") and tail.endswith("}")

    def _head(self, text: str) -> str:
        try:
            given: Any = json.loads(text.rstrip().rstrip(",") + "}", strict=False)
        except (ValueError, RecursionError):
            given = None
        known = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        self.replaced += len(known.keys() - _HEADER)
        kept = {key: value for key, value in known.items() if key in _HEADER}
        return json.dumps(kept)[:-1] + (", " if kept else "") + '"traceEvents": ['

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        kind, category = event.get("ph"), str(event.get("cat", "")).lower()
        name = str(event.get("name", ""))
        if kind == "X":
            self.events += 1
            self.kernels += category == "kernel"
            if category == "cpu_op" and isinstance(event.get("tid"), int):
                self.threads.add(event["tid"])
            self.launches += "Launch" in name and category in {"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"}
        arguments: Any = event.get("args")
        if isinstance(arguments, dict):
            given = cast("dict[str, Any]", arguments)
            event["args"] = {key: value for key, value in given.items() if key in ARGUMENTS}
            self.replaced += len(given) - len(event["args"])
        if kind != "M" and name:
            event["name"] = self._known(category, name)
        return event

    def _known(self, category: str, text: str) -> str:
        kept = self._passed.get((category, text))
        if kept is None:
            kept = self._name(category, text)
            if len(self._passed) < _NAMES:
                self._passed[category, text] = kept
        self.replaced += kept.startswith("annotation-")
        return kept

    def _name(self, category: str, text: str) -> str:
        if category in _CODE:
            return text
        if category in {"cpu_op", "operator"}:
            if _OPERATOR.match(text) or self._is_operator(text) or (text.isidentifier() and self._is_operator(f"aten::{text}")):
                return text
        elif category == "python_function":
            function = _FUNCTION.match(text)
            if function is not None:
                return f"{short_path(function[1])}({function[2]}): {function[3]}"
            if _PYTHON.match(text):
                return text
        elif _ANNOTATION.match(text) or (not category and text in _WINDOW):
            return text
        if text not in self._names and len(self._names) >= _NAMES:
            return "annotation-other"
        return self._names.setdefault(text, f"annotation-{len(self._names) + 1}")
