"""tritonclient over http, grpc, http.aio and grpc.aio: calls to a Triton server as stages of the request that makes them.

`triton:MODEL` is the call; inside it `triton.serialize` builds the message and `io:triton:MODEL` is the network and the server. What the
server did meanwhile (queue, input, infer, output) comes from its statistics extension, asked by a client of our own on a thread of ours. The
application's headers are copied before anything is added, and a traceparent is added only when the application's span is sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from inferscope.integration import Integration
from inferscope_integrations.tritonclient import grpc_clients, http_clients

if TYPE_CHECKING:
    from inferscope.patching import Ledger

__all__ = ["TritonClientIntegration", "TritonGrpcAioIntegration", "TritonGrpcIntegration", "TritonHttpAioIntegration"]


class _Clients(Integration):
    """What the four have in common."""

    distribution: ClassVar[str] = "tritonclient"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 41), None)
    serves: ClassVar[bool] = False


class TritonClientIntegration(_Clients):
    """`tritonclient.http`: infer, async_infer, get_result."""

    name: ClassVar[str] = "tritonclient"
    target: ClassVar[str] = "tritonclient.http"
    brings: ClassVar[tuple[str, ...]] = ("tritonclient_http_aio", "tritonclient_grpc", "tritonclient_grpc_aio")

    def patch(self, ledger: Ledger) -> None:
        """Replace methods of the client's class."""
        http_clients.patch_sync(ledger)


class TritonHttpAioIntegration(_Clients):
    """`tritonclient.http.aio`: infer."""

    name: ClassVar[str] = "tritonclient_http_aio"
    target: ClassVar[str] = "tritonclient.http.aio"

    def patch(self, ledger: Ledger) -> None:
        """Replace methods of the client's class."""
        http_clients.patch_aio(ledger)


class TritonGrpcIntegration(_Clients):
    """`tritonclient.grpc`: infer, async_infer and streams."""

    name: ClassVar[str] = "tritonclient_grpc"
    target: ClassVar[str] = "tritonclient.grpc"

    def patch(self, ledger: Ledger) -> None:
        """Replace methods of the client's class."""
        grpc_clients.patch_sync(ledger)


class TritonGrpcAioIntegration(_Clients):
    """`tritonclient.grpc.aio`: infer, stream_infer."""

    name: ClassVar[str] = "tritonclient_grpc_aio"
    target: ClassVar[str] = "tritonclient.grpc.aio"

    def patch(self, ledger: Ledger) -> None:
        """Replace methods of the client's class."""
        grpc_clients.patch_aio(ledger)
