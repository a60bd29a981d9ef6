"""Progress of parts that take long: a bar on a terminal, one line a part elsewhere, nothing when stdout is data."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Progress"]


class Progress:
    """Shows which part runs, on stderr.

    Args:
        quiet: Show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._tty = sys.stderr.isatty()

    @contextmanager
    def part(self, label: str, seconds: float | None = None) -> Generator[None]:
        """Show `label` while the block runs; with `seconds`, the bar fills over that time."""
        if self._quiet:
            yield
            return
        if not self._tty:
            sys.stderr.write(f"{label} ...\n")
            sys.stderr.flush()
            yield
            return
        yield from self._bar(label, seconds)

    @staticmethod
    def _bar(label: str, seconds: float | None) -> Generator[None]:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        with Bar(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=seconds)
            stop = threading.Event()
            began = time.monotonic()

            def fill() -> None:
                while not stop.wait(0.2):
                    bar.update(task, completed=min(time.monotonic() - began, seconds or 0.0))

            filler = threading.Thread(target=fill, daemon=True)
            if seconds is not None:
                filler.start()
            try:
                yield
            finally:
                stop.set()

    def done(self) -> None:
        """All parts are over."""
        sys.stderr.flush()
