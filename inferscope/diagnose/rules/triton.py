"""Calls to a Triton server: what the client does to itself, and what the server says of its queue and its instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import grade, share_evidence
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.findings import Context
    from inferscope.remote import Calls, ServerTotals
    from inferscope.types import Share

__all__ = ["async_sleep", "json_tensors", "large_tensors", "server_queue"]

_SLEEP_NS: Final = 9_500_000
"""`async_infer` of the HTTP client ends with `gevent.sleep(0.01)` (triton-inference-server/server#4669)."""
_LARGE_BYTES: Final = 1 << 20
"""From here a copy through a socket costs more than a copy into shared memory, many times over for gRPC."""
_ENOUGH: Final = 50
_QUEUE: Final = 0.5
_BUSY: Final = 0.8
_OURS: Final = 0.9
_LOCAL: Final = ("127.", "localhost", "[::1]", "::1")


def _calls(context: Context) -> Iterable[Calls]:
    return (row for row in context.horizon.calls if row.system == "triton" and row.count)


def _share(context: Context, model: str, *others: str) -> Share | None:
    """The largest of the columns that calls to a model own."""
    labels = {f"io:triton:{model}", f"triton:{model}", *others}
    return max((share for share in context.attribution.shares if share.name in labels), key=lambda share: share.share, default=None)


def _finding(context: Context, share: Share | None, evidence: tuple[Evidence, ...], **words: str) -> Finding:
    """A claim that rests on counters; severity comes from the share of the calls in the excess."""
    severity, confidence = ("low", "low") if share is None else grade(context, share)
    return Finding(
        severity=words.pop("severity", severity),
        confidence=words.pop("confidence", confidence),
        evidence=evidence if share is None else (share_evidence(share), *evidence),
        share=None if share is None else share.share,
        what_if_p99_ms=None if share is None else context.plan.p99_ms(share.name),
        id=words["id"],
        class_=words["class_"],
        where=words["where"],
        claim=words["claim"],
        refute_by=words["refute_by"],
        fix=words["fix"],
        rollback=words["rollback"],
    )


def async_sleep(context: Context) -> Iterable[Finding]:
    """TRITON_ASYNC_SLEEP: the HTTP client's `async_infer` sleeps 10 ms in each call."""
    for row in _calls(context):
        if row.method != "http.async_infer" or not row.submitted or not row.submit_ns:
            continue
        each = row.submit_ns / row.submitted
        if each < _SLEEP_NS:
            continue
        # every request pays it, slow or not, so the excess of the slow ones does not show it
        matters = context.objective_broken and each >= 0.1 * context.threshold_ns
        yield _finding(
            context,
            None,
            (Evidence("mean time in async_infer", round(each / 1e6, 2), "ms"), Evidence("calls of async_infer", row.submitted, "calls")),
            severity="medium" if matters else "low",
            confidence="high",
            id="TRITON_ASYNC_SLEEP",
            class_="scheduling",
            where=f"tritonclient.http async_infer, model {row.model}",
            claim=f"async_infer of the HTTP client takes {each / 1e6:.1f} ms before it returns: it sleeps 10 ms in every call.",
            refute_by="Time async_infer against a server on the same machine: without the sleep it returns in well under 1 ms.",
            fix="Use tritonclient.grpc async_infer or tritonclient.http.aio, which do not sleep; or infer() in a thread.",
            rollback="Return to the HTTP client: one import.",
        )


def json_tensors(context: Context) -> Iterable[Finding]:
    """TRITON_JSON: inputs travel as JSON numbers."""
    for row in _calls(context):
        if not row.json_inputs:
            continue
        elements = row.json_elements / row.count
        serialized = None if row.serialize_ns is None else row.serialize_ns / row.count / 1e6
        yield _finding(
            context,
            _share(context, row.model, "triton.serialize"),
            (
                Evidence("elements sent as JSON in a call", round(elements, 1), "elements"),
                *(() if serialized is None else (Evidence("mean time to build the message", round(serialized, 3), "ms"),)),
            ),
            id="TRITON_JSON",
            class_="communication",
            where=f"tritonclient {row.method}, model {row.model}",
            claim=f"Calls to {row.model} send {elements:.0f} elements as JSON text, which is hundreds of times dearer than binary data.",
            refute_by="Send the same input with binary_data=True and compare the time in triton.serialize.",
            fix="Call set_data_from_numpy(..., binary_data=True), the default, and ask for outputs with binary_data=True.",
            rollback="Pass binary_data=False again.",
        )


def large_tensors(context: Context) -> Iterable[Finding]:
    """TRITON_NO_SHARED_MEMORY: a megabyte and more a call goes through a socket to a server on the same machine."""
    for row in _calls(context):
        each = row.binary_bytes / row.count
        if each < _LARGE_BYTES or row.shared_inputs or not row.server.startswith(_LOCAL):
            continue
        yield _finding(
            context,
            _share(context, row.model),
            (
                Evidence("binary inputs in a call", round(each / (1 << 20), 2), "MiB"),
                Evidence("largest call", round(row.largest_bytes / (1 << 20), 2), "MiB"),
                Evidence("mean time of a call", round(row.wall_ns / row.count / 1e6, 3), "ms"),
            ),
            id="TRITON_NO_SHARED_MEMORY",
            class_="communication",
            where=f"tritonclient {row.method}, model {row.model}",
            claim=f"Each call sends {each / (1 << 20):.1f} MiB through a socket to {row.server}, on this machine, and copies it several times.",
            refute_by="Register one system shared-memory region for the input on one replica and compare the time of the call.",
            fix="Register a shared-memory region once (tritonclient.utils.shared_memory) and pass it with set_shared_memory.",
            rollback="Send the tensors inline again; unregister the region.",
        )


def server_queue(context: Context) -> Iterable[Finding]:
    """TRITON_INSTANCE_BOUND and TRITON_QUEUE_BOUND: most of the server's time is its queue, with busy instances or without."""
    for server in context.horizon.servers:
        if server.system != "triton" or server.count < _ENOUGH or server.queue_ns < _QUEUE * server.total_ns:
            continue
        busy = server.busy_ns / (server.window_ns * server.instances) if server.window_ns and server.instances else None
        share = _share(context, server.model)
        evidence = _of_server(server, busy)
        waits = server.queue_ns / server.count / 1e6
        if busy is not None and busy >= _BUSY:
            yield _finding(
                context,
                share,
                evidence,
                id="TRITON_INSTANCE_BOUND",
                class_="scheduling",
                where=f"Triton model {server.model} on {server.server}",
                claim=f"Requests wait {waits:.1f} ms in Triton's queue, and its {server.instances} instances are busy {busy:.0%} of the time.",
                refute_by="Add one instance on one server: if the queue stays, instances were not what was missing.",
                fix=f"Raise instance_group count of {server.model}, or let the batcher form larger batches (now {_batch(server):.1f} a batch).",
                rollback="Set the count back; the model reloads.",
            )
        elif busy is not None:
            delay = "" if not server.max_queue_delay_ns else f" (max_queue_delay is {server.max_queue_delay_ns / 1e6:g} ms)"
            yield _finding(
                context,
                share,
                evidence,
                id="TRITON_QUEUE_BOUND",
                class_="scheduling",
                where=f"Triton model {server.model} on {server.server}",
                claim=f"Requests wait {waits:.1f} ms in Triton's queue while its instances are busy only {busy:.0%} of the time{delay}.",
                refute_by="Set max_queue_delay_microseconds to 0 on one server: if the wait stays, the batcher is not what holds requests.",
                fix="Lower max_queue_delay_microseconds, or add preferred sizes that the traffic fills; smooth bursts on the client's side.",
                rollback="Set the delay back; the model reloads.",
            )


def _batch(server: ServerTotals) -> float:
    return server.inferences / server.executions if server.executions else 1.0


def _of_server(server: ServerTotals, busy: float | None) -> tuple[Evidence, ...]:
    mean = 1e6 * server.count
    rows = [
        Evidence("mean wait in the server's queue", round(server.queue_ns / mean, 3), "ms"),
        Evidence("mean time in the server", round(server.total_ns / mean, 3), "ms"),
        Evidence("mean batch", round(_batch(server), 2), "requests"),
    ]
    if busy is not None:
        rows.append(Evidence("instances busy", round(100 * busy, 1), "%"))
    if server.own < _OURS * server.count:  # means of all clients' requests
        rows.append(Evidence("requests that are this process's own", round(100 * server.own / server.count, 1), "%"))
    return tuple(rows)
