"""The rule engine: what the score and the applicant's figures decide.

Rules are data in a store that is far away; loading them takes a while, applying them microseconds.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Rule", "RuleStore", "Verdict", "apply", "parse"]

_COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">": lambda left, right: left > right,
    ">=": lambda left, right: left >= right,
    "<": lambda left, right: left < right,
}
_STRICTNESS: Final = ("approve", "review", "decline")
_STORED: Final = json.dumps(
    [
        {"name": "likely-default", "if": [["score", ">=", 0.5]], "then": "decline"},
        {"name": "likely-default-under-stress", "if": [["stress", ">=", 0.8]], "then": "decline"},
        {"name": "doubtful", "if": [["score", ">=", 0.15]], "then": "review"},
        {"name": "doubtful-under-stress", "if": [["stress", ">=", 0.4]], "then": "review"},
        {"name": "balance-above-limit", "if": [["balance", ">", 2200.0]], "then": "review"},
        {"name": "debt-above-income", "if": [["debt_ratio", ">", 0.2]], "then": "review"},
        {"name": "student-with-large-balance", "if": [["student", ">", 0.5], ["balance", ">", 1500.0]], "then": "review"},
        {"name": "no-income", "if": [["income", "<", 1000.0]], "then": "decline"},
    ]
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: when all conditions hold, the decision is at least `then`."""

    name: str
    conditions: tuple[tuple[str, Callable[[float, float], bool], float], ...]
    then: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules say."""

    decision: str
    """`approve`, `review` or `decline`: the strictest of the rules that hold."""
    reasons: tuple[str, ...]
    """Names of the rules that hold, in the store's order."""


class RuleStore:
    """Where rules come from."""

    def fetch(self, milliseconds: float) -> str:
        """The rules as JSON, after the time that the store takes to answer."""
        time.sleep(milliseconds / 1e3)
        return _STORED


def parse(text: str) -> tuple[Rule, ...]:
    """Rules ready to apply.

    Raises:
        KeyError: an unknown comparison or a missing field.
        ValueError: not JSON, or an unknown decision.
    """
    rules: list[Rule] = []
    for entry in json.loads(text):
        if entry["then"] not in _STRICTNESS:
            raise ValueError(f"rule {entry['name']}: unknown decision {entry['then']!r}")
        conditions = tuple((field, _COMPARISONS[comparison], float(value)) for field, comparison, value in entry["if"])
        rules.append(Rule(entry["name"], conditions, entry["then"]))
    return tuple(rules)


def apply(rules: tuple[Rule, ...], facts: Mapping[str, Any]) -> Verdict:
    """The strictest decision of the rules that hold for `facts`."""
    held = [rule for rule in rules if all(test(facts[field], value) for field, test, value in rule.conditions)]
    decision = max((rule.then for rule in held), key=_STRICTNESS.index, default=_STRICTNESS[0])
    return Verdict(decision, tuple(rule.name for rule in held))
