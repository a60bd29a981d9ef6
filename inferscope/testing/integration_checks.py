"""What any integration, ours or somebody else's, can be held to in its own tests.

    from inferscope.testing.integration_checks import problems

    def test_the_integration_behaves() -> None:
        assert problems(RankerIntegration(), use=lambda: Ranker().rank([3, 1, 2])) == []

Each check names what it found; none needs a running inferscope. The library that the integration instruments has to be installed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.integration import Integration
from inferscope.patching import Ledger
from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["problems"]

_MISSING: Final = object()


def problems(integration: Integration, *, use: Callable[[], Any] | None = None) -> list[str]:
    """Everything about an integration that would change the application it is used in; empty when there is nothing.

    Args:
        integration: An instance, not yet switched on.
        use: Calls the instrumented library in a way that gives the same result, or the same exception, each time; results are compared
            with `==`. Without it only the patches themselves are checked.

    Raises:
        ImportError: The library is not installed.
    """
    found = list(_declared(integration))
    if found:
        return found
    if integration.target:
        importlib.import_module(integration.target)
    found += _patched(integration)
    if not found:
        found += _used(integration, use)
        found += _between(integration, use)
    return [*found, *_imports(integration)]


def _declared(integration: Integration) -> Iterator[str]:
    kind = type(integration)
    if not integration.name:
        yield f"{kind.__name__}.name is empty: people switch it on by its name"
    low, high = integration.versions
    if integration.distribution and high is not None and high <= low:
        yield f"{kind.__name__}.versions ends at {high}, before it begins at {low}"


def _own(owner: Any, name: str) -> Any:
    own = cast("dict[str, Any]", vars(owner))
    return own.get(name, _MISSING)


def _looks(owner: Any, name: str) -> dict[str, Any]:
    """What introspection says of an attribute."""
    value = getattr(owner, name)
    seen = {each: getattr(value, each, None) for each in ("__name__", "__qualname__", "__doc__", "__module__")}
    try:
        seen["signature"] = inspect.signature(value)
    except (TypeError, ValueError) as error:
        seen["signature"] = type(error)
    seen["coroutine function"] = inspect.iscoroutinefunction(value)
    seen["generator function"] = inspect.isgeneratorfunction(value)
    seen["asynchronous generator function"] = inspect.isasyncgenfunction(value)
    return seen


def _label(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__qualname__', getattr(owner, '__name__', owner))}.{name}"


def _patched(integration: Integration) -> Iterator[str]:
    """Patch and undo are the identity, patching twice is patching once, and what is patched looks as before."""
    ledger = Ledger()
    integration.patch(ledger)
    places = ledger.places()
    ours = {place: _own(*place) for place in places}
    after = {place: _looks(*place) for place in places}
    integration.patch(ledger)
    for place in places:
        if _own(*place) is not ours[place]:
            yield f"patching twice replaces {_label(*place)} a second time: replace it through the ledger"
    integration.unpatch()
    stayed = ledger.undo()
    if not places and type(integration).unpatch is Integration.unpatch:  # one with an unpatch of its own may listen to signals instead
        yield "patch() replaced nothing through the ledger, and there is no unpatch() of its own"
    if stayed:
        yield f"{stayed} patches could not be undone although nobody patched over them"
    for owner, name in places:
        before = _looks(owner, name)
        differ = [each for each, value in before.items() if after[owner, name][each] != value]
        if differ:
            yield f"patched, {_label(owner, name)} has another {', another '.join(differ)}"
        if _own(owner, name) is ours[owner, name]:
            yield f"{_label(owner, name)} is still ours after undo()"


def _outcome(use: Callable[[], Any] | None) -> tuple[str, Any]:
    if use is None:
        return "nothing", None
    try:
        return "result", use()
    except Exception as error:  # noqa: BLE001  (an exception is one of the two outcomes that are compared)
        return "exception", (type(error), str(error))


def _same(left: tuple[str, Any], right: tuple[str, Any]) -> bool:
    return left[0] == right[0] and (left[1] is right[1] or bool(left[1] == right[1]))


def _used(integration: Integration, use: Callable[[], Any] | None) -> Iterator[str]:
    """The library does what it did: inside a request, outside any, while recording is off, and after uninstrumenting."""
    plain = _outcome(use)
    ledger = Ledger()
    integration.patch(ledger)
    try:
        if not _same(_outcome(use), plain):
            yield "the library's outcome differs while it is instrumented"
        with core.default.request("integration check") as request:
            if not _same(_outcome(use), plain):
                yield "the library's outcome differs inside a request"
            request.discard()
        was, core.default.enabled = core.default.enabled, False
        try:
            if not _same(_outcome(use), plain):
                yield "the library's outcome differs while recording is off"
        finally:
            core.default.enabled = was
    finally:
        integration.unpatch()
        ledger.undo()
    if not _same(_outcome(use), plain):
        yield "the library's outcome differs after it was uninstrumented"


def _vendor(owner: Any, name: str) -> tuple[Any, Callable[[], object]]:
    """Somebody else's wrapper around an attribute, and how they take it away."""
    stored, original = _own(owner, name), getattr(owner, name)
    if isinstance(stored, (staticmethod, classmethod)):
        return None, lambda: None

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def restore() -> None:
        if stored is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, stored)

    try:
        setattr(owner, name, wrapper)
    except TypeError:  # a type of C, whose attributes nobody else sets
        return None, lambda: None
    return wrapper, restore


def _between(integration: Integration, use: Callable[[], Any] | None) -> Iterator[str]:
    """Another vendor's patches, before and after ours, taken away in either order."""
    plain = _outcome(use)
    ledger = Ledger()
    integration.patch(ledger)
    places = ledger.places()
    integration.unpatch()
    ledger.undo()
    before = {place: _own(*place) for place in places}

    theirs = [(place, *_vendor(*place)) for place in places]
    integration.patch(ledger)
    if not _same(_outcome(use), plain):
        yield "the library's outcome differs when it is instrumented over another vendor's patches"
    integration.unpatch()
    ledger.undo()
    for place, wrapper, restore in reversed(theirs):
        if wrapper is not None and _own(*place) is not wrapper:
            yield f"another vendor's patch of {_label(*place)} was lost when ours, above it, was undone"
        restore()

    integration.patch(ledger)
    theirs = [(place, *_vendor(*place)) for place in places]
    if not _same(_outcome(use), plain):
        yield "the library's outcome differs under another vendor's patches"
    integration.unpatch()
    ledger.undo()
    for place, wrapper, _ in theirs:
        if wrapper is not None and _own(*place) is not wrapper:
            yield f"another vendor's patch of {_label(*place)} was lost when ours, below it, was undone"
    if not _same(_outcome(use), plain):
        yield "the library's outcome differs when ours was undone under another vendor's patches: ask `patch.active` first"
    for owner, name in reversed(places):
        if before[owner, name] is _MISSING:
            if name in vars(owner):
                delattr(owner, name)
        elif _own(owner, name) is not before[owner, name]:
            setattr(owner, name, before[owner, name])


def _imports(integration: Integration) -> Iterator[str]:
    """Importing the integration's module must not import its library: waiting for it is the point."""
    root = integration.target.partition(".")[0]
    module = type(integration).__module__
    if not root or root in sys.stdlib_module_names or module == "__main__":
        return
    program = f"import sys\ntry:\n    import {module}\nexcept ImportError:\n    raise SystemExit(0)\nraise SystemExit(3 if {root!r} in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, timeout=120)  # noqa: S603  (this interpreter and a name)
    if done.returncode == 3:
        yield f"importing {module} imports {root}: import it inside patch()"
