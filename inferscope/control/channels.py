"""The channels of one process: which are on, why the others are not."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.control import http
from inferscope.control.desk import Allowance, Desk
from inferscope.control.protocol import SCHEMA, Actor, RequestError, check
from inferscope.control.server import Server
from inferscope.control.signals import SignalSource
from inferscope.control.socket import UnixClient, UnixSocket, peer
from inferscope.errors import CaptureRefusedError, ConfigurationError, InferscopeError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inferscope.control.opamp import OpampAgent
    from inferscope.control.protocol import Operations, Request, Wanted
    from inferscope.settings import Settings

__all__ = ["Control", "Options"]

LOOPBACK: Final = "127.0.0.1"
_FAILURES: Final = 10
_PATIENCE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """Which channels are wanted."""

    socket: bool = True
    """`control`: False switches all channels off."""
    http_host: str = LOOPBACK
    http_port: int | None = None
    """`control_http`: the worker in slot n listens on the port + n; 0 takes any free port. None (default): off."""
    signal: str | None = None
    """`control_signal`, such as SIGUSR2. None (default): off."""
    opamp: str | None = None
    """`control_opamp`: the URL of an OpAMP server, for whoever builds the `OpampAgent`. None (default): off."""
    token_file: Path | None = None
    """`control_token_file`; None: INFERSCOPE_CONTROL_TOKEN, else one that is made."""
    fleet_size: int = 1
    """Replicas of the service: what a wish of the OpAMP server is shared among."""

    @classmethod
    def of(cls, settings: Settings) -> Options:
        """As the settings have it, whether they come from keywords, the environment or a file."""
        if not settings.control:
            return cls(socket=False)
        host, port = settings.control_http or (LOOPBACK, None)
        return cls(
            http_host=host,
            http_port=port,
            signal=settings.control_signal,
            opamp=settings.control_opamp,
            token_file=settings.control_token_file,
            fleet_size=settings.fleet_size,
        )


class Control:
    """All channels of one process.

    Args:
        operations: What may be done.
        options: Which channels are wanted.
        environ: Where the HTTP token is looked for; default `os.environ`.
        clock: Seconds, monotonic; replaced in tests.
    """

    def __init__(
        self,
        operations: Operations,
        options: Options,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._environ = os.environ if environ is None else environ
        self._clock = clock
        self.desk = Desk(operations, clock)
        self._server: Server | None = None
        self._unix: UnixSocket | None = None
        self._signal: SignalSource | None = None
        self._signals = 0
        self._name = ("unknown_service", "")
        self._agent: OpampAgent | None = None
        self._agent_failed = False
        self.opamp_pause_s = 0.2
        """Seconds until `poll_opamp` should be called again."""
        self._opened = threading.Event()
        self._notes: dict[str, str] = {"socket": "off", "http": "off", "signal": "off"}

    def _listen_signals(self) -> None:
        """Install the signal's handler, where one is wanted; it survives `close` and a fork."""
        if self._options.signal is None or self._signal is not None:
            return
        try:
            self._signal = SignalSource(self._options.signal, self._wake_server)
            self._notes["signal"] = self._signal.name
        except InferscopeError as error:
            self._off("signal", error)

    def open(self, directory: Path | None, slot: int = 0, name: tuple[str, str] = ("unknown_service", "")) -> None:
        """Open the channels of a worker, in place of those that were open; one that cannot be opened costs a line and stays off.

        The signal needs the main thread the first time.

        Args:
            directory: The worker's own, `STATE_DIR/<service>/<slot>`; None leaves the socket off.
            slot: Its place; added to the HTTP port.
            name: `service.name` and `service.instance.id`, as an OpAMP server gets to know them.
        """
        self.close()
        self._name = name
        if not self._options.socket:
            return
        server = Server(self._clock)
        self._listen_signals()
        if self._signal is not None:
            self._signal.take()  # what came while nobody served is over
        if directory is None:
            self._notes["socket"] = "off: there is no state directory"
        else:
            self._open_socket(server, directory)
        if self._options.http_port is not None:
            self._open_http(server, directory, self._options.http_port + (slot if self._options.http_port else 0))
        self._server = server
        self._opened.set()

    def _open_socket(self, server: Server, directory: Path) -> None:
        try:
            self._unix = unix = UnixSocket(directory)
        except InferscopeError as error:
            self._off("socket", error)
            return

        def greet(sock: socket.socket, _: Any) -> UnixClient:
            actor, refusal = peer(sock)
            if refusal is not None:
                self.desk.counts["unauthorised"] += 1
            return UnixClient(self.desk, actor, refusal)

        server.listen(unix.listener, greet)
        self._notes["socket"] = str(unix.path)

    def _open_http(self, server: Server, directory: Path | None, port: int) -> None:
        try:
            token = http.read_token(self._environ, directory, self._options.token_file)
            listener = http.listen(self._options.http_host, port)
        except InferscopeError as error:
            self._off("http", error)
            return
        failures = Allowance(_FAILURES, 1.0, self._clock)
        server.listen(listener, lambda _, address: http.HttpClient(self.desk, token, failures, f"{address[0]}:{address[1]}"))
        host, bound = listener.getsockname()[:2]
        self._notes["http"] = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

    def _off(self, channel: str, error: InferscopeError) -> None:
        self._notes[channel] = f"off: {error}"
        guard.log_once(f"control.{channel} {error}", f"control by {channel} is off: {error}")

    def serve_once(self, timeout_s: float = 0.5) -> None:
        """Wait at most `timeout_s` seconds for a request, answer what came, do one queued change. One thread calls it, in a loop."""
        server = self._server
        if server is None:
            self._opened.wait(timeout_s)
            self._opened.clear()
            return
        server.serve_once(0.0 if self.desk.waiting else timeout_s)
        if self._signal is not None and self._signal.take():
            self._signals += 1
            message = {
                "schema": SCHEMA,
                "id": f"signal-{os.getpid()}-{self._signals}",
                "op": "capture",
                "args": {"reason": f"signal {self._signal.name}"},
            }
            self.desk.submit(check(message), Actor("signal", peer=self._signal.name))
        self.desk.run_one()

    def opamp(self, service: str, instance_id: str) -> OpampAgent | None:
        """The agent for the OpAMP server that is wanted, to be polled by a thread of its own; None, with a line, when there is none.

        Args:
            service: `service.name`.
            instance_id: `service.instance.id`.
        """
        if self._options.opamp is None or not self._options.socket:
            return None
        from inferscope.control.opamp import OpampAgent

        try:
            agent = OpampAgent(self._options.opamp, service, instance_id, self.ask, fleet_size=self._options.fleet_size)
        except InferscopeError as error:
            self._off("opamp", error)
            return None
        self._notes["opamp"] = self._options.opamp
        return agent

    @property
    def wants_opamp(self) -> bool:
        """Whether a server is named that shall be polled."""
        return self._options.opamp is not None and self._options.socket

    def poll_opamp(self) -> None:
        """Poll the OpAMP server when it is time; a thread of its own calls this again and again, since a silent server holds it for a second."""
        if self._server is None and self._agent is None:
            return  # this process serves nothing so far, or no more
        if self._agent is None and not self._agent_failed:
            self._agent = self.opamp(*self._name)
            self._agent_failed = self._agent is None
        if self._agent is not None:
            self.opamp_pause_s = min(self._agent.run_once(), 1.0)

    def leave_opamp(self) -> None:
        """Say goodbye to the server, within a second."""
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def ask(self, request: Request, actor: Actor) -> dict[str, Any]:
        """Ask from another thread: what an `OpampAgent` is given. Returns the ticket; asked again, the same one as it stands then."""
        answer = self.desk.submit(request, actor)
        self._wake_server()
        return answer

    def capture(self, id_: str, wanted: Wanted) -> str:
        """A capture asked for by the service's own code, once for an id; returns the incident's.

        Raises:
            CaptureRefusedError: It is denied; the message says why.
            ConfigurationError: An argument cannot be used.
        """
        args = {key: value for key, value in asdict(wanted).items() if value is not None}
        try:
            request = check({"schema": SCHEMA, "id": id_, "op": "capture", "args": args})
        except RequestError as error:
            raise ConfigurationError("capture_now", id_, error.why) from error
        answer = self.desk.now(request, Actor("code", os.geteuid(), os.getpid()))
        deadline = time.monotonic() + _PATIENCE_S
        while answer["state"] == "queued" and time.monotonic() < deadline:  # somebody else asks under the same id right now
            time.sleep(0.02)
            answer = self.desk.now(request, Actor("code"))
        if answer["state"] != "done":
            raise CaptureRefusedError(str(answer["why"] or "another thread asks under this id and has no answer yet"))
        return str(answer["result"]["incident"])

    def wake(self) -> None:
        """End the wait of `serve_once`, from any thread: to stop."""
        self._opened.set()
        self._wake_server()

    def _wake_server(self) -> None:
        """As `wake`, without taking a lock: for the signal's handler."""
        server = self._server
        if server is not None:
            server.wake()

    def status(self) -> dict[str, Any]:
        """Channel to its address, or to "off" and why; and what was asked so far."""
        notes = dict(self._notes)
        if self._signal is not None and not self._signal.active:
            notes["signal"] = f"off: another handler took {self._signal.name}"
        if self._agent is not None:
            notes["opamp"] = f"{self._options.opamp}: {self._agent.state}"
        turned_away = self._server.turned_away if self._server is not None else 0
        return {**notes, "requests": dict(self.desk.counts), "turned_away": turned_away}

    def close(self) -> None:
        """Close all channels and take the socket's name away, from any thread; the signal's handler stays, and does nothing."""
        unix, self._unix = self._unix, None
        if unix is not None:
            unix.remove()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._notes |= {"socket": "off", "http": "off"}

    def stop(self) -> None:
        """Close, and give the signal back where this is the main thread."""
        self.close()
        self._opened.set()
        if self._signal is not None:
            self._signal.restore()
            self._signal = None
            self._notes["signal"] = "off"

    def after_fork(self) -> None:
        """In a forked child: close its copies of the parent's sockets, leave the parent's name on disk, forget the parent's tickets."""
        self._unix = None
        server, self._server = self._server, None
        if server is not None:
            server.drop()
        self._agent, self._agent_failed = None, False  # its connection is the parent's
        self._opened = threading.Event()
        self.desk.forget()
        self._notes |= {"socket": "off", "http": "off"}
