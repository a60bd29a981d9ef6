"""Options of `bench` beyond the usual: lengths, precision, levels and blocks, pages and time lines, golden arrays, single gates."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from inferscope.bench import golden, inprocess, lengths, metrics, precision, runs, stats
from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.cli import main
from inferscope.errors import ConfigurationError, EvidenceError, InferscopeError
from inferscope.report import chart, load_html, load_trace

MODULE = """
import time
import inferscope
seen = []
def sized(input_len=1):
    with inferscope.stage("think"):
        time.sleep(input_len / 1e6)
    return [float(input_len)]
def plain():
    return 1.0
"""


def status_of(*words):
    try:
        return main(list(map(str, words)))
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def sized(tmp_path, monkeypatch):
    (tmp_path / "sized_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lengths_are_read_and_drawn_by_the_seed(tmp_path):
    assert lengths.parse_lengths("128").fixed == 128
    found = lengths.parse_lengths("uniform:64-256")
    drawn = found.draw(20_000, 7)
    assert (drawn.min(), drawn.max()) == (64, 256)
    assert drawn.mean() == pytest.approx(160, abs=2)
    assert np.array_equal(drawn, found.draw(20_000, 7))
    assert not np.array_equal(drawn, found.draw(20_000, 8))
    path = tmp_path / "lengths.txt"
    path.write_text("10\n10\n10\n40\n")
    recorded = lengths.parse_lengths(str(path))
    values, counts = np.unique(recorded.draw(8000, 1), return_counts=True)
    assert values.tolist() == [10, 40]
    assert counts[0] / 8000 == pytest.approx(0.75, abs=0.02)
    assert recorded.sha256 != found.sha256 == lengths.parse_lengths("uniform:64-256").sha256


@pytest.mark.parametrize("text", ["0", "uniform:9-3", "uniform:0-3", "-4", "nowhere.txt", ""])
def test_lengths_that_say_nothing_are_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match="uniform:LOW-HIGH"):
        lengths.parse_lengths(text)


def test_a_function_gets_a_length_of_its_own_each_time(sized, monkeypatch):
    monkeypatch.syspath_prepend(sized)
    settings = {"input_len": 5, "input_lens": [100, 300, 200]}
    found = inprocess.measure(
        LoadPlan("", 1.0, 5.0, mode="closed", connections=1, requests=9), "sized_module:sized", settings, [], golden=True
    )
    assert found.outputs == [[5.0]]
    took = (found.load.done_ns - found.load.sent_ns) / 1e3
    assert all(took[1::3] > 300)
    assert found.load.fine.all()


def run_of(count, rate=100.0, noise=0.3, start_ns=1, seed=0):
    rng = np.random.default_rng(seed)
    intended = (np.arange(count) * (1e9 / rate)).astype(np.int64) + start_ns
    done = intended + (rng.normal(10, noise, count) * 1e6).astype(np.int64)
    return LoadResult(LoadPlan("", rate, count / rate), intended, intended.copy(), intended.copy(), done, np.full(count, 200))


def test_rounds_go_on_until_a_percentile_is_known():
    asked = precision.parse_precision("p95±1%")
    plans, now = [], [0.0]

    def measured(plan):
        plans.append(plan)
        now[0] += plan.seconds
        return run_of(int(plan.rate * plan.seconds), noise=1.0, start_ns=int(now[0] * 1e9), seed=plan.seed)

    plan = LoadPlan("", 100.0, 4.0)
    found = precision.rounds(measured, plan, asked.reached, 600.0, lambda: now[0])
    assert asked.reached(found)
    assert [each.seconds for each in plans] == [4.0 * max(2**index // 2, 1) for index in range(len(plans))]
    assert len({each.seed for each in plans}) == len(plans) > 2
    assert not asked.reached(measured(plan))
    # The time is over: less than was asked for, and it is said.
    plans.clear()
    short = precision.rounds(measured, plan, lambda _: False, 20.0, lambda: now[0])
    assert sum(each.seconds for each in plans) == pytest.approx(20.0)
    assert precision.Precision("p99±0.1%", "p99", 0.001).to_json(short, 0, None)["reached"] is False
    stopped = run_of(50)
    plans.clear()
    given_up = precision.rounds(
        lambda _: LoadResult(plan, *(getattr(stopped, name) for name in runs_columns()), stopped="gone"), plan, lambda _: False, 99.0
    )
    assert given_up.stopped == "gone"


def runs_columns():
    return ("intended_ns", "launched_ns", "sent_ns", "done_ns", "status")


def test_rounds_are_put_together_without_the_pause_between():
    first, second = run_of(1000), run_of(1000, start_ns=60_000_000_000, seed=2)
    second.sent_ns[900] = second.done_ns[900] = second.status[900] = 0  # never answered
    found, back = precision.stitched(first, second, first.plan)
    assert found.status.size == 1950  # half a second is left out
    gaps = np.diff(found.intended_ns)
    assert gaps.max() == pytest.approx(10_000_000, abs=2)
    assert (found.done_ns - found.intended_ns)[1000] == (second.done_ns - second.intended_ns)[50]
    assert back == pytest.approx(60e9 + 0.5e9 - 10e9, abs=1e7)
    assert found.done_ns[1850] == 0
    law = metrics.little(found)
    assert law["holds"]
    assert metrics.describe(found)["throughput"]["requests_per_s"] == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize("text", ["p99", "p42±5%", "p99±0%", "p99±200%", "p99±1.2.3%", "mean±5%"])
def test_a_precision_that_says_nothing_is_refused(text):
    assert precision.parse_precision(" p99+-5% ").share == 0.05
    with pytest.raises(ConfigurationError, match="as in p99±5%"):
        precision.parse_precision(text)


def test_level_and_blocks_decide_the_interval():
    result = run_of(4000)
    latency, at = (result.done_ns - result.intended_ns) / 1e6, result.intended_ns
    usual, wide = (stats.estimate(latency, at, 0.95, level=level) for level in (0.95, 0.999))
    assert wide.low < usual.low < usual.value < usual.high < wide.high
    assert usual.method == "40 blocks of 1 s"
    assert stats.estimate(latency, at, 0.95, blocks=25).method == "25 blocks of 1.6 s"
    assert wide.needed > usual.needed
    rows = metrics.describe(result, level=0.9)["latency"]
    assert rows["p95"]["level"] == 0.9
    assert "level" not in metrics.describe(result)["latency"]["p95"]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.names, self.fetched = [], [], []

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        if tag not in {"meta", "line", "polyline"}:
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in {"src", "href"}]

    def handle_startendtag(self, tag, attributes):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_one_run_with_every_file_that_it_can_leave(sized, capsys):
    words = ["bench", "sized_module:sized", "--input-len", "uniform:1000-3000", "--seed", 7, "--repeat", 80, "--warmup", 0, "--baseline", 0]
    files = ["--html", "r.html", "--perfetto", "r.json", "--hgrm", "r.hgrm", "-o", "run.json", "--save-golden", "g.npz", "--json", "d.json"]
    assert status_of(*words, "--ci", 90, "--rtol", "auto", "--atol", "1e-3", *files) == 0
    assert "[" in capsys.readouterr().out
    value = json.loads(Path("d.json").read_text())
    assert value["settings"]["input_len"] == "uniform:1000-3000"
    assert value["settings"]["input_len_sha256"] == lengths.parse_lengths("uniform:1000-3000").sha256
    assert value["metrics"]["latency"]["p50"]["level"] == 0.9
    latency = (runs.read(Path("run.json")).load.done_ns - runs.read(Path("run.json")).load.sent_ns) / 1e6
    assert np.quantile(latency, 0.9) - np.quantile(latency, 0.1) > 0.8  # lengths vary from 1 to 3 ms
    page, tags = Path("r.html").read_text(), Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.fetched == []
    assert "script" not in tags.names
    assert tags.names.count("svg") >= 2
    assert "sized_module:sized" in page
    assert f"{value['metrics']['latency']['p50']['ms']:.2f} ms" in page
    trace = json.loads(Path("r.json").read_text())["traceEvents"]
    ours = [event for event in trace if event["ph"] == "X" and event["name"] == "request" and event["pid"] == 1_000_000]
    assert len(ours) == 80
    inside = [event for event in trace if event["ph"] == "X" and event["name"] == "think"]
    assert inside, "the target's own stages are beside the requests"
    slowest = max(ours, key=lambda event: event["dur"])
    assert any(slowest["ts"] - 500 <= event["ts"] <= slowest["ts"] + slowest["dur"] + 500 for event in inside)  # one clock
    assert "Total count    =           80" in Path("r.hgrm").read_text()
    assert "Total count" in Path("r.corrected.hgrm").read_text()
    assert len(golden.read(Path("g.npz"))["outputs"]) == 1
    assert status_of("compare", "run.json", "run.json", "--metric", "p95", "--tolerance", "7%", "--json", "c.json") in {0, 3}
    assert json.loads(Path("c.json").read_text())["gates"] == [{"metric": "p95", "tolerance": pytest.approx(0.07)}]


def test_a_time_line_keeps_overlapping_requests_apart():
    ms = 1_000_000
    rows = [
        (0, 10 * ms, 10 * ms, 30 * ms, 200),
        (1, 20 * ms, 25 * ms, 50 * ms, 200),
        (2, 35 * ms, 35 * ms, 0, 0),
        (3, 60 * ms, 60 * ms, 61 * ms, 503),
    ]
    curve = [{"at_s": 0.5, "cpu_cores": 0.25, "resident_bytes": None}]
    inside = [{"ph": "X", "name": "think\x01", "ts": 12_000, "dur": 1.0, "pid": 0, "tid": 5}]
    text = load_trace.render(rows, unix_offset_ns=0, name="m:f", curve=curve, curve_began_ns=10 * ms, inside=inside)
    assert text.isascii()
    events = json.loads(text)["traceEvents"]
    lanes = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == 1_000_000 and event["name"].endswith("request"):
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) == 2
    for spans in lanes.values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        "request",
        "failed request",
        "waits to be sent",
        "service",
        "think\x01",
    }
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["ts"], counter["args"]["value"]) == (510_000, 0.25)


def test_a_chart_draws_what_is_known_and_escapes_the_rest():
    assert chart.chart("t", "ms", [chart.Line("a", [(0.0, None)])], []) == ""
    drawn = chart.chart(
        "P99 <x>", "ms", [chart.Line("a&b", [(0.0, 1.0), (1.0, None), (2.0, 4.0), (3.0, 2.0)])], [(0.0, "0 s"), (9.0, "9 s")]
    )
    figure = ET.fromstring(drawn)
    lines = figure.findall(".//polyline")
    assert len(lines) == 2  # a gap is not bridged
    heights = [float(point.split(",")[1]) for point in lines[1].get("points").split()]
    assert heights[0] < heights[1]  # 4 lies above 2
    assert [each.text for each in figure.findall(".//text")] == ["0", "2", "4", "0 s"]
    page = load_html.render(
        load_html.Page("a <b>", "INVALID: x", False, ("load",), [("<1>",)], ["r"], rungs=[(1.0, 10.0, 2.0), (2.0, 20.0, None)])
    )
    assert "<b>" not in page
    assert "&lt;1&gt;" in page


def test_golden_arrays_are_kept_and_those_of_others_read(tmp_path):
    outputs = [[1.0, 2.0], [3.0, 4.5], 7]
    golden.save(tmp_path / "ours.npz", outputs, precision="fp16", inputs_sha256="ab")
    found = golden.read(tmp_path / "ours.npz")
    assert (found["outputs"], found["precision"], found["inputs_sha256"]) == (outputs, "fp16", "ab")
    np.savez(tmp_path / "theirs.npz", np.array([[1.0, 2.0], [3.0, 4.0]]))
    theirs = golden.read(tmp_path / "theirs.npz")
    assert theirs["outputs"] == [[1.0, 2.0], [3.0, 4.0]]
    assert "inputs_sha256" not in theirs
    np.savez(tmp_path / "many.npz", *[np.full(2, index) for index in range(11)])
    assert [row[0] for row in golden.read(tmp_path / "many.npz")["outputs"]] == list(range(11))
    with pytest.raises(InferscopeError, match="output 0 is no array of numbers"):
        golden.save(tmp_path / "text.npz", [{"score": 1.0}], precision="fp32", inputs_sha256=None)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "ours.npz").read_bytes()[:60])
    with pytest.raises(EvidenceError, match="is damaged"):
        golden.read(tmp_path / "cut.npz")
    with pytest.raises(EvidenceError, match="cannot be read"):
        golden.read(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "m:f", "--until", "soon"], "as in p99±5%"),
        (["bench", "m:f", "--until", "p99±5%", "--find-knee"], "one load by our own generators"),
        (["bench", "m:f", "--input-len", "uniform:9-3"], "uniform:LOW-HIGH"),
        (["bench", "http://127.0.0.1:9/", "--input-len", "uniform:3-9"], "elsewhere --inputs decides how long inputs are"),
        (["bench", "m:f", "--blocks", "5"], "at least 20"),
        (["bench", "m:f", "--ci", "100"], "percent from 50 to 99.9"),
        (["bench", "m:f", "--rtol", "fine"], "neither auto nor a number"),
        (["compare", "a.json", "b.json", "--tolerance", "5%"], "--tolerance belongs to --metric"),
        (["compare", "a.json", "b.json", "--gate", "p50:3%", "--metric", "p99"], "--gate says all that"),
        (["ab", "--a", "x {port}", "--b", "y {port}", "--metric", "speed"], "METRIC:PERCENT%"),
        (["ab", "--a", "x {port}", "--b", "y {port}", "--pairs", "5"], "at least 20"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(words, said, capsys):
    assert status_of(*words) == 64
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
