"""The seam between the core and integrations with other people's libraries.

An integration is a class with `name`, `target` (the root module it patches), `versions`, `patch(ledger)` and nothing else; entry-point group
`inferscope.integrations` finds it. Patching happens when the target is imported, never by importing it: an application that does not use
torch does not pay for it. `instrument` followed by `uninstrument` is the identity.
"""

from __future__ import annotations

import abc
import functools
import importlib.metadata
import importlib.util
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope import guard
from inferscope.copied import copies, forget_copies, record_copy, record_first_byte, record_shape, shape_of, shape_tables
from inferscope.errors import IntegrationUnavailableError
from inferscope.imports import is_loading, when_loaded
from inferscope.patching import Ledger
from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from inferscope.patching import Patch

__all__ = [
    "EXCLUDED_PATHS",
    "GROUP",
    "Integration",
    "Registry",
    "copies",
    "forget_copies",
    "record_copy",
    "record_first_byte",
    "record_shape",
    "record_wait",
    "recorder",
    "registry",
    "shape_of",
    "shape_tables",
    "stand_in",
]

GROUP: Final = "inferscope.integrations"
EXCLUDED_PATHS: Final = frozenset({"/healthz", "/livez", "/readyz", "/metrics", "/favicon.ico"})
"""HTTP paths that are no work of the service; they appear in no signal."""


class Integration(abc.ABC):
    """Base of every integration; subclasses set the class attributes and `patch`."""

    name: ClassVar[str] = ""
    target: ClassVar[str] = ""
    """Root module whose import triggers `patch`; empty patches at once."""
    distribution: ClassVar[str] = ""
    """Distribution whose version is checked; empty skips the check."""
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((0,), None)
    """Oldest supported version and the first unsupported one (None: no upper end)."""

    brings: ClassVar[tuple[str, ...]] = ()
    """Names of integrations that come with this one: other modules of the same library."""
    serves: ClassVar[bool] = True
    """Whether a program that imports `target` is one that `inferscope run` measures; False for what every program imports."""

    @abc.abstractmethod
    def patch(self, ledger: Ledger) -> None:
        """Replace what must be replaced, through the ledger.

        Raises:
            IntegrationUnavailableError: There is nothing to patch here; the message is the reason that `states()` and doctor show.
        """

    def unpatch(self) -> None:  # noqa: B027  (most integrations keep nothing outside the ledger)
        """Undo what the ledger does not know of; default nothing."""


@dataclass(slots=True)
class _Entry:
    integration: Integration
    ledger: Ledger = field(default_factory=Ledger)
    state: str = "waiting"
    reason: str = ""
    hooked: bool = False


class Registry:
    """The integrations of this process and their states: `active`, `waiting`, `skipped` (with a reason)."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._broken: dict[str, str] = {}
        self._lock = threading.RLock()
        self.on_active: Callable[[str], None] | None = None
        """Called with the name of each integration that became active."""

    @staticmethod
    def available() -> dict[str, importlib.metadata.EntryPoint]:
        """Installed integrations by name."""
        return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}

    def instrument(self, names: Iterable[str] = ()) -> dict[str, str]:
        """Switch integrations on; no name means all that are installed.

        Returns:
            State by name, with the reason behind a skip.

        Raises:
            IntegrationUnavailableError: A name that no installed package offers.
        """
        wanted = list(names)
        points = self.require(wanted)
        with self._lock:
            for name in wanted or sorted(points):
                self._switch_on(name, points)
        return self.states()

    def _switch_on(self, name: str, points: Mapping[str, importlib.metadata.EntryPoint]) -> None:
        entry = self._entries.get(name)
        if entry is None and name in points:
            entry = self._load(name, points[name])
        if entry is not None:
            self._activate(entry)
            for other in entry.integration.brings:
                self._switch_on(other, points)

    def _load(self, name: str, point: importlib.metadata.EntryPoint) -> _Entry | None:
        """The integration behind an entry point; somebody else's broken package costs itself alone."""
        with guard.guard(f"integration {name}"):
            entry = self._entries[name] = _Entry(point.load()())
            self._broken.pop(name, None)
            return entry
        self._broken[name] = "skipped: it cannot be loaded; see the log"
        return None

    def require(self, names: Iterable[str]) -> dict[str, importlib.metadata.EntryPoint]:
        """Installed integrations, when all of `names` are among them or were added.

        Raises:
            IntegrationUnavailableError: A name that no installed package offers.
        """
        points = self.available()
        for name in names:
            if name not in points and name not in self._entries:
                known = ", ".join(sorted(points)) or "none is installed"
                raise IntegrationUnavailableError(f"there is no integration {name!r}; known: {known}")
        return points

    def serves(self, name: str) -> bool:
        """Whether the target of an integration that was asked for says that this process serves."""
        entry = self._entries.get(name)
        return entry is not None and entry.integration.serves

    def preview(self, names: Iterable[str] = ()) -> dict[str, tuple[str, str]]:
        """What `instrument` would do in a process that has imported nothing: {name: (state, target)}; nothing is patched or imported.

        A state is `waiting for TARGET`, `ready` (nothing to wait for), `skipped: REASON`, or `broken: REASON` when it cannot be loaded.
        """
        found: dict[str, tuple[str, str]] = {}
        for name, point in sorted(self.available().items()):
            if names and name not in names:
                continue
            try:
                integration: type[Integration] = point.load()
                reason = _unsupported(integration) or _absent(integration.target)
                waits = f"waiting for {integration.target}" if integration.target else "ready"
                found[name] = (f"skipped: {reason}" if reason else waits, integration.target if integration.serves else "")
            except Exception as error:  # noqa: BLE001  (somebody else's package)
                found[name] = (f"broken: it cannot be loaded ({type(error).__name__})", "")
        return found

    def add(self, integration: Integration) -> None:
        """Switch on an integration object that no entry point announces."""
        with self._lock:
            entry = self._entries.setdefault(integration.name, _Entry(integration))
            self._activate(entry)

    def _activate(self, entry: _Entry) -> None:
        if entry.state == "active":
            return
        target = entry.integration.target
        module = sys.modules.get(target)
        if not target or (module is not None and not is_loading(module)):
            self._patch(entry)
            return
        entry.state = "waiting"
        if entry.hooked:
            return
        entry.hooked = True
        if module is not None:  # we were called from within its import
            when_loaded(module, lambda: self._imported(entry, module))
        else:
            import wrapt

            wrapt.register_post_import_hook(functools.partial(self._imported, entry), target)

    def _imported(self, entry: _Entry, module: Any) -> None:
        if is_loading(module):  # wrapt tells of it a moment before its end
            when_loaded(module, lambda: self._imported(entry, module))
            return
        with self._lock:
            entry.hooked = False
            if entry.state != "waiting":
                return
            if sys.modules.get(entry.integration.target) is module:
                self._patch(entry)
            else:  # the import failed; it may be tried again
                self._activate(entry)

    def _patch(self, entry: _Entry) -> None:
        reason = _unsupported(entry.integration)
        if reason:
            entry.state, entry.reason = "skipped", reason
            return
        with guard.guard(f"integration {entry.integration.name}") as contained:
            try:
                entry.integration.patch(entry.ledger)
            except IntegrationUnavailableError as unavailable:
                entry.ledger.undo()
                entry.state, entry.reason = "skipped", str(unavailable)
                return
        if contained.ok:
            entry.state, entry.reason = "active", ""
            if self.on_active is not None:
                self.on_active(entry.integration.name)
        else:
            entry.ledger.undo()
            entry.state, entry.reason = "skipped", "patching failed; see the log"

    def uninstrument(self, names: Iterable[str] = ()) -> dict[str, str]:
        """Undo integrations; no name means all."""
        with self._lock:
            for name in list(names) or list(self._entries):
                entry = self._entries.get(name)
                if entry is None:
                    continue
                with guard.guard(f"integration {name}"):
                    entry.integration.unpatch()
                stayed = entry.ledger.undo()
                entry.state = "off"
                entry.reason = f"{stayed} wrappers stay dormant under another library's" if stayed else ""
        return self.states()

    def states(self) -> dict[str, str]:
        """State of each integration that was asked for."""
        return {**self._broken, **{name: f"{e.state}: {e.reason}" if e.reason else e.state for name, e in self._entries.items()}}


def _absent(target: str) -> str:
    root = target.partition(".")[0]
    return f"{root} is not installed" if root and root not in sys.modules and importlib.util.find_spec(root) is None else ""


def _unsupported(integration: Integration | type[Integration]) -> str:
    if not integration.distribution:
        return ""
    try:
        text = importlib.metadata.version(integration.distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{integration.distribution} is not installed"
    found = tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
    low, high = integration.versions
    if found < low or (high is not None and found >= high):
        upper = f" and below {'.'.join(map(str, high))}" if high else ""
        return f"{integration.distribution} {text} is not supported: needs {'.'.join(map(str, low))} or later{upper}"
    return ""


registry: Final = Registry()


def recorder() -> Any:
    """The recorder that the process's requests run through."""
    return core.default


def stand_in(kind: str, original: Any, patch: Patch, slow: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    """What to put in place of a method that is called too often for a Python closure.

    Args:
        kind: `forward` (a stage around the outermost call), `move` (tells `note` when the result lies on another kind of memory), `make`
            (tells `note` when the result lies on a device), `read` (calls `slow` when the tensor does not lie on the host) or `call` (calls
            `slow`, and passes for the original in every other way).
        original: The method that is replaced.
        patch: The ledger's.
        slow: Does all of it in Python; runs while `timer.enabled`, and always where the compiled core is missing.
        **more: `timer`, an object with `enabled`; `note(began_ns, result, *args, **kwargs)` of `move` and `make`, and of `forward` where it
            gets 0 and None first; for `forward` the ContextVar
            `inside`, `names` ({id(module): (anything, stage)}), the common stage's `name`, and `shapes`: the `shape_tables`, in which the
            core notes a shape that was met before without asking `note`.
    """
    make = getattr(core.default, "_stand_in", None)
    if make is None:
        return slow
    timer, note, inside, shapes = more.get("timer"), more.get("note"), more.get("inside"), more.get("shapes")
    made: Callable[..., Any] = make(kind, original, (patch, timer, slow, note, inside, more.get("names", {}), more.get("name"), shapes))
    return made


def record_wait(queue: str, start_ns: int, end_ns: int) -> None:
    """Tell of time that the current request spent in a queue before its work went on."""
    core.default.interval("queue", queue, start_ns, end_ns)
