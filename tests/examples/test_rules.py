"""The rule engine of the risk scoring example."""

from __future__ import annotations

import json

import pytest

from examples.risk_scoring import rules

FACTS = {"score": 0.01, "stress": 0.02, "student": 0.0, "balance": 500.0, "income": 40_000.0, "debt_ratio": 0.0125}


@pytest.fixture
def stored() -> tuple[rules.Rule, ...]:
    return rules.parse(rules.RuleStore().fetch(0))


@pytest.mark.parametrize(
    ("facts", "decision", "reasons"),
    [
        ({}, "approve", ()),
        ({"score": 0.6, "stress": 0.9}, "decline", ("likely-default", "likely-default-under-stress", "doubtful", "doubtful-under-stress")),
        ({"balance": 2300.0}, "review", ("balance-above-limit",)),
        ({"student": 1.0, "balance": 1600.0}, "review", ("student-with-large-balance",)),
        ({"balance": 1600.0}, "approve", ()),
        ({"income": 500.0, "score": 0.2}, "decline", ("doubtful", "no-income")),
    ],
)
def test_the_strictest_rule_that_holds_decides(stored, facts, decision, reasons):
    assert rules.apply(stored, FACTS | facts) == rules.Verdict(decision, reasons)


def test_a_rule_that_nobody_understands_is_refused():
    with pytest.raises(ValueError, match="unknown decision 'perhaps'"):
        rules.parse(json.dumps([{"name": "x", "if": [], "then": "perhaps"}]))
    with pytest.raises(KeyError):
        rules.parse(json.dumps([{"name": "x", "if": [["score", "~", 1]], "then": "review"}]))
