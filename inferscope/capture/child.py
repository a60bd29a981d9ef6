"""The diagnosis as a child process: nothing of it runs in the one that serves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SHARE", "DiagnosisChild"]

SHARE: Final = "INFERSCOPE_CHILD_CPU"
"""Tells the child which part of a CPU it may use."""


class DiagnosisChild:
    """`python -m inferscope.diagnose DIRECTORY`, with a time limit.

    Args:
        directory: The incident.
        limit_s: Seconds after which it is ended.
        share: Part of a CPU that it may use. Default None: as much as is idle.
    """

    def __init__(self, directory: Path, limit_s: float, share: float | None = None) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "INFERSCOPE_STRICT"}
        if share is not None:
            environment[SHARE] = f"{share:.3f}"
        command = [sys.executable, "-m", "inferscope.diagnose", str(directory)]
        # No preexec_fn: it would run Python between fork and exec in a threaded process. The child limits itself.
        self._process = subprocess.Popen(  # noqa: S603  (our own interpreter and module; the directory is one argument, not a shell's)
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._deadline = time.monotonic() + limit_s
        self.complaint = ""
        """Why it failed, in one line; empty when it did not."""

    def running(self) -> bool:
        """Whether it still works; ends it when its time is over."""
        if self._process.poll() is None:
            if time.monotonic() > self._deadline:
                self.kill()
            return True
        _, said = self._process.communicate()
        if self._process.returncode != 0:
            lines = said.decode(errors="replace").strip().splitlines() or ["no message"]
            self.complaint = f"status {self._process.returncode}: {lines[-1]}"
        return False

    def kill(self) -> None:
        """End it now and take its status, so that no zombie stays."""
        self._process.kill()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            return  # in uninterruptible I/O; the next call sees its end
