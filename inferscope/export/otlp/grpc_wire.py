"""OTLP over gRPC, on a channel of our own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from inferscope.export.otlp import protobuf
from inferscope.export.otlp.wire import Reply

if TYPE_CHECKING:
    from inferscope.export.otlp.target import Target

__all__ = ["GrpcWire"]

_METHODS: Final = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
    "profiles": "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
}
_RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class GrpcWire:
    """A channel that is opened by the first export and opened anew after the receiver was unavailable."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._channel: grpc.Channel | None = None

    def post(self, payload: bytes, timeout_s: float) -> Reply:
        """Try once."""
        if self._channel is None:
            self._channel = self._open()
        channel: Any = self._channel  # the serializers, and so the types of a call, are the identity
        call = channel.unary_unary(_METHODS[self._target.signal])
        try:
            body = call(payload, timeout=timeout_s, metadata=tuple(self._target.headers.items()))
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.UNAVAILABLE:
                self.close()  # a channel to a restarted receiver behind a changed address never recovers by itself
            return Reply(ok=False, retryable=code in _RETRYABLE, reason=f"gRPC {code.name}")
        refused, reason = protobuf.rejected(self._target.signal, body)
        return Reply(ok=True, refused=refused, reason=reason)

    def close(self) -> None:
        """Drop the channel and cancel what is in flight."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _open(self) -> grpc.Channel:
        target = self._target
        compression = grpc.Compression.Gzip if target.compression == "gzip" else grpc.Compression.NoCompression
        if target.insecure:
            return grpc.insecure_channel(target.endpoint, compression=compression)
        credentials = grpc.ssl_channel_credentials(_read(target.certificate), _read(target.client_key), _read(target.client_certificate))
        return grpc.secure_channel(target.endpoint, credentials, compression=compression)


def _read(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path else None
