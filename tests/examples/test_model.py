"""The data and the model of the risk scoring example."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from examples.risk_scoring import data, model


def test_the_data_are_those_of_the_book(cache):
    rows = data.load(cache)
    assert rows.features.shape == (10_000, 3)
    assert int(rows.defaulted.sum()) == 333
    assert set(np.unique(rows.features[:, 0])) == {0.0, 1.0}


def test_held_out_rows_are_not_trained_on(cache):
    rows = data.load(cache)
    seen, held = data.split(rows, 5)
    assert (len(seen.defaulted), len(held.defaulted)) == (8_000, 2_000)
    # balance and income together tell the rows apart
    assert not {tuple(row) for row in seen.features[seen.features[:, 1] > 0]} & {tuple(row) for row in held.features}


def test_the_model_ranks_unseen_rows_well(cache):
    trained = model.load_or_train(cache)
    assert not trained.fresh
    assert 0.9 < trained.auc < 0.99
    _, held = data.split(data.load(cache), 0)
    shuffled = np.random.default_rng(0).permutation(held.defaulted)
    with torch.inference_mode():
        scores = trained.model(torch.from_numpy(held.features)).numpy()
    assert model.auc(scores, shuffled) == pytest.approx(0.5, abs=0.1), "the measure itself sees no skill where there is none"


def test_training_follows_its_seed_and_leaves_the_global_one_alone(cache):
    seen, _ = data.split(data.load(cache), 0)
    few = data.Dataset(seen.features[:500], seen.defaulted[:500])
    before = torch.random.get_rng_state()
    weights = [model.train(few, seed).state_dict()["layers.0.weight"] for seed in (1, 1, 2)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("scores", "positive", "expected"),
    [([1, 2, 3, 4], [0, 0, 1, 1], 1.0), ([1, 2, 3, 4], [1, 1, 0, 0], 0.0), ([1, 1, 1, 1], [0, 1, 0, 1], 0.5), ([1, 2, 3], [1, 0, 1], 0.5)],
)
def test_auc_of_small_cases(scores, positive, expected):
    assert model.auc(np.array(scores, np.float32), np.array(positive, bool)) == expected


def test_auc_agrees_with_counting_pairs():
    draw = np.random.default_rng(3)
    scores, positive = draw.integers(0, 20, 200).astype(np.float32), draw.random(200) < 0.3
    pairs = scores[positive][:, None] - scores[~positive][None, :]
    assert model.auc(scores, positive) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_auc_needs_both_kinds():
    with pytest.raises(ValueError, match="both kinds"):
        model.auc(np.ones(3, np.float32), np.ones(3, bool))


def test_bodies_are_applicants_of_the_data(cache):
    rows = data.load(cache)
    drawn = data.bodies(rows, 20, seed=1)
    assert drawn == data.bodies(rows, 20, seed=1) != data.bodies(rows, 20, seed=2)
    balances = {round(float(value), 2) for value in rows.features[:, 1]}
    assert all(json.loads(body)["balance"] in balances for body in drawn)
