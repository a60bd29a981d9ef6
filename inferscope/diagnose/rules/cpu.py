"""CPUs and the interpreter: who was ready and did not run, and who ran meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.findings import MINIMUM_SHARE, grade, model_label, share_evidence
from inferscope.host.scheduling import is_telemetry
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.host import ThreadRows
    from inferscope.types import Share

__all__ = ["interpreter_lock", "own_threads", "run_queue", "slow_windows", "telemetry"]

_OWN: Final = 0.60
"""Part of the allowed CPUs that this process used while its requests waited for one, from which its own threads are the cause."""
_THROTTLED: Final = 0.05
_BACKGROUND: Final = 0.20
_TELEMETRY: Final = 0.03


def slow_windows(context: Context) -> list[tuple[float, float, int]]:
    """(start, end, slot) of retained slow requests, overlaps joined, unix ns."""
    found: list[tuple[float, float, int]] = []
    spans = sorted((r.slot, float(r.start_ns), float(r.start_ns + r.wall_ns)) for r in context.kept(slow=True)[0])
    for slot, start, end in spans:
        if found and found[-1][2] == slot and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end), slot)
        else:
            found.append((start, end, slot))
    return found


def _used(rows: ThreadRows, windows: list[tuple[float, float, int]]) -> tuple[float, float]:
    """CPU time and run-queue delay of a thread within windows, ns; an interval that is partly inside counts by that part."""
    cpu = delay = 0.0
    for start, end, slot in windows:
        if slot != rows.slot:
            continue
        part = slice(int(np.searchsorted(rows.ends, start, "right")), int(np.searchsorted(rows.starts, end, "left")))
        length = np.maximum(rows.ends[part] - rows.starts[part], 1.0)
        inside = np.maximum(np.minimum(rows.ends[part], end) - np.maximum(rows.starts[part], start), 0.0) / length
        cpu += float((rows.cpu[part] * inside).sum())
        delay += float((rows.delay[part] * inside).sum())
    return cpu, delay


def _sampled(context: Context) -> list[tuple[float, float, int]]:
    """Slow windows that were sampled."""
    threads = context.horizon.host.threads
    if not threads:
        return []
    first, last = min(rows.starts[0] for rows in threads), max(rows.ends[-1] for rows in threads)
    return [(start, end, slot) for start, end, slot in slow_windows(context) if start >= first and end <= last]


def own_threads(context: Context) -> tuple[float, float, float] | None:
    """While slow requests ran: CPUs this process used, CPUs its threads waited for, CPUs that threads Python did not start waited for."""
    windows = _sampled(context)
    wall = sum(end - start for start, end, _ in windows)
    if wall <= 0:
        return None
    used = [(rows.name is None, *_used(rows, windows)) for rows in context.horizon.host.threads]
    return (
        sum(cpu for _, cpu, _ in used) / wall,
        sum(delay for _, _, delay in used) / wall,
        sum(delay for native, _, delay in used if native) / wall,
    )


def run_queue(context: Context) -> Iterable[Finding]:
    """CGROUP_THROTTLE, THREAD_OVERSUB, CPU_PREEMPTION: slow requests were ready to run and had no CPU."""
    shares = [share for share in context.shares("cpu") if share.name == "cpu:run-queue"]
    pooled = _pool_starves(context)
    if not shares and pooled is None:
        return
    share = max((share for share in (pooled, *shares) if share is not None), key=lambda share: share.share)
    throttled = _throttled(context)
    own = own_threads(context)
    facts = context.horizon.host
    allowed = facts.quota or facts.allowed_cpus or context.horizon.process.get("cpus")
    if throttled is not None and shares:
        yield _throttle(context, shares[0], throttled)
    elif own is not None and allowed and (own[0] >= _OWN * allowed or pooled is not None):
        yield _oversubscribed(context, share, own, float(allowed))
    elif shares:
        yield _preempted(context, shares[0], own, allowed)


def _pool_starves(context: Context) -> Share | None:
    """The model's share, when it is slow because its own pool has more threads than CPUs."""
    label = model_label(context.horizon.labels, context.attribution.shares)
    share = context.attribution.share(label) if label else None
    own, allowed = own_threads(context), context.horizon.host.allowed_cpus
    pool = context.horizon.process.get("torch_threads")
    if share is None or share.share < MINIMUM_SHARE or own is None or not allowed or not pool:
        return None
    return share if pool > allowed and own[2] >= 0.5 else None


def _throttled(context: Context) -> tuple[float, float, float] | None:
    """(throttled periods, all periods, seconds stopped), when the quota stopped the group often enough."""
    ticks = context.horizon.host.ticks
    if not len(ticks) or np.isnan(ticks[:, 1:4]).any():
        return None
    periods, stopped, time = (float(ticks[:, column].sum()) for column in (1, 2, 3))
    return (stopped, periods, time / 1e9) if periods and stopped / periods >= _THROTTLED else None


def _base(context: Context, share: Share) -> list[Evidence]:
    return [
        share_evidence(share),
        Evidence("run-queue delay in a slow request", round(share.tail_ms, 2), "ms"),
        Evidence("in an ordinary request", round(share.body_ms, 2), "ms"),
        *([Evidence("slow requests sampled", context.waits.slow, "requests")] if context.waits.slow else []),
    ]


def _throttle(context: Context, share: Share, throttled: tuple[float, float, float]) -> Finding:
    severity, confidence = grade(context, share)
    stopped, periods, seconds = throttled
    quota = context.horizon.host.quota
    evidence = [
        *_base(context, share),
        Evidence("enforcement periods in which the quota stopped the group", round(100 * stopped / periods, 1), "%"),
        Evidence("time stopped", round(seconds, 2), "s"),
    ]
    if quota is not None:
        evidence.append(Evidence("CPUs that the quota allows", round(quota, 2), "CPUs"))
    return Finding(
        id="CGROUP_THROTTLE",
        class_="scheduling",
        severity=severity,
        confidence=confidence,
        where="cgroup CPU quota",
        claim=f"The container's CPU quota stopped it in {100 * stopped / periods:.0f} % of the periods; slow requests waited {share.tail_ms:.1f} ms for a CPU.",
        evidence=tuple(evidence),
        share=share.share,
        what_if_p99_ms=context.plan.p99_ms(share.name),
        refute_by="Lift the quota on one replica: if requests above the objective stay, throttling is not what makes them slow.",
        fix="Set the pools (OMP_NUM_THREADS, torch.set_num_threads, workers) to the quota rounded down, or raise the quota.",
        rollback="Return to the earlier quota or thread counts.",
    )


def _oversubscribed(context: Context, share: Share, own: tuple[float, float, float], allowed: float) -> Finding:
    severity, confidence = grade(context, share)
    pool = context.horizon.process.get("torch_threads")
    evidence = [
        share_evidence(share),
        Evidence("CPUs used by this process while slow requests ran", round(own[0], 2), "CPUs"),
        Evidence("CPUs that its threads waited for meanwhile", round(own[1], 2), "CPUs"),
        Evidence("CPUs allowed", round(allowed, 2), "CPUs"),
        *([Evidence("threads of torch's pool", pool, "threads")] if pool else []),
    ]
    return Finding(
        id="THREAD_OVERSUB",
        class_="scheduling",
        severity=severity,
        confidence=confidence,
        where=f"thread pools of this process, {allowed:g} CPUs ({share.name})",
        claim=f"This process's own threads wanted {own[0] + own[1]:.1f} CPUs while slow requests ran and may use {allowed:g}: they wait for each other.",
        evidence=tuple(evidence),
        share=share.share,
        what_if_p99_ms=context.plan.p99_ms(share.name),
        refute_by="Halve the pools on one replica: if the run-queue delay above the objective stays, somebody else uses the CPUs.",
        fix=f"Keep pools times concurrent requests at {allowed:g}: OMP_NUM_THREADS, torch.set_num_threads, workers; or allow more CPUs.",
        rollback="Return to the earlier thread counts.",
    )


def _preempted(context: Context, share: Share, own: tuple[float, float, float] | None, allowed: float | None) -> Finding:
    severity, confidence = grade(context, share)
    threads = context.horizon.process.get("threads")
    evidence = _base(context, share)
    if allowed and threads:
        evidence.append(Evidence("threads for each CPU", round(threads / allowed, 2), "threads"))
    if own is not None and allowed:
        evidence.append(Evidence("CPUs used by this process while slow requests ran", f"{own[0]:.2f} of {allowed:g}", "CPUs"))
    return Finding(
        id="CPU_PREEMPTION",
        class_="scheduling",
        severity=severity,
        confidence=confidence,
        where="CPU scheduler",
        claim=f"Slow requests were ready to run and waited {share.tail_ms:.1f} ms for a CPU that others had.",
        evidence=tuple(evidence),
        share=share.share,
        what_if_p99_ms=context.plan.p99_ms(share.name),
        refute_by="Give one replica a CPU of its own: if the run-queue delay stays, the wait is not for a CPU.",
        fix="Move the neighbours to other CPUs (affinity, requests and limits), raise this container's share, or give it more CPUs.",
        rollback="Return to the earlier placement.",
    )


def interpreter_lock(context: Context) -> Iterable[Finding]:
    """GIL_CONTENTION, or TELEMETRY_OVERHEAD when who computed only measures: slow requests waited for the interpreter."""
    for share in (share for share in context.shares("cpu") if share.name == "cpu:gil"):
        sampled = context.waits.slow > 0
        severity, confidence = grade(context, share, confidence="high" if sampled else "medium")
        evidence = [share_evidence(share), Evidence("wait in a slow request", round(share.tail_ms, 2), "ms")]
        threads = context.horizon.process.get("threads")
        if sampled:
            evidence.append(Evidence("slow requests sampled", context.waits.slow, "requests"))
        elif threads:
            evidence.append(Evidence("Python threads", threads, "threads"))
        name, part = _who_computed(context)
        if name is not None:
            evidence.append(Evidence(f"Python threads' CPU time used by {name} meanwhile", round(100 * part, 1), "%"))
        measures = name is not None and is_telemetry(name)
        yield Finding(
            id="TELEMETRY_OVERHEAD" if measures else "GIL_CONTENTION",
            class_="scheduling",
            severity=severity,
            confidence=confidence,
            where=f"thread {name}" if name is not None else "interpreter lock",
            claim=_gil_claim(share, name, sampled=sampled),
            evidence=tuple(evidence),
            share=share.share,
            what_if_p99_ms=context.plan.p99_ms(share.name),
            refute_by=f"Stop {f'the thread {name}' if name else 'background Python threads'} on one replica: if the wait stays, it is not the interpreter.",
            fix=_gil_fix(measures=measures),
            rollback="Return to the earlier setting." if measures else "Return that work to a thread.",
        )


def _gil_claim(share: Share, name: str | None, *, sampled: bool) -> str:
    wait = f"Slow requests waited {share.tail_ms:.1f} ms for the interpreter"
    if not sampled:
        return f"Slow requests waited {share.tail_ms:.1f} ms off the CPU while none of their named waits was open: most likely for the interpreter."
    return f"{wait}, held mostly by the thread {name}." if name is not None else f"{wait}, held by other requests' own Python code."


def _gil_fix(*, measures: bool) -> str:
    if measures:
        return "Lower its rate or detail (longer export interval, fewer series, smaller samples), or move it out of this process."
    return "Move Python work that does not serve requests (reloads, encoding, logging) into another process, or into code that releases the interpreter."


def _who_computed(context: Context) -> tuple[str | None, float]:
    """The background Python thread that used most CPU while slow requests ran, and its part of all Python threads'."""
    windows = _sampled(context)
    serving = {(r.slot, thread) for r in context.horizon.host.requests for thread in (r.thread, *(span.thread for span in r.spans))}
    used: dict[str, float] = {}
    total = 0.0
    for rows in context.horizon.host.threads:
        if rows.name is None:
            continue
        cpu, _ = _used(rows, windows)
        total += cpu
        if (rows.slot, rows.thread) not in serving:
            used[rows.name] = used.get(rows.name, 0.0) + cpu
    top = max(used, key=lambda name: used[name], default=None)
    if top is None or total <= 0 or used[top] / total < _BACKGROUND:
        return None, 0.0
    return top, used[top] / total


def telemetry(context: Context) -> Iterable[Finding]:
    """TELEMETRY_OVERHEAD, low: threads that only measure use a noticeable part of a CPU, though nothing says that requests wait for them."""
    seconds = context.horizon.host.seconds
    wall = float(seconds[:, 1].sum())
    part = float(seconds[:, 6].sum()) / wall if wall > 0 else 0.0
    if part < _TELEMETRY:
        return
    yield Finding(
        id="TELEMETRY_OVERHEAD",
        class_="scheduling",
        severity="low",
        confidence="medium",
        where="telemetry threads",
        claim=f"Threads that only measure use {100 * part:.1f} % of a CPU.",
        evidence=(Evidence("CPU time of telemetry threads", round(100 * part, 2), "% of a CPU"),),
        share=None,
        what_if_p99_ms=None,
        refute_by="Switch telemetry off on one replica: if latencies stay, it costs CPU only.",
        fix="Lengthen export intervals, drop series that nobody reads, or sample less.",
        rollback="Return to the earlier intervals.",
    )
