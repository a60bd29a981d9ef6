"""A rotating ring of OTLP/JSON lines: what is exported, kept on disk in the layout of the collector's `file` exporter.

`<signal>.jsonl` is being written; `<signal>-<unix ns>.jsonl.gz` are older parts. A crash at any point costs at most the last line:
a torn line is fenced off at the next start, and a part is deleted only after its compressed form is on disk.
Everything is made for its owner alone (files 0600, directory 0700). Opened by the export thread on its first write; a forked child
gets a ring that writes nothing.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import time
import zlib
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["PART_BYTES", "RING_BYTES", "Ring", "read_ring"]

RING_BYTES: Final = 64 * 1024 * 1024
"""All parts of all signals of one process together."""
PART_BYTES: Final = 4 * 1024 * 1024
"""Uncompressed size at which a part is closed."""

_SHARE: Final = {"metrics": 0.75, "logs": 0.125, "traces": 0.125}

_VECTOR: Final = 1024
"""Pieces that the kernel takes in one call (IOV_MAX)."""


class Ring:
    """The writer of one signal's lines.

    Args:
        directory: Where the parts lie; None writes nothing.
        signal: `metrics`, `logs` or `traces`.
        total_bytes: Size of the whole ring; the signal takes its share.
        part_bytes: Size of one part before compression.
        unix_ns: Wall clock, which names the parts.
    """

    def __init__(
        self,
        directory: Path | None,
        signal: str,
        *,
        total_bytes: int = RING_BYTES,
        part_bytes: int = PART_BYTES,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._directory = directory
        self._signal = signal
        self._total = int(total_bytes * _SHARE.get(signal, 1.0))
        self._part = min(part_bytes, max(self._total // 4, 1))
        self._unix_ns = unix_ns
        self._file: int | None = None
        self._size = 0
        self._pid = os.getpid()
        self.written = 0
        self.lost = 0
        self.problem: str | None = None
        """Why nothing is written any more."""

    def append(self, line: str | Sequence[bytes]) -> bool:
        """Write one line (without newline), whole or in pieces; False when the ring does not write."""
        if self._directory is None or self._pid != os.getpid():
            return False
        pieces = [line.encode(), b"\n"] if isinstance(line, str) else [*line, b"\n"]
        try:
            if self._file is None:
                self._open(self._directory)
            if self._size and self._size + sum(map(len, pieces)) > self._part:
                self._rotate(self._directory)
            self._write(pieces)
        except OSError as error:
            self.lost += 1
            self._give_up(error)
            return False
        self.written += 1
        return True

    def _write(self, pieces: Sequence[bytes]) -> None:
        assert self._file is not None  # noqa: S101
        for start in range(0, len(pieces), _VECTOR):
            some = pieces[start : start + _VECTOR]
            left = sum(map(len, some))
            done = os.writev(self._file, some)
            self._size += done
            view = memoryview(b"".join(some))[done:] if done < left else memoryview(b"")  # a disk that is nearly full takes a part
            while view:
                done = os.write(self._file, view)
                self._size += done
                view = view[done:]

    def _open(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._recover(directory)
        path = directory / f"{self._signal}.jsonl"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._write([b"\n"])  # a crash tore the last line: fence it off from the next one

    def _recover(self, directory: Path) -> None:
        """Finish what a crash during a rotation left."""
        for stale in directory.glob(f"{self._signal}-*.tmp"):
            stale.unlink()
        for plain in sorted(directory.glob(f"{self._signal}-*.jsonl")):
            if plain.with_name(plain.name + ".gz").exists():
                plain.unlink()
            else:
                _compress(plain)

    def _rotate(self, directory: Path) -> None:
        assert self._file is not None  # noqa: S101
        os.fsync(self._file)
        os.close(self._file)
        self._file = None
        part = directory / f"{self._signal}-{self._unix_ns():020d}.jsonl"
        (directory / f"{self._signal}.jsonl").rename(part)
        _compress(part)
        self._evict(directory)
        self._open(directory)

    def _evict(self, directory: Path) -> None:
        parts = sorted(directory.glob(f"{self._signal}-*.gz"))
        sizes = [part.stat().st_size for part in parts]
        room = self._total - self._part
        while parts and sum(sizes) > room:
            parts.pop(0).unlink()
            sizes.pop(0)

    def _give_up(self, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        self.problem = f"{self._directory} cannot be written ({reason})"
        guard.log_once(f"ring-{self._signal}", f"{self.problem}; {self._signal} are not kept on disk any more, OTLP still works")
        self._directory = None
        self.close()

    def close(self) -> None:
        """Close the file; the next `append` opens it anew."""
        file, self._file = self._file, None
        if file is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                os.close(file)


def _compress(plain: Path) -> None:
    """Replace a part by its compressed form; both names exist for a moment, and then the compressed one counts."""
    finished = plain.with_name(plain.name + ".gz")
    temporary = plain.with_name(plain.name + ".tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as raw:
        with plain.open("rb") as source, gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=6, mtime=0) as target:
            shutil.copyfileobj(source, target, 64 * 1024)
        raw.flush()
        os.fsync(raw.fileno())
    temporary.rename(finished)
    _sync_directory(plain.parent)
    plain.unlink()


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_ring(directory: Path, signal: str, damaged: list[Path] | None = None) -> Iterator[dict[str, Any]]:
    """Every whole request of a ring, oldest first, also while it is being written; torn or damaged lines are left out.

    Args:
        directory: `STATE_DIR/<service>/<slot>`.
        signal: `metrics`, `logs` or `traces`.
        damaged: Gets the file of each line or part that was left out.
    """
    parts = {part.name.removesuffix(".gz"): part for part in sorted(directory.glob(f"{signal}-*.jsonl"))}
    parts |= {part.name.removesuffix(".gz"): part for part in sorted(directory.glob(f"{signal}-*.jsonl.gz"))}
    damaged = [] if damaged is None else damaged
    for _, path in sorted(parts.items()):
        yield from _requests(path, damaged)
    current = directory / f"{signal}.jsonl"
    if current.exists():
        yield from _requests(current, damaged)


def _requests(path: Path, damaged: list[Path]) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield value
                elif line.strip():  # an empty one fences a torn line off
                    damaged.append(path)
    except FileNotFoundError:
        return  # rotated away between listing and opening
    except (OSError, EOFError, zlib.error):
        damaged.append(path)  # cut or not readable: what was read so far stands
