"""What counts as a wrong output."""

from __future__ import annotations

import math

import numpy as np
import pytest

from inferscope.bench import golden
from inferscope.bench.golden import agree, tolerance
from inferscope.errors import EvidenceError, InferscopeError


@pytest.mark.parametrize(("precision", "relative", "correct"), [
    ("fp32", 1e-6, True), ("fp32", 1e-4, False), ("tf32", 5e-4, True), ("tf32", 5e-3, False),
    ("fp16", 5e-3, True), ("fp16", 5e-2, False), ("bf16", 1e-2, True), ("bf16", 1e-1, False), ("unknown", 1e-4, False),
])  # fmt: skip
def test_the_tolerance_follows_the_precision(precision, relative, correct):
    expected = [[100.0, 200.0], {"score": 300.0}]
    actual = [[100.0 * (1 + relative), 200.0], {"score": 300.0 * (1 + relative)}]
    assert agree(expected, actual, tolerance(precision)).correct is correct


@pytest.mark.parametrize(
    ("actual", "said"),
    [
        ([math.nan, 2.0], "holds nan"),
        ([math.inf, 2.0], "holds inf"),
        ([1.0], "has 1 elements, golden has 2"),
        ([[1.0], [2.0]], "output 0[0] is list, golden is float"),
        ("1.0, 2.0", "is str, golden is list"),
        (None, "is NoneType"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_nan_and_shape_are_wrong_whatever_the_tolerance(actual, said, precision):
    found = agree([[1.0, 2.0]], [actual], tolerance(precision))
    assert not found.correct
    assert said in found.text()


def test_a_lone_nan_is_wrong_too():
    assert not agree([1.0], [math.nan], tolerance("fp32", rtol=1e9, atol=1e9)).correct


def test_labels_decide_for_quantised_models():
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 1, (200, 10)).tolist()
    near = [[value + 0.001 for value in row] for row in scores]
    assert agree(scores, near, tolerance("int8")).correct
    flipped = [row[::-1] if index < 4 else row for index, row in enumerate(scores)]
    found = agree(scores, flipped, tolerance("int8"))
    assert not found.correct
    assert found.to_json()["label_agreement"] == pytest.approx(0.98)
    assert "label agreement 98.00 %" in found.text()


def test_scores_of_quantised_models_stay_within_a_band():
    rng = np.random.default_rng(1)
    scores = rng.uniform(0, 1, (100, 10)).tolist()
    for row in scores:
        row[3] = 10.0  # the label is never in doubt
    drifted = [[value + (0.3 if place in {0, 1} else 0.01) for place, value in enumerate(row)] for row in scores]
    found = agree(scores, drifted, tolerance("int8"))
    assert found.to_json()["label_agreement"] == 1
    assert found.to_json()["band_agreement"] == pytest.approx(0.8)
    assert not found.correct
    assert "scores in band 80.00 %" in found.text()
    assert agree(scores, [[value + 0.01 for value in row] for row in scores], tolerance("int8")).correct


def test_golden_outputs_of_another_model_are_wrong():
    rule = tolerance("fp32")
    answers = [{"score": 0.2}, {"score": 0.4}]
    for other, said in (
        ([{"label": 0.2}, {"label": 0.4}], "has other keys: label, score"),
        ([{"score": [0.2, 0.2]}, {"score": [0.4, 0.4]}], "output 0.score is float, golden is list"),
        ([{"score": 0.2}], "2 outputs, golden has 1"),
        ([0.2, 0.4], "output 0 is dict, golden is float"),
    ):
        found = agree(other, answers, rule)
        assert not found.correct
        assert said in found.text()


def test_keys_words_and_flags_must_be_equal():
    rule = tolerance("fp32")
    assert agree([{"ok": True, "why": "income"}], [{"ok": True, "why": "income"}], rule).correct
    assert not agree([{"ok": True}], [{"ok": False}], rule).correct
    assert not agree([{"ok": True}], [{"ok": 1}], rule).correct
    assert "has other keys: extra" in agree([{"a": 1}], [{"a": 1, "extra": 2}], rule).text()
    assert "2 outputs, golden has 1" in agree([1], [1, 2], rule).text()
    assert not agree([], [], rule).correct


def test_outputs_become_plain_values():
    class Tensor:
        def detach(self):
            return self

        def cpu(self):
            return np.array([[1.5, 2.5]])

    assert golden.plain({"a": Tensor(), "b": (1, np.float32(2.0)), "c": None}) == {"a": [[1.5, 2.5]], "b": [1, 2.0], "c": None}
    with pytest.raises(InferscopeError, match="of type object"):
        golden.plain([object()])


def test_golden_files_are_read_back_and_bad_ones_refused(tmp_path):
    path = tmp_path / "golden.json"
    golden.save(path, [[0.1, 0.2]], precision="fp16", inputs_sha256="ab")
    assert golden.read(path)["outputs"] == [[0.1, 0.2]]
    with pytest.raises(InferscopeError, match="holds NaN"):
        golden.save(path, [[math.nan]], precision="fp32", inputs_sha256=None)
    with pytest.raises(InferscopeError, match="there are no outputs"):
        golden.save(path, [], precision="fp32", inputs_sha256=None)
    for content, said in (
        ("{", "not JSON"),
        ("[]", "no golden outputs"),
        ('{"kind": "inferscope.golden", "schema": 2, "outputs": []}', "schema 2"),
    ):
        path.write_text(content)
        with pytest.raises(EvidenceError, match=said):
            golden.read(path)
    with pytest.raises(EvidenceError, match="cannot be read"):
        golden.read(tmp_path / "none.json")
