"""Progress of parts that take long: a bar on a terminal, one line a part elsewhere, nothing when stdout is data."""

from __future__ import annotations

import sys
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
    def part(self, label: str, seconds: float | None = None) -> Generator[None, None, None]:
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
    def _bar(label: str, seconds: float | None) -> Generator[None, None, None]:
        from rich.console import Console
        from rich.progress import Progress as Bar
        from rich.progress import ProgressColumn, Task, TextColumn, TimeElapsedColumn
        from rich.progress_bar import ProgressBar

        class Elapsed(ProgressColumn):
            """Fills with the time that has passed; pulses where nobody knows how long it takes."""

            def render(self, task: Task) -> ProgressBar:
                done = min(task.elapsed or 0.0, seconds or 0.0)
                return ProgressBar(total=seconds, completed=done, width=40, pulse=seconds is None)

        with Bar(TextColumn("{task.description}"), Elapsed(), TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
            bar.add_task(label, total=seconds)
            yield

    def done(self) -> None:
        """All parts are over."""
        sys.stderr.flush()
