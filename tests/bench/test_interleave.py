"""Blocks in turn: their order, when it stops, and the whole thing against real services."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from inferscope.bench import compare, evidence
from inferscope.bench.compare import Block
from inferscope.bench.interleave import block_of, order, until_decided
from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.cli import main

P50 = compare.parse_gates("p50:3%")


def steady(slower=1.0, noise=0.01, log=None):
    rng = np.random.default_rng(0)

    def measured(arm, pair):
        if log is not None:
            log.append((arm, pair))
        return Block(rng.normal(10 * (slower if arm == "b" else 1), 0.5, 300) * rng.lognormal(0, noise))

    return measured


def clock():
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_blocks_go_a_b_b_a_and_stop_when_decided():
    log = []
    found = until_decided(steady(1.2, log=log), P50, max_s=1e9, clock=clock())
    assert found.verdicts[0].word == "REGRESSED"
    assert (found.pairs, found.looks) == (20, [20])
    assert "".join(arm for arm, _ in log)[:8] == "abbaabba"
    assert [pair for _, pair in log[:6]] == [0, 0, 1, 1, 2, 2]
    assert order(1) == ("b", "a")


def test_an_open_question_doubles_the_pairs_and_the_level_rises():
    found = until_decided(steady(1.0, noise=0.06), P50, max_s=100, clock=clock())
    assert found.looks[:2] == [20, 40]
    assert found.verdicts[0].level >= 0.99


def test_time_is_up_before_twenty_pairs():
    found = until_decided(steady(), P50, max_s=5, clock=clock())
    assert found.pairs < 20
    assert found.verdicts[0].word == "INCONCLUSIVE"
    assert "needs 20 pairs" in found.verdicts[0].text()


def test_the_beginning_of_a_block_is_left_out():
    intended = np.arange(100, dtype=np.int64) * 10_000_000 + 5
    status = np.full(100, 200)
    status[[3, 80]] = 500
    result = LoadResult(LoadPlan("", 100, 1.0), intended, intended, intended, intended + 1_000_000, status)
    block = block_of(result, 0.5)
    assert (block.latency_ms.size, block.failed, block.seconds) == (49, 1, 0.5)
    empty = np.empty(0, dtype=np.int64)
    assert block_of(LoadResult(LoadPlan("", 1, 1), empty, empty, empty, empty, empty), 0.1).latency_ms.size == 0


SHORT = ["--block", "0.15", "--settle", "0.02", "--warmup", "0.2", "--max-lag", "10s", "--concurrency", "1"]


def test_one_look_may_spend_more_than_the_first_of_several():
    found = until_decided(steady(1.0, noise=0.06), P50, extend=False, max_s=100, clock=clock())
    assert found.looks == [20]
    assert found.verdicts[0].level == 0.96


def test_two_services_are_compared_in_turn(command, functions, capsys):
    words = ["ab", "--a", command(0.004), "--b", command(0.012), "--inputs", "inputs.jsonl", "--gate", "p50:20%", "--no-extend"]
    proof = ["--evidence", "chain", "--slo", "p50<=100ms", "--change", "another sort", "--rollback", "the old one"]
    assert main([*words, *SHORT, *proof, "--junit", "junit.xml", "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    verdict = value["verdicts"][0]
    assert (verdict["metric"], verdict["word"], verdict["kind"]) == ("p50", "REGRESSED", "interleaved")
    assert verdict["change"] > 0.5
    assert value["outputs"]["correct"]
    assert value["pairs"] == 20
    assert len(value["blocks"]["a"]) == value["pairs"]
    assert '<failure message="p50 REGRESSED' in (functions / "junit.xml").read_text()
    index = json.loads((functions / "chain" / "evidence.json").read_text())
    assert [row["step"] for row in index["links"]] == ["objective", "run", "change", "candidate", "comparison"]
    assert index["missing"] == ["incident", "finding"]
    assert evidence.verify(functions / "chain", value["evidence"]["root_sha256"]) == []
    kept = json.loads((functions / "chain" / "comparison.json").read_text())
    assert len(kept["samples"]["b"]) == 20
    assert kept["verdicts"] == value["verdicts"]
    assert "samples" not in value


@pytest.mark.parametrize(
    ("other", "more", "code", "said"),
    [
        (("0.001", "0.5"), [], 4, "output 0.score differs by 0.5"),
        (("nonsense",), [], 1, "could not convert string to float"),
        (("0.001",), ["--url", "http://127.0.0.1:{port}/busy"], 1, "answers 503 to input 0"),
        (("0.001",), ["--settle", "1"], 64, "leaves nothing of a block"),
        (("0.001",), ["--inputs", "none.jsonl"], 1, "cannot be read"),
        (("0.001",), ["--gate", "p50"], 64, "METRIC:PERCENT%"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(command, functions, capsys, other, more, code, said):
    words = ["ab", "--a", command(0.001), "--b", command(*other), "--inputs", "inputs.jsonl", *SHORT, *more]
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    out = capsys.readouterr()
    assert status == code
    assert said in out.out + out.err
    assert len(out.err.strip().splitlines()) <= 5


def test_a_command_that_cannot_be_told_where_to_listen_is_refused(functions, capsys):
    assert main(["ab", "--a", "true", "--b", "true {port}", *SHORT]) == 1
    assert "has no {port}" in capsys.readouterr().err
