"""gRPC for the load and for single questions: raw messages over a channel, and JSON where the server tells its message types.

`grpc` is imported when a `grpc://` or `triton://` address is used, and not before; `grpc_reflection` when inputs are JSON.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard, cast
from urllib.parse import urlsplit

from inferscope.bench.targets import ServiceError
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["HEALTH", "Address", "Codec", "ask", "parse", "raw_call", "wait_ready"]

HEALTH: Final = "/grpc.health.v1.Health/Check"
SERVING: Final = b"\x08\x01"
"""A HealthCheckResponse with status SERVING: field 1, varint 1."""
_STATUS: Final = {
    "OK": 200, "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404, "ALREADY_EXISTS": 409, "ABORTED": 409, "RESOURCE_EXHAUSTED": 429, "CANCELLED": 499, "UNIMPLEMENTED": 501,
    "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
"""HTTP statuses of gRPC codes (google.rpc.Code); UNAVAILABLE is 0, as a refused connection is, everything else 500."""
_OPTIONS: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def need(module: str, distribution: str) -> Any:
    """A module that only some targets need.

    Raises:
        InferscopeError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InferscopeError(f"this target needs {distribution}, which is not installed ({error.name or module} is missing)") from error


@dataclass(frozen=True, slots=True)
class Address:
    """Where a method is called."""

    place: str
    """`host:port`."""
    method: str
    """`/package.Service/Method`."""


def parse(url: str) -> Address:
    """`grpc://host:port/package.Service/Method`; without a method, the standard health check.

    Raises:
        InferscopeError: another form.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    path = parts.path.rstrip("/")
    if parts.scheme != "grpc" or not parts.hostname or port is None or (path and path.count("/") != 2):
        raise InferscopeError(f"{url} is no address; the form is grpc://host:port/package.Service/Method")
    return Address(parts.netloc, path or HEALTH)


def _identity(value: bytes) -> bytes:
    return value


def status_of(code: Any) -> int:
    """The HTTP status that stands for a gRPC code."""
    return 0 if code.name == "UNAVAILABLE" else _STATUS.get(code.name, 500)


def raw_call(url: str, timeout_s: float) -> tuple[Callable[[bytes], Awaitable[int]], Callable[[], Awaitable[None]]]:
    """A call that takes a serialised message and returns a status, and what closes its channel; made inside the event loop that runs it.

    Args:
        url: see `parse`.
        timeout_s: a call without an answer by then is unanswered.
    """
    grpc: Any = need("grpc", "grpcio")
    aio: Any = need("grpc.aio", "grpcio")
    address = parse(url)
    state: dict[str, Any] = {}

    def stub() -> Any:
        if not state:
            state["channel"] = aio.insecure_channel(address.place, options=_OPTIONS)
            state["call"] = state["channel"].unary_unary(address.method, _identity, _identity)
        return state["call"]

    async def call(payload: bytes) -> int:
        try:
            answer = await stub()(payload, timeout=timeout_s)
        except grpc.RpcError as error:
            # A deadline of ours is silence, not an answer.
            return 0 if error.code().name == "DEADLINE_EXCEEDED" else status_of(error.code())
        return 503 if address.method == HEALTH and answer != SERVING else 200

    async def close() -> None:
        if state:
            await state["channel"].close()

    return call, close


def _why(url: str, error: Any) -> ServiceError:
    code, details = error.code().name, str(error.details() or "").splitlines()[:1]
    if code == "UNAVAILABLE":
        return ServiceError(f"{url} cannot be reached, or does not speak gRPC")
    if code == "DEADLINE_EXCEEDED":
        return ServiceError(f"{url} did not answer in time")
    return ServiceError(f"{url} answers {code}{f' ({details[0][:120]})' if details else ''}")


def ask(url: str, payload: bytes, timeout_s: float = 10.0) -> bytes:
    """One call with a serialised message.

    Raises:
        ServiceError: nobody answers, or with an error.
    """
    grpc: Any = need("grpc", "grpcio")
    address = parse(url)
    with grpc.insecure_channel(address.place, options=_OPTIONS) as channel:
        try:
            answer: bytes = channel.unary_unary(address.method, _identity, _identity)(payload, timeout=timeout_s, wait_for_ready=False)
        except grpc.RpcError as error:
            raise _why(url, error) from None
    if address.method == HEALTH and answer != SERVING:
        raise ServiceError(f"{url} says that it is not serving")
    return answer


def wait_ready(url: str, timeout_s: float) -> None:
    """Until a channel to the address stands.

    Raises:
        ServiceError: it does not in time.
    """
    grpc: Any = need("grpc", "grpcio")
    with grpc.insecure_channel(parse(url).place) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            raise ServiceError(f"{url} cannot be reached, or does not speak gRPC") from None


class Codec:
    """Turns JSON inputs into a method's messages and its answers into JSON, by the types that the server tells (gRPC reflection).

    Inputs of the form `{"base64": "…"}` are serialised messages already and need no types; answers are base64 text then.

    Args:
        url: the method.
        typed: ask the server for its types.

    Raises:
        ServiceError: the server does not offer them, or has no such method.
    """

    def __init__(self, url: str, *, typed: bool) -> None:
        self._url = url
        self._types: tuple[Any, Any] | None = self._ask_types() if typed else None

    def _ask_types(self) -> tuple[Any, Any]:
        grpc: Any = need("grpc", "grpcio")
        reflection: Any = need("grpc_reflection.v1alpha.proto_reflection_descriptor_database", "grpcio-reflection")
        pools: Any = need("google.protobuf.descriptor_pool", "protobuf")
        factory: Any = need("google.protobuf.message_factory", "protobuf")
        address = parse(self._url)
        service, _, method = address.method.strip("/").partition("/")
        with grpc.insecure_channel(address.place) as channel:
            try:
                pool = pools.DescriptorPool(reflection.ProtoReflectionDescriptorDatabase(channel))
                found = pool.FindServiceByName(service).FindMethodByName(method)
            except KeyError:
                raise ServiceError(f"{self._url}: the server knows no such method") from None
            except grpc.RpcError:
                raise ServiceError(
                    f'{self._url}: the server offers no reflection, so JSON inputs cannot be encoded; give them as {{"base64": "…"}}'
                ) from None
        return factory.GetMessageClass(found.input_type), factory.GetMessageClass(found.output_type)

    def encode(self, line: bytes) -> bytes:
        """A serialised message of one JSON input.

        Raises:
            InferscopeError: the input does not fit the message.
        """
        value: Any = json.loads(line)
        if is_raw(value):
            try:
                return base64.b64decode(value["base64"], validate=True)
            except (binascii.Error, TypeError) as error:
                raise InferscopeError("an input's base64 is damaged") from error
        assert self._types is not None  # noqa: S101  (typed unless every input is raw)
        from google.protobuf import json_format

        try:
            return bytes(json_format.Parse(line, self._types[0]()).SerializeToString())
        except json_format.ParseError as error:
            raise InferscopeError(f"an input does not fit {self._types[0].DESCRIPTOR.full_name}: {error}") from error

    def decode(self, answer: bytes) -> Any:
        """An answer as JSON values."""
        if self._types is None:
            return base64.b64encode(answer).decode()
        from google.protobuf import json_format

        message = self._types[1]()
        message.ParseFromString(answer)
        return json_format.MessageToDict(message)


def is_raw(value: object) -> TypeGuard[dict[str, str]]:
    """Whether an input is a serialised message."""
    return isinstance(value, dict) and list(cast("dict[object, object]", value)) == ["base64"]


def typed(lines: Sequence[bytes]) -> bool:
    """Whether any of the inputs needs the method's types."""
    return any(not is_raw(json.loads(line)) for line in lines)
