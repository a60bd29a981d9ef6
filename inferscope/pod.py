"""Several workers in one pod: who has which slot, who leads, and what they count together.

A worker leases the lowest free slot by `flock`, so that a recycled worker gets its predecessor's slot and makes no new series. The pool is
one small memory-mapped file: each worker writes its own running counts, the leader sums them, so that one detector sees the pod and one
incident is open at a time. Everything here is advisory: without a state directory a process is alone, slot 0, leading itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import socket
import struct
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Announcement", "Pod", "Slot", "lease", "safe_name"]

SLOT_LIMIT: Final = 128
OBJECTIVE_LIMIT: Final = 40
"""Rows of counts of one worker: objectives, what else they promise, and triggers (`detect.watch.ROW_LIMIT`)."""
PARTS: Final = 5
"""Numbers of an objective: requests, exceeding, errors, severe, excluded."""
STALE_NS: Final = 10_000_000_000
"""A worker whose counts are older than this is taken for gone."""
_VERSION: Final = 4
_FIELDS: Final = ("version", "sequence", "state", "onset", "until", "slot", "warm", "leader", "token", "name")
# Native layout: an aligned number is copied whole, so that no reader in another process sees half of it.
_HEADER: Final = struct.Struct("@qqqqqqqqq128s")
_CELL: Final = struct.Struct("@" + "q" * (2 + PARTS * OBJECTIVE_LIMIT))  # token, heartbeat, then the parts by objective
_BEAT: Final = struct.Struct("@qq")
_HEADER_SIZE: Final = 256
_CELL_SIZE: Final = 1664
_INSTANCE_NAMESPACE: Final = uuid.UUID("6f2b5c2e-7d0e-5b1b-9d57-1c0f5e5a9c11")


def safe_name(service: str) -> str:
    """`service` as one path component."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", service).strip(".")[:80] or "service"


@dataclass(frozen=True, slots=True)
class Slot:
    """A leased place in the pod."""

    index: int
    directory: Path | None
    """`STATE_DIR/<service>/<slot>`, owner-only; None without a state directory."""
    instance_id: str
    """`service.instance.id`: uuid5 of container, service and slot."""
    descriptor: int
    """The locked file; -1 when nothing is leased."""

    def release(self) -> None:
        """Give the slot back; in a forked child this closes the child's copy only."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)


def _container() -> str:
    """What tells this container from its neighbours: the host name, which is the pod's name under Kubernetes."""
    return socket.gethostname()


def _instance_id(service: str, index: int) -> str:
    return str(uuid.uuid5(_INSTANCE_NAMESPACE, f"{_container()}/{service}/{index}"))


def lease(state_dir: Path | None, service: str) -> Slot:
    """Lease the lowest free slot of `service`.

    Raises:
        OSError: The directory cannot be written, or all slots are taken.
    """
    if state_dir is None:
        return Slot(0, None, _instance_id(service, 0), -1)
    base = state_dir / safe_name(service)
    locks = base / "slots"
    locks.mkdir(mode=0o700, parents=True, exist_ok=True)
    for index in range(SLOT_LIMIT):
        descriptor = os.open(locks / f"{index}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        directory = base / str(index)
        directory.mkdir(mode=0o700, exist_ok=True)
        return Slot(index, directory, _instance_id(service, index), descriptor)
    raise OSError(f"all {SLOT_LIMIT} slots of {service} are taken")


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the owner of the open incident tells the pod; usually the leader."""

    sequence: int
    open: bool
    onset_ns: int
    until_ns: int
    """Until when captures and evidence are wanted."""
    directory: str
    """The incident's directory."""
    slot: int = -1
    """The owner's place."""
    token: int = 0
    """The owner's `Pod.token`."""


class Pod:
    """The pool of one service on one machine; every method is safe without a state directory. One worker thread uses it."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self._leader = -1
        self._map: mmap.mmap | None = None
        self._base = slot.directory.parent if slot.directory is not None else None
        self._own: list[tuple[int, ...]] = []
        self._seen: dict[tuple[int, int], tuple[int, ...]] | None = None
        self._orphan: str | None = None
        # Not the process id: those repeat in containers, and a stale cell must not pass for ours.
        self.token = int.from_bytes(os.urandom(7), "little") + 1
        if self._base is not None:
            self._map = _open_pool(self._base / f"pool-{_VERSION}.bin")

    def publish(self, now_ns: int, counts: list[tuple[int, ...]]) -> None:
        """Write this worker's running numbers, `PARTS` by objective."""
        if self._map is None:
            self._own = counts
            return
        _CELL.pack_into(self._map, self._place(self.slot.index), self.token, now_ns, *_flat(counts))

    @staticmethod
    def _place(index: int) -> int:
        return _HEADER_SIZE + index * _CELL_SIZE

    def collect(self, now_ns: int, objectives: int) -> list[tuple[int, ...]]:
        """What all live workers counted since the last call, by objective."""
        sums = [[0] * PARTS for _ in range(objectives)]
        live = self._counts(now_ns)
        # What was counted before this leader looked first is history; a worker that appears later counts from zero.
        known = live if self._seen is None else self._seen
        self._seen = {**{key: cell for key, cell in known.items() if key not in live}, **live}
        for key, cell in live.items():
            before = known.get(key, (0,) * len(cell))
            for objective in range(min(objectives, OBJECTIVE_LIMIT)):
                for part in range(PARTS):
                    position = PARTS * objective + part
                    sums[objective][part] += max(0, cell[position] - before[position])
        return [tuple(row) for row in sums]

    def _counts(self, now_ns: int) -> dict[tuple[int, int], tuple[int, ...]]:
        if self._map is None:
            return {(0, self.token): tuple(_flat(self._own))}
        return {(index, token): tuple(_CELL.unpack_from(self._map, self._place(index))[2:]) for index, token in self._live(now_ns).items()}

    def _live(self, now_ns: int) -> dict[int, int]:
        """Tokens of live workers by slot."""
        if self._map is None:
            return {0: self.token}
        live: dict[int, int] = {}
        for index in range(SLOT_LIMIT):
            token, beat = _BEAT.unpack_from(self._map, self._place(index))
            if token and abs(now_ns - beat) < STALE_NS:
                live[index] = token
        return live

    def workers(self, now_ns: int) -> list[int]:
        """Slots whose workers are alive, ascending."""
        return list(self._live(now_ns))

    @property
    def leading(self) -> bool:
        """Whether this worker leads at present; asking changes nothing."""
        return self._base is None or self._leader >= 0

    def leads(self) -> bool:
        """Whether this worker runs the pod's detector; takes the lead when it is free."""
        if self._base is None or self._leader >= 0:
            return True
        descriptor = os.open(self._base / "leader.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._leader = descriptor
        if self._map is not None:
            before, last = self._header()[7], self.announcement()
            self._write_header(leader=self.token)
            if last is not None and last.open and last.token in {before, self.token}:
                self._abandon(last)
        return True

    def orphan(self, now_ns: int) -> str | None:
        """For the leader: directory of an open incident whose owner is gone, told once; the pod was told that it is closed."""
        if self.leading and self._orphan is None:
            last = self.announcement()
            if last is not None and last.open and last.token != self.token and self._live(now_ns).get(last.slot) != last.token:
                self._abandon(last)
        found, self._orphan = self._orphan, None
        return found

    def _abandon(self, last: Announcement) -> None:
        self._orphan = last.directory
        self.announce(open_=False, onset_ns=0, until_ns=0, directory="")

    def owner_lives(self, now_ns: int, word: Announcement) -> bool:
        """Whether the worker that spoke is still there."""
        return self._live(now_ns).get(word.slot) == word.token

    @property
    def warm(self) -> bool:
        """Whether a worker of this pod said that the warm-up is over."""
        return self._map is not None and bool(self._header()[6])

    def set_warm(self, warm: bool) -> None:  # noqa: FBT001  (a switch)
        """Tell the pod that the warm-up is over, or that it begins."""
        if self._map is not None:
            self._write_header(warm=int(warm))

    def announce(self, *, open_: bool, onset_ns: int, until_ns: int, directory: str) -> int:
        """Tell the other workers that an incident opened, wants evidence until another time, or closed; returns the sequence number."""
        if self._map is None or self._base is None:
            return 0
        sequence = int(self._header()[1]) + 1
        name = os.path.relpath(directory, self._base).encode()[:127] if directory else b""
        self._write_header(
            sequence=sequence, state=int(open_), onset=onset_ns, until=until_ns, slot=self.slot.index, token=self.token, name=name
        )
        return sequence

    def announcement(self) -> Announcement | None:
        """The owner's latest word; None when there is no pool."""
        if self._map is None or self._base is None:
            return None
        _, sequence, state, onset, until, owner, _, _, token, name = self._header()
        path = name.rstrip(b"\0").decode(errors="replace")
        return Announcement(sequence, bool(state), onset, until, str(self._base / path) if path else "", owner, token)

    def _header(self) -> tuple[Any, ...]:
        """The header, read until two readings agree: another process may be writing it."""
        if self._map is None:
            return (_VERSION, 0, 0, 0, 0, -1, 0, 0, 0, b"")
        read = _HEADER.unpack_from(self._map, 0)
        for _ in range(8):
            again = _HEADER.unpack_from(self._map, 0)
            if again == read:
                break
            read = again
        return read

    def _write_header(self, **changed: Any) -> None:
        if self._map is not None:
            values = dict(zip(_FIELDS, self._header(), strict=True)) | changed
            _HEADER.pack_into(self._map, 0, *values.values())

    def close(self) -> None:
        """Give up slot and lead; in a forked child only the child's copies are closed and nothing is written."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._leader >= 0:
            with contextlib.suppress(OSError):
                os.close(self._leader)
            self._leader = -1
        self.slot.release()

    def retire(self) -> None:
        """Mark the slot's counts as gone, then close: for a worker that stops in good order."""
        if self._map is not None:
            _CELL.pack_into(self._map, self._place(self.slot.index), *([0] * (2 + PARTS * OBJECTIVE_LIMIT)))
        self.close()


def _flat(counts: list[tuple[int, ...]]) -> list[int]:
    """Numbers by objective as one cell holds them; missing ones are 0."""
    flat = [value for row in counts[:OBJECTIVE_LIMIT] for value in (*row, *[0] * (PARTS - len(row)))]
    return flat + [0] * (PARTS * OBJECTIVE_LIMIT - len(flat))


def _open_pool(path: Path) -> mmap.mmap:
    """Map the pool, which only ever grows: a mapped file that loses a page kills whoever touches it."""
    size = _HEADER_SIZE + SLOT_LIMIT * _CELL_SIZE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock_briefly(descriptor)
        if os.fstat(descriptor).st_size < size:
            _reserve(descriptor, size)
        pool = mmap.mmap(descriptor, size)
        if _HEADER.unpack_from(pool, 0)[0] != _VERSION:
            _HEADER.pack_into(pool, 0, _VERSION, 0, 0, 0, 0, -1, 0, 0, 0, b"")
        return pool
    finally:
        # mmap keeps a duplicate of the descriptor, and with it the lock, unless it is given up here.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    """Give the file real blocks: a hole that cannot be filled when the disk is full would be a SIGBUS later, here it is an OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.write(descriptor, b"\0" * size)


def _lock_briefly(descriptor: int) -> None:
    """Lock for the few microseconds that initialising takes; never wait long for a stuck neighbour."""
    for _ in range(50):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.01)
        else:
            return
    raise OSError("the pool of the pod's workers is locked by another process")
