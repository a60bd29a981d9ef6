"""CPUs and the interpreter: who was ready and did not run, and who ran meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.findings import MINIMUM_SHARE, Texts, model_label, of_share, plain
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
_COMPETES: Final = 0.25
"""CPUs that loaders use while requests wait for one, from which they compete."""
_LEAST: Final = 0.10
_LOADING: Final = ("loader", "prefetch", "pin_memory", "pin memory", "feeder")


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
    """Slow windows as far as they were sampled: a healthy process is looked at for a part of the time only."""
    found: list[tuple[float, float, int]] = []
    for start, end, slot in slow_windows(context):
        inside = ((max(start, low), min(end, high)) for low, high, of in context.horizon.host.sampled if of == slot)
        found += [(low, high, slot) for low, high in inside if low < high]
    return found


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
    """CGROUP_THROTTLE, LOADER_COMPETES, THREAD_OVERSUB, CPU_PREEMPTION: slow requests were ready to run and had no CPU."""
    shares = [share for share in context.shares("cpu") if share.name == "cpu:run-queue"]
    pooled = _pool_starves(context)
    if not shares and pooled is None:
        return
    share = max((share for share in (pooled, *shares) if share is not None), key=lambda share: share.share)
    throttled = _throttled(context)
    own = own_threads(context)
    facts = context.horizon.host
    allowed = facts.quota or facts.allowed_cpus or context.horizon.process.get("cpus")
    loader = _loaders(context)
    if throttled is not None and shares:
        yield _throttle(context, shares[0], throttled)
    elif loader is not None and shares:
        yield _competing(context, shares[0], loader, allowed)
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
        Evidence("run-queue delay in a slow request", round(share.tail_ms, 2), "ms"),
        Evidence("in an ordinary request", round(share.body_ms, 2), "ms"),
        *([Evidence("slow requests sampled", context.waits.slow, "requests")] if context.waits.slow else []),
    ]


def _throttle(context: Context, share: Share, throttled: tuple[float, float, float]) -> Finding:
    stopped, periods, seconds = throttled
    quota = context.horizon.host.quota
    texts = Texts(
        where="cgroup CPU quota",
        claim=f"The container's CPU quota stopped it in {100 * stopped / periods:.0f} % of the periods; slow requests waited {share.tail_ms:.1f} ms for a CPU.",
        refute_by="Lift the quota on one replica: if requests above the objective stay, throttling is not what makes them slow.",
        fix="Set the pools (OMP_NUM_THREADS, torch.set_num_threads, workers) to the quota rounded down, or raise the quota.",
        rollback="Return to the earlier quota or thread counts.",
    )
    evidence = [
        *_base(context, share),
        Evidence("enforcement periods in which the quota stopped the group", round(100 * stopped / periods, 1), "%"),
        Evidence("time stopped", round(seconds, 2), "s"),
        *([Evidence("CPUs that the quota allows", round(quota, 2), "CPUs")] if quota is not None else []),
    ]
    return of_share(context, share, "CGROUP_THROTTLE", "scheduling", texts, evidence)


def _oversubscribed(context: Context, share: Share, own: tuple[float, float, float], allowed: float) -> Finding:
    pool = context.horizon.process.get("torch_threads")
    texts = Texts(
        where=f"thread pools of this process, {allowed:g} CPUs ({share.name})",
        claim=f"This process's own threads wanted {own[0] + own[1]:.1f} CPUs while slow requests ran and may use {allowed:g}: they wait for each other.",
        refute_by="Halve the pools on one replica: if the run-queue delay above the objective stays, somebody else uses the CPUs.",
        fix=f"Keep pools times concurrent requests at {allowed:g}: OMP_NUM_THREADS, torch.set_num_threads, workers; or allow more CPUs.",
        rollback="Return to the earlier thread counts.",
    )
    evidence = [
        Evidence("CPUs used by this process while slow requests ran", round(own[0], 2), "CPUs"),
        Evidence("CPUs that its threads waited for meanwhile", round(own[1], 2), "CPUs"),
        Evidence("CPUs allowed", round(allowed, 2), "CPUs"),
        *([Evidence("threads of torch's pool", pool, "threads")] if pool else []),
    ]
    return of_share(context, share, "THREAD_OVERSUB", "scheduling", texts, evidence)


def _loaders(context: Context) -> tuple[str, float] | None:
    """Who loads data, and the CPUs it used while slow requests ran: threads named as loaders are, or processes that this one started."""
    windows = slow_windows(context)
    wall = sum(end - start for start, end, _ in windows)
    if wall <= 0:
        return None
    found: dict[str, float] = {}
    for rows in context.horizon.host.threads:
        if rows.name is not None and any(word in rows.name.lower() for word in _LOADING):
            stem = rows.name.rstrip("0123456789-_ ()")
            found[f"threads {stem}"] = found.get(f"threads {stem}", 0.0) + _used(rows, windows)[0]
    found = {name: cpu / wall for name, cpu in found.items()}
    used = _children(context, windows)
    if used is not None:
        found["processes that this one started"] = used
    name = max(found, key=lambda key: found[key], default=None)
    own = own_threads(context)
    # where others have most of a CPU, what loaders get of the rest is judged against what the service gets
    least = _COMPETES if own is None else max(_LEAST, min(_COMPETES, 0.5 * own[0]))
    return (name, found[name]) if name is not None and found[name] >= least else None


def _children(context: Context, windows: list[tuple[float, float, int]]) -> float | None:
    """CPUs that child processes used in the ticks that hold slow requests."""
    table = context.horizon.host.children
    if not len(table):
        return None
    held = np.zeros(len(table), bool)
    for start, end, _ in windows:
        held |= (table[:, 0] - table[:, 1] < end) & (table[:, 0] > start)
    wall = float(table[held, 1].sum())
    return float(table[held, 2].sum()) / wall if wall > 0 else None


def _competing(context: Context, share: Share, loader: tuple[str, float], allowed: float | None) -> Finding:
    who, used = loader
    texts = Texts(
        where=f"{who} on the service's CPUs",
        claim=f"While slow requests waited {share.tail_ms:.1f} ms for a CPU, {who} used {used:.1f} CPUs{f' of the {allowed:g} allowed' if allowed else ''}.",
        refute_by="Stop the loaders on one replica: if the run-queue delay of slow requests stays, somebody else has the CPUs.",
        fix="Give loaders CPUs of their own (os.sched_setaffinity in their initialiser), fewer workers, or a lower priority (os.nice); load outside of the serving container.",
        rollback="Return to the shared CPUs.",
    )
    evidence = [
        *_base(context, share),
        Evidence(f"CPUs used by {who} meanwhile", round(used, 2), "CPUs"),
        *([Evidence("CPUs allowed", round(allowed, 2), "CPUs")] if allowed else []),
    ]
    return of_share(context, share, "LOADER_COMPETES", "scheduling", texts, evidence)


def _preempted(context: Context, share: Share, own: tuple[float, float, float] | None, allowed: float | None) -> Finding:
    threads = context.horizon.process.get("threads")
    texts = Texts(
        where="CPU scheduler",
        claim=f"Slow requests were ready to run and waited {share.tail_ms:.1f} ms for a CPU that others had.",
        refute_by="Give one replica a CPU of its own: if the run-queue delay stays, the wait is not for a CPU.",
        fix="Move the neighbours to other CPUs (affinity, requests and limits), raise this container's share, or give it more CPUs.",
        rollback="Return to the earlier placement.",
    )
    evidence = _base(context, share)
    if allowed and threads:
        evidence.append(Evidence("threads for each CPU", round(threads / allowed, 2), "threads"))
    if own is not None and allowed:
        evidence.append(Evidence("CPUs used by this process while slow requests ran", f"{own[0]:.2f} of {allowed:g}", "CPUs"))
    return of_share(context, share, "CPU_PREEMPTION", "scheduling", texts, evidence)


def interpreter_lock(context: Context) -> Iterable[Finding]:
    """GIL_CONTENTION, or TELEMETRY_OVERHEAD when who computed only measures: slow requests waited for the interpreter."""
    for share in (share for share in context.shares("cpu") if share.name == "cpu:gil"):
        sampled = context.waits.slow > 0
        evidence = [Evidence("wait in a slow request", round(share.tail_ms, 2), "ms")]
        threads = context.horizon.process.get("threads")
        if sampled:
            evidence.append(Evidence("slow requests sampled", context.waits.slow, "requests"))
        elif threads:
            evidence.append(Evidence("Python threads", threads, "threads"))
        name, part = _who_computed(context)
        if name is not None:
            evidence.append(Evidence(f"Python threads' CPU time used by {name} meanwhile", round(100 * part, 1), "%"))
        measures = name is not None and is_telemetry(name)
        texts = Texts(
            where=f"thread {name}" if name is not None else "interpreter lock",
            claim=_gil_claim(share, name, sampled=sampled),
            refute_by=f"Stop {f'the thread {name}' if name else 'background Python threads'} on one replica: if the wait stays, it is not the interpreter.",
            fix=_gil_fix(measures=measures),
            rollback="Return to the earlier setting." if measures else "Return that work to a thread.",
        )
        id_ = "TELEMETRY_OVERHEAD" if measures else "GIL_CONTENTION"
        yield of_share(context, share, id_, "scheduling", texts, evidence, confidence="high" if sampled else "medium")


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
    texts = Texts(
        where="telemetry threads",
        claim=f"Threads that only measure use {100 * part:.1f} % of a CPU.",
        refute_by="Switch telemetry off on one replica: if latencies stay, it costs CPU only.",
        fix="Lengthen export intervals, drop series that nobody reads, or sample less.",
        rollback="Return to the earlier intervals.",
    )
    evidence = (Evidence("CPU time of telemetry threads", round(100 * part, 2), "% of a CPU"),)
    yield plain("TELEMETRY_OVERHEAD", "scheduling", texts, evidence, severity="low", confidence="medium")
