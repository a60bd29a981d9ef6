"""The knee, and the search for the highest rate, on services whose truth is known."""

from __future__ import annotations

import argparse
import json

import numpy as np
import pytest

from inferscope.bench import ladder
from inferscope.bench.acceptance import parse_objective
from inferscope.bench.load import LoadResult
from inferscope.cli import bench, climbing, main
from inferscope.cli.measuring import Inputs

OBJECTIVE = [parse_objective("p99<=20ms")]


def rung(number, *, rate, p99=10.0, word="HOLDS", errors=0.0, problems=()):
    metrics = {"throughput": {"requests_per_s": rate}, "error_rate": {"share": errors}, "latency": {"p99": {"ms": p99}}}
    row = {"word": word, "share": 0.0 if word != "BROKEN" else 0.5, "allowed": 0.01}
    return {"rung": number, "metrics": metrics, "acceptance": [row], "problems": list(problems), "stopped": ""}


def saturating(clients):
    """100 requests/s a client up to 8 of them; then they wait."""
    return rung(clients, rate=100.0 * min(clients, 8), p99=10.0 * max(1, clients / 8), word="HOLDS" if clients <= 16 else "BROKEN")


def test_the_knee_is_the_last_rung_that_gained():
    found = ladder.climb(saturating, [1, 2, 4, 8, 16, 32], OBJECTIVE)
    assert ladder.knee(found) == 8
    assert [each["rung"] for each in found] == [1, 2, 4, 8, 16, 32]
    short = ladder.climb(saturating, [1, 2, 4, 8, 16, 32], OBJECTIVE, to_knee=True)
    assert [each["rung"] for each in short] == [1, 2, 4, 8, 16]
    assert ladder.knee(short) == 8


def test_a_ladder_ends_where_it_is_over():
    for broken in ({"errors": 0.02}, {"p99": 61.0}):
        found = ladder.climb(lambda number, more=broken: rung(number, rate=1.0, **(more if number == 2 else {})), [1, 2, 3], OBJECTIVE)
        assert [each["rung"] for each in found] == [1, 2]
    assert ladder.knee([rung(1, rate=10.0, word="BROKEN")]) is None


def limited(limit, *, log=None, inconclusive=(), generator=10**9, unsure_below=0.0):
    def measured(rate, times):
        if log is not None:
            log.append((rate, times))
        if rate > generator:
            return rung(rate, rate=rate, problems=["generator-bound: its own lateness"])
        if rate > limit:
            return rung(rate, rate=limit, p99=90.0, word="BROKEN")
        unsure = (any(abs(rate - each) < 1 for each in inconclusive) and times == 1) or rate < unsure_below
        return rung(rate, rate=rate, word="INCONCLUSIVE" if unsure else "HOLDS")

    return measured


@pytest.mark.parametrize("limit", [37.0, 410.0, 5000.0])
def test_the_highest_rate_is_found_to_five_percent(limit):
    found = ladder.find_max_rate(limited(limit), 50.0)
    assert 0.94 * limit <= found.rate <= limit
    assert found.beyond > limit
    assert found.limited_by == "the service"
    assert f"{found.rate:g}/s" in found.text()


def test_an_open_question_is_asked_again_for_longer():
    log = []
    found = ladder.find_max_rate(limited(450.0, log=log, inconclusive=(100.0,)), 50.0)
    assert (100.0, 2) in log
    assert found.rate > 400


def test_the_generator_may_be_what_is_too_slow():
    found = ladder.find_max_rate(limited(1e9, generator=900.0), 100.0)
    assert found.limited_by == "the generator"
    assert 800 <= found.rate <= 900
    assert "too much for the generator" in found.text()


def test_a_busy_machine_is_no_reason_to_search_for_ever():
    log = []
    found = ladder.find_max_rate(limited(1e9, log=log, generator=0.0), 64.0)
    assert [rate for rate, _ in log] == [64.0, 32.0]
    assert (found.rate, found.limited_by) == (None, "the generator")
    assert "late even at 32/s: this machine is busy" in found.text()
    # Late at the first rate only: the next lower one is believed.
    assert 34 <= ladder.find_max_rate(limited(1e9, generator=36.0), 64.0).rate <= 36


def test_nothing_holds_and_everything_holds():
    nothing = ladder.find_max_rate(limited(0.1), 100.0)
    assert nothing.rate is None
    assert "none" in nothing.text()
    all_of_it = ladder.find_max_rate(limited(1e9), 100.0, ceiling=1000.0)
    assert (all_of_it.rate, all_of_it.beyond) == (1000.0, None)


def test_a_rate_that_is_not_kept_up_with_does_not_hold():
    behind = rung(100, rate=80.0)
    assert ladder.outcome(behind, 100.0) == "the service"
    assert ladder.outcome(rung(100, rate=99.0), 100.0) == "holds"


def test_too_few_requests_are_no_reason_to_go_lower():
    found = ladder.find_max_rate(limited(300.0, unsure_below=150.0), 10.0)
    assert 285 <= found.rate <= 300
    never = ladder.find_max_rate(limited(300.0, unsure_below=1000.0), 10.0)
    assert never.rate is None
    assert 285 <= never.open <= 300
    assert "it takes a longer --duration to show it" in never.text()


class Session:
    """A service of one server, 10 ms a request: beyond 100/s it falls behind; one client at a time gets 100/s."""

    endpoint, baseline = (
        None,
        {"idle": {"cpu_cores": 0.0, "memory": None, "host_cpu_cores": None}, "single": {"requests": 5, "p50_ms": 10.0, "min_ms": 9.9}},
    )

    def rest(self, plan):
        pass

    def measure(self, plan):
        rate = plan.rate if plan.mode == "open" else 100.0 * min(plan.connections, 4)
        count = int(min(plan.seconds, 8.0) * rate)
        intended = (np.arange(count) * (1e9 / rate)).astype(np.int64) + 1
        behind = np.maximum(np.arange(count) * (0.01 - 1 / rate), 0.0) * 1e9 if plan.mode == "open" else 0.0
        done = intended + 10_000_000 + np.asarray(behind).astype(np.int64)
        memory = {"static_bytes": 1_000_000, "peak_bytes": 3_000_000, "dynamic_bytes": 2_000_000}
        resources = {
            "cpu_cores": rate / 100,
            "host_cpu_cores": None,
            "memory": memory,
            "device": None,
            "curve": [{"at_s": 1.0, "cpu_cores": 0.5}],
        }
        return LoadResult(plan, intended, intended, intended, done, np.full(count, 200)), {"resources": resources}


def climbed(*words):
    parser = argparse.ArgumentParser()
    bench.arguments(parser)
    options = parser.parse_args(["http://127.0.0.1:1/", "--warmup", "0", *map(str, words)])
    options.json = "out.json"
    return climbing.run(options, bench._plan(options), Session(), Inputs((), None), [*options.slo])


def test_the_verb_searches_the_highest_rate(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert climbed("--find-max-rate", "--slo", "p99<=30ms", "--duration", "8s") == 0
    value = json.loads((tmp_path / "out.json").read_text())
    assert 90 <= value["max_rate"] <= 101
    assert value["limited_by"] == "the service"
    assert value["ladder"][0]["rung"] == 10.0  # a tenth of what one client at a time gets
    assert value["ladder"][0]["process"]["memory"]["peak_bytes"] == 3_000_000
    assert value["ladder"][0]["curve"]
    out = capsys.readouterr().out
    assert "highest rate under the objectives: " in out
    assert "one request at a time: P50 10.00 ms" in out


def test_the_verb_finds_the_knee_and_shows_resources_a_rung(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert climbed("--find-knee", "--md", "-") == 0
    value = json.loads((tmp_path / "out.json").read_text())
    assert (value["knee"], [each["rung"] for each in value["ladder"]]) == (4, [1, 2, 4, 8])
    out = capsys.readouterr().out
    assert "| clients | throughput/s | P50 | P99 | errors | CPU | memory | GPU | objectives |" in out
    assert "2.00 cores" in out
    assert "3 MB" in out


@pytest.mark.parametrize(
    "words", [["--find-max-rate"], ["--find-knee", "--ladder", "1,2"], ["--find-max-rate", "--mode", "closed", "--slo", "p99<=1ms"]]
)
def test_a_search_that_makes_no_sense_is_refused(words, capsys):
    assert main(["bench", "http://127.0.0.1:1/", *words]) == 64
    assert capsys.readouterr().err.count("\n") == 1
