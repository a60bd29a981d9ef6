"""Verdicts: which words, and how often they are wrong on a noisy service that did not change."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from inferscope.bench import compare, flips
from inferscope.bench.compare import Block, Gate, judge, parse_gates
from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.errors import ConfigurationError

GATES = parse_gates(compare.GATES)


def noisy(seed, pairs=20, slower=1.0, requests=250):
    """Pairs of blocks of one service on a machine that drifts."""
    rng = np.random.default_rng(seed)
    drift = np.exp(np.cumsum(rng.normal(0, 0.02, pairs)))

    def block(level):
        latency = rng.lognormal(math.log(8 * level), 0.2, requests)
        for start in rng.integers(0, requests, rng.poisson(3)):
            latency[start : start + 5] += rng.exponential(6.0) * level
        return Block(latency)

    return [block(level) for level in drift], [block(level * slower) for level in drift]


def words(seed, **kwargs):
    return {verdict.metric: verdict.word for verdict in judge(*noisy(seed, **kwargs), GATES)}


def test_the_same_service_is_rarely_called_changed():
    changed = dict.fromkeys(("p50", "p95", "p99", "error_rate"), 0)
    for seed in range(40):
        for metric, word in words(seed).items():
            changed[metric] += word in {"IMPROVED", "REGRESSED"}
    assert max(changed.values()) <= 5, changed  # 5 % of 40 is 2; more than 5 has a chance of 1.4 %


def test_a_change_is_found_and_named_by_its_direction():
    assert {words(seed, slower=1.10)["p50"] for seed in range(5)} == {"REGRESSED"}
    assert {words(seed, slower=0.80)["p50"] for seed in range(5)} == {"IMPROVED"}
    tail = [words(seed, slower=1.25, requests=500)["p99"] for seed in range(10)]
    assert "NO CHANGE" not in tail
    assert tail.count("REGRESSED") >= 6


def test_the_interval_contains_the_true_change():
    inside = 0
    for seed in range(30):
        verdict = judge(*noisy(seed, slower=1.15), GATES[:1])[0]
        inside += verdict.low <= 0.15 <= verdict.high
    assert inside >= 25


def test_a_sharp_measurement_of_no_change_says_so_and_a_blurred_one_does_not():
    rng = np.random.default_rng(0)
    same = [Block(rng.normal(10, 0.1, 500)) for _ in range(40)]
    assert judge(same[:20], same[20:], [Gate("p50", 0.03)])[0].word == "NO CHANGE"
    blurred = [Block(rng.normal(10 * level, 0.1, 500)) for level in rng.lognormal(0, 0.3, 40)]
    verdict = judge(blurred[:20], blurred[20:], [Gate("p50", 0.03)])[0]
    assert verdict.word == "INCONCLUSIVE"
    assert verdict.high - verdict.low > 0.06


def test_a_real_difference_inside_the_tolerance_is_no_change():
    rng = np.random.default_rng(1)
    base = [Block(rng.normal(10.0, 0.05, 500)) for _ in range(20)]
    candidate = [Block(rng.normal(10.1, 0.05, 500)) for _ in range(20)]
    verdict = judge(base, candidate, [Gate("p50", 0.03)])[0]
    assert verdict.word == "NO CHANGE"
    assert verdict.low > 0


def test_pairing_takes_out_what_the_machine_does():
    rng = np.random.default_rng(2)
    levels = rng.lognormal(0, 0.4, 20)
    base = [Block(rng.normal(10 * level, 0.1, 300)) for level in levels]
    candidate = [Block(rng.normal(11 * level, 0.1, 300)) for level in levels]
    paired = judge(base, candidate, [Gate("mean", 0.03)])[0]
    alone = judge(base, candidate, [Gate("mean", 0.03)], paired=False)[0]
    assert paired.word == "REGRESSED"
    assert alone.word == "INCONCLUSIVE"
    assert (paired.kind, alone.kind) == ("interleaved", "sequential")


def test_too_few_blocks_or_requests_are_no_verdict():
    base, candidate = noisy(0, pairs=19)
    verdict = judge(base, candidate, GATES)[0]
    assert verdict.word == "INCONCLUSIVE"
    assert verdict.text() == "p50 INCONCLUSIVE: needs 20 pairs of blocks, there are 19"
    base, candidate = noisy(0, requests=100)
    assert judge(base, candidate, [Gate("p999", 0.1)])[0].why == "needs ≥ 3688 answered requests, there are 2000"
    with pytest.raises(ValueError, match="make no pairs"):
        judge(base[:3], candidate, GATES)


def test_a_version_that_fails_is_not_faster():
    rng = np.random.default_rng(4)
    base = [Block(rng.normal(10, 0.1, 200)) for _ in range(20)]
    failing = [Block(rng.normal(5, 0.1, 150), failed=50) for _ in range(20)]
    found = {verdict.metric: verdict for verdict in judge(base, failing, GATES)}
    assert found["error_rate"].word == "REGRESSED"
    assert found["error_rate"].change == pytest.approx(0.25)
    assert found["p50"].word == "INCONCLUSIVE"
    assert "prove nothing" in found["p50"].text()
    dead = [Block(np.empty(0), failed=200) for _ in range(20)]
    found = {verdict.metric: verdict for verdict in judge(base, dead, GATES)}
    assert (found["error_rate"].word, found["p50"].word) == ("REGRESSED", "INCONCLUSIVE")
    assert compare.exit_code(list(found.values())) == 1


def far_off(count):
    """The same service twice; `count` blocks of the second one fell into a time when the machine was slow."""
    rng = np.random.default_rng(7)
    base = [Block(rng.lognormal(2.0, 0.2, 200), 0, 10.0) for _ in range(20)]
    return base, [Block(rng.lognormal(2.0, 0.2, 200) * (10.0 if index < count else 1.0), 0, 10.0) for index in range(20)]


def test_a_few_far_off_blocks_are_no_difference():
    found = judge(*far_off(4), [Gate("p95", 0.05)])[0]
    assert found.change > 0.05
    assert found.low < 0, "four pairs on the same side come about by chance in 2 / 2^4 of all cases"
    assert found.word == "INCONCLUSIVE"
    assert judge(*far_off(12), [Gate("p95", 0.05)])[0].word == "REGRESSED"


def test_the_interval_excludes_no_difference_exactly_when_chance_is_excluded():
    """Sums of signed numbers, of which all throws can be counted."""
    pairs = np.array([0.3, 0.1, -0.2, 0.4, 0.25, 0.15, -0.05, 0.35, 0.2, 0.3, 0.1, 0.45])
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=pairs.size)))
    for shift in (0.0, 0.05, 0.1, 0.15):
        values = pairs - shift

        def thrown(taken_off, values=values):
            return signs @ (values - taken_off) / values.size

        reach, chance = flips.reach(thrown, 0.95)
        exact = float((np.abs(thrown(0.0)) >= abs(values.mean()) - 1e-12).mean())
        assert chance == pytest.approx(exact)
        assert (reach < abs(values.mean())) == (exact <= 0.05)
        # The ends of the interval are where an exact test of that change just does not reject it (Fisher's randomisation interval).
        ends = [end for end in np.linspace(-0.3, 0.6, 901) if (np.abs(thrown(end)) >= abs((values - end).mean()) - 1e-12).mean() > 0.05]
        assert values.mean() - reach == pytest.approx(ends[0], abs=0.03)
        assert values.mean() + reach == pytest.approx(ends[-1], abs=0.03)


def test_a_coin_is_thrown_for_each_pair():
    rows = flips.places(20, 0.95, seed=1)
    assert rows.shape == (2000, 40)
    assert (rows[0], rows[1000])[0].tolist() == [1.0] * 20 + [0.0] * 20
    assert (rows[:1000] + rows[1000:] == 1.0).all()  # what one has the other has not
    assert (rows[:, :20] + rows[:, 20:] == 1.0).all()  # one block of each pair
    assert flips.places(20, 0.999, seed=1).shape[0] == 10_000  # five throws lie beyond such an interval


def test_blocks_that_are_shorter_than_stalls_make_no_verdict():
    rng = np.random.default_rng(9)
    base = [Block(rng.lognormal(3.0, 0.2, 300), 0, 0.05) for _ in range(20)]
    candidate = [Block(rng.lognormal(3.5, 0.2, 300), 0, 0.05) for _ in range(20)]
    found = judge(base, candidate, GATES)[0]
    assert found.word == "INCONCLUSIVE"
    assert found.why.startswith("blocks of 0.05 s are too short beside a P99 of ")
    longer = [[Block(block.latency_ms, 0, 0.5) for block in arm] for arm in (base, candidate)]
    assert judge(*longer, GATES)[0].word == "REGRESSED"


def test_more_throughput_is_better():
    rng = np.random.default_rng(6)
    base = [Block(rng.normal(10, 1, 100)) for _ in range(20)]
    more = [Block(rng.normal(10, 1, 150)) for _ in range(20)]
    assert judge(base, more, parse_gates("throughput:5%"))[0].word == "IMPROVED"
    assert judge(more, base, parse_gates("throughput:5%"))[0].word == "REGRESSED"


@pytest.mark.parametrize("text", ["p50", "p50:3", "p98:3%", "p50:-3%", "p50:0%", "p50:1.2.3%", ""])
def test_a_gate_that_says_nothing_is_refused(text):
    with pytest.raises(ConfigurationError, match="METRIC:PERCENT%"):
        parse_gates(text)


def test_looking_again_and_again_spends_no_more_than_five_percent():
    assert compare.look_level(0, 1) == 0.96
    assert compare.look_level(0) == 0.975
    assert sum(1 - compare.look_level(look) for look in range(30)) <= 0.05 + 1e-9


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (["NO CHANGE", "IMPROVED"], 0),
        (["NO CHANGE", "INCONCLUSIVE"], 3),
        (["REGRESSED", "INCONCLUSIVE"], 1),
        (["INCORRECT", "REGRESSED"], 4),
        (["INCOMPARABLE"], 5),
    ],
)
def test_the_exit_code_is_that_of_the_worst(found, code):
    verdicts = [compare.Verdict("p50", word, 1.0, 1.0, 0.0, 0.0, 0.0, 0.95, 0.03, 20, "interleaved") for word in found]
    assert compare.exit_code(verdicts) == code


def run_of(latency_ms, rate=100.0, status=200):
    intended = (np.arange(len(latency_ms)) * (1e9 / rate)).astype(np.int64) + 1
    done = intended + (np.asarray(latency_ms) * 1e6).astype(np.int64)
    return LoadResult(LoadPlan("", rate, len(latency_ms) / rate), intended, intended, intended, done, np.full(len(latency_ms), status))


def test_two_runs_are_cut_into_blocks_and_labelled_sequential():
    rng = np.random.default_rng(8)
    slow, fast = run_of(rng.lognormal(3.0, 0.2, 3000)), run_of(rng.lognormal(2.5, 0.2, 3000))
    blocks = compare.blocks_of(slow)
    assert len(blocks) == 29
    assert sum(block.latency_ms.size for block in blocks) == 3000
    assert len(compare.blocks_of(slow, skip=1500)) == 20
    found = compare.sequential(slow, fast)
    assert [verdict.metric for verdict in found] == ["p50", "p95", "p99", "error_rate"]
    assert {verdict.word for verdict in found[:3]} == {"IMPROVED"}
    assert found[0].change == pytest.approx(math.exp(-0.5) - 1, abs=0.02)
    assert found[0].text().endswith("29 blocks, sequential")
    assert found[0].to_json()["kind"] == "sequential"


def test_unanswered_requests_are_errors_of_their_block():
    result = run_of(np.full(1000, 5.0), status=503)
    assert sum(block.failed for block in compare.blocks_of(result)) == 1000
    empty = np.empty(0, dtype=np.int64)
    assert compare.blocks_of(LoadResult(LoadPlan("", 1, 1), empty, empty, empty, empty, empty)) == []
