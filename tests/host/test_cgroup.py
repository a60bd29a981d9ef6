"""Limits and throttling as both hierarchies write them."""

from __future__ import annotations

import pytest

from inferscope.host.cgroup import Cgroup, controllers, cpu_quota


@pytest.fixture
def v1(tmp_path):
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n1:cpu,cpuacct:/pod/box\n0::/\n")
    place = tmp_path / "root" / "cpu" / "pod" / "box"
    place.mkdir(parents=True)
    for folder, quota in ((place, -1), (place.parent, 150_000), (place.parent.parent, -1)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        (folder / "cpu.stat").write_text("nr_periods 10\nnr_throttled 2\nthrottled_time 5000000\n")
    return tmp_path / "root", own


@pytest.fixture
def v2(tmp_path):
    own = tmp_path / "own"
    own.write_text("0::/pod\n")
    place = tmp_path / "root" / "pod"
    place.mkdir(parents=True)
    (place.parent / "cpu.stat").write_text("usage_usec 5\n")
    (place / "cpu.max").write_text("50000 100000\n")
    (place / "cpu.stat").write_text("usage_usec 9\nnr_periods 10\nnr_throttled 2\nthrottled_usec 5000\n")
    (place / "cpu.pressure").write_text(
        "some avg10=1.00 avg60=0.50 avg300=0.10 total=7000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    return tmp_path / "root", own


def test_v1_takes_the_tightest_quota_of_the_hierarchy(v1):
    assert controllers(*v1)[0] == 1
    assert cpu_quota(*v1) == 1.5


def test_v2(v2):
    assert controllers(*v2)[0] == 2
    assert cpu_quota(*v2) == 0.5


def test_ticks_are_differences_in_nanoseconds(v1, v2, tmp_path):
    nowhere = tmp_path / "none"
    for root, own in (v1, v2):
        cgroup = Cgroup(root, own, nowhere)
        assert cgroup.tick(1) is None
        again = cgroup.tick(2)
        assert (again.periods, again.throttled, again.throttled_ns) == (0, 0, 0)
    stat = v2[0] / "pod" / "cpu.stat"
    stat.write_text("nr_periods 30\nnr_throttled 17\nthrottled_usec 305000\n")
    (v2[0] / "pod" / "cpu.pressure").write_text("some avg10=1.00 avg60=0.50 avg300=0.10 total=9500\n")
    tick = cgroup.tick(3)
    assert (tick.periods, tick.throttled, tick.throttled_ns, tick.pressure_ns) == (20, 15, 300_000_000, 2_500_000)
    evidence = cgroup.evidence(2, 3)
    assert evidence["ticks"] == [[3, 20, 15, 300_000_000, 2_500_000]]
    assert evidence["quota"] == 0.5


def test_what_the_kernel_does_not_say_is_none(tmp_path):
    cgroup = Cgroup(tmp_path / "root", tmp_path / "own", tmp_path / "pressure")
    assert cgroup.version is None
    cgroup.tick(1)
    assert cgroup.tick(2)[1:] == (None, None, None, None)
    assert cgroup.evidence(0, 9)["quota"] is None
