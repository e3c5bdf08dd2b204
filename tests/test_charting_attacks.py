"""Attackers: exact where a closed form exists, never worse than chance where they know more."""
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

from privfl.charting.attacks import (AnchorAttack, bayes_errors, bayes_positions, chance_errors, errors_in_metres, hmm_posterior,
                                     kalman_smooth, orientation_leakage, posterior_positions, repeated_posterior, step_transition,
                                     strongest_error, summarise_errors)
from privfl.charting.mechanisms import MahalanobisPlanarLaplace, PlanarLaplace, unit_chart
from privfl.charting.sound import BalancedExponential, TwoStepMahalanobis, posterior

ANGLE = np.linspace(0, 4, 100)
CHART = unit_chart(np.c_[np.cos(ANGLE) * (1 + ANGLE), np.sin(ANGLE) * (1 + ANGLE)] + 0.05 * np.random.default_rng(0).standard_normal((100, 2)))
POSITIONS = 50 * CHART @ np.array([[0.8, 0.3], [-0.4, 0.9]]) + [100.0, -20.0]


def test_affine_attack_is_exact_on_affine_charts():
    attack = AnchorAttack("affine").fit(CHART[::10], POSITIONS[::10])
    inside = (POSITIONS >= attack.low_).all(1) & (POSITIONS <= attack.high_).all(1)
    assert inside.mean() > 0.9 and np.allclose(attack.predict(CHART)[inside], POSITIONS[inside])


@pytest.mark.parametrize("kind", ["affine", "tps", "mlp"])
def test_anchor_attacks_beat_chance_and_repeat(kind):
    chosen = np.random.default_rng(1).choice(100, 20, replace=False)
    attack = AnchorAttack(kind).fit(CHART[chosen], POSITIONS[chosen])
    errors = errors_in_metres(attack.predict(CHART), POSITIONS)
    assert errors.mean() < 0.5 * chance_errors(POSITIONS, np.random.default_rng(2))["constant"].mean()
    again = clone(attack).fit(CHART[chosen], POSITIONS[chosen])
    assert np.array_equal(again.predict(CHART), attack.predict(CHART))
    wild = attack.predict(np.full((1, 2), 1e6))
    assert (wild >= attack.low_).all() and (wild <= attack.high_).all()  # stays in the city
    assert np.isfinite(AnchorAttack(kind).fit(CHART[:3], POSITIONS[:3]).predict(CHART)).all()


def test_anchor_input_is_checked():
    for arguments in ((CHART[:5], POSITIONS[:4]), (CHART[:2], POSITIONS[:2]), (CHART[:5], POSITIONS[:5] * np.nan)):
        with pytest.raises(ValueError):
            AnchorAttack().fit(*arguments)
    with pytest.raises(ValueError, match="kind"):
        AnchorAttack("cubic").fit(CHART[:9], POSITIONS[:9])


@pytest.mark.parametrize("mechanism", [PlanarLaplace(2.0), MahalanobisPlanarLaplace(2.0, 8, 0.1, 0.9), BalancedExponential(2.0, 25), TwoStepMahalanobis(1.0, 0.5, 8)])
def test_bayes_is_better_than_knowing_nothing(mechanism):
    fitted = clone(mechanism).fit(CHART, CHART)
    answers = fitted.transform(CHART, np.random.default_rng(3))
    errors = bayes_errors(answers, fitted, POSITIONS)
    chance = chance_errors(POSITIONS, np.random.default_rng(4))
    assert strongest_error(answers, fitted, POSITIONS) == min(e.mean() for e in errors.values()) < chance["constant"].mean()
    assert (errors["mean"] ** 2).mean() <= min((errors[k] ** 2).mean() for k in ("median", "map")) * 1.05


def test_little_noise_gives_everybody_away():
    fitted = PlanarLaplace(1e4).fit(CHART)
    errors = bayes_errors(fitted.transform(CHART, np.random.default_rng(5)), fitted, POSITIONS)
    assert max(e.max() for e in errors.values()) < 1.0


def test_much_noise_leaves_the_prior():
    fitted = PlanarLaplace(1e-4).fit(CHART)
    guess = bayes_positions(fitted.transform(CHART, np.random.default_rng(6)), fitted, POSITIONS)["mean"]
    assert np.abs(guess - POSITIONS.mean(0)).max() < 1.0
    with pytest.raises(ValueError, match="positions"):
        posterior_positions(np.full((2, 100), 0.01), POSITIONS[:-1])


def test_repeated_answers_multiply():
    fitted = PlanarLaplace(1.0).fit(CHART)
    reports = np.stack([fitted.transform(CHART, np.random.default_rng(s)) for s in range(8)])
    assert np.allclose(repeated_posterior(reports[:1], fitted), posterior(reports[0], fitted))
    product = posterior(reports[0], fitted) * posterior(reports[1], fitted)
    assert np.allclose(repeated_posterior(reports[:2], fitted), product / product.sum(1, keepdims=True))
    errors = [errors_in_metres(posterior_positions(repeated_posterior(reports[:q], fitted), POSITIONS)["median"], POSITIONS).mean() for q in (1, 8)]
    assert errors[1] < 0.7 * errors[0]
    with pytest.raises(ValueError):
        repeated_posterior(reports[0], fitted)


@given(st.integers(2, 4), st.integers(2, 3), st.integers(0, 10**6))
@settings(max_examples=20)
def test_hidden_markov_smoothing_equals_all_paths(length, states, seed):
    generator = np.random.default_rng(seed)
    transition = generator.dirichlet(np.ones(states), states)
    logs = generator.normal(size=(length, states))
    total = np.zeros((length, states))
    for path in itertools.product(range(states), repeat=length):
        weight = np.exp(logs[range(length), path].sum()) * np.prod([transition[a, b] for a, b in zip(path, path[1:])])
        total[range(length), path] += weight
    assert np.allclose(hmm_posterior(logs, transition), total / total.sum(1, keepdims=True))


def test_hidden_markov_input_is_checked():
    with pytest.raises(ValueError, match="transition"):
        hmm_posterior(np.zeros((4, 3)), np.ones((3, 3)))
    move = step_transition(CHART, 0.1)
    assert np.allclose(move.sum(1), 1) and (np.diag(move) == move.max(1)).all()
    with pytest.raises(ValueError):
        step_transition(CHART, 0.0)


def test_kalman_is_least_squares_without_velocity_noise():
    clock = np.array([0.0, 1, 2.5, 3, 4, 6, 7, 8.5, 9, 11])
    noisy = np.c_[0.3 * clock, 1 - 0.1 * clock] + 0.2 * np.random.default_rng(7).standard_normal((10, 2))
    design = np.c_[np.ones(10), clock]
    line = design @ np.linalg.lstsq(design, noisy, rcond=None)[0]
    assert np.abs(kalman_smooth(noisy, clock, 0.04, np.array([1e-7])) - line).max() < 1e-3
    assert np.abs(kalman_smooth(noisy, clock, 0.04, np.array([1e4])) - noisy).max() < 1e-2  # free to move: follows the answers


@pytest.mark.parametrize("acceleration", [0.05, 0.3, 2.0])
def test_kalman_equals_a_dense_gauss_markov_solve(acceleration):
    """Integrated white noise has covariance a^2 m^2 (3 M - m) / 6 between times m <= M; the smoother is its regression."""
    clock = np.array([0.0, 1, 2.5, 3, 4, 6, 7, 8.5, 9, 11])
    noisy, variance = np.random.default_rng(9).standard_normal((10, 2)).cumsum(axis=0), 0.2
    small, large = np.minimum.outer(clock, clock), np.maximum.outer(clock, clock)
    wide = 1e4 * (variance + np.ptp(noisy) ** 2)  # the start is nearly unknown
    prior = wide + wide / np.median(np.diff(clock)) ** 2 * np.outer(clock, clock) + acceleration**2 * small**2 * (3 * large - small) / 6
    dense = noisy[0] + prior @ np.linalg.solve(prior + variance * np.eye(10), noisy - noisy[0])
    assert np.abs(kalman_smooth(noisy, clock, variance, np.array([acceleration])) - dense).max() < 1e-5


def test_kalman_helps_on_a_walk():
    clock = np.arange(100.0)
    answers = CHART + np.random.default_rng(8).laplace(scale=0.3, size=CHART.shape)
    smooth = kalman_smooth(answers, clock, 0.18)
    assert np.linalg.norm(smooth - CHART, axis=1).mean() < 0.7 * np.linalg.norm(answers - CHART, axis=1).mean()
    for arguments in ((answers, clock[::-1], 0.1), (answers[:2], clock[:2], 0.1), (answers, clock[:-1], 0.1), (answers, clock, 0.0)):
        with pytest.raises(ValueError):
            kalman_smooth(*arguments)


def test_orientation_leaks_whatever_epsilon():
    """20,000 answers at 90 degrees: 4 standard deviations around the closed form, false alarm below 1e-4."""
    expected = 1 - 2 / np.pi * np.arctan(np.sqrt(1 / 9))
    for epsilon in (0.01, 1.0, 100.0):
        fitted = MahalanobisPlanarLaplace(epsilon, 8, 0.1, 0.9).fit(CHART, CHART)
        accuracy = orientation_leakage(fitted, 90, np.random.default_rng(9), repeats=200)
        assert abs(accuracy - expected) < 4 * np.sqrt(expected * (1 - expected) / 20_000)
    assert orientation_leakage(fitted, 0, np.random.default_rng(9), repeats=5) == pytest.approx(0.5, abs=0.02)
    assert orientation_leakage(PlanarLaplace(1.0).fit(CHART), 90, np.random.default_rng(9)) == 0.5


def test_chance_and_summaries():
    chance = chance_errors(POSITIONS, np.random.default_rng(10))
    for step in np.random.default_rng(11).normal(scale=5, size=(20, 2)):
        assert chance["constant"].mean() <= errors_in_metres(np.broadcast_to(np.median(POSITIONS, axis=0) + step, POSITIONS.shape), POSITIONS).mean() + 0.05
    summary = summarise_errors(np.array([0.0, 3.0, 4.0, 5.0]))
    assert summary["mean_m"] == 3.0 and summary["median_m"] == 3.5 and summary["rmse_m"] == pytest.approx(np.sqrt(12.5))


def test_a_shared_draw_is_removed_by_one_anchor():
    shared = CHART + PlanarLaplace(1.0).fit(CHART).transform(CHART, np.random.default_rng(12))[:1] - CHART[:1]
    assert np.allclose(shared - (shared[0] - CHART[0]), CHART)
