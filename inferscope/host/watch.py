"""All host evidence of one process behind one object: `tick` with every window, `sample` from a thread of its own, `evidence` for an incident.

Threads are sampled one part in sixteen of the time while all is well, so that an incident begins with what ordinary requests were like, and
all the time while an incident is open or, for two minutes at most, an objective burns.

It keeps a bounded number of retained requests, slow and ordinary ones, with what the kernel said of each (CPU time, switches, thread), so
that a diagnosis can lay pauses and samples over them by thread and time. Nothing is joined here: that is the diagnosis's work.
"""

from __future__ import annotations

import base64
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import now_ns
from inferscope.copied import shape_of
from inferscope.host.cgroup import Cgroup
from inferscope.host.children import Children
from inferscope.host.duty import SHARE, Allowance, Duty
from inferscope.host.gil import PERIOD_S, Sampler
from inferscope.host.scheduling import Scheduling
from inferscope.types import Reason

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from inferscope.host.chapters import Chapter
    from inferscope.host.gc import GcPauses
    from inferscope.types import LockSite, RequestRecord

__all__ = ["HostWatch"]

_SLOW: Final = 384
_ORDINARY: Final = 384
_IDLE_S: Final = 0.5
_CHAPTER_NS: Final = 60_000_000_000
"""Samples of a healthy process are kept so long, and then as long again."""
_LONGEST_NS: Final = 3_600_000_000_000
"""Instants of samples are 32 bits of microseconds."""


class HostWatch:
    """Built once a process; no threads of its own.

    Args:
        gc: The collector's pauses.
        slow: Latest requests above an objective that are kept.
        ordinary: Latest sampled requests that are kept beside them.
    """

    def __init__(self, gc: GcPauses, *, slow: int = _SLOW, ordinary: int = _ORDINARY) -> None:
        self._gc = gc
        self.scheduling = Scheduling()
        self.cgroup = Cgroup()
        self.children = Children()
        self.sampler = Sampler()
        self._slow: deque[RequestRecord] = deque(maxlen=slow)
        self._ordinary: deque[RequestRecord] = deque(maxlen=ordinary)
        self._first_ns: int | None = None
        self._shapes: dict[int, tuple[tuple[int, ...], bool]] = {}
        self._duty, self._allowance = Duty(), Allowance()
        self._earlier: deque[Chapter] = deque(maxlen=1)
        self._always = self._open = False
        self.sampler.arm()

    def tick(self, now_ns: int, records: Iterable[RequestRecord], lock_sites: Iterable[LockSite] = ()) -> None:
        """Take a window's retained requests and the sites of contended holds, and read the counters; on the worker."""
        if self.sampler.armed:
            self.sampler.look_for(site.site for site in lock_sites)
        for record in records:
            shape = shape_of(record.id)
            if shape is not None:
                self._shapes[record.id] = shape
            if self._first_ns is None or record.start_ns < self._first_ns:
                self._first_ns = record.start_ns
            if record.profiled:
                continue
            if record.reasons & Reason.BREACH:
                self._slow.append(record)
            elif record.reasons & Reason.RESERVOIR:
                self._ordinary.append(record)
        while len(self._shapes) > 2 * (self._slow.maxlen or 0) + 2 * (self._ordinary.maxlen or 0):
            del self._shapes[next(iter(self._shapes))]
        self.scheduling.tick(now_ns)
        self.cgroup.tick(now_ns)
        self.children.tick(now_ns)

    @property
    def period_s(self) -> float:
        """Seconds until `sample` should be called again: short while it looks, else only often enough to notice that it should."""
        wait_s = 0.0 if self._always else self._duty.wait_ns(now_ns()) / 1e9
        return min(max(wait_s, PERIOD_S), _IDLE_S) if self.sampler.armed else _IDLE_S

    def arm(self, *, burning: bool = False) -> bool:
        """Sample threads all the time; False where that cannot be done.

        Args:
            burning: An objective burns, and there is no incident: only the last minutes are kept, and what burns on is sampled as if all were well.
        """
        self._open = not burning
        if burning:
            self._always = self._allowance.spend(now_ns())
        else:
            self._allowance.rest(now_ns())
            self._always = True
        return self.sampler.armed

    def disarm(self) -> None:
        """Sample one part in sixteen of the time; what was seen stays for `evidence` a minute or two."""
        self._allowance.rest(now_ns())
        self._always = self._open = False

    def stop(self) -> None:
        """Sample no more."""
        self.sampler.disarm()

    def sample(self) -> None:
        """Look at every thread once, if it is time to; on the sampling thread, from which nothing else is called."""
        sampler, moment = self.sampler, now_ns()
        if not sampler.armed:
            return
        if sampler.first_ns and moment - sampler.first_ns >= (_LONGEST_NS if self._open else _CHAPTER_NS):
            self._earlier.append(sampler.turn())
        if self._always or self._duty.wait_ns(moment) == 0:
            sampler.sample()
        else:
            sampler.rest()

    def evidence(self, request: str, from_ns: int, to_ns: int) -> dict[str, Any]:
        """The part `host` of an evidence document; None stands for what is not measured here.

        Args:
            request: Requests of this name only.
            from_ns: Begin, monotonic.
            to_ns: End, monotonic.
        """
        kept = [
            _request(record, self._shapes.get(record.id))
            for held in (list(self._slow), list(self._ordinary))
            for record in held
            if record.key.request == request and from_ns < record.start_ns + record.wall_ns <= to_ns
        ]
        return {
            "requests": kept,
            "first_request_ns": self._first_ns,
            "gc": [list(pause) for pause in list(self._gc.positions) if pause[1] > from_ns and pause[0] < to_ns],
            "scheduling": {
                "reason": self.scheduling.reason,
                "seconds": [list(second) for second in self.scheduling.within(from_ns, to_ns)],
            },
            "children": self.children.evidence(from_ns, to_ns),
            "samples": self._samples(self.sampler.chapter()),
            "earlier_samples": [self._samples(chapter) for chapter in list(self._earlier)],
            "cgroup": self.cgroup.evidence(from_ns, to_ns),
        }

    def _samples(self, chapter: Chapter) -> dict[str, Any]:
        threads = [
            {"thread": thread, "name": name, "rows": _text(rows), "places": _text(places)}
            for thread, (name, rows, places) in chapter.intervals().items()
        ]
        return {
            "reason": self.sampler.reason,
            "from_ns": chapter.first_ns or None,
            "to_ns": chapter.last_ns or None,
            "spans": chapter.spans,
            "period_s": PERIOD_S,
            "samples": chapter.samples,
            "dropped": chapter.dropped,
            "threads": threads,
            "places": chapter.places.names(),
            "sites": [
                {"site": f"{name} ({file})", "cpu_us": row[0], "delay_us": row[1], "blocked_us": row[2:]}
                for (name, file), row in list(chapter.sites.items())
            ],
        }

    def status(self) -> dict[str, Any]:
        """What is measured, and why not."""
        return {
            "scheduling": self.scheduling.reason or "on",
            "sampler": self.sampler.reason or (("armed" if self._always else f"one part in {SHARE}") if self.sampler.armed else "off"),
            "cgroup": self.cgroup.version,
        }

    def reset(self) -> None:
        """Nothing of the parent's is ours: for a forked child."""
        self.scheduling.reset()
        self.sampler.reset()
        self._earlier.clear()
        self._always = self._open = False
        self.cgroup.reset()
        self.children.reset()
        self._slow.clear()
        self._ordinary.clear()
        self._shapes.clear()
        self._first_ns = None


def _text(numbers: array[int]) -> str:
    return base64.b64encode(numbers.tobytes()).decode("ascii")


def _request(record: RequestRecord, shape: tuple[tuple[int, ...], bool] | None) -> dict[str, Any]:
    return {
        "id": record.id,
        "start_ns": record.start_ns,
        "wall_ns": record.wall_ns,
        "band": record.band,
        "slow": bool(record.reasons & Reason.BREACH),
        "thread": record.thread_id,
        "size": record.size,
        "shape": None if shape is None else list(shape[0]),
        "new_shape": None if shape is None else shape[1],
        "items": record.items,
        "error": record.error,
        "cpu_ns": record.cpu_ns,
        "voluntary": record.voluntary_switches,
        "involuntary": record.involuntary_switches,
        "vector": list(record.vector),
        "spans": [[span.column, span.start_ns, span.end_ns, span.parent, span.thread_id, span.aux] for span in record.spans],
    }
