"""Merging slots, and evidence that cannot be used."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from inferscope.diagnose import attribute, merge, read_documents
from inferscope.diagnose.evidence import quantile_ns
from inferscope.errors import EvidenceError


def test_slots_add_up_to_the_service(service, requests, document):
    half = np.arange(len(requests.wall)) % 2 == 0
    edges = [20 * service.MS]
    parts = [
        service.evidence(requests.select(half), edges),
        service.evidence(requests.select(~half), edges, slot=1, order=[0, 1, 6, 5, 4, 3, 2]),
    ]
    whole, added = merge([document], "score"), merge(parts, "score")
    assert added.count == whole.count
    assert added.violations == whole.violations
    assert added.latency == whole.latency
    assert np.array_equal(added.band_ids, whole.band_ids)
    assert np.array_equal(added.band_sums, whole.band_sums)
    assert np.array_equal(added.blocks.tail_counts, whole.blocks.tail_counts)
    assert np.array_equal(added.blocks.tail_sums, whole.blocks.tail_sums)
    assert attribute(added) == attribute(whole)
    assert added.slots == 2


def test_columns_beyond_the_limit_become_other(document):
    wide = copy.deepcopy(document)
    wide["columns"] += [["stage", f"s{i}"] for i in range(57)]
    entry = wide["classes"][0]
    for sums in entry["bands"]["sums"]:
        sums += [0] * 57
    first = merge([wide], "score")
    assert len(first.columns) == 64
    other = copy.deepcopy(document)
    other["columns"][2] = ["stage", "renamed"]
    both = merge([wide, other], "score")
    assert len(both.columns) == 64
    renamed = sum(sums[2] for sums in entry["bands"]["sums"])
    assert both.band_sums[:, 1].sum() == renamed


def test_reservoir_rows_sum_to_their_wall(document):
    sample = merge([document], "score").reservoir
    assert np.allclose(sample.vectors.sum(axis=1), sample.wall_ns)


def test_edge_rows_come_right_after_their_band(service, document):
    horizon = merge([document], "score")
    assert 216 in horizon.band_ids
    assert np.all(np.diff(horizon.band_lower) > 0)
    assert horizon.band_lower[list(horizon.band_ids).index(216)] == 20 * service.MS + 1


def test_spans_move_to_wall_time_and_merged_columns(service, document):
    record = document["classes"][0]["slowest"][0]
    found = merge([document], "score").slowest[0]
    assert found.start_unix_ns == record["start_ns"] + service.OFFSET
    assert found.spans[0].start_ns == record["spans"][0][1] + service.OFFSET
    named = copy.deepcopy(document)
    fields = ("column", "start_ns", "end_ns", "parent", "thread_id", "flags", "aux")
    for entry in named["classes"][0]["slowest"]:
        entry["spans"] = [dict(zip(fields, span, strict=True)) for span in entry["spans"]]
    assert merge([named], "score").slowest == merge([document], "score").slowest


def test_percentiles_are_those_of_the_requests(requests, document):
    latency = merge([document], "score").latency
    for q in (0.5, 0.95, 0.99, 0.999):
        assert quantile_ns(latency, q) == pytest.approx(np.quantile(requests.wall, q, method="inverted_cdf"), rel=2e-3)


@pytest.mark.parametrize(("count", "q", "known"), [(99, 0.99, False), (100, 0.99, True), (1, 0.5, False), (2, 0.5, True), (0, 0.5, False)])
def test_percentiles_need_requests(count, q, known):
    latency = [(1000.0, 1001.0, count)] if count else []
    assert (quantile_ns(latency, q) is not None) is known


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["classes"].clear(), "no evidence about the request 'score'"),
        (lambda d: d.pop("columns"), "KeyError"),
        (lambda d: d["classes"][0]["bands"]["counts"].pop(), "ValueError"),
        (lambda d: d["classes"][0]["bands"]["ids"].__setitem__(0, 219), "damaged"),
        (lambda d: d["classes"][0]["reservoir"][0].pop("wall_ns"), "KeyError"),
        (lambda d: d["classes"][0]["bands"]["sums"][0].append(1), "IndexError"),
        (lambda d: d.__setitem__("from_ns", None), "TypeError"),
    ],
)
def test_damage_is_one_error(document, change, message):
    bad = copy.deepcopy(document)
    change(bad)
    with pytest.raises(EvidenceError, match=message) as caught:
        merge([bad], "score")
    assert "\n" not in str(caught.value)


def test_slots_that_disagree_are_refused(document):
    other = copy.deepcopy(document)
    other["classes"][0]["edges_ns"] = [1]
    with pytest.raises(EvidenceError, match="edges"):
        merge([document, other], "score")
    other = copy.deepcopy(document)
    other["classes"][0]["latency"]["digits"] = 2
    with pytest.raises(EvidenceError, match="layout"):
        merge([document, other], "score")


def test_newest_document_of_each_slot_is_read(tmp_path):
    for slot, n in (("0", 1), ("0", 2), ("0", 10), ("1", 1)):
        (tmp_path / f"evidence-{slot}-{n}.json").write_text(json.dumps({"schema": 1, "slot": slot, "n": n}))
    (tmp_path / "evidence-x.json").write_text("not evidence")
    assert [(d["slot"], d["n"]) for d in read_documents(tmp_path)] == [("0", 10), ("1", 1)]


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"schema": 99}', "schema 99"), ("{", "damaged JSON"), ("[]", "expected a JSON object"), ("", "damaged JSON")],
)
def test_unusable_file_is_named(tmp_path, content, message):
    (tmp_path / "evidence-0-1.json").write_text(content)
    with pytest.raises(EvidenceError, match=f"evidence-0-1.json: .*{message}"):
        read_documents(tmp_path)
