"""Who owns the time that a caller was blocked on the device: told late, in the closed request, and summing to its wall time."""

from __future__ import annotations

import pytest
import torch

from inferscope.aggregate.window import Aggregator
from inferscope.device.events import timer
from inferscope.device.harvest import DeviceSpan
from inferscope.device.settling import LEAST_NS, PATIENCE_NS, Settler
from inferscope.types import SpanFlag

MS = 1_000_000


def test_a_copy_that_waits_for_its_own_forward_is_the_forwards_time(serving) -> None:
    net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    with serving.recorder.request("predict"):
        net(value).cpu()
    assert serving.recorder.drain() == []  # withheld until the device's data came
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["stage:forward"] == pytest.approx(20.0, abs=0.1)
    assert vector["copy:d2h"] < 0.1
    assert "gpu-queue" not in vector


def test_a_value_read_inside_a_forward_waits_for_that_forward(serving) -> None:
    class Reading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> float:
            return self.layer(value).sum().item()

    net, value = Reading().to("sim"), torch.ones(2, 4, device="sim")
    with serving.recorder.request("predict"):
        net(value)
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["stage:forward"] == pytest.approx(20.0, abs=0.1)
    assert vector["copy:d2h"] < 0.1


def test_what_others_do_on_the_device_is_the_gpu_queue(serving) -> None:
    net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    with serving.recorder.request("other"):
        net(value)
    with serving.recorder.request("predict"):
        net(value).cpu()
    serving.settle()
    by_name = {tuple(sorted(vector)): vector for vector in serving.vectors()}
    (vector,) = [vector for vector in by_name.values() if "gpu-queue" in vector]
    assert vector["gpu-queue"] == pytest.approx(20.0, abs=0.1)  # the other request's forward
    assert vector["stage:forward"] == pytest.approx(20.0, abs=0.1)
    assert vector["copy:d2h"] < 0.1
    assert serving.harvester.settler.settled_ns["gpu-queue"] == pytest.approx(20 * MS, abs=MS // 10)


def test_a_copy_behind_a_copy_stays_a_copy(serving) -> None:
    serving.sim.configure(h2d_gb_s=0.2)
    table = torch.ones(1 << 20).pin_memory()
    mine = torch.ones(16).pin_memory()
    table.to("sim", non_blocking=True)  # 20 ms, of nobody's request
    with serving.recorder.request("predict"):
        mine.to("sim")
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["copy:h2d"] == pytest.approx(21.0, abs=0.1)
    assert "gpu-queue" not in vector


def test_what_no_span_covers_stays_where_it_was(serving) -> None:
    serving.sim.kernel(15.0, "somebody else's")
    with serving.recorder.request("predict"):
        torch.ones(4).to("sim")
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["copy:h2d"] == pytest.approx(15.0, abs=0.1)
    assert "gpu-queue" not in vector


def test_a_wait_for_the_stream_is_owned_by_what_the_stream_did(serving) -> None:
    net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    with serving.recorder.request("other"):
        net(value)
    with serving.recorder.request("predict"), serving.recorder.stage("respond"):
        net(value)
        torch.accelerator.synchronize()
    with serving.recorder.request("without a stage"):
        net(value)
        torch.accelerator.synchronize()
    serving.settle()
    _, vector, bare = serving.vectors()
    assert vector["gpu-queue"] == pytest.approx(20.0, abs=0.1)
    assert vector["stage:forward"] == pytest.approx(20.0, abs=0.1)
    assert vector["stage:respond"] < 0.1
    assert bare["stage:forward"] == pytest.approx(20.0, abs=0.1)
    assert bare["unattributed:unattributed"] < 0.1
    assert not [series for series in serving.recorder.series() if series[2][0].startswith("wait:")]


def test_settled_time_is_in_the_bands_too(serving) -> None:
    net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    aggregator = Aggregator(serving.recorder)
    aggregator.tick(timer.clock())
    for _ in range(3):
        with serving.recorder.request("banded"):
            net(value).cpu()
        serving.settle()
    window = aggregator.tick(timer.clock())
    (found,) = [each for each in window.classes if each.key.request == "banded"]
    totals = dict(zip([column.label for column in window.columns], found.bands.sums.sum(axis=0), strict=False))
    assert totals["forward"] == pytest.approx(60 * MS, abs=MS // 5)
    assert found.bands.sums.sum() == sum(record.wall_ns for record in window.records if record.key.request == "banded")
    assert all(not record.device_incomplete for record in window.records)


def test_a_lost_span_lets_its_request_go(serving) -> None:
    net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    with serving.recorder.request("predict"):
        net(value).cpu()
    serving.sim.fail("elapsed", times=None)
    serving.harvester.run_once()
    serving.harvester.run_once()  # by now the device is left alone, with all that was pending
    serving.sim.heal()
    (vector,) = serving.vectors()
    assert vector["copy:d2h"] == pytest.approx(20.0, abs=0.1)  # as the host saw it


class Book:
    """A recorder that notes who moves what."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.moves: list[tuple[int, str, str, int]] = []
        self.gone: list[int] = []

    def column(self, kind: str, name: str) -> int:
        self.names.append((kind, name))
        return len(self.names) - 1

    def settle(self, ref: int, source: int, target: int, nanoseconds: int) -> int:
        self.moves.append((ref, ":".join(self.names[source]), ":".join(self.names[target]), nanoseconds))
        return nanoseconds

    def unpin(self, ref: int) -> None:
        self.gone.append(ref)


class Asked:
    def __init__(self, identity: int) -> None:
        self.id = identity


def span(name: str, start: int, length: int, request: int = 0, *, issue: int | None = None, blocked: int = 0) -> DeviceSpan:
    issued = start if issue is None else issue
    return DeviceSpan(
        name=name,
        device="sim:0",
        stream=0,
        issue_ns=issued * MS,
        start_ns=start * MS,
        error_ns=1000,
        exec_ns=length * MS,
        queue_wait_ns=(start - issued) * MS,
        gap_ns=None,
        host_ns=blocked * MS,
        cross_stream=False,
        device_error=False,
        shared_stream=False,
        weight=1.0,
        request=Asked(request) if request else None,
        nbytes=4,
        flags=SpanFlag.SYNC,
    )


def test_every_piece_of_a_wait_has_one_owner() -> None:
    book = Book()
    settler = Settler(book)
    for each in (
        span("forward", 0, 12, request=2),  # began before the wait
        span("copy:h2d", 20, 5, request=2),
        span("forward", 26, 4, request=2),  # another's, inside this request's own
        span("forward", 25, 15, request=1),
    ):
        settler.add(each, 0, 0)
    settler.add(span("copy:d2h", 45, 1, request=1, issue=10, blocked=36), 7, 0)
    settler.run_once(PATIENCE_NS - 1)
    assert book.moves == []
    settler.run_once(PATIENCE_NS)
    assert sorted(book.moves) == [
        (7, "copy:d2h", "gpu-queue:", 2 * MS),
        (7, "copy:d2h", "gpu-queue:", 4 * MS),
        (7, "copy:d2h", "stage:forward", 11 * MS),
    ]
    assert book.gone == [7]


def test_what_others_put_between_a_copys_events_is_theirs() -> None:
    book = Book()
    settler = Settler(book)
    for each in (span("forward", 12, 8, request=2), span("copy:h2d", 21, 2, request=2), span("forward", 24, 20, request=3)):
        settler.add(each, 0, 0)
    settler.add(span("copy:d2h", 10, 20, request=1, blocked=20), 7, 0)
    settler.run_once(PATIENCE_NS)
    assert book.moves == [
        (7, "copy:d2h", "gpu-queue:", 8 * MS)
    ]  # the last forward ends after the copy did: how much of it came before is not known


def test_a_caller_that_went_on_earlier_was_not_blocked_for_all_of_it() -> None:
    book = Book()
    settler = Settler(book)
    settler.add(span("forward", 0, 40, request=2), 0, 0)
    settler.add(span("copy:h2d", 40, 1, request=1, issue=0, blocked=15), 7, 0)
    settler.run_once(PATIENCE_NS)
    assert book.moves == [(7, "copy:h2d", "gpu-queue:", 15 * MS)]


def test_a_launch_is_no_wait_and_keeps_no_request_back() -> None:
    book = Book()
    settler = Settler(book)
    short = span("copy:h2d", 10, 0, request=1, blocked=4)._replace(exec_ns=LEAST_NS - 1)
    settler.add(short, 7, 0)
    settler.add(short._replace(start_ns=None), 8, 0)
    assert book.gone == [7, 8]
    settler.run_once(PATIENCE_NS)
    assert book.moves == []
