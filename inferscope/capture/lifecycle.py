"""What must happen to a session around exit and fork; the interpreter offers no way to unregister, so one registration serves all.

Exit with an open session crashes the process. A fork copies the session of the forking thread into the child, where nothing would ever
stop it; and torch's lock over the callbacks of all threads, which threads take for a moment after each change, would be copied as it is, held
perhaps by a thread that a child does not have. Hence a fork waits a moment for a window of all threads to end. And the first session of a process starts a thread of Kineto's that a child does not have: with torch 2.13 a child that exits in
the ordinary way waits for it forever, in the destructor of `libkineto::ConfigLoader`.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import weakref
from typing import TYPE_CHECKING

from inferscope import fork
from inferscope.guard import guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.capture.request_scoped import RequestScopedCapture
    from inferscope.capture.window import Window

__all__ = ["follow_process"]

_current: weakref.ref[RequestScopedCapture] | None = None
_registered = False
_leaves = False
_held: Window | None = None


def follow_process(capture: RequestScopedCapture) -> None:
    """Stop `capture` before exit and around forks, for as long as it lives; a later one takes its place."""
    global _current, _registered  # noqa: PLW0603  (one registration a process)
    _current = weakref.ref(capture)
    fork.on_parent("capture", _before_fork, _after_fork)
    fork.on_child("capture", _in_child)
    if _registered:
        return
    _registered = True
    atexit.register(_at_exit)
    # Runs before threads are joined: from then on no session opens, and those of working threads end with their regions.
    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_at_threading_exit)


def _capture() -> RequestScopedCapture | None:
    return _current() if _current is not None else None


def _at_threading_exit() -> None:
    capture = _capture()
    if capture is not None:
        with guard("capture"):
            capture.disarm()


def _at_exit() -> None:
    capture = _capture()
    if capture is not None:
        with guard("capture"):
            capture.disable("exit")


def _before_fork() -> None:
    global _held  # noqa: PLW0603  (between the two halves of one fork)
    capture = _capture()
    if capture is None:
        return
    capture.recording.stop_here()
    window = capture.recording.window
    if window is None or window.give_way(threading.get_native_id()):
        return
    # It cannot be stopped in time; a start or stop that is half done would be copied as it is.
    _held = window if window.hold() else None


def _after_fork() -> None:
    global _held  # noqa: PLW0603  (as above)
    if _held is not None:
        _held.let_go()
        _held = None


def _in_child() -> None:
    capture = _capture()
    if capture is None:
        return
    recorded = capture.recording.counts.sessions > 0
    capture.after_fork()
    if recorded:
        _leave_before_destructors()


def _leave_before_destructors() -> None:
    """Make this child's exit end before C++ destructors run, with its own status and after flushing; as `multiprocessing` children do.

    Handlers run last in, first out: what the child itself registers later still runs, then streams are flushed, then it is over. Python's
    own finalisation comes before all of them.
    """
    global _leaves  # noqa: PLW0603  (the C library's list is the process's, and children inherit it)
    libc = ctypes.CDLL(None)
    if _leaves or not (hasattr(libc, "on_exit") and hasattr(libc, "fcloseall")):
        return  # on_exit, which passes the status on, is glibc's
    _leaves = True
    libc.on_exit(ctypes.cast(libc["_exit"], ctypes.c_void_p), None)
    libc.on_exit(ctypes.cast(libc.fcloseall, ctypes.c_void_p), None)  # takes nothing and ignores what it is given
