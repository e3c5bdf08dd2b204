"""privfl.audit: valid under the null, sharp enough for planted faults, exact where densities are known.

Null tests: 200 repetitions at confidence .95 may be positive 23 times, the binomial 1e-4 quantile; that is their false-alarm rate.
Every seed is fixed, so each test has one outcome. Planted faults state their power in the notebook.
"""
import inspect
import json
from math import exp, inf, log, sqrt

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from notebook_tools import ROOT
from scipy import stats

from privfl import audit
from privfl.accounting import (compose, gaussian_epsilon, gaussian_event, l2_sensitivity, mask_delta_floor,
                               oneshot_laplace_epsilon, poisson_sampled)
from privfl.audit import (ScoreAudit, audit_mechanism, audit_metric_privacy, audit_scores, clopper_pearson,
                          epsilon_lower_bound, gaussian_parameter_lower_bound, mechanism_scores, one_run_audit,
                          one_run_epsilon, one_run_p_value, plot_epsilons, probe_outputs)
from privfl.mechanisms import add_gaussian_noise, gaussian_sigma, oneshot_laplace_top_k, planar_laplace

ALLOWED = int(stats.binom.isf(1e-4, 200, 0.05))
NAN = float("nan")
identity = lambda outputs: outputs


def laplace(value, scale):
    """Sampler of the Laplace mechanism."""
    return lambda number, generator: value + generator.laplace(0.0, scale, number)


def normal(value, sigma):
    """Sampler of the Gaussian mechanism."""
    return lambda number, generator: value + generator.normal(0.0, sigma, number)


def generator(seed):
    """A numpy generator."""
    return np.random.default_rng(seed)


# ---- bounds from scores -----------------------------------------------------------------------------------------

NULLS = {"normal": lambda g, n: g.normal(size=n), "heavy": lambda g, n: g.standard_cauchy(n), "coarse": lambda g, n: g.integers(0, 4, n).astype(float),
         "two values": lambda g, n: (g.random(n) < 0.02).astype(float), "sorted": lambda g, n: np.sort(g.normal(size=n))}


@pytest.mark.parametrize("kind", NULLS)
@pytest.mark.parametrize("size", [40, 500])
def test_trap_15_null_scores_give_no_bound(kind, size):
    """n = 40 and 500 in each sample, 200 repetitions, 23 positives allowed (false-alarm rate 1e-4)."""
    draw = generator(1)
    bounds = [epsilon_lower_bound(NULLS[kind](draw, size), NULLS[kind](draw, size)) for _ in range(200)]
    assert ALLOWED == 23 and np.sum(np.array(bounds) > 0) <= ALLOWED and min(bounds) >= 0


def test_trap_15_the_order_of_the_scores_does_not_matter():
    """Files are often sorted; without a shuffle before the split the audit would be blind. n = 3000, and 200 null repetitions with n = 300."""
    ones, zeros = laplace(1.0, 0.5)(3000, generator(4)), laplace(0.0, 0.5)(3000, generator(5))
    for order in (np.sort, lambda scores: np.sort(scores)[::-1]):
        assert 1.2 < epsilon_lower_bound(order(ones), zeros) <= 2.0 and 1.2 < epsilon_lower_bound(order(ones), order(zeros)) <= 2.0
    draw = generator(37)
    assert sum(epsilon_lower_bound(np.sort(one), other) > 0 for one, other in draw.normal(size=(200, 2, 300))) <= ALLOWED


def test_trap_15_the_choice_of_the_threshold_is_paid_for():
    """At confidence .5 luck shows: n = 1000, Laplace at epsilon 1, where half-lines attain the truth; 200 repetitions, 126 bounds above it allowed (1e-4 quantile)."""
    draw, allowed = generator(38), int(stats.binom.isf(1e-4, 200, 0.5))
    bounds = np.array([epsilon_lower_bound(1 + draw.laplace(size=1000), draw.laplace(size=1000), confidence=0.5) for _ in range(200)])
    assert allowed == 126 and (bounds > 1.0).sum() <= allowed


@pytest.mark.parametrize("bound", [lambda a, b: epsilon_lower_bound(a, b, delta=0.01), gaussian_parameter_lower_bound, lambda a, b: audit_scores(a, b, threshold=0.3).lower])
def test_trap_15_the_other_bounds_are_silent_on_null_scores(bound):
    """n = 300 in each sample, 200 repetitions, 23 positives allowed."""
    draw = generator(2)
    assert sum(bound(*draw.normal(size=(2, 300))) > 0 for _ in range(200)) <= ALLOWED


@pytest.mark.parametrize("make, truth, delta", [
    (lambda g, n: (laplace(1.0, 1.0)(n, g), laplace(0.0, 1.0)(n, g)), 1.0, 0.0),
    (lambda g, n: (normal(1.0, 1.0)(n, g), normal(0.0, 1.0)(n, g)), gaussian_epsilon(1.0, 0.01), 0.01),
    (lambda g, n: ((g.random(n) < 0.9) * 1.0, (g.random(n) < 0.1) * 1.0), log(9), 0.0)], ids=["laplace", "gaussian", "randomised response"])
def test_trap_15_bounds_cover_the_true_epsilon(make, truth, delta):
    """n = 1000 in each sample, 200 repetitions, 23 bounds above the truth allowed; the bound is not vacuous either."""
    draw = generator(3)
    bounds = np.array([epsilon_lower_bound(*make(draw, 1000), delta=delta) for _ in range(200)])
    assert (bounds > truth).sum() <= ALLOWED and np.median(bounds) > 0.4 * truth


def test_trap_15_reversed_scores_and_swapped_worlds_still_give_a_bound():
    ones, zeros = laplace(1.0, 0.5)(5000, generator(4)), laplace(0.0, 0.5)(5000, generator(5))
    bounds = [epsilon_lower_bound(ones, zeros), epsilon_lower_bound(-ones, -zeros), epsilon_lower_bound(zeros, ones), epsilon_lower_bound(-zeros, -ones)]
    assert min(bounds) > 1.5 and max(bounds) <= 2.0
    assert min(gaussian_parameter_lower_bound(sign * ones, sign * zeros) for sign in (1, -1)) > 1.0


def test_both_tails_are_looked_at():
    """The leak is in one tail only: 2 % of the outputs are impossible in the other world."""
    base, leaky = generator(6).normal(size=20_000), generator(7).normal(size=20_000)
    leaky[:400] = 50.0
    for sign in (1, -1):
        assert epsilon_lower_bound(sign * leaky, sign * base) > 3 and epsilon_lower_bound(sign * base, sign * leaky) > 3
        assert epsilon_lower_bound(sign * leaky, sign * base, delta=0.05) == 0


def test_arrays_tensors_lists_and_infinite_scores_agree():
    ones, zeros = generator(8).normal(1, 1, 600), generator(9).normal(0, 1, 600)
    ones[:30] = inf
    bound = epsilon_lower_bound(ones, zeros)
    for other in ((torch.tensor(ones), torch.tensor(zeros)), (ones.tolist(), zeros.tolist()), (torch.tensor(ones, requires_grad=True), zeros)):
        assert epsilon_lower_bound(*other) == bound
    assert bound > 0


@given(st.integers(1, 400), st.integers(0, 400), st.floats(1e-4, 0.4))
def test_clopper_pearson_inverts_the_binomial_tails(trials, hits, alpha):
    hits = min(hits, trials)
    low, up = (float(limit) for limit in clopper_pearson(hits, trials, alpha))
    assert low <= hits / trials <= up
    if hits > 0:
        assert stats.binom.sf(hits - 1, trials, low) == pytest.approx(alpha, rel=1e-6)
    if hits < trials:
        assert stats.binom.cdf(hits, trials, up) == pytest.approx(alpha, rel=1e-6)


def test_the_bound_grows_with_the_sample_and_falls_with_confidence_and_delta():
    ones, zeros = laplace(1.0, 1.0)(30_000, generator(10)), laplace(0.0, 1.0)(30_000, generator(11))
    assert epsilon_lower_bound(ones[:300], zeros[:300]) < epsilon_lower_bound(ones, zeros) <= 1.0
    assert epsilon_lower_bound(ones, zeros, confidence=0.999) < epsilon_lower_bound(ones, zeros, confidence=0.6)
    assert epsilon_lower_bound(ones, zeros, delta=0.2) < epsilon_lower_bound(ones, zeros, delta=0.0)


def test_a_tiny_sample_proves_nothing_and_does_not_fail():
    for size in (1, 2, 3, 5):
        assert epsilon_lower_bound(np.arange(size) + 10.0, np.arange(size)) == 0.0
        assert gaussian_parameter_lower_bound(np.arange(size) + 10.0, np.arange(size)) == 0.0


def test_the_result_is_reproducible_and_leaves_the_global_generators_alone():
    ones, zeros = normal(1.0, 1.0)(500, generator(12)), normal(0.0, 1.0)(500, generator(13))
    before = (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert epsilon_lower_bound(ones, zeros) == epsilon_lower_bound(ones, zeros)
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_a_score_audit_describes_its_event():
    ones, zeros = laplace(1.0, 0.5)(9000, generator(14)), laplace(0.0, 0.5)(9000, generator(15))
    found = audit_scores(ones, zeros, delta=0.001, confidence=0.9)
    assert isinstance(found, ScoreAudit) and found.lower <= found.estimate <= found.upper and (found.num_in, found.num_out) == (6000, 6000)
    hit = (lambda scores: scores > found.threshold) if found.tail == "above" else (lambda scores: scores <= found.threshold)
    p, q = (hit(zeros).mean(), hit(ones).mean()) if found.swapped else (hit(ones).mean(), hit(zeros).mean())
    assert log(p / q) == pytest.approx(found.estimate, abs=0.1)
    fixed = audit_scores(ones, zeros, threshold=0.5)
    assert fixed.threshold == 0.5 and (fixed.num_in, fixed.num_out) == (9000, 9000) and 1.3 < fixed.lower < 2.0


# ---- mechanisms -------------------------------------------------------------------------------------------------

def test_a_million_samples_pass_at_the_claim_and_half_the_noise_does_not():
    right = audit_mechanism(laplace(1.0, 1.0), laplace(0.0, 1.0), 1_000_000, identity, 0.0, 0.95, generator(16))
    half = audit_mechanism(laplace(1.0, 0.5), laplace(0.0, 0.5), 1_000_000, identity, 0.0, 0.95, generator(17))
    assert 0.95 < right <= 1.0 < 1.9 < half <= 2.0


def gaussian_by_library(value, sigma):
    """Sampler through privfl.mechanisms with a torch generator."""
    return lambda number, generator: add_gaussian_noise(torch.full((number,), value, dtype=torch.float64), sigma, generator)


def test_the_gaussian_passes_at_its_claim_and_half_the_noise_is_caught():
    """Claim (1, 1e-5), n = 400,000; the bound from events and the one on mu."""
    sigma, torch_generator = gaussian_sigma(1.0, 1e-5, 1.0), torch.Generator().manual_seed(18)
    for factor, caught in ((1.0, False), (0.5, True)):
        scores = mechanism_scores(gaussian_by_library(1.0, factor * sigma), gaussian_by_library(0.0, factor * sigma), 400_000, identity, torch_generator)
        assert (epsilon_lower_bound(*scores, delta=1e-5) > 1.0) == caught
        assert (gaussian_epsilon(1 / gaussian_parameter_lower_bound(*scores), 1e-5) > 1.0) == caught


def test_planar_laplace_passes_at_its_claim_and_half_the_noise_is_caught():
    """Points 3 apart, epsilon .5 per unit, n = 200,000."""
    here, there = np.zeros(2), np.array([3.0, 0.0])
    sampler = lambda point, epsilon: lambda number, generator: point + np.asarray(planar_laplace(number, epsilon, generator))
    closer = lambda outputs: np.linalg.norm(outputs - there, axis=1) - np.linalg.norm(outputs - here, axis=1)
    right, half = (audit_mechanism(sampler(here, epsilon), sampler(there, epsilon), 200_000, closer, 0.0, 0.95, generator(19)) for epsilon in (0.5, 1.0))
    assert 1.2 < right <= 1.5 < 2.5 < half <= 3.0


def test_two_independent_laplace_draws_are_not_planar_laplace():
    """Trap 13 seen from outside: on the diagonal the product of two Laplace laws loses sqrt 2 times the claim. On a grid: see trap 21."""
    here, there = np.zeros(2), np.array([2.0, 2.0])
    sampler = lambda point: lambda number, generator: np.round(point + generator.laplace(0, 1.0, (number, 2)), 9)
    closer = lambda outputs: np.abs(outputs - there).sum(1) - np.abs(outputs - here).sum(1)
    found = audit_mechanism(sampler(here), sampler(there), 400_000, closer, 0.0, 0.95, generator(20))
    assert found > sqrt(8) and found <= 4.0


def oneshot(values, scale):
    """Vectorised oneshot Laplace, k = 1 of two."""
    def sample(number, generator):
        selected = (np.abs(values) + generator.laplace(0, scale, (number, 2))).argmax(1)
        return np.stack([selected, np.take(values, selected) + generator.laplace(0, scale, number)], axis=1)
    return sample


small_and_high = lambda outputs: np.where(outputs[:, 0] == 0, outputs[:, 1], -50.0)


def selection(gap, scale):
    """Probability that the smaller of two entries wins."""
    return 0.5 * (1 + gap / (2 * scale)) * exp(-gap / scale)


def test_oneshot_laplace_exceeds_epsilon_and_stays_below_three_halves():
    """k = 1, m = 2, gap 10, scale 2, n = 10^6: exact loss 1.346 of an event of probability .0118 before the value."""
    exact = log(selection(8, 2.0) / selection(10, 2.0)) + 0.5
    assert exact == pytest.approx(1.346, abs=5e-4) and selection(10, 2.0) == pytest.approx(0.0118, abs=5e-5)
    found = audit_mechanism(oneshot(np.array([1.0, 9.0]), 2.0), oneshot(np.array([0.0, 10.0]), 2.0), 1_000_000, small_and_high, 0.0, 0.95, generator(21))
    assert 1.0 < found < oneshot_laplace_epsilon(1, 2.0, 2.0, 1.0, 1.0) == 1.5


def test_oneshot_laplace_with_twice_the_value_sensitivity_stays_below_two():
    """(-1, 9) against (1, 8): magnitude sensitivity 1, value sensitivity 2, claim 1, accounted 2; magnitudes of the small entry equal."""
    found = audit_mechanism(oneshot(np.array([1.0, 9.0]), 2.0), oneshot(np.array([-1.0, 10.0]), 2.0), 1_000_000, small_and_high, 0.0, 0.95, generator(22))
    assert 1.0 < found < oneshot_laplace_epsilon(1, 2.0, 2.0, 1.0, 2.0) == 2.0


def test_the_librarys_oneshot_laplace_is_the_audited_one():
    """n = 2000 calls on each input; 5 standard errors (false alarm 6e-7); the audit of its outputs keeps the accountant's bound."""
    def sampler(values):
        values = torch.tensor(values, dtype=torch.float64)
        def sample(number, generator):
            pairs = [oneshot_laplace_top_k(values, 1, 2.0, 2.0, generator) for _ in range(number)]
            return np.array([[int(indices[0]), float(released[0])] for indices, released in pairs])
        return sample
    torch_generator = torch.Generator().manual_seed(23)
    outputs = sampler([0.0, 4.0])(2000, torch_generator)
    share = selection(4, 2.0)
    assert abs((outputs[:, 0] == 0).mean() - share) < 5 * sqrt(share * (1 - share) / 2000)
    noise = outputs[:, 1] - np.where(outputs[:, 0] == 0, 0.0, 4.0)  # fresh, so symmetric although the selection is not
    assert abs(np.abs(noise).mean() - 2.0) < 5 * 2.0 / sqrt(2000) and abs((noise > 0).mean() - 0.5) < 5 * 0.5 / sqrt(2000)
    scores = small_and_high(sampler([1.0, 3.0])(2000, torch_generator)), small_and_high(outputs)
    assert 0.5 < epsilon_lower_bound(*scores) <= 1.5


FAULTS = {  # what an implementer can get wrong: sampler of (one, other), against a claim of mu at sensitivity 1 (replace-one: clip 1/2)
    "right": lambda mu: (normal(1.0, 1 / mu), normal(0.0, 1 / mu), True),
    "half the noise": lambda mu: (normal(1.0, 0.5 / mu), normal(0.0, 0.5 / mu), False),
    "inverted scale": lambda mu: (normal(1.0, mu), normal(0.0, mu), False),
    "variance given for standard deviation": lambda mu: (normal(1.0, sqrt(1 / mu)), normal(0.0, sqrt(1 / mu)), False),
    "noise for a mean of 10 on a sum": lambda mu: (normal(1.0, 0.1 / mu), normal(0.0, 0.1 / mu), False),
    "replace-one with sensitivity C": lambda mu: (normal(0.5, 0.5 / mu), normal(-0.5, 0.5 / mu), False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_trap_14_calibration_faults_are_caught_from_outside(fault):
    """Claim epsilon 1 at delta 1e-5 (mu about .27), n = 20,000 runs on each input."""
    mu = 1 / gaussian_sigma(1.0, 1e-5, 1.0)
    one, other, passes = FAULTS[fault](mu)
    scores = mechanism_scores(one, other, 20_000, identity, generator(24))
    assert (gaussian_parameter_lower_bound(*scores) <= mu) == passes


def test_trap_14_one_random_key_used_twice_is_caught():
    """Two groups get the same draw: their difference is noise-free, so the two worlds are told apart at any noise. n = 2000."""
    def sampler(values, shared):
        def sample(number, generator):
            first = generator.normal(0, 10.0, number)
            return np.stack([values[0] + first, values[1] + (first if shared else generator.normal(0, 10.0, number))], axis=1)
        return sample
    difference = lambda outputs: outputs[:, 0] - outputs[:, 1]
    for shared in (False, True):
        found = audit_mechanism(sampler((1.0, 0.0), shared), sampler((0.0, 0.0), shared), 2000, difference, 1e-5, 0.95, generator(25))
        assert (found > 5) == shared and (found < 0.5) == (not shared)


def test_a_mask_has_no_epsilon_below_its_floor():
    """Five differing coordinates, R = .8, floor .672, n = 50,000: the bound grows with n below the floor and vanishes above."""
    first, second = np.zeros(8), np.r_[np.ones(5), np.zeros(3)]
    sampler = lambda update: lambda number, generator: np.where(generator.random((number, 8)) < 0.8, np.nan, update)
    revealed = lambda outputs: (outputs[:, :5] == 0).any(1).astype(float) - (outputs[:, :5] == 1).any(1)
    floor = mask_delta_floor(0.8, 5)
    at = lambda number, delta: audit_mechanism(sampler(first), sampler(second), number, revealed, delta, 0.95, generator(26))
    assert at(50_000, 0.0) - at(500, 0.0) > 3 and at(50_000, floor - 0.05) > 4
    assert at(50_000, floor + 0.001) == 0.0


def test_a_data_dependent_noise_shape_is_caught_although_nothing_else_differs():
    """Equal means, sigma 1 against 1.5, n = 100,000."""
    assert audit_mechanism(normal(0.0, 1.5), normal(0.0, 1.0), 100_000, np.abs, 1e-5, 0.95, generator(27)) > 2


def test_sampling_gives_no_amplification_to_who_sees_the_sender():
    """q = .1, noise multiplier 1, n = 200,000: hidden, the subsampled account holds; seen, the audit refutes it."""
    def sampler(value, seen):
        return lambda number, generator: value * (seen | (generator.random(number) < 0.1)) + generator.normal(0, 1, number)
    quoted = compose([(poisson_sampled(gaussian_event(1.0, 1.0), 0.1), 1)], 1e-5, "add_remove")
    hidden, seen = (audit_mechanism(sampler(1.0, who), sampler(0.0, who), 200_000, identity, 1e-5, 0.95, generator(28)) for who in (False, True))
    assert hidden <= quoted < seen <= gaussian_epsilon(1.0, 1e-5)


def test_batches_do_not_change_what_is_asked_for():
    sizes = []
    sampler = lambda number, generator: sizes.append(number) or generator.normal(size=(number, 3))
    ins, outs = mechanism_scores(sampler, sampler, 10, lambda outputs: outputs[:, 0], generator(29), batch_size=4)
    assert sizes == [4, 4, 2] * 2 and len(ins) == len(outs) == 10


# ---- one run ----------------------------------------------------------------------------------------------------

def randomised_response(epsilon, canaries, draw):
    """Included bits and scores that attain epsilon exactly: each bit is kept with probability e^eps / (1 + e^eps)."""
    included = draw.random(canaries) < 0.5
    kept = draw.random(canaries) < exp(epsilon) / (1 + exp(epsilon))
    return np.where(kept, included, ~included) + 1e-6 * draw.random(canaries), included


@pytest.mark.parametrize("epsilon", [0.0, 1.0, 3.0])
def test_trap_15_one_run_audits_cover_the_true_epsilon(epsilon):
    """m = 400 canaries, 200 guesses, the tight mechanism, 200 repetitions, 23 bounds above the truth allowed."""
    draw = generator(30)
    bounds = []
    for _ in range(200):
        scores, included = randomised_response(epsilon, 400, draw)
        bounds.append(one_run_audit(scores, included, 200))
    assert sum(bound > epsilon for bound in bounds) <= ALLOWED
    assert epsilon == 0 or np.median(bounds) > 0.6 * epsilon


def test_one_run_catches_half_the_noise():
    """2000 canaries, Gaussian noise; claim epsilon 2 at delta 1e-5, the code adds a third of the noise."""
    draw, sigma = generator(31), gaussian_sigma(2.0, 1e-5, 1.0)
    included = draw.random(2000) < 0.5
    audits = {factor: one_run_audit(torch.tensor(included + draw.normal(0, factor * sigma, 2000)), torch.tensor(included), [100, 400], delta=1e-5) for factor in (1.0, 1 / 4)}
    assert audits[1.0] <= 2.0 < audits[1 / 4]


@pytest.mark.parametrize("correct, guesses, canaries, delta", [(90, 100, 100, 0.0), (90, 100, 1000, 1e-4), (500, 900, 1000, 1e-5), (100, 100, 100, 1e-3)])
def test_one_run_p_values_grow_with_epsilon_and_delta(correct, guesses, canaries, delta):
    values = [one_run_p_value(correct, guesses, canaries, epsilon, delta) for epsilon in np.linspace(0, 8, 60)]
    assert (np.diff(values) >= -1e-12).all() and 0 <= values[0] and values[-1] <= 1
    assert values[10] >= one_run_p_value(correct, guesses, canaries, np.linspace(0, 8, 60)[10], 0.0)
    bound = one_run_epsilon(correct, guesses, canaries, delta)
    assert one_run_p_value(correct, guesses, canaries, bound + 1e-3, delta) >= 0.05 - 1e-9
    assert bound == 0 or one_run_p_value(correct, guesses, canaries, bound, delta) < 0.05


def test_one_run_correction_bounds_a_mechanism_that_fails_with_delta():
    """With probability delta the mechanism publishes all bits: the p-value must not promise less than that."""
    assert one_run_p_value(1000, 1000, 1000, 0.0, delta=1e-3) >= 1e-3


# ---- metric privacy ---------------------------------------------------------------------------------------------

PLACES = np.random.default_rng(32).uniform(-50, 50, size=(12, 2))
PROBES = probe_outputs(PLACES, [0.5, 20.0, 1000.0])


def planar(epsilon, places=PLACES):
    """log density of planar Laplace."""
    return lambda outputs, index: 2 * np.log(epsilon) - np.log(2 * np.pi) - epsilon * np.linalg.norm(outputs - places[index], axis=1)


def test_planar_laplace_needs_exactly_its_epsilon():
    right, half = (audit_metric_privacy(planar(epsilon), PLACES, PROBES, 0.1, unit="metre") for epsilon in (0.1, 0.2))
    assert right.holds() and right.needed_epsilon == pytest.approx(0.1) and abs(right.excess) < 1e-9
    assert not half.holds() and half.needed_epsilon == pytest.approx(0.2)
    assert half.excess == pytest.approx(0.1 * np.linalg.norm(PLACES[half.pair[0]] - PLACES[half.pair[1]]), rel=1e-6)
    assert half.log_ratio == pytest.approx(half.allowed + half.excess) and "per metre" in str(half) and "exceeded" in str(half)


def test_the_reported_triple_is_the_violation():
    found = audit_metric_privacy(planar(0.3), PLACES, PROBES, 0.1)
    first, second = found.pair
    at = [planar(0.3)(found.output[None], np.array([index]))[0] for index in (first, second)]
    assert at[0] - at[1] == pytest.approx(found.log_ratio)
    assert found.num_pairs == 12 * 11 and found.num_outputs == len(PROBES)


def test_the_noise_of_planar_laplace_and_the_audited_density_are_one():
    """Kolmogorov-Smirnov of the radius against Gamma(2, 1/epsilon), n = 20,000, level 1e-6."""
    radius = np.linalg.norm(np.asarray(planar_laplace(20_000, 0.1, generator(33))), axis=1)
    assert stats.kstest(radius, stats.gamma(2, scale=10.0).cdf).pvalue > 1e-6


def test_trap_23_an_epsilon_in_the_wrong_unit_is_caught():
    """Claim .01 per metre. Drawing with 10 (per kilometre) on coordinates in metres needs a thousand times the claim."""
    metres = audit_metric_privacy(planar(0.01), PLACES, PROBES, 0.01, unit="metre")
    confused = audit_metric_privacy(planar(10.0), PLACES, PROBES, 0.01, unit="metre")
    assert metres.holds() and not confused.holds() and confused.needed_epsilon == pytest.approx(10.0)
    kilometres = audit_metric_privacy(planar(10.0, PLACES / 1000), PLACES / 1000, PROBES / 1000, 10.0, unit="kilometre")
    assert kilometres.holds() and "per kilometre" in str(kilometres)
    assert "unit" in inspect.signature(audit_metric_privacy).parameters


def test_a_shape_of_its_own_for_each_point_is_found_far_away_only():
    centres = np.array([[0.0, 0.0], [1.0, 0.0]])
    shapes = np.stack([np.diag([1.0, 0.8]), np.eye(2)])

    def local(outputs, index):
        whitened = np.einsum("mij,mj->mi", shapes[index], outputs - centres[index])
        return np.linalg.slogdet(shapes[index])[1] - np.linalg.norm(whitened, axis=1)

    near, far = (audit_metric_privacy(local, centres, probe_outputs(centres, [radius]), 1.0) for radius in (0.5, 100.0))
    assert near.excess < 1 and far.excess > 15


def test_impossible_outputs_and_tensors():
    """Uniform on an interval around each point: disjoint supports violate any claim; impossible at both says nothing."""
    points = torch.tensor([[0.0], [3.0]], dtype=torch.float64)
    uniform = lambda width: lambda outputs, index: torch.where((torch.as_tensor(outputs) - points[index]).abs()[:, 0] < width, 0.0, -inf)
    assert audit_metric_privacy(uniform(1.0), points, torch.tensor([[0.5], [50.0]]), 10.0).excess == inf
    assert audit_metric_privacy(uniform(9.0), points, torch.tensor([[0.5], [50.0]]), 10.0).holds()


def test_mechanism_objects_and_other_distances():
    class Mechanism:
        """Has a log density, as the chart mechanisms do."""
        log_density = staticmethod(planar(0.1))

    assert audit_metric_privacy(Mechanism(), PLACES, PROBES, 0.1).holds()
    manhattan = lambda points: np.abs(points[:, None] - points[None]).sum(-1)
    assert audit_metric_privacy(Mechanism(), PLACES, PROBES, 0.1, distance=manhattan).holds()  # it is at least Euclidean
    assert not audit_metric_privacy(Mechanism(), PLACES, PROBES, 0.1, distance=0.5 * manhattan(PLACES)).holds()


def test_equal_points_must_have_equal_densities():
    twins = np.zeros((2, 2))
    assert audit_metric_privacy(planar(1.0, twins), twins, PROBES, 1.0).holds()
    assert audit_metric_privacy(lambda outputs, index: -(1.0 + index) * np.abs(outputs[:, 0]), twins, PROBES, 1.0).needed_epsilon == inf


# ---- figure, documents, errors ----------------------------------------------------------------------------------

def test_the_figure_shows_what_was_found():
    found = audit_scores(laplace(1.0, 1.0)(3000, generator(34)), laplace(0.0, 1.0)(3000, generator(35)))
    axes = plot_epsilons(["Laplace", "mask"], [1.0, np.nan], [1.0, inf], [found, 5.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Laplace", "mask"]
    assert any("no (epsilon, delta)" in text.get_text() for text in axes.texts) and axes.get_legend() is not None
    assert plot_epsilons(["a"], [1], [1], [0.5], axes=axes) is axes
    matplotlib.pyplot.close("all")


def test_trap_21_low_bits_of_floating_point_noise_give_the_input_away():
    """Right Laplace code at epsilon 1, n = 50,000: outputs near 0 with steps finer than 2^-54 cannot come from the input 1; a grid closes this."""
    fine = lambda outputs: ((np.abs(outputs) < 0.25) & ((outputs * 2.0**54) % 1.0 != 0)).astype(float)
    grid = lambda sampler: lambda number, generator: np.round(sampler(number, generator) * 2.0**20) / 2.0**20
    assert audit_mechanism(laplace(0.0, 1.0), laplace(1.0, 1.0), 50_000, fine, 0.0, 0.95, generator(36)) > 5
    assert audit_mechanism(grid(laplace(0.0, 1.0)), grid(laplace(1.0, 1.0)), 50_000, fine, 0.0, 0.95, generator(36)) <= 1.0


def test_trap_21_the_chapters_say_that_this_is_research_noise():
    for name in ("04_accounting", "05_audit"):
        cells = json.loads((ROOT / "nbs" / "00_core" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
        text = " ".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert "floating-point" in text and "research noise" in text and "production" in text


@pytest.mark.parametrize("call, words", [
    (lambda: epsilon_lower_bound([], [1.0]), "at least one entry"),
    (lambda: epsilon_lower_bound([1.0], np.zeros(0)), "scores_out"),
    (lambda: epsilon_lower_bound([1.0, np.nan], [1.0]), "NaN"),
    (lambda: epsilon_lower_bound(torch.tensor([float("nan")]), [1.0]), "NaN"),
    (lambda: epsilon_lower_bound(np.zeros((2, 2)), [1.0]), "shape"),
    (lambda: epsilon_lower_bound([1.0], [1.0], delta=1.0), "delta"),
    (lambda: epsilon_lower_bound([1.0], [1.0], delta=-1e-9), "delta"),
    (lambda: epsilon_lower_bound([1.0], [1.0], confidence=1.0), "confidence"),
    (lambda: epsilon_lower_bound([1.0], [1.0], confidence=95), "confidence"),
    (lambda: gaussian_parameter_lower_bound([1.0], [1.0], confidence=0.0), "confidence"),
    (lambda: audit_mechanism(identity, identity, 0, identity, 0.0, 0.95, None), "num_samples"),
    (lambda: audit_mechanism(normal(0, 1), normal(0, 1), 5, lambda outputs: outputs[:2], 0.0, 0.95, generator(0)), "one score for each"),
    (lambda: audit_mechanism(normal(0, 1), normal(0, 1), 5, lambda outputs: outputs * np.nan, 0.0, 0.95, generator(0)), "NaN"),
    (lambda: one_run_p_value(5, 4, 10, 1.0), "correct"),
    (lambda: one_run_epsilon(3, 4, 10, confidence=2.0), "confidence"),
    (lambda: one_run_audit([1.0, 2.0], np.array([True]), 1), "included"),
    (lambda: one_run_audit([1.0, 2.0], np.array([1, 0]), 1), "bool"),
    (lambda: one_run_audit([1.0, 2.0], np.array([True, False]), 3), "num_guesses"),
    (lambda: audit_metric_privacy(None, PLACES, PROBES, 1.0), "no log density"),
    (lambda: audit_metric_privacy(object(), PLACES, PROBES, 1.0), "no log density"),
    (lambda: audit_metric_privacy(lambda outputs, index: np.full(len(outputs), np.nan), PLACES, PROBES, 1.0), "NaN"),
    (lambda: audit_metric_privacy(lambda outputs, index: np.full(len(outputs), inf), PLACES, PROBES, 1.0), "no density"),
    (lambda: audit_metric_privacy(planar(1.0), PLACES, PROBES, 0.0), "epsilon"),
    (lambda: audit_metric_privacy(planar(1.0), PLACES, PROBES, inf), "epsilon"),
    (lambda: audit_metric_privacy(planar(1.0), PLACES[:1], PROBES, 1.0), "n >= 2"),
    (lambda: audit_metric_privacy(planar(1.0), PLACES, PROBES[:0], 1.0), "outputs"),
    (lambda: audit_metric_privacy(planar(1.0), PLACES, PROBES, 1.0, distance=np.ones((12, 12))), "distances"),
    (lambda: probe_outputs(PLACES, [0.0]), "radii"),
    (lambda: probe_outputs(PLACES, [1.0, NAN]), "radii"),
    (lambda: probe_outputs(PLACES * NAN, [1.0]), "points must be finite"),
    (lambda: audit_metric_privacy(lambda outputs, index: np.zeros(len(outputs)), PLACES * NAN, PROBES, 1.0), "points must be finite"),
    (lambda: audit_scores([1.0, 2.0], [1.0, 0.0], threshold=NAN), "threshold"),
    (lambda: audit_scores([1.0, 2.0], [1.0, 0.0], delta=None), "delta"),
    *[(lambda hits=hits: clopper_pearson(hits, 5, 0.05), "hits <= trials") for hits in (6, -1, NAN, 1.5)],
    (lambda: clopper_pearson(0, 0, 0.05), "trials >= 1"),
    *[(lambda alpha=alpha: clopper_pearson(3, 5, alpha), "alpha is .* number in") for alpha in (0, 1, -1, NAN)],
    *[(lambda epsilon=epsilon: one_run_p_value(3, 4, 10, epsilon), "epsilon is .* number in") for epsilon in (-1.0, NAN)],
    *[(lambda delta=delta: one_run_p_value(3, 4, 10, 1.0, delta), "delta is .* number in") for delta in (1.5, NAN)],
    (lambda: one_run_p_value(1.5, 4, 10, 1.0), "whole numbers"),
    (lambda: one_run_audit([1.0, 2.0], np.array([True, False]), 1.5), "num_guesses must be whole"),
    (lambda: plot_epsilons([], [], [], []), "each name"),
])
def test_bad_input_says_what_is_allowed(call, words):
    with pytest.raises(ValueError, match=words):
        call()
