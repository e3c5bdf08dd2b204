"""Scores of charts: exact, equal to scikit-learn, bounded in memory, and with a rule for ties."""
import tracemalloc
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.manifold import trustworthiness as sklearn_trustworthiness

from privfl.charting.metrics import (bucket_plan, continuity, kruskal_stress, quality_loss, range_query_error, shuffled_rows,
                                     trustworthiness, trustworthiness_continuity)


def dense(original, embedded, k):
    """The definition with N x N ranks; ties by row after the fixed shuffle."""
    order = shuffled_rows(len(original))

    def ranks(points):
        points = points[order]
        distance = ((points[:, None] - points[None]) ** 2).sum(axis=2)
        np.fill_diagonal(distance, np.inf)
        rank = np.empty(distance.shape, int)
        np.put_along_axis(rank, np.argsort(distance, axis=1, kind="stable"), np.arange(1, len(points) + 1)[None], axis=1)
        return rank

    first, second, size = ranks(np.asarray(original, float)), ranks(np.asarray(embedded, float)), len(original)
    factor = 2 / (size * k * (2 * size - 3 * k - 1))
    return tuple(1 - factor * np.maximum(a - k, 0)[b <= k].sum() for a, b in ((first, second), (second, first)))


@given(st.integers(8, 70), st.integers(1, 34), st.integers(1, 12), st.integers(0, 10**6))
def test_equals_scikit_learn_without_ties(size, k, dimension, seed):
    k = min(k, (size - 1) // 2)
    generator = np.random.default_rng(seed)
    original, embedded = generator.standard_normal((size, dimension)), generator.standard_normal((size, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert abs(trustworthiness(original, embedded, k) - sklearn_trustworthiness(original, embedded, n_neighbors=k)) < 1e-12
        assert abs(continuity(original, embedded, k) - sklearn_trustworthiness(embedded, original, n_neighbors=k)) < 1e-12


@given(st.integers(8, 60), st.integers(1, 29), st.integers(1, 5), st.integers(0, 10**6))
def test_trap_11_ties_follow_the_documented_rule(size, k, levels, seed):
    k = min(k, (size - 1) // 2)
    generator = np.random.default_rng(seed)
    original = generator.integers(0, levels + 1, (size, 2)).astype(float)  # many equal distances, many duplicates
    embedded = generator.integers(0, levels + 1, (size, 2)).astype(float)
    assert np.allclose(trustworthiness_continuity(original, embedded, k), dense(original, embedded, k), atol=1e-12, rtol=0)
    assert trustworthiness_continuity(original, original, k) == (1.0, 1.0)
    assert trustworthiness_continuity(original, embedded, k) == trustworthiness_continuity(embedded, original, k)[::-1]


def test_trap_11_ties_do_not_leak_the_order_of_rows():
    """30 landmarks, 600 users sorted by position: within .01 of random row orders (spread over orders is about .002)."""
    generator = np.random.default_rng(0)
    truth = generator.random((600, 2))
    landmarks = generator.random((30, 2))[generator.integers(30, size=600)]  # answers that know nothing
    order = np.lexsort((truth[:, 1], np.round(truth[:, 0], 1)))
    scores = [trustworthiness(truth[rows], landmarks[rows], 30) for rows in (order, order[::-1], generator.permutation(600))]
    assert np.ptp(scores) < 0.02 and abs(np.mean(scores) - 0.5) < 0.05
    collapsed = np.zeros_like(truth)
    by_centre = np.argsort(np.linalg.norm(truth - 0.5, axis=1))
    assert abs(trustworthiness(truth[by_centre], collapsed, 30) - 0.5) < 0.05


@pytest.mark.parametrize("size, k", [(100, 50), (100, 0), (101, 51), (10, 2.5), (3, 2)])
def test_trap_11_too_many_neighbours_are_refused(size, k):
    points = np.random.default_rng(1).random((size, 2))
    with pytest.raises(ValueError, match="n_neighbors"):
        trustworthiness(points, points, k)


def test_trap_11_the_largest_admissible_k():
    points, noise = np.random.default_rng(2).random((2, 101, 2))
    value = trustworthiness(points, noise, 50)
    assert 0 <= value <= 1 and abs(value - dense(points, noise, 50)[0]) < 1e-12


def test_trap_11_memory_stays_below_a_distance_matrix():
    """5,000 points in 20 dimensions: a matrix of distances alone would take 200 MB."""
    generator = np.random.default_rng(3)
    original = generator.standard_normal((5000, 20))
    embedded = original[:, :2] + 0.1
    trustworthiness_continuity(original[:100], embedded[:100], 5)  # compile first
    tracemalloc.start()
    trustworthiness_continuity(original, embedded, 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6


@pytest.mark.parametrize("dimension", [2, 9, 40])
def test_trap_11_blocked_equals_dense(dimension):
    generator = np.random.default_rng(dimension)
    original, embedded = generator.standard_normal((150, dimension)), generator.standard_normal((150, 2))
    values = {trustworthiness_continuity(original, embedded, 10, block_rows=rows) for rows in (1, 7, 64, 150, 1000)}
    assert len(values) == 1
    assert np.allclose(values.pop(), dense(original, embedded, 10), atol=1e-12, rtol=0)


def test_duplicates_in_high_dimension_are_exact_ties():
    generator = np.random.default_rng(4)
    original = np.repeat(generator.standard_normal((40, 30)), 3, axis=0)
    embedded = np.repeat(generator.standard_normal((40, 2)), 3, axis=0)
    assert trustworthiness_continuity(original, original[:, :], 8) == (1.0, 1.0)
    assert np.allclose(trustworthiness_continuity(original, embedded, 8), dense(original, embedded, 8), atol=1e-12, rtol=0)


def test_outliers_and_far_origins_change_nothing():
    generator = np.random.default_rng(5)
    original, embedded = generator.random((200, 2)), generator.random((200, 2))
    base = trustworthiness_continuity(original, embedded, 10)
    assert trustworthiness_continuity(2.0**20 * original, embedded, 10) == base
    moved = np.round(original * 2**20) / 2**20  # exactly representable after the shift
    assert trustworthiness_continuity(moved + 2.0**22, embedded, 10) == trustworthiness_continuity(moved, embedded, 10)
    embedded[0] = 1e9
    assert np.allclose(trustworthiness_continuity(original, embedded, 10), dense(original, embedded, 10), atol=1e-12, rtol=0)


@given(st.floats(1e-200, 1e200), st.integers(2, 10**6))
def test_buckets_keep_the_order(largest, size):
    shift, base, count = bucket_plan(size, largest)
    values = np.array([0.0, 1e-30, 1e-12, 1e-3, 0.1, 0.5, 0.9, 1.0]) * largest
    buckets = np.clip((values.view(np.int64) >> shift) - base, 0, count - 2)
    assert (np.diff(buckets) >= 0).all() and buckets[-1] <= count - 2 and buckets[0] == 0


@pytest.mark.parametrize("spoil", [lambda x: x[:-1], lambda x: x[:, 0], lambda x: np.where(x > 0.9, np.nan, x), lambda x: np.where(x > 0.9, np.inf, x)])
def test_bad_points_are_refused(spoil):
    points = np.random.default_rng(6).random((50, 2))
    for metric in (lambda a, b: trustworthiness(a, b, 5), kruskal_stress, quality_loss, lambda a, b: range_query_error(a, b, 0.1)):
        with pytest.raises(ValueError):
            metric(points, spoil(points))


def test_stress_is_kruskals_formula():
    generator = np.random.default_rng(7)
    original, embedded = generator.random((60, 3)), generator.random((60, 2))
    upper = np.triu_indices(60, 1)
    d, e = (np.linalg.norm(x[:, None] - x[None], axis=2)[upper] for x in (original, embedded))
    scales = np.linspace(0.1, 3, 20001)
    expected = min(np.sqrt(((d[None] - b[:, None] * e[None]) ** 2).sum(1) / (d**2).sum()).min() for b in np.array_split(scales, 50))
    assert abs(kruskal_stress(original, embedded) - expected) < 1e-6
    with pytest.raises(ValueError, match="coincide"):
        kruskal_stress(np.zeros((5, 2)), embedded[:5])


@given(st.integers(0, 10**6), st.floats(0.01, 2.0))
def test_range_query_error_equals_sets(seed, radius):
    generator = np.random.default_rng(seed)
    points = generator.random((40, 2))
    noisy = points + 0.2 * generator.standard_normal(points.shape)
    near = lambda centre: {j for j in range(40) if (points[j, 0] - centre[0]) ** 2 + (points[j, 1] - centre[1]) ** 2 <= radius * radius}
    pairs = [(near(points[i]), near(noisy[i])) for i in range(40)]
    assert all(i in true for i, (true, _) in enumerate(pairs))
    assert np.isclose(range_query_error(points, noisy, radius), np.mean([1 - len(a & b) / len(a) for a, b in pairs]))
    assert np.isclose(range_query_error(points, noisy, radius, "jaccard"), np.mean([1 - len(a & b) / len(a | b) for a, b in pairs]))
    assert np.isclose(range_query_error(points, noisy, radius, "count"), np.mean([abs(len(b) - len(a)) / len(a) for a, b in pairs]))


@pytest.mark.parametrize("radius, kind", [(0, "recall"), (-1, "recall"), (np.nan, "recall"), (0.1, "precision")])
def test_range_query_arguments(radius, kind):
    with pytest.raises(ValueError):
        range_query_error(np.zeros((3, 2)), np.zeros((3, 2)), radius, kind)
