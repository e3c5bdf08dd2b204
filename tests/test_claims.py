"""Claims: intervals against references, the six rules, and what a verdict may never do."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from privfl.claims import (OUTCOMES, RULES, Claim, ClaimError, Interval, check_tuning, claim_from_dict, claim_to_dict, forest_plot,
                           format_interval, half_width_in_sd, judge, median_interval, paired_interval, share_interval)
from scipy import stats

finite = some.floats(-1e3, 1e3, allow_nan=False)
REPRODUCED, NOT_REPRODUCED, INCONCLUSIVE, OTHER_SCALE, NOT_YET = OUTCOMES


def claim(rule="difference", margin=1.0, target=None, **more):
    return Claim("c", "test", "a statement", target, "points", margin, rule, **more)


def interval(low, high):
    return Interval((low + high) / 2, low, high, 3, "paired t")


# --- intervals -----------------------------------------------------------------------------------------------------

def test_t_interval_equals_scipy():
    ours, other = np.array([61.2, 60.1, 62.3, 60.9]), np.array([61.0, 60.4, 62.6, 60.2])
    found, wanted = paired_interval(ours, other), stats.ttest_rel(ours, other).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high)) and found.n == 4
    wanted = stats.ttest_1samp(ours, 0).confidence_interval(0.8)
    found = paired_interval(ours, confidence=0.8)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))


def test_three_seeds_are_two_and_a_half_standard_deviations():
    assert half_width_in_sd(3) == pytest.approx(2.484, abs=1e-3) and half_width_in_sd(5) == pytest.approx(1.2417, abs=1e-3)
    with pytest.raises(ClaimError, match="at least 2"):
        half_width_in_sd(1)


def test_one_seed_knows_nothing_and_equal_seeds_give_a_point():
    assert (paired_interval([0.3]).low, paired_interval([0.3]).high) == (-math.inf, math.inf)
    assert paired_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0, 3, "paired t")


@pytest.mark.parametrize(("n", "rank"), [(5, 0), (6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_median_interval_takes_the_tabulated_ranks(n, rank):
    """Ranks of the 95 % sign-test interval, from the binomial."""
    values = np.random.default_rng(n).permutation(np.arange(1, n + 1))
    found = median_interval(values)
    assert (found.low, found.high) == ((rank, n + 1 - rank) if rank else (-math.inf, math.inf))
    if rank:
        assert 2 * stats.binom.cdf(rank - 1, n, 0.5) <= 0.05 < 2 * stats.binom.cdf(rank, n, 0.5)


def test_bootstrap_is_seeded_and_an_unknown_method_is_refused():
    values = np.random.default_rng(0).random(30)
    assert median_interval(values, method="bootstrap", seed=1) == median_interval(values, method="bootstrap", seed=1)
    few = [median_interval(values, method="bootstrap", seed=seed, resamples=41) for seed in (1, 2)]
    assert few[0] != few[1]
    with pytest.raises(ClaimError, match="order"):
        median_interval(values, method="jackknife")


@pytest.mark.parametrize(("successes", "trials"), [(0, 40), (3, 40), (40, 40), (1, 1), (7, 9)])
def test_share_interval_equals_scipy(successes, trials):
    found = share_interval(successes, trials)
    wanted = stats.binomtest(successes, trials).proportion_ci(0.95, method="exact")
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_coverage_of_the_t_interval():
    """20,000 experiments of 3 seeds; standard error .0015; five of them: false alarm below 1e-6."""
    samples = np.random.default_rng(0).normal(0.7, 2.0, (20_000, 3))
    half = half_width_in_sd(3) * samples.std(1, ddof=1)
    assert abs((np.abs(samples.mean(1) - 0.7) <= half).mean() - 0.95) < 0.008


def test_false_verdicts_are_at_most_two_and_a_half_percent():
    """2,000 experiments with the true difference on the margin; five standard errors (.0035) above .025."""
    samples = np.random.default_rng(1).normal(1.0, 1.0, (2_000, 4))
    outcomes = [judge(claim(), sample).outcome for sample in samples]
    assert outcomes.count(REPRODUCED) / 2_000 < 0.0425 and outcomes.count(NOT_REPRODUCED) / 2_000 < 0.0425


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_intervals_refuse_what_is_not_finite(values):
    for function in (paired_interval, median_interval):
        with pytest.raises(ClaimError):
            function(values)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, 2.0])
def test_confidence_lies_inside_zero_and_one(confidence):
    for call in (lambda: paired_interval([1, 2], confidence=confidence), lambda: share_interval(1, 2, confidence)):
        with pytest.raises(ClaimError, match="between 0 and 1"):
            call()


@pytest.mark.parametrize(("successes", "trials"), [(-1, 3), (4, 3), (0, 0)])
def test_shares_are_counts(successes, trials):
    with pytest.raises(ClaimError):
        share_interval(successes, trials)


# --- rules ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("rule", "target", "low", "high", "outcome"), [
    ("difference", None, 1.1, 2.0, REPRODUCED), ("difference", None, 0.9, 2.0, INCONCLUSIVE), ("difference", None, -0.5, 0.5, NOT_REPRODUCED),
    ("difference", None, -3.0, -1.5, NOT_REPRODUCED), ("difference", None, -3.0, 0.5, NOT_REPRODUCED), ("difference", None, -3.0, 3.0, INCONCLUSIVE),
    ("no_loss", None, -0.9, 5.0, REPRODUCED), ("no_loss", None, -1.1, 5.0, INCONCLUSIVE), ("no_loss", None, -5.0, -1.1, NOT_REPRODUCED),
    ("no_loss", None, -3.0, -0.5, INCONCLUSIVE),
    ("no_loss", None, 2.0, 3.0, REPRODUCED), ("value", 5.0, 4.0, 6.0, REPRODUCED), ("value", 5.0, 3.9, 5.0, INCONCLUSIVE),
    ("value", 5.0, 1.0, 3.9, NOT_REPRODUCED), ("value", 5.0, 6.1, 7.0, NOT_REPRODUCED), ("value", 5.0, 3.0, 7.0, INCONCLUSIVE),
])
def test_rules_with_a_margin(rule, target, low, high, outcome):
    assert judge(claim(rule, 1.0, target), interval(low, high)).outcome == outcome


@pytest.mark.parametrize(("rule", "low", "high", "outcome"), [
    ("threshold_above", 0.61, 0.8, REPRODUCED), ("threshold_above", 0.5, 0.8, INCONCLUSIVE), ("threshold_above", 0.2, 0.59, NOT_REPRODUCED),
    ("threshold_below", 0.2, 0.59, REPRODUCED), ("threshold_below", 0.5, 0.8, INCONCLUSIVE), ("threshold_below", 0.61, 0.8, NOT_REPRODUCED),
])
def test_thresholds(rule, low, high, outcome):
    assert judge(claim(rule, 0.0, 0.6), interval(low, high)).outcome == outcome


@pytest.mark.parametrize(("side", "values", "outcome"), [
    ("equal", [2.0, 2.0 + 1e-7], REPRODUCED), ("equal", [2.0, 2.1], NOT_REPRODUCED), ("below", [-5.0, 2.0], REPRODUCED),
    ("below", [-5.0, 2.1], NOT_REPRODUCED), ("above", [2.0, 9.0], REPRODUCED), ("above", [1.9, 9.0], NOT_REPRODUCED),
])
def test_exact_statements_need_every_value(side, values, outcome):
    verdict = judge(claim("exact", 1e-6, 2.0, side=side), values)
    assert verdict.outcome == outcome and verdict.method == "exact" and str(len(values)) in verdict.sentence


def test_medians_judge_thresholds_over_images_and_shares_need_zeros_and_ones():
    images = np.concatenate([np.full(15, 0.7), np.full(5, 0.0)])  # mean 0.525, median 0.7
    assert judge(claim("threshold_above", 0.0, 0.6, replication="image"), images).outcome == REPRODUCED
    assert judge(claim("threshold_above", 0.0, 0.6), images).outcome == INCONCLUSIVE  # seeds: the mean
    share = claim("threshold_below", 0.0, 0.5, statistic="share")
    assert judge(share, [0] * 19 + [1]).outcome == REPRODUCED
    with pytest.raises(ClaimError, match="0 or 1"):
        judge(share, [0.5, 1.0])


def test_unjudged_verdicts():
    assert judge(claim(scales=("full",)), [1, 2, 3], "quick").outcome == OTHER_SCALE
    assert judge(claim()).outcome == judge(claim(), []).outcome == NOT_YET
    with pytest.raises(ClaimError, match="smoke, quick, full, paper"):
        judge(claim(), [1, 2], "huge")


def test_a_nan_never_disappears():
    verdict = judge(claim(), [5.0, math.nan, 5.1])
    assert verdict.outcome == INCONCLUSIVE and "1 of 3" in verdict.sentence
    assert judge(claim("exact", 0.0, 1.0), [1.0, math.nan]).outcome == INCONCLUSIVE
    assert judge(claim(), [5.0, 5.1], baseline=[math.nan, 0.0]).outcome == INCONCLUSIVE


def test_one_seed_decides_nothing():
    verdict = judge(claim(), [50.0])
    assert verdict.outcome == INCONCLUSIVE and "1 seed" in verdict.sentence
    assert judge(claim("no_loss"), [50.0]).outcome == INCONCLUSIVE


def test_pairs_must_match():
    with pytest.raises(ClaimError, match="3 values against 2"):
        judge(claim(), [1, 2, 3], baseline=[1, 2])


@given(some.lists(finite, min_size=2, max_size=8), some.floats(0, 50), finite, some.sampled_from(["difference", "no_loss"]))
def test_more_is_never_worse(values, margin, shift, rule):
    """Moving every replicate up never turns `reproduced` into anything else, nor anything into `not reproduced`."""
    order = {NOT_REPRODUCED: 0, INCONCLUSIVE: 1, REPRODUCED: 2}
    before = judge(claim(rule, margin), values).outcome
    after = judge(claim(rule, margin), np.array(values) + abs(shift)).outcome
    assert order[after] >= order[before]


@given(finite, some.floats(0, 100), some.floats(0, 50), finite, some.sampled_from(RULES[:-1]))
def test_inconclusive_means_that_both_answers_are_inside(low, width, margin, target, rule):
    """Judged by its ends: an interval is inconclusive exactly when some of it agrees and some of it does not."""
    a_claim = claim(rule, 0.0 if rule.startswith("threshold") else margin, target)
    holds = {"difference": lambda value: value > margin, "no_loss": lambda value: value >= -margin,
             "value": lambda value: abs(value - target) <= margin, "threshold_above": lambda value: value > target,
             "threshold_below": lambda value: value < target}[rule]
    points = np.concatenate([np.linspace(low, low + width, 41), [point for point in (target,) if low <= point <= low + width]])
    inside = [bool(holds(point)) for point in points]
    outcome = judge(a_claim, interval(low, low + width)).outcome
    if outcome == REPRODUCED:
        assert all(inside)
    if outcome == NOT_REPRODUCED:
        assert not any(inside[1:-1])  # the ends may sit on the line


@pytest.mark.parametrize("wrong", [{"rule": "better"}, {"margin": -1.0}, {"margin": math.nan}, {"rule": "value"}, {"rule": "threshold_above", "target": 1.0},
                                   {"scales": ()}, {"scales": ("tiny",)}, {"statistic": "mode"}, {"side": "left"}])
def test_a_claim_says_what_is_wrong_with_it(wrong):
    with pytest.raises(ClaimError):
        claim(**{"rule": "difference", "margin": 1.0, **wrong})


def test_a_claim_needs_names():
    for names in (("", "paper"), ("name", "")):
        with pytest.raises(ClaimError, match="name and a paper"):
            Claim(*names, "statement")


def test_claims_survive_json():
    for item in (claim(), claim("exact", 0.1, 2.0, side="below"), claim("threshold_below", 0.0, 0.1, replication="image", scales="quick")):
        assert claim_from_dict({**claim_to_dict(item), "added later": 1}) == item


def test_format_interval():
    assert format_interval(0.5, 0.25, 0.75) == "0.5 [0.25, 0.75]" and format_interval(1.0, 1.0, 1.0) == "1"
    assert format_interval(math.nan, 0, 1) == "-" and format_interval(2.0, -math.inf, math.inf) == "2 [no interval]"


def test_forest_plot_draws_infinite_intervals():
    verdicts = [judge(claim(), [5.0]), judge(claim(), [5.0, 5.1, 5.2]), judge(claim())]
    figure = forest_plot([claim()] * 3, verdicts)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["c", "c", "c"]
    with pytest.raises(ClaimError, match="one verdict for each claim"):
        forest_plot([claim()], verdicts)


def test_trap_17_tuning_on_reported_replicates_is_refused():
    check_tuning([100, 101], [0, 1, 2])
    with pytest.raises(ClaimError, match="learning rate was tuned on 1, which"):
        check_tuning([1, 100], range(3), "learning rate")


def test_trap_17_the_best_of_forty_looks_better_than_it_is():
    """4,000 repetitions: the standard error of the mean maximum is .0075; five of them."""
    runs = np.random.default_rng(2).normal(size=(4_000, 40))
    assert abs(runs.max(1).mean() - 2.16) < 0.04


# --- input that looks usable ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("same", [1.0, np.float64(1), np.int64(1), np.array(1), torch.tensor(1), "1"])
def test_trap_17_a_seed_is_the_same_seed_however_it_is_written(same):
    with pytest.raises(ClaimError, match="tuned on 1"):
        check_tuning([1], [same])
    check_tuning([2, 1.5], [same])


@pytest.mark.parametrize("target", [math.nan, math.inf, "x"])
def test_a_target_is_a_finite_number(target):
    with pytest.raises(ClaimError, match="target"):
        Claim("c", "test", "", rule="value", target=target)


def test_an_interval_that_is_none_never_decides():
    for rule in RULES:
        judged = claim(rule, 0.0 if rule.startswith("threshold") else 1.0, 2.0)
        assert judge(judged, Interval(1.0, math.nan, 2.0, 3, "paired t")).outcome == INCONCLUSIVE
        with pytest.raises(ClaimError, match="lower end first"):
            judge(judged, Interval(2.0, 3.0, 1.0, 3, "paired t"))
    with pytest.raises(ClaimError, match="whole numbers"):
        share_interval(1.5, 2)
    with pytest.raises(ClaimError, match="between 0 and 1"):
        half_width_in_sd(3, 95)
