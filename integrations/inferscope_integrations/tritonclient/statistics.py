"""What a Triton server counted for a model: the statistics extension, asked through a client of our own.

The extension gives sums over all clients, so its quotients are means of the server's requests, not of ours: where others ask the same
model, `own` is smaller than `count` and the reader is told.
"""

from __future__ import annotations

import abc
import importlib
import json
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.clock import now_ns
from inferscope.remote import Calls, ServerTotals
from inferscope_integrations.tritonclient.calls import SYSTEM

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GrpcPoller", "HttpPoller", "StatisticsPoller"]

_TIMEOUT_S: Final = 1.0
_FAILURES: Final = 3
_COUNTED: Final = (("queue_ns", "queue"), ("input_ns", "compute_input"), ("infer_ns", "compute_infer"), ("output_ns", "compute_output"))
_COMPUTE: Final = ("compute_input", "compute_infer", "compute_output")


class StatisticsPoller(abc.ABC):
    """Asks for one model; subclasses know the protocol.

    Args:
        server: `host:port`.
        model: The model's name.
        row: Calls of this process, to tell whether others ask too.
    """

    def __init__(self, server: str, model: str, row: Calls) -> None:
        self.totals = ServerTotals(SYSTEM, server, model)
        self._row = row
        self._before: dict[str, int] | None = None
        self._own_before = 0
        self._asked_ns = 0
        self._failures = 0

    @abc.abstractmethod
    def statistics(self) -> Mapping[str, Any]:
        """The server's `model_stats[0]` as JSON.

        Raises:
            LookupError: The server does not have the extension, or not for us; it is not asked again.
            OSError: It cannot be reached now.
        """

    @abc.abstractmethod
    def config(self) -> Mapping[str, Any]:
        """The model's configuration as JSON; raises as `statistics`."""

    def poll(self) -> None:
        """Add what was counted since the last time."""
        try:
            if self.totals.state == "waiting":
                self._configure(self.config())
            own = self._row.count
            found = _numbers(self.statistics())
        except LookupError as error:
            self.totals.state = f"off: {error}"
            return
        except OSError as error:
            self._failures += 1
            if self._failures >= _FAILURES:
                self.totals.state = f"off: it cannot be reached ({type(error).__name__})"
            return
        self._failures = 0
        self.totals.state = "watched"
        moment = now_ns()
        if self._before is not None and all(found[name] >= self._before[name] for name in found):  # smaller: the server was restarted
            for name, value in found.items():
                setattr(self.totals, name, getattr(self.totals, name) + value - self._before[name])
            self.totals.own += own - self._own_before
            self.totals.window_ns += moment - self._asked_ns
        self._before, self._own_before, self._asked_ns = found, own, moment

    def _configure(self, config: Mapping[str, Any]) -> None:
        groups = config.get("instance_group") or ()
        self.totals.instances = sum(int(group.get("count") or 1) * max(1, len(group.get("gpus") or ())) for group in groups) or None
        batching = config.get("dynamic_batching")
        if batching is not None:
            self.totals.max_queue_delay_ns = 1000 * int(batching.get("max_queue_delay_microseconds") or 0)


def _field(table: Mapping[str, Any] | None, name: str, field: str) -> int:
    """A number of a nested message; JSON made of protobuf leaves zeros out and writes large ones as text."""
    part: Mapping[str, Any] = (table or {}).get(name) or {}
    return int(part.get(field) or 0)


def _numbers(model: Mapping[str, Any]) -> dict[str, int]:
    inference: Mapping[str, Any] | None = model.get("inference_stats")
    batches: list[Mapping[str, Any]] = model.get("batch_stats") or []
    found = {"count": _field(inference, "success", "count"), "total_ns": _field(inference, "success", "ns")}
    found |= {ours: _field(inference, theirs, "ns") for ours, theirs in _COUNTED}
    found |= {"executions": int(model.get("execution_count") or 0), "inferences": int(model.get("inference_count") or 0)}
    # of executions, whereas the times above are summed over the requests in them
    found["busy_ns"] = sum(_field(batch, name, "ns") for batch in batches for name in _COMPUTE)
    return found


class HttpPoller(StatisticsPoller):
    """Over the standard library's HTTP, so that no event loop and no pool of the application's client is touched."""

    def _get(self, path: str) -> Mapping[str, Any]:
        import http.client

        connection = http.client.HTTPConnection(self.totals.server, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise LookupError(f"the server answers {answer.status} to {path.rsplit('/', 1)[-1]}")
        value: Mapping[str, Any] = json.loads(body)
        return value

    def statistics(self) -> Mapping[str, Any]:
        """GET /v2/models/NAME/stats."""
        found: Mapping[str, Any] = self._get(f"/v2/models/{self.totals.model}/stats")["model_stats"][0]
        return found

    def config(self) -> Mapping[str, Any]:
        """GET /v2/models/NAME/config."""
        return self._get(f"/v2/models/{self.totals.model}/config")


class GrpcPoller(StatisticsPoller):
    """Over a channel of its own."""

    def __init__(self, server: str, model: str, row: Calls) -> None:
        super().__init__(server, model, row)
        self._stub: Any = None

    def _ask(self, method: str, request: str) -> Mapping[str, Any]:
        import grpc
        from google.protobuf.json_format import MessageToDict

        service_pb2: Any = importlib.import_module("tritonclient.grpc.service_pb2")
        if self._stub is None:
            stub: Any = importlib.import_module("tritonclient.grpc.service_pb2_grpc").GRPCInferenceServiceStub
            self._stub = stub(grpc.insecure_channel(self.totals.server))
        try:
            answer = getattr(self._stub, method)(getattr(service_pb2, request)(name=self.totals.model), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            code: Any = cast("Any", error).code()
            if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                raise OSError(code.name) from error
            raise LookupError(f"the server answers {code.name} to {method}") from error
        found: Mapping[str, Any] = MessageToDict(answer, preserving_proto_field_name=True)
        return found

    def statistics(self) -> Mapping[str, Any]:
        """ModelStatistics."""
        found: Mapping[str, Any] = self._ask("ModelStatistics", "ModelStatisticsRequest")["model_stats"][0]
        return found

    def config(self) -> Mapping[str, Any]:
        """ModelConfig."""
        found: Mapping[str, Any] = self._ask("ModelConfig", "ModelConfigRequest")["config"]
        return found
