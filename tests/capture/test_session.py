from __future__ import annotations

import threading

import pytest

from inferscope.capture.session import FAULT_LIMIT, TRANSITIONS, Machine, State, loaded_torch

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = SECOND

    def __call__(self) -> int:
        return self.now


def at(state: State) -> Machine:
    machine = Machine(Clock())
    machine.state = state
    return machine


def test_every_state_has_a_way_out_and_can_be_switched_off():
    assert set(TRANSITIONS) == set(State)
    for state in set(State) - {State.DISABLED}:
        assert State.DISABLED in TRANSITIONS[state], state


@pytest.mark.parametrize("here", State)
@pytest.mark.parametrize("to", State)
def test_only_the_tables_transitions_happen(here, to):
    machine = at(here)
    allowed = to in TRANSITIONS[here] or here is to
    assert machine.move(to) is allowed
    assert machine.state is (to if allowed else here)
    assert machine.counts == ({(here, to): 1} if allowed and here is not to else {})
    assert machine.refused == (not allowed)


def test_recording_is_reached_from_armed_only():
    assert [state for state in State if State.RECORDING in TRANSITIONS[state]] == [State.ARMED]


def test_the_breaker_opens_at_the_third_fault_within_a_minute():
    clock = Clock()
    machine = Machine(clock)
    assert [machine.fault("x") for _ in range(FAULT_LIMIT)] == [False, False, True]
    clock.now += 3600 * SECOND
    assert not machine.fault("x")
    clock.now += 61 * SECOND
    assert not machine.fault("x")


def test_the_breaker_closes_after_an_hour_unless_it_is_for_good():
    clock = Clock()
    machine = Machine(clock)
    machine.move(State.IDLE)
    machine.trip("stall")
    machine.recover()
    assert (machine.state, machine.reason) == (State.TRIPPED, "stall")
    clock.now += 3600 * SECOND
    machine.recover()
    assert (machine.state, machine.reason) == (State.IDLE, "")
    machine.trip("poisoned", for_good=True)
    clock.now += 36_000 * SECOND
    machine.recover()
    assert machine.state is State.TRIPPED


def test_a_module_that_is_still_being_imported_is_not_torch(monkeypatch):
    import sys
    import types

    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert loaded_torch() is None
    monkeypatch.delitem(sys.modules, "torch")
    assert loaded_torch() is None


def test_nothing_here_needs_the_main_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(Machine().move(State.IDLE)))
    thread.start()
    thread.join()
    assert seen == [True]
