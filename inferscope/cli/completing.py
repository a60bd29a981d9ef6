"""What a service with `diagnose="deferred"` or `"off"` leaves to the command line: the profiles of a closed incident, as pprof files.

They are added as a further manifest of the incident's chain, so that it still verifies and nothing before changes. An incident has one writer:
while its worker lives and might still write there, nothing is added.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from inferscope.capture.bundle import Bundle
from inferscope.control import workers
from inferscope.diagnose import profiles
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["add_profiles"]

_FOLDER: Final = "profiles/"
_ASK_S: Final = 2.0


def add_profiles(path: Path) -> tuple[str, ...]:
    """Fold the captures and stacks of a closed incident into pprof files, unless that was done.

    Args:
        path: The incident.

    Returns:
        Names of the files that were added; none where there is nothing to fold, the place cannot be written, or somebody still writes there.
    """
    try:
        bundle = Bundle.open(path)
        if bundle.state != "closed" or any(name.startswith(_FOLDER) for name in bundle.artefacts) or not os.access(path, os.W_OK):
            return ()
        lock = path.parent.parent.parent / "slots" / f"{path.parent.parent.name}.lock"
        if _written(path, lock):
            return ()
        written = profiles.write(path)
        if not written or not _publish(bundle, written, lock, path):
            return ()
    except (EvidenceError, OSError):
        return ()  # the evidence is read all the same, and says what is wrong with it
    return tuple(name.relative_to(path).as_posix() for name in written)


def _written(path: Path, lock: Path) -> bool:
    """Whether the worker that wrote the incident lives and may add its diagnosis yet."""
    free = _take(lock)
    if free is not None:
        os.close(free)
        return False
    slot, service = path.parent.parent.name, path.parent.parent.parent
    for worker in workers.find(service.parent, service.name, int(slot)):
        try:
            result = workers.request(worker, "status", "status", {}, _ASK_S)["result"]
            return bool(result["incidents"]["diagnosis"]["mode"] == "local")
        except (InferscopeError, KeyError, TypeError):
            break
    return True


def _take(lock: Path) -> int | None:
    """The slot's lease; None when a process holds it. Any descriptor where there are no slots: a copy has no writer."""
    slots = lock.is_file()
    descriptor = os.open(lock if slots else os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if slots:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _publish(bundle: Bundle, written: tuple[Path, ...], lock: Path, path: Path) -> bool:
    """Seal the files under the slot's lease where it is free: a worker that starts in these milliseconds would take the next one."""
    held = _take(lock)
    if held is None and _written(path, lock):
        return False
    try:
        for file in written:
            bundle.add_file(file)
        bundle.publish("closed")
    finally:
        if held is not None:
            os.close(held)
    return True
