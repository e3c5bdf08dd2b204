"""Mechanisms that keep the promise: exact levels by brute force, densities against samples, remaps, the optimum."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

from privfl.audit import audit_metric_privacy, probe_outputs
from privfl.charting import sound as module
from privfl.charting.mechanisms import MahalanobisPlanarLaplace, PlanarLaplace, audit_on_circles, unit_chart
from privfl.charting.metrics import quality_loss
from privfl.charting.sound import (BalancedExponential, GeodesicExponential, GlobalMahalanobis, TwoStepMahalanobis, balanced_weights,
                                   bayes_remap, farthest_points, geometric_median, lipschitz, matrix_roots, optimal_mechanism,
                                   posterior, snap_to_chart, table_level)

ANGLE = np.linspace(0, 4, 90)
CHART = unit_chart(np.c_[np.cos(ANGLE) * (1 + ANGLE), np.sin(ANGLE) * (1 + ANGLE)] + 0.05 * np.random.default_rng(0).standard_normal((90, 2)))
ALL = {"global": GlobalMahalanobis(2.0), "two": TwoStepMahalanobis(1.0, 0.6, 8), "geodesic": GeodesicExponential(3.0, 6),
       "balanced": BalancedExponential(2.0, 20), "planar": PlanarLaplace(2.0)}


def brute_level(table, distance):
    """Largest log-ratio over distance, the slow way."""
    worst = 0.0
    for i in range(len(table)):
        for j in range(len(table)):
            if i != j:
                possible = np.isfinite(table[i])
                worst = max(worst, (table[i][possible] - table[j][possible]).max() / distance[i, j])
    return worst


@given(st.floats(0.2, 20), st.integers(3, 25), st.integers(0, 10**6))
def test_balanced_level_is_a_certificate(epsilon, count, seed):
    points = np.random.default_rng(seed).standard_normal((25, 2))
    mechanism = BalancedExponential(epsilon, count).fit(points)
    distance = np.linalg.norm(mechanism.landmarks_[:, None] - mechanism.landmarks_[None], axis=2)
    exact = brute_level(mechanism.log_table_, distance)
    assert exact <= mechanism.level_ + 1e-7 and mechanism.level_ <= epsilon * (1 + 1e-9)
    assert mechanism.inner_epsilon_ >= epsilon / 2 * (1 - 1e-12) and (mechanism.weights_ >= 0).all()
    normaliser = np.log(np.exp(-mechanism.inner_epsilon_ * distance) @ mechanism.weights_)
    assert mechanism.level_ == pytest.approx(mechanism.inner_epsilon_ + lipschitz(normaliser, distance))
    assert abs(table_level(mechanism.log_table_, distance) - exact) < 1e-9
    used = mechanism.weights_ > 0
    if used.all():
        assert exact == pytest.approx(mechanism.level_, rel=1e-6)  # exact where every landmark can be an answer


@given(st.floats(0.2, 8), st.integers(0, 10**6))
@settings(max_examples=20)
def test_any_weights_are_sound(inner, seed):
    """The level formula does not depend on how the weights were found."""
    generator = np.random.default_rng(seed)
    points, weights = generator.random((12, 2)), generator.random(12) * (generator.random(12) > 0.3)
    weights[0] = 1.0
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    kernel = weights * np.exp(-inner * distance)
    normaliser = np.log(kernel.sum(1))
    with np.errstate(divide="ignore"):
        exact = brute_level(np.log(kernel) - normaliser[:, None], distance)
    assert exact <= inner + lipschitz(normaliser, distance) + 1e-9


def test_balancing_beats_the_half():
    landmarks, _ = farthest_points(CHART, 40)
    distance = np.linalg.norm(landmarks[:, None] - landmarks[None], axis=2)
    for inner in (1.0, 4.0):
        assert balanced_weights(distance, inner)[2] < inner + lipschitz(np.log(np.exp(-inner * distance).sum(1)), distance)


def test_borders_cost_two_cover_radii():
    mechanism = ALL["balanced"].fit(CHART)
    table, distance = mechanism.log_table_[mechanism.state_], np.linalg.norm(CHART[:, None] - CHART[None], axis=2)
    with np.errstate(invalid="ignore"):
        loss = np.array([[np.nanmax(np.where(np.isfinite(table[i]), table[i] - table[j], -np.inf)) for j in range(90)] for i in range(90)])
    assert (loss <= mechanism.level_ * (distance + 2 * mechanism.cover_radius_) + 1e-7).all()
    assert mechanism.loss_bound(0.5) == pytest.approx(mechanism.level_ * (0.5 + 2 * mechanism.cover_radius_))


def test_geodesic_level_equals_all_triples():
    mechanism = ALL["geodesic"].fit(CHART)
    assert brute_level(mechanism.log_table_, mechanism.geodesics_) == pytest.approx(mechanism.level_, rel=1e-9)
    straight = np.linalg.norm(mechanism.outputs_[:, None] - mechanism.outputs_[None], axis=2)
    assert brute_level(mechanism.log_table_, straight) == pytest.approx(mechanism.euclidean_level_, rel=1e-9)
    assert mechanism.level_ <= 3.0 and (mechanism.geodesics_ >= straight - 1e-12).all()
    ways = mechanism.geodesics_
    assert all((ways <= ways[:, [k]] + ways[[k]] + 1e-9).all() for k in range(90))  # a metric


def test_geodesic_needs_a_connected_graph():
    with pytest.raises(ValueError, match="parts"):
        GeodesicExponential(1.0, 5).fit(np.r_[CHART, CHART + 100])


def test_one_shape_keeps_its_promise():
    for mechanism in (GlobalMahalanobis(2.0), GlobalMahalanobis(2.0, covariance=np.array([[0.2, 0.1], [0.1, 0.9]]))):
        fitted = mechanism.fit(CHART)
        rows = audit_on_circles(fitted, (0.05, 0.5, 5.0, 50.0), 256)
        assert max(row.excess for row in rows) <= 1e-9
        assert max(row.ratio for row in rows) * 2.0 <= fitted.euclidean_level_ + 1e-9
        assert audit_metric_privacy(fitted, CHART[:25], probe_outputs(CHART[:25], [0.5, 20.0]), epsilon=fitted.euclidean_level_, unit="chart unit").holds()


def test_full_shrinkage_is_planar_laplace():
    one, other = GlobalMahalanobis(2.0, shrinkage=1.0).fit(CHART), PlanarLaplace(2.0).fit(CHART)
    assert np.allclose(one.transform(CHART, np.random.default_rng(1)), other.transform(CHART, np.random.default_rng(1)))
    assert one.euclidean_level_ == pytest.approx(2.0)


def test_two_steps_keep_their_joint_promise():
    mechanism = TwoStepMahalanobis(1.0, 0.6, 8, 0.2, 1.8).fit(CHART)
    users, probe = np.arange(0, 90, 15), probe_outputs(CHART[::15], [0.2, 3.0, 30.0], 8)
    distance, worst = np.linalg.norm(CHART[users][:, None] - CHART[users][None], axis=2), 0.0
    for released in probe[::13]:
        logs = np.stack([mechanism.log_density(probe, np.full(len(probe), user), np.broadcast_to(released, probe.shape)) for user in users], axis=1)
        worst = max(worst, max((logs[:, i] - logs[:, j]).max() / distance[i, j] for i in range(len(users)) for j in range(len(users)) if i != j))
    assert 0.6 * mechanism.level_ < worst <= mechanism.level_ + 1e-9


def test_two_step_shapes_ignore_the_user():
    mechanism = TwoStepMahalanobis(1.0, 0.6, 8).fit(CHART)
    released = np.array([[0.3, -0.2]])
    first = mechanism.shapes(released)
    moved = TwoStepMahalanobis(1.0, 0.6, 8).fit(CHART, features=np.random.default_rng(2).standard_normal((90, 5)))
    assert np.array_equal(first, moved.shapes(released))


@pytest.mark.parametrize("name", ["global", "two"])
def test_densities_integrate_to_one(name):
    mechanism, side = clone(ALL[name]).fit(CHART), np.linspace(-14, 14, 451)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2) + CHART[3]
    index = np.full(len(grid), 3)
    if name == "global":
        mass = np.exp(mechanism.log_density(grid, index)).sum() * (side[1] - side[0]) ** 2
    else:  # given the first release, the answer's density is the joint one over the first one's
        first = CHART[[3]] + [[0.4, 0.1]]
        marginal = 2 * np.log(1.0) - np.log(2 * np.pi) - np.linalg.norm(first[0] - CHART[3])
        mass = np.exp(mechanism.log_density(grid, index, np.broadcast_to(first, grid.shape)) - marginal).sum() * (side[1] - side[0]) ** 2
    assert abs(mass - 1) < 1e-2


@pytest.mark.parametrize("name", ["geodesic", "balanced"])
def test_discrete_samples_match_the_table(name):
    """2,000 draws of one user; chi-square at level 1e-4 over the answers with 5 or more expected."""
    from scipy.stats import chisquare
    mechanism = clone(ALL[name]).fit(CHART)
    assert np.allclose(np.exp(mechanism.log_table_).sum(1), 1)
    draws = np.concatenate([mechanism.transform(CHART, np.random.default_rng(s))[[40]] for s in range(2000)])
    index, exists = mechanism._match(draws)
    assert exists.all()
    expected = 2000 * np.exp(mechanism.log_density(mechanism.outputs_, np.full(len(mechanism.outputs_), 40)))
    seen = np.bincount(index, minlength=len(expected))
    common = expected >= 5
    if not common.all():
        seen, expected = np.r_[seen[common], seen[~common].sum()], np.r_[expected[common], expected[~common].sum()]
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4
    assert np.isneginf(mechanism.log_density(CHART[:2] + 7.0, np.array([0, 1]))).all()


def test_two_step_samples_match_the_density():
    """Whitened second noise of 5,400 answers: KS at level 1e-3."""
    from scipy.stats import gamma, kstest
    mechanism, lengths = TwoStepMahalanobis(1.0, 0.6, 8).fit(CHART), []
    for seed in range(60):
        answers = mechanism.transform(CHART, np.random.default_rng(seed))
        white = np.einsum("nij,nj->ni", matrix_roots(mechanism.shapes(mechanism.first_), -0.5), answers - CHART)
        lengths.append(np.linalg.norm(white, axis=1))
    assert kstest(np.concatenate(lengths), gamma(2, scale=1 / 0.6).cdf).pvalue > 1e-3
    assert not np.array_equal(mechanism.first_, answers)


@pytest.mark.parametrize("name", list(ALL))
def test_remap_helps_and_costs_nothing(name):
    mechanism = clone(ALL[name]).fit(CHART)
    answers = mechanism.transform(CHART, np.random.default_rng(3))
    weights = posterior(answers, mechanism)
    assert weights.shape == (90, 90) and np.allclose(weights.sum(1), 1)
    median, mean = bayes_remap(answers, CHART, mechanism, loss="absolute"), bayes_remap(answers, CHART, mechanism)
    assert quality_loss(CHART, median) <= quality_loss(CHART, answers) + 0.02
    assert ((mean - CHART) ** 2).sum() <= ((median - CHART) ** 2).sum() * 1.05


def test_remap_is_the_argmin_of_the_posterior_loss():
    mechanism = ALL["planar"].fit(CHART)
    answers = mechanism.transform(CHART, np.random.default_rng(4))[:5]
    weights, median = posterior(answers, mechanism), bayes_remap(answers, CHART, mechanism, loss="absolute")
    cost = lambda guess: (weights * np.linalg.norm(guess[:, None] - CHART[None], axis=2)).sum(1)
    for step in 0.02 * np.random.default_rng(5).standard_normal((50, 2)):
        assert (cost(median) <= cost(median + step) + 1e-4).all()


def test_geometric_median_of_known_sets():
    square = np.array([[0.0, 0], [1, 0], [0, 1], [1, 1]])
    assert np.allclose(geometric_median(np.full((1, 4), 0.25), square), 0.5, atol=1e-3)
    heavy = np.array([[0.6, 0.2, 0.1, 0.1]])
    assert np.allclose(geometric_median(heavy, square, iterations=500, tolerance=1e-9), 0, atol=1e-3)


def test_snapping_lands_on_the_chart():
    answers = CHART + 0.3 * np.random.default_rng(6).standard_normal(CHART.shape)
    snapped = snap_to_chart(answers, CHART)
    brute = CHART[np.linalg.norm(answers[:, None] - CHART[None], axis=2).argmin(1)]
    assert np.array_equal(snapped, brute)


@pytest.mark.parametrize("epsilon", [1.0, 3.0])
def test_linear_program_is_feasible_and_not_beaten(epsilon):
    landmarks, _ = farthest_points(CHART, 12)
    distance = np.linalg.norm(landmarks[:, None] - landmarks[None], axis=2)
    table, best = optimal_mechanism(landmarks, epsilon)
    assert np.allclose(table.sum(1), 1)
    slack = table[:, None] - np.exp(epsilon * distance)[:, :, None] * table[None]
    assert slack.max() < 1e-6
    balanced = BalancedExponential(epsilon, 12).fit(landmarks)
    between = np.linalg.norm(balanced.landmarks_[:, None] - balanced.landmarks_[None], axis=2)
    ours = (np.exp(balanced.log_table_).T @ between / 12).min(1).sum()
    halved = np.exp(-epsilon / 2 * between)
    halved = (((halved / halved.sum(1, keepdims=True)).T @ between) / 12).min(1).sum()
    assert best <= ours * (1 + 1e-6) <= 1.12 * best and ours < halved


def test_landmarks_spread_and_cover():
    landmarks, cover = farthest_points(CHART, 15)
    gap = np.linalg.norm(CHART[:, None] - landmarks[None], axis=2).min(1)
    assert cover == pytest.approx(gap.max()) and len(np.unique(landmarks, axis=0)) == 15
    apart = np.linalg.norm(landmarks[:, None] - landmarks[None], axis=2) + 1e9 * np.eye(15)
    assert apart.min() >= cover - 1e-12  # the property of farthest-point sampling


@pytest.mark.parametrize("build", [lambda: BalancedExponential(0.0, 10), lambda: BalancedExponential(1.0, 2), lambda: BalancedExponential(1.0, 91), lambda: BalancedExponential(1.0, 4.5),
                                   lambda: GeodesicExponential(-1.0, 5), lambda: GeodesicExponential(1.0, 0), lambda: GlobalMahalanobis(np.nan), lambda: GlobalMahalanobis(1.0, 1.5),
                                   lambda: GlobalMahalanobis(1.0, covariance=np.ones((2, 2))), lambda: GlobalMahalanobis(1.0, covariance=np.eye(3)), lambda: TwoStepMahalanobis(0.0, 1.0),
                                   lambda: TwoStepMahalanobis(1.0, 0.0), lambda: TwoStepMahalanobis(1.0, 1.0, 1), lambda: TwoStepMahalanobis(1.0, 1.0, 91)])
def test_bad_parameters_are_refused(build):
    with pytest.raises(ValueError):
        build().fit(CHART)


def test_a_line_is_singular_without_shrinkage():
    line = np.c_[np.arange(9.0), np.zeros(9)]
    with pytest.raises(ValueError, match="singular"):
        GlobalMahalanobis(1.0, shrinkage=0.0).fit(line)
    assert np.isfinite(GlobalMahalanobis(1.0).fit(line).transform(line, np.random.default_rng(0))).all()


def test_duplicate_points_have_a_rule():
    chart = np.repeat(CHART[:30], 2, axis=0)
    for mechanism in (GeodesicExponential(2.0, 6), BalancedExponential(2.0, 20)):
        fitted = clone(mechanism).fit(chart)
        assert np.isfinite(fitted.level_)
        answers = fitted.transform(chart, np.random.default_rng(1))
        density = fitted.log_density(np.repeat(answers[:1], 2, axis=0), np.array([0, 1]))
        assert density[0] == density[1]  # users at one place are alike
    assert len(GeodesicExponential(2.0, 6).fit(chart).outputs_) == 30


def test_joint_density_needs_its_first_release():
    mechanism = TwoStepMahalanobis(1.0, 0.6, 8).fit(CHART)
    with pytest.raises(ValueError, match="first"):
        mechanism.log_density(CHART[:3], np.arange(3))
    answers = mechanism.transform(CHART, np.random.default_rng(0))
    assert np.allclose(mechanism.log_density(answers, np.arange(90)), mechanism.log_density(answers, np.arange(90), mechanism.first_))


def test_remap_refuses_strangers():
    mechanism = PlanarLaplace(1.0).fit(CHART)
    with pytest.raises(ValueError, match="rows"):
        bayes_remap(CHART, CHART[:-1], mechanism)
    with pytest.raises(ValueError, match="loss"):
        bayes_remap(CHART, CHART, mechanism, loss="cubic")
    discrete = GeodesicExponential(1.0, 6).fit(CHART)
    with pytest.raises(ValueError, match="impossible"):
        posterior(CHART[:2] + 9, discrete)


def test_estimators_clone_and_repeat():
    for mechanism in ALL.values():
        assert clone(mechanism).get_params() == mechanism.get_params()
        first, second = (clone(mechanism).fit(CHART).transform(CHART, np.random.default_rng(8)) for _ in range(2))
        assert np.array_equal(first, second)
    assert np.isinf(MahalanobisPlanarLaplace(1.0, 8).fit(CHART, CHART).level_)
    assert module.BalancedExponential is BalancedExponential


def test_two_steps_are_small_along_the_chart_and_large_across():
    """On a line chart every released point has the line's axis: 48,000 answers, each variance within 5 standard errors: false alarm below 1e-6."""
    line = np.c_[np.arange(240.0), np.zeros(240)]
    mechanism = TwoStepMahalanobis(5.0, 2.0, 6, 0.1, 0.9).fit(line)
    noise = np.concatenate([mechanism.transform(line, np.random.default_rng(s)) - line for s in range(200)])
    for column, variance in ((0, 0.1), (1, 0.9)):
        squared = noise[:, column] ** 2
        assert abs(squared.mean() - 3 * variance / 4) < 5 * squared.std() / np.sqrt(len(squared))
    assert np.allclose(mechanism.shapes(line[:5] + [0.0, 0.3]), np.diag([0.1, 0.9]))
