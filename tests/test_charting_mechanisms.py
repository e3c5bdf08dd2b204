"""The paper's mechanisms: samplers, densities, the promise and its failure."""
import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from sklearn.base import clone

from privfl.audit import audit_mechanism, audit_metric_privacy, probe_outputs
from privfl.charting import mechanisms as module
from privfl.charting.mechanisms import (GaussianMechanism, MahalanobisPlanarLaplace, PlanarLaplace, audit_on_circles, chart_diameter,
                                        loss_on_circle, matched_variances, principal_directions, relaxed_loss, shape_matrices,
                                        shape_ratio, tail_radius, unit_chart)

GENERATOR = np.random.default_rng(0)
ANGLE = np.linspace(0, 4, 120)
CHART = unit_chart(np.c_[np.cos(ANGLE) * (1 + ANGLE), np.sin(ANGLE) * (1 + ANGLE)] + 0.05 * GENERATOR.standard_normal((120, 2)))
FEATURES = np.c_[CHART, 0.3 * GENERATOR.standard_normal((120, 4))]


def axis(degrees):
    """A unit vector as (1, 2)."""
    return np.array([[np.cos(np.radians(degrees)), np.sin(np.radians(degrees))]])


def fitted(name):
    """Each mechanism of this module on the test chart."""
    return {"planar": PlanarLaplace(2.0), "gaussian": GaussianMechanism(2.0, 1e-5, 0.5),
            "mnpl": MahalanobisPlanarLaplace(2.0, 10, 0.02, 0.3)}[name].fit(CHART, FEATURES)


@pytest.mark.parametrize("name", ["planar", "gaussian", "mnpl"])
def test_densities_integrate_to_one(name):
    mechanism, side = fitted(name), np.linspace(-9, 9, 1501)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    mass = np.exp(mechanism.log_density(grid + CHART[7], np.full(len(grid), 7))).sum() * (side[1] - side[0]) ** 2
    assert abs(mass - 1) < 2e-3


@pytest.mark.parametrize("name", ["planar", "mnpl"])
def test_trap_13_samples_match_the_density(name):
    """3,600 answers, two KS tests each at level 1e-3; fixed seed."""
    mechanism = fitted(name)
    inverse = getattr(mechanism, "inverse_roots_", np.broadcast_to(np.eye(2), (120, 2, 2)))
    white = np.concatenate([np.einsum("nij,nj->ni", inverse, mechanism.transform(CHART, np.random.default_rng(s)) - CHART) for s in range(30)])
    assert stats.kstest(np.linalg.norm(white, axis=1), stats.gamma(2, scale=0.5).cdf).pvalue > 1e-3
    assert stats.kstest(np.arctan2(white[:, 1], white[:, 0]), stats.uniform(-np.pi, 2 * np.pi).cdf).pvalue > 1e-3


def test_gaussian_samples_have_the_analytic_deviation():
    """14,400 numbers: 4 standard errors, false alarm below 1e-4."""
    mechanism = fitted("gaussian")
    noise = np.concatenate([mechanism.transform(CHART, np.random.default_rng(s)) - CHART for s in range(60)])
    assert abs(noise.std() / mechanism.sigma_ - 1) < 4 / np.sqrt(2 * noise.size)
    assert mechanism.sensitivity_ == 0.5 and np.isinf(mechanism.level_)


def test_matrix_of_densities_equals_single_ones():
    for name in ("planar", "gaussian", "mnpl"):
        mechanism = fitted(name)
        noisy = mechanism.transform(CHART, np.random.default_rng(1))[:9]
        full = mechanism.log_density_matrix(noisy)
        assert full.shape == (9, 120)
        assert np.allclose(full[:, 5], mechanism.log_density(noisy, np.full(9, 5)))


def test_planar_laplace_keeps_its_promise_exactly():
    mechanism = fitted("planar")
    report = audit_metric_privacy(mechanism, CHART[:30], probe_outputs(CHART[:30], [0.1, 1.0, 50.0]), epsilon=2.0, unit="chart unit")
    assert report.holds() and abs(report.needed_epsilon - 2.0) < 1e-6
    assert max(row.excess for row in audit_on_circles(mechanism)) <= 1e-9


def test_published_mechanism_breaks_its_promise():
    mechanism = fitted("mnpl")
    excess = [row.excess for row in audit_on_circles(mechanism, (0.1, 1, 10, 100))]
    assert excess[0] > 0 and excess[3] > 5 * excess[2] > 25 * excess[1] > 0  # grows with the distance of the answer
    assert np.isinf(mechanism.level_)


def test_published_mechanism_fails_an_audit_from_samples():
    """Two users at one point, axes 90 degrees apart: the claim is loss 0; 100,000 answers each show more (confidence .95)."""
    shapes = shape_matrices(np.concatenate([axis(0), axis(90)]), 0.01, 0.09)
    roots = [np.linalg.cholesky(shape) for shape in shapes]

    def sampler(which):
        def draw(count, generator):
            return module.planar_laplace(count, 1.0, generator) @ roots[which].T
        return draw

    statistic = lambda z: np.sqrt((z @ np.linalg.inv(shapes[1]) * z).sum(1)) - np.sqrt((z @ np.linalg.inv(shapes[0]) * z).sum(1))
    assert audit_mechanism(sampler(0), sampler(1), 100_000, statistic, 0.0, 0.95, np.random.default_rng(2)) > 3.0
    assert audit_mechanism(sampler(0), sampler(0), 100_000, statistic, 0.0, 0.95, np.random.default_rng(3)) < 0.5


@given(st.floats(0, 180), st.floats(0.05, 20), st.floats(-1, 1), st.floats(-1, 1), st.floats(0.01, 100))
def test_one_shape_obeys_the_triangle_inequality(turn, ratio, dx, dy, radius):
    shape, offset = shape_matrices(axis(turn), 1.0, ratio)[0], np.array([dx, dy])
    claimed = np.sqrt(offset @ np.linalg.solve(shape, offset))
    assert loss_on_circle(shape, shape, offset, 1.5, radius, 360) <= 1.5 * claimed + 1e-7


@given(st.floats(2, 90), st.floats(1.5, 20))
def test_two_shapes_have_no_bound(turn, ratio):
    first, second = (shape_matrices(axis(degrees), 1.0, ratio)[0] for degrees in (0, turn))
    near, far = (loss_on_circle(first, second, np.zeros(2), 1.0, radius) for radius in (1.0, 1000.0))
    assert far > 500 * near > 0


def test_counter_example_has_the_known_numbers():
    first, offset = shape_matrices(axis(0), 1, 4)[0], np.array([0.1, 0.0])
    known = {30: (0.32, 2.6, 25), 5: (0.13, 0.52, 4.4)}
    for turn, values in known.items():
        for radius, value in zip((1, 10, 100), values):
            assert abs(loss_on_circle(first, shape_matrices(axis(turn), 1, 4)[0], offset, 1.0, radius) / value - 1) < 0.03


@given(st.floats(0, 90), st.floats(0.1, 10), st.floats(1e-6, 0.3))
def test_relaxation_floor_does_not_know_epsilon(turn, ratio, delta):
    first, second = (shape_matrices(axis(degrees), 1.0, ratio)[0] for degrees in (0, turn))
    floors = [relaxed_loss(first, second, np.array([0.3, -0.1]), epsilon, delta)[1] for epsilon in (1e-3, 1.0, 10.0)]
    assert np.ptp(floors) == 0 and floors[0] >= -1e-9
    assert shape_ratio(first, second) >= 1 - 1e-9  # equal determinants


def test_relaxation_holds_with_its_probability():
    """400,000 answers at delta .05: 4 standard deviations, false alarm below 1e-4."""
    first, second, offset = shape_matrices(axis(0), 1, 9)[0], shape_matrices(axis(35), 1, 9)[0], np.array([0.2, 0.1])
    answers = module.planar_laplace(400_000, 2.0, np.random.default_rng(4)) @ np.linalg.cholesky(first).T
    norm = lambda v, shape: np.sqrt((v @ np.linalg.inv(shape) * v).sum(1))
    loss = 2.0 * (norm(answers - offset, second) - norm(answers, first))
    share = (loss > relaxed_loss(first, second, offset, 2.0, 0.05)[0]).mean()
    assert share <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 400_000)


def test_tail_radius_and_its_range():
    for delta in (0.5, 1e-2, 1e-6, 1e-12):
        tau = tail_radius(delta)
        assert abs((1 + tau) * np.exp(-tau) / delta - 1) < 1e-9
    for delta in (0.0, 1.0, -1, np.nan):
        with pytest.raises(ValueError):
            tail_radius(delta)


@pytest.mark.parametrize("ratio", [0.25, 1.0, 9.0])
def test_matched_variances(ratio):
    for matching, value in (("trace", sum), ("determinant", np.prod), ("smallest", min)):
        pair = matched_variances(ratio, matching)
        assert np.isclose(pair[1] / pair[0], ratio) and np.isclose(value(pair), 2 if matching == "trace" else 1)
    with pytest.raises(ValueError):
        matched_variances(9, "energy")


def test_noise_energy():
    """E |n|^2 = 3 tr Sigma / epsilon^2 over 24,000 answers: 4 standard errors."""
    mechanism = fitted("mnpl")
    energy = np.concatenate([((mechanism.transform(CHART, np.random.default_rng(s)) - CHART) ** 2).sum(1) for s in range(200)])
    assert abs(energy.mean() - 3 * 0.32 / 4) < 4 * energy.std() / np.sqrt(len(energy))


def test_neighbours_come_from_features_not_from_the_chart():
    features = np.random.default_rng(5).standard_normal((120, 3))
    mechanism = MahalanobisPlanarLaplace(1.0, 5, 0.1, 0.4).fit(CHART, features)
    brute = np.argsort(np.linalg.norm(features[:, None] - features[None], axis=2) + 1e9 * np.eye(120), axis=1)[:, :5]
    assert all(set(a) == set(b) for a, b in zip(mechanism.neighbors_, brute))


def test_degenerate_neighbourhoods_follow_the_rule():
    assert np.array_equal(principal_directions(np.zeros((5, 2)), np.array([[0, 1, 2]])), [[1.0, 0.0]])
    line = np.c_[np.arange(30.0), np.zeros(30)]
    along = MahalanobisPlanarLaplace(1.0, 4, 0.1, 0.4).fit(line, line)
    assert np.allclose(np.abs(along.principal_), [1, 0])
    assert along.level_ == pytest.approx(1 / np.sqrt(0.1))  # one shape for all: the claim holds there
    repeated = np.repeat(CHART[:20], 3, axis=0)
    assert np.isfinite(MahalanobisPlanarLaplace(1.0, 4).fit(repeated, np.repeat(FEATURES[:20], 3, axis=0)).transform(repeated, np.random.default_rng(0))).all()


def test_noise_is_small_along_the_chart_and_large_across():
    """On a line chart the axes are known: 48,000 answers, each variance within 5 standard errors (kurtosis of the law included): false alarm below 1e-6."""
    line = np.c_[np.arange(240.0), np.zeros(240)]
    mechanism = MahalanobisPlanarLaplace(2.0, 6, 0.1, 0.9).fit(line, line)
    noise = np.concatenate([mechanism.transform(line, np.random.default_rng(s)) - line for s in range(200)])
    for column, variance in ((0, 0.1), (1, 0.9)):  # planar Laplace has variance 3 / epsilon^2 in each direction
        squared = noise[:, column] ** 2
        assert abs(squared.mean() - 3 * variance / 4) < 5 * squared.std() / np.sqrt(len(squared))


def test_shapes_have_the_principal_variance_along_the_principal_axis():
    mechanism = MahalanobisPlanarLaplace(1.0, 10, 0.02, 0.3).fit(CHART, FEATURES)
    axes, shapes = mechanism.principal_, mechanism.covariances_
    across = np.c_[-axes[:, 1], axes[:, 0]]
    assert np.allclose(np.einsum("ni,nij,nj->n", axes, shapes, axes), 0.02)
    assert np.allclose(np.einsum("ni,nij,nj->n", across, shapes, across), 0.3)
    for user in (0, 50, 119):  # and the axis is the first eigenvector of the neighbours on the chart
        vectors = np.linalg.eigh(np.cov(CHART[mechanism.neighbors_[user]].T))[1]
        assert abs(abs(vectors[:, 1] @ axes[user]) - 1) < 1e-9


@pytest.mark.parametrize("epsilon,delta", [(0.3, 1e-5), (2.0, 1e-2)])
def test_relaxed_loss_is_the_formula_by_hand(epsilon, delta):
    """Each term on its own: determinants, epsilon times the distance in the other's norm, (rho - 1) times the Gamma quantile."""
    first, second, offset = shape_matrices(axis(0), 1.0, 4.0)[0], 1.7 * shape_matrices(axis(50), 1.0, 9.0)[0], np.array([0.4, -0.2])
    turn = np.linspace(0, np.pi, 200_001)
    spots = np.c_[np.cos(turn), np.sin(turn)]
    norms = [np.sqrt(np.einsum("ni,ij,nj->n", spots, np.linalg.inv(shape), spots)) for shape in (first, second)]
    rho = (norms[1] / norms[0]).max()
    floor = 0.5 * np.log(np.linalg.det(second) / np.linalg.det(first)) + (rho - 1) * stats.gamma(2).isf(delta)
    bound = floor + epsilon * np.sqrt(offset @ np.linalg.inv(second) @ offset)
    assert relaxed_loss(first, second, offset, epsilon, delta) == pytest.approx((bound, floor), rel=1e-8)
    wide = relaxed_loss(4 * first, first / 4, offset, epsilon, delta)  # rho is 4 there; the other way it is below 1 and counts as nothing
    assert wide[1] == pytest.approx(-np.log(16) + 3 * stats.gamma(2).isf(delta))
    assert relaxed_loss(first / 4, 4 * first, offset, epsilon, delta)[1] == pytest.approx(np.log(16))


def test_estimators_clone_and_keep_their_parameters():
    for mechanism in (PlanarLaplace(2.0), GaussianMechanism(1.0, 1e-5), MahalanobisPlanarLaplace(3.0, 7, 0.1, 0.2)):
        assert clone(mechanism).get_params() == mechanism.get_params()
        first, second = (clone(mechanism).fit(CHART, FEATURES).transform(CHART, np.random.default_rng(9)) for _ in range(2))
        assert np.array_equal(first, second)


def test_transform_takes_the_fitted_rows_only():
    for name in ("planar", "gaussian", "mnpl"):
        mechanism = fitted(name)
        for rows in (CHART[:-1], CHART[::-1], CHART + 1e-9):
            with pytest.raises(ValueError, match="fitted on"):
                mechanism.transform(rows, np.random.default_rng(0))
    with pytest.raises(ValueError, match="not fitted"):
        PlanarLaplace(1.0).transform(CHART, np.random.default_rng(0))
    with pytest.raises(ValueError, match="Generator"):
        fitted("planar").transform(CHART, 3)


@pytest.mark.parametrize("chart", [np.zeros((9, 2)), np.ones((9, 1)), np.arange(9.0), np.full((9, 2), np.nan), np.repeat([[0, 0], [1, 1]], 5, axis=0)])
def test_bad_charts_are_refused(chart):
    with pytest.raises(ValueError):
        PlanarLaplace(1.0).fit(chart)


@pytest.mark.parametrize("build", [lambda: PlanarLaplace(0.0), lambda: PlanarLaplace(-1.0), lambda: PlanarLaplace(np.nan), lambda: PlanarLaplace(np.inf),
                                   lambda: GaussianMechanism(0.0, 1e-5), lambda: GaussianMechanism(1.0, 0.0), lambda: GaussianMechanism(1.0, 1e-5, 0.0),
                                   lambda: MahalanobisPlanarLaplace(0.0), lambda: MahalanobisPlanarLaplace(1.0, 1), lambda: MahalanobisPlanarLaplace(1.0, 120),
                                   lambda: MahalanobisPlanarLaplace(1.0, 5, 0.0, 1.0), lambda: MahalanobisPlanarLaplace(1.0, 5, 1.0, -1.0)])
def test_bad_parameters_are_refused(build):
    with pytest.raises(ValueError):
        build().fit(CHART, FEATURES)


def test_published_mechanism_needs_features():
    with pytest.raises(ValueError, match="feature"):
        MahalanobisPlanarLaplace(1.0, 5).fit(CHART)
    with pytest.raises(ValueError, match="rows"):
        MahalanobisPlanarLaplace(1.0, 5).fit(CHART, FEATURES[:-1])


def test_bad_answers_are_refused():
    mechanism = fitted("planar")
    for noisy, index in ((CHART[:3], [0, 1]), (CHART[:3, 0], [0, 1, 2]), (CHART[:3], [0, 1, 120]), (CHART[:3], [-1, 0, 1])):
        with pytest.raises(ValueError):
            mechanism.log_density(noisy, np.array(index))


def test_diameter():
    points = np.random.default_rng(6).random((200, 2))
    assert chart_diameter(points) == pytest.approx(np.linalg.norm(points[:, None] - points[None], axis=2).max())
    assert chart_diameter(np.c_[np.arange(4.0), np.arange(4.0)]) == pytest.approx(3 * np.sqrt(2))


def test_trap_23_the_unit_stands_beside_every_epsilon():
    for mechanism in (PlanarLaplace, MahalanobisPlanarLaplace):
        line = next(line for line in inspect.getsource(mechanism.__init__).splitlines() if "epsilon:" in line)
        assert "unit" in line


def test_trap_20_nothing_touches_the_global_generator():
    before = np.random.get_state()[1].copy()
    for name in ("planar", "gaussian", "mnpl"):
        fitted(name).transform(CHART, np.random.default_rng(0))
    assert np.array_equal(before, np.random.get_state()[1])
