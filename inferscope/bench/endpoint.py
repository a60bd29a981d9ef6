"""What an address is, for everything but the load itself: whether it answers, what it answers to the golden inputs, what it counts inside.

Addresses: `http(s)://host:port/path` (JSON bodies to POST, or GET), `grpc://host:port/package.Service/Method` (any unary method; without one,
the standard health check), `triton://host:port/model[/version]` (KServe v2, over whichever of HTTP and gRPC the port speaks).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from inferscope.bench import kserve, probe, rpc
from inferscope.bench.targets import ServiceError
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FORMS", "SCHEMES", "Endpoint", "resolve"]

SCHEMES: Final = ("http", "https", "grpc", "triton")
FORMS: Final = "http(s)://host:port/path, grpc://host:port/package.Service/Method, triton://host:port/model"
_MODEL: Final = re.compile(r"/([\w.\-]+)(?:/(?:versions/)?(\d+))?/?\Z")
Totals = dict[str, tuple[int, float]]
"""Stages inside the server, running totals: name to (how often, milliseconds)."""


class Endpoint(Protocol):
    """An address that can be asked."""

    url: str
    """What the generators ask."""
    bodies: tuple[bytes, ...]
    """What they send; none is a GET, or an empty message."""

    def check(self) -> None:
        """Raise ServiceError when it does not answer."""

    def answers(self, most: int) -> list[Any]:
        """What it answers to the first inputs, as JSON values; raises ServiceError when it does not."""
        ...

    def totals(self) -> Totals:
        """What it counts inside; empty when it tells nothing."""
        ...


class HttpEndpoint:
    """JSON over HTTP."""

    def __init__(self, url: str, bodies: Sequence[bytes]) -> None:
        self.url, self.bodies = url, tuple(bodies)

    def check(self) -> None:
        """Ask once."""
        probe.ask(self.url, self.bodies[0] if self.bodies else None)

    def answers(self, most: int) -> list[Any]:
        """As JSON, or text where it is none."""
        return probe.answers(self.url, self.bodies[:most])

    def totals(self) -> Totals:
        """A plain HTTP service tells nothing."""
        return {}


class GrpcEndpoint:
    """One unary method."""

    def __init__(self, url: str, lines: Sequence[bytes]) -> None:
        address = rpc.parse(url)
        self.url = f"grpc://{address.place}{address.method}"
        if lines:
            rpc.wait_ready(self.url, 10.0)
        self._codec = rpc.Codec(self.url, typed=rpc.typed(lines))
        self.bodies = tuple(self._codec.encode(line) for line in lines)

    def check(self) -> None:
        """Ask once."""
        rpc.ask(self.url, self.bodies[0] if self.bodies else b"")

    def answers(self, most: int) -> list[Any]:
        """As JSON by the method's types, else as base64 text."""
        return [self._codec.decode(rpc.ask(self.url, body)) for body in (self.bodies[:most] or (b"",))]

    def totals(self) -> Totals:
        """The protocol has nothing for it."""
        return {}


class KserveHttp:
    """A model over the protocol's HTTP."""

    def __init__(self, place: str, name: str, version: str, lines: Sequence[bytes], options: dict[str, Any]) -> None:
        self._base = f"http://{place}"
        self._path = f"/v2/models/{name}" + (f"/versions/{version}" if version else "")
        self.model = kserve.http_model(self._base, self._path, version)
        self.url = f"{self._base}{self._path}/infer"
        self.bodies = tuple(kserve.http_body(each, self.model) for each in kserve.requests(self.model, lines, **options))

    def check(self) -> None:
        """Ask for one inference."""
        status, content = probe.ask(self.url, self.bodies[0])
        if status != 200:
            raise ServiceError(f"{self.url} answers {status}: {content[:120].decode(errors='replace')}")

    def answers(self, most: int) -> list[Any]:
        """Outputs by name."""
        found: list[Any] = []
        for index, body in enumerate(self.bodies[:most]):
            status, content = probe.ask(self.url, body)
            if status != 200:
                raise ServiceError(f"{self.url} answers {status} to input {index}, so its outputs cannot be checked")
            found.append(kserve.http_outputs(content))
        return found

    def totals(self) -> Totals:
        """The server's statistics, where it has them."""
        import json

        try:
            status, content = probe.ask(f"{self._base}{self._path}/stats", None)
            return kserve.stages(json.loads(content)) if status == 200 else {}
        except (ServiceError, ValueError):
            return {}


class KserveGrpc:
    """A model over the protocol's gRPC."""

    def __init__(self, place: str, name: str, version: str, lines: Sequence[bytes], options: dict[str, Any]) -> None:
        self._place = place
        self.model = kserve.grpc_model(place, name, version)
        self.url = f"grpc://{place}{kserve.SERVICE}ModelInfer"
        self.bodies = tuple(kserve.encode_infer(each, self.model) for each in kserve.requests(self.model, lines, **options))

    def check(self) -> None:
        """Ask for one inference."""
        rpc.ask(self.url, self.bodies[0])

    def answers(self, most: int) -> list[Any]:
        """Outputs by name."""
        return [kserve.decode_infer(rpc.ask(self.url, body)) for body in self.bodies[:most]]

    def totals(self) -> Totals:
        """The server's statistics, where it has them."""
        messages: Any = rpc.need("tritonclient.grpc.service_pb2", "tritonclient[grpc]")
        request = messages.ModelStatisticsRequest(name=self.model.name, version=self.model.version)
        try:
            return kserve.stages(kserve.grpc_ask(self._place, "ModelStatistics", request))
        except ServiceError:
            return {}


def resolve(
    target: str, lines: Sequence[bytes], *, batch: int = 1, input_len: int | Sequence[int] | None = None, seed: int = 0
) -> Endpoint:
    """The endpoint of an address.

    Args:
        target: the address.
        lines: inputs, one JSON value each.
        batch: inputs in a request (models behind `triton://` only).
        input_len: size of free dimensions of random inputs, or several sizes (the same).
        seed: of random inputs (the same).

    Raises:
        InferscopeError: it is no address, nobody answers, a package is missing, or the inputs do not fit.
    """
    parts = urlsplit(target)
    if parts.scheme in {"http", "https"}:
        return HttpEndpoint(target, lines)
    if parts.scheme == "grpc":
        return GrpcEndpoint(target, lines)
    match = _MODEL.match(parts.path)
    if parts.scheme != "triton" or not parts.netloc or match is None:
        raise InferscopeError(f"{target} is no address; the forms are {FORMS}")
    options: dict[str, Any] = {"batch": batch, "input_len": input_len, "seed": seed}
    name, version = match[1], match[2] or ""
    if _speaks_http(parts.netloc):
        return KserveHttp(parts.netloc, name, version, lines, options)
    return KserveGrpc(parts.netloc, name, version, lines, options)


def _speaks_http(place: str) -> bool:
    """Whether a port answers HTTP/1; one that answers otherwise is taken for gRPC.

    Raises:
        ServiceError: nobody answers there.
    """
    try:
        probe.ask(f"http://{place}/v2/health/ready", None, 5.0)
    except ServiceError as error:
        if "cannot be reached" in str(error) or "no address" in str(error) or "within" in str(error):
            raise
        return False
    return True
