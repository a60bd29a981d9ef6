"""Lines of the application that threads are in; libraries and inferscope are passed over."""

from __future__ import annotations

import threading

import pytest

from inferscope.host.places import Places
from inferscope.record import core


@pytest.mark.skipif(not hasattr(core.default, "_stack"), reason="only the C core looks at other threads' stacks")
def test_the_innermost_line_that_is_no_librarys():
    stop = threading.Event()

    def wait_here():
        stop.wait(10)

    thread = threading.Thread(target=wait_here)
    thread.start()
    places = Places()
    number = 0
    while not number or "wait_here" not in places.names()[number]:
        number = places.look(thread.ident)
    stop.set()
    thread.join()
    name = places.names()[number]
    assert name.startswith("test_the_innermost_line_that_is_no_librarys.<locals>.wait_here (test_places.py:")
    assert places.names()[0] == ""
    places.clear()
    assert places.names() == [""]


def test_who_is_not_there_is_nowhere():
    assert Places().look(None) == 0
    assert Places().look(1) == 0
