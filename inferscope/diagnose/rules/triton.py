"""Calls to a Triton server: what the client does to itself, and what the server says of its queue and its instances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import Texts, of_share, plain
from inferscope.types import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.findings import Context
    from inferscope.remote import Calls, ServerTotals
    from inferscope.types import Finding, Share

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


def _finding(context: Context, share: Share | None, id_: str, class_: str, texts: Texts, evidence: Iterable[Evidence]) -> Finding:
    """A claim that rests on counters; severity comes from the share of the calls in the excess."""
    if share is None:
        return plain(id_, class_, texts, evidence, severity="low", confidence="low")
    return of_share(context, share, id_, class_, texts, evidence)


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
        texts = Texts(
            where=f"tritonclient.http async_infer, model {row.model}",
            claim=f"async_infer of the HTTP client takes {each / 1e6:.1f} ms before it returns: it sleeps 10 ms in every call.",
            refute_by="Time async_infer against a server on the same machine: without the sleep it returns in well under 1 ms.",
            fix="Use tritonclient.grpc async_infer or tritonclient.http.aio, which do not sleep; or infer() in a thread.",
            rollback="Return to the HTTP client: one import.",
        )
        evidence = (
            Evidence("mean time in async_infer", round(each / 1e6, 2), "ms"),
            Evidence("calls of async_infer", row.submitted, "calls"),
        )
        severity = "medium" if matters else "low"
        yield plain("TRITON_ASYNC_SLEEP", "scheduling", texts, evidence, severity=severity, confidence="high")


def json_tensors(context: Context) -> Iterable[Finding]:
    """TRITON_JSON: inputs travel as JSON numbers."""
    for row in _calls(context):
        if not row.json_inputs:
            continue
        elements = row.json_elements / row.count
        evidence = [Evidence("elements sent as JSON in a call", round(elements, 1), "elements")]
        if row.serialize_ns is not None:
            evidence.append(Evidence("mean time to build the message", round(row.serialize_ns / row.count / 1e6, 3), "ms"))
        texts = Texts(
            f"tritonclient {row.method}, model {row.model}",
            f"Calls to {row.model} send {elements:.0f} elements as JSON text, which is hundreds of times dearer than binary data.",
            "Send the same input with binary_data=True and compare the time in triton.serialize.",
            "Call set_data_from_numpy(..., binary_data=True), the default, and ask for outputs with binary_data=True.",
            "Pass binary_data=False again.",
        )
        yield _finding(context, _share(context, row.model, "triton.serialize"), "TRITON_JSON", "communication", texts, evidence)


def large_tensors(context: Context) -> Iterable[Finding]:
    """TRITON_NO_SHARED_MEMORY: a megabyte and more a call goes through a socket to a server on the same machine."""
    for row in _calls(context):
        each = row.binary_bytes / row.count
        if each < _LARGE_BYTES or row.shared_inputs or not row.server.startswith(_LOCAL):
            continue
        evidence = (
            Evidence("binary inputs in a call", round(each / (1 << 20), 2), "MiB"),
            Evidence("largest call", round(row.largest_bytes / (1 << 20), 2), "MiB"),
            Evidence("mean time of a call", round(row.wall_ns / row.count / 1e6, 3), "ms"),
        )
        texts = Texts(
            f"tritonclient {row.method}, model {row.model}",
            f"Each call sends {each / (1 << 20):.1f} MiB through a socket to {row.server}, on this machine, and copies it several times.",
            "Register one system shared-memory region for the input on one replica and compare the time of the call.",
            "Register a shared-memory region once (tritonclient.utils.shared_memory) and pass it with set_shared_memory.",
            "Send the tensors inline again; unregister the region.",
        )
        yield _finding(context, _share(context, row.model), "TRITON_NO_SHARED_MEMORY", "communication", texts, evidence)


def server_queue(context: Context) -> Iterable[Finding]:
    """TRITON_INSTANCE_BOUND and TRITON_QUEUE_BOUND: most of the server's time is its queue, with busy instances or without."""
    for server in context.horizon.servers:
        if server.system != "triton" or server.count < _ENOUGH or server.queue_ns < _QUEUE * server.total_ns:
            continue
        busy = server.busy_ns / (server.window_ns * server.instances) if server.window_ns and server.instances else None
        if busy is None:
            continue
        bound = busy >= _BUSY
        waits = f"Requests wait {server.queue_ns / server.count / 1e6:.1f} ms in Triton's queue"
        delay = "" if not server.max_queue_delay_ns else f" (max_queue_delay is {server.max_queue_delay_ns / 1e6:g} ms)"
        texts = Texts(
            where=f"Triton model {server.model} on {server.server}",
            claim=(
                f"{waits}, and its {server.instances} instances are busy {busy:.0%} of the time."
                if bound
                else f"{waits} while its instances are busy only {busy:.0%} of the time{delay}."
            ),
            refute_by=(
                "Add one instance on one server: if the queue stays, instances were not what was missing."
                if bound
                else "Set max_queue_delay_microseconds to 0 on one server: if the wait stays, the batcher is not what holds requests."
            ),
            fix=(
                f"Raise instance_group count of {server.model}, or let the batcher form larger batches (now {_batch(server):.1f} a batch)."
                if bound
                else "Lower max_queue_delay_microseconds, or add preferred sizes that the traffic fills; smooth bursts on the client's side."
            ),
            rollback=f"Set the {'count' if bound else 'delay'} back; the model reloads.",
        )
        id_ = "TRITON_INSTANCE_BOUND" if bound else "TRITON_QUEUE_BOUND"
        yield _finding(context, _share(context, server.model), id_, "scheduling", texts, _of_server(server, busy))


def _batch(server: ServerTotals) -> float:
    return server.inferences / server.executions if server.executions else 1.0


def _of_server(server: ServerTotals, busy: float) -> tuple[Evidence, ...]:
    mean = 1e6 * server.count
    rows = [
        Evidence("mean wait in the server's queue", round(server.queue_ns / mean, 3), "ms"),
        Evidence("mean time in the server", round(server.total_ns / mean, 3), "ms"),
        Evidence("mean batch", round(_batch(server), 2), "requests"),
        Evidence("instances busy", round(100 * busy, 1), "%"),
    ]
    if server.own < _OURS * server.count:  # means of all clients' requests
        rows.append(Evidence("requests that are this process's own", round(100 * server.own / server.count, 1), "%"))
    return tuple(rows)
