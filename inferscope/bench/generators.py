"""Load generators in processes of their own, started once and used for every load of a session.

Several share one schedule: the k-th of n sends every n-th request, on the same clock, so that what leaves the machine is the load that was
drawn, whatever their number. Each waits for its next job on its standard input.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.bench.result import ARRAYS, LoadPlan, LoadResult, merged
from inferscope.bench.targets import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

__all__ = ["Generators"]

_LEAD_NS: Final = 250_000_000
"""Several generators read their job and connect in this time."""
_COMMAND: Final = (sys.executable, "-m", "inferscope.bench.load", "--serve")


class Generators:
    """Use it in a with-block; its processes end with it.

    Args:
        count: how many.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="inferscope-load-")
        self._log = Path(self._folder.name, "log")

    def __enter__(self) -> Self:
        """Nothing runs before the first load."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes.clear()
        self._folder.cleanup()

    def measure(self, plan: LoadPlan, bodies: Sequence[bytes] = ()) -> LoadResult:
        """Run the plan and return its result.

        Args:
            plan: what to send.
            bodies: see `load.generate`.

        Raises:
            ServiceError: a generator failed.
        """
        self._start()
        content = Path(self._folder.name, "bodies.json")
        content.write_text(json.dumps([base64.b64encode(body).decode() for body in bodies]), "ascii")
        start_ns = time.perf_counter_ns() + _LEAD_NS if self.count > 1 else None
        answers = [Path(self._folder.name, f"answer-{index}.npz") for index in range(self.count)]
        for index, process in enumerate(self._processes):
            job = {
                "plan": asdict(plan),
                "bodies": str(content),
                "share": [index, self.count],
                "start_ns": start_ns,
                "answer": str(answers[index]),
            }
            self._write(process, json.dumps(job).encode() + b"\n")
        said = [self._answer(process) for process in self._processes]
        problem = next((each["error"] for each in said if each["error"]), None)
        if problem:
            raise ServiceError(str(problem))
        parts: list[LoadResult] = []
        for answer, row in zip(answers, said, strict=True):
            with np.load(answer) as columns:
                parts.append(LoadResult(plan, **{name: columns[name] for name in ARRAYS}, stopped=str(row["stopped"])))
            answer.unlink()
        return parts[0] if self.count == 1 else merged(parts, plan)

    def _start(self) -> None:
        while len(self._processes) < self.count:
            with self._log.open("ab") as log:
                self._processes.append(subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log))

    def _write(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        try:
            assert process.stdin is not None  # noqa: S101  (it is a pipe)
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            raise self._died(process) from None

    def _answer(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert process.stdout is not None  # noqa: S101  (it is a pipe)
        line = process.stdout.readline()
        if not line:
            raise self._died(process)
        found: dict[str, Any] = json.loads(line)
        return found

    def _died(self, process: subprocess.Popen[bytes]) -> ServiceError:
        said = self._log.read_text(errors="replace").strip().splitlines()
        return ServiceError(f"the load generator ended with status {process.wait()}: {said[-1][-300:] if said else 'it said nothing'}")
