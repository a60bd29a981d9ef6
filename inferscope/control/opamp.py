"""Captures asked for by an OpAMP server, as remote configuration; off unless a server is named, and an optional extra.

    {"inferscope": {"capture": {"id": "inc-42", "reason": "P99 of the fleet", "requests": 8, "expires_unix_s": 1735689600}}}

The protocol's own client has threads and a message for its agent; here its messages and transport are used and the caller's thread polls.
A configuration is a standing wish, delivered again and again: its id makes it one capture, `expires_unix_s` keeps a restarted process from
doing an old one. Every replica of a fleet gets it: of N, `replicas` (4 unless it says otherwise) capture, drawn by a hash of the id and the
instance, so that a repeated delivery draws the same, and spread over six seconds. The server is told APPLIED, or FAILED with the reason.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import time
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.control.protocol import LINE_BYTES, SCHEMA, Actor, Request, RequestError, check, load
from inferscope.detect.fleet import JITTER_S, WANTED_IN_ALL
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["OpampAgent"]

INTERVAL_S: Final = 5.0
_TIMEOUT_MS: Final = 1000
_LONGEST_PAUSE_S: Final = 300.0
_ARGUMENTS: Final = ("reason", "requests", "window_ms", "tier", "shapes", "stacks", "allow_stall_ms", "expires_unix_s")
_KEYS: Final = frozenset({"id", "replicas", *_ARGUMENTS})


class OpampAgent:
    """Polls one server. One thread calls `run_once`, again and again; it blocks for a second at most.

    Args:
        url: The server's HTTP endpoint.
        service: `service.name`.
        instance_id: `service.instance.id`.
        ask: Hands a request to the control thread and returns its ticket: `Control.ask`.
        fleet_size: Replicas of the service, N.
        clock: Seconds, monotonic; replaced in tests.
        headers: Added to each poll, a bearer token say.

    Raises:
        InferscopeError: The client library is not installed, or the URL is none.
    """

    def __init__(
        self,
        url: str,
        service: str,
        instance_id: str,
        ask: Callable[[Request, Actor], Mapping[str, Any]],
        *,
        fleet_size: int = 1,
        clock: Callable[[], float] = time.monotonic,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InferscopeError(f"OpAMP control: {url!r} is no http:// or https:// address")
        try:
            client: Any = importlib.import_module("opentelemetry._opamp.client")
            self._pb: Any = importlib.import_module("opentelemetry._opamp.proto.opamp_pb2")
        except ImportError as error:
            raise InferscopeError("OpAMP control needs the package opentelemetry-opamp-client (0.5b0 was tried)") from error
        self._client: Any = client.OpAMPClient(
            endpoint=url,
            headers=headers,
            timeout_millis=_TIMEOUT_MS,
            agent_identifying_attributes={"service.name": service, "service.instance.id": instance_id},
        )
        self._ask, self._clock = ask, clock
        self._instance_id, self._fleet_size = instance_id, max(fleet_size, 1)
        self._replicas = self._not_before = 0.0
        self._actor = Actor("opamp", peer=url)
        self._due = clock()
        self._failures = 0
        self._introduced = False
        self._pending: tuple[bytes, Request] | None = None
        self._hash = b""
        self._report: Any = None
        self.state = "waiting for the server"
        """`connected`, or why not."""

    def run_once(self) -> float:
        """Poll when it is time; returns the seconds until the next poll."""
        if self._pending is not None and self._clock() >= self._not_before:
            self._follow(*self._pending)
        now = self._clock()
        if now >= self._due:
            self._poll()
        pause = self._due - self._clock()
        return max(0.0, min(pause, 0.2) if self._pending is not None else pause)

    def _poll(self) -> None:
        report, self._report = self._report, None
        client = self._client
        try:
            if not self._introduced:  # this tells the state of the configuration as well
                message = client.build_full_state_message()
            elif report is not None:
                message = client.build_remote_config_status_response_message(report)
            else:
                message = client.build_heartbeat_message()
            answer = client.send(message)
        except Exception as error:  # noqa: BLE001  (whatever the transport raises, we try again later)
            self._report = report  # what did not arrive is sent again
            self._failures += 1
            self.state = f"{self._actor.peer} does not answer ({type(error.__cause__ or error).__name__})"
            self._rest(min(_LONGEST_PAUSE_S, INTERVAL_S * 2 ** min(self._failures, 6)))
            return
        self._introduced, self._failures, self.state = True, 0, "connected"
        self._rest(INTERVAL_S)
        self._take(answer)

    def _rest(self, seconds: float) -> None:
        # Jitter: a fleet that was started at once shall not poll at once.
        self._due = self._clock() + seconds * random.uniform(0.8, 1.2)  # noqa: S311  (no secret)

    def _take(self, answer: Any) -> None:
        if answer.HasField("error_response"):
            self.state = "the server reports an error"
            return
        if answer.flags & self._pb.ServerToAgentFlags_ReportFullState:
            self._introduced = False  # the next poll, at its own time: a server that asks always gets no more than that
        if not answer.HasField("remote_config") or answer.remote_config.config_hash == self._hash:
            return
        self._hash = bytes(answer.remote_config.config_hash)
        try:
            request = self._read(answer.remote_config.config.config_map)
        except RequestError as error:
            self._say("FAILED", error.why)
            return
        if request is None:
            self._say("APPLIED")
            return
        delay_s = self._draw(request.id)
        if delay_s is None:
            self._say("APPLIED", "other replicas were drawn")
            return
        self._say("APPLYING")
        self._pending, self._not_before = (self._hash, request), self._clock() + delay_s
        if delay_s == 0.0:
            self._follow(self._hash, request)

    def _draw(self, id_: str) -> float | None:
        """Seconds to wait before this replica captures; None when others were drawn."""
        share = self._replicas / self._fleet_size
        if share >= 1.0:
            return 0.0
        digest = hashlib.blake2b(f"{id_}/{self._instance_id}".encode(), digest_size=16).digest()
        lot, delay = (int.from_bytes(part, "big") / 2.0**64 for part in (digest[:8], digest[8:]))
        return delay * JITTER_S if lot < share else None

    def _read(self, files: Mapping[str, Any]) -> Request | None:
        """The capture that a configuration wishes for; None when it says nothing about us."""
        for file in files.values():
            if len(file.body) > LINE_BYTES:
                raise RequestError(f"a configuration is at most {LINE_BYTES} bytes")
            if not self._is_ours(file.body):
                continue
            wish: Any = cast("dict[str, Any]", load(file.body)["inferscope"]).get("capture")
            if not isinstance(wish, dict):
                raise RequestError("inferscope.capture: expected an object")
            return self._wish(cast("dict[str, Any]", wish))
        return None

    @staticmethod
    def _is_ours(body: bytes) -> bool:
        try:
            value: Any = json.loads(body)
        except (ValueError, RecursionError):
            return False  # a configuration of somebody else's, in another language
        return isinstance(value, dict) and isinstance(cast("dict[str, object]", value).get("inferscope"), dict)

    def _wish(self, wish: dict[str, Any]) -> Request:
        unknown = sorted(set(wish) - _KEYS)
        if unknown:
            raise RequestError(f"inferscope.capture.{unknown[0][:40]}: unknown; known are {', '.join(sorted(_KEYS))}")
        expires = wish.get("expires_unix_s")
        if not isinstance(expires, (int, float)) or isinstance(expires, bool):
            raise RequestError("inferscope.capture.expires_unix_s: expected the second after which it is void")
        if time.time() > expires:
            raise RequestError("inferscope.capture: it has expired")
        replicas = wish.get("replicas", WANTED_IN_ALL)
        if not isinstance(replicas, (int, float)) or isinstance(replicas, bool) or not 0 < replicas <= 1_000_000:
            raise RequestError("inferscope.capture.replicas: expected how many of the fleet shall capture, 1 to 1000000")
        self._replicas = float(replicas)
        args = {key: wish[key] for key in _ARGUMENTS if key in wish}
        return check({"schema": SCHEMA, "id": wish.get("id"), "op": "capture", "args": args})

    def _follow(self, hash_: bytes, request: Request) -> None:
        """Ask, or ask again for the same ticket, until it has ended."""
        ticket = self._ask(request, self._actor)
        if ticket["state"] == "queued" or hash_ != self._hash:
            return
        self._pending = None
        self._say("APPLIED" if ticket["state"] == "done" else "FAILED", str(ticket["why"] or ""))

    def _say(self, status: str, why: str = "") -> None:
        value = getattr(self._pb, f"RemoteConfigStatuses_{status}")
        report = self._client.update_remote_config_status(self._hash, value, why)
        if report is not None:
            self._report, self._due = report, self._clock()

    def close(self) -> None:
        """Tell the server that we go, within a second; its silence is no matter."""
        if self._introduced and self._failures == 0:
            try:
                self._client.send(self._client.build_agent_disconnect_message())
            except Exception:  # noqa: BLE001  (we are going anyway)
                self.state = "gone"
