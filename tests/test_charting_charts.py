"""Chart learners: scikit-learn's habits, determinism, and a score that a reader would expect."""
import inspect

import numpy as np
import pytest
import torch
from sklearn.base import clone

from privfl.charting.charts import AutoencoderChart, PCAChart, SiameseChart, TripletChart, check_dissimilarities, perceptron
from privfl.charting.csi import autocorrelation_features, charting_dissimilarity, load_munich
from privfl.charting.metrics import kruskal_stress, trustworthiness_continuity

MUNICH = load_munich(150, shipped=True)
FEATURES = autocorrelation_features(MUNICH.csi)
QUICK = {"iterations": 25, "progress": False}
LEARNERS = [PCAChart(), AutoencoderChart(**QUICK), SiameseChart(**QUICK), TripletChart(**QUICK)]


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda item: type(item).__name__)
def test_scikit_learns_habits(learner):
    copy = clone(learner)
    assert copy.get_params() == learner.get_params() and copy is not learner
    assert copy.fit(FEATURES) is copy and copy.n_features_in_ == FEATURES.shape[1]
    points = copy.transform(FEATURES)
    assert points.shape == (150, 2) and points.dtype == np.float64 and np.isfinite(points).all()
    assert np.allclose(clone(learner).fit_transform(FEATURES), points)
    assert np.allclose(copy.transform(FEATURES[:7]), points[:7], atol=1e-5)  # users one by one
    changed = clone(learner).set_params(seed=5)
    assert changed.get_params()["seed"] == 5


@pytest.mark.parametrize("learner", LEARNERS[1:], ids=lambda item: type(item).__name__)
def test_seeds_decide_everything(learner):
    first = clone(learner).fit(FEATURES).transform(FEATURES)
    torch.rand(7, generator=torch.Generator().manual_seed(1))
    second = clone(learner).fit(FEATURES).transform(FEATURES)
    other = clone(learner).set_params(seed=1).fit(FEATURES).transform(FEATURES)
    assert np.array_equal(first, second) and not np.allclose(first, other)


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda item: type(item).__name__)
def test_trap_20_the_global_generators_stay(learner):
    with torch.random.fork_rng():
        torch.manual_seed(987)
        before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
        clone(learner).fit(FEATURES).transform(FEATURES)
        assert torch.equal(before, torch.random.get_rng_state()) and np.array_equal(numpy_before, np.random.get_state()[1])


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda item: type(item).__name__)
@pytest.mark.parametrize("spoil", [lambda f: np.where(f > 0.9 * f.max(), np.nan, f), lambda f: f[:, 0], lambda f: np.repeat(f[:2], 40, axis=0)])
def test_bad_features_are_refused(learner, spoil):
    with pytest.raises(ValueError):
        clone(learner).fit(spoil(FEATURES))


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda item: type(item).__name__)
def test_another_number_of_features_is_refused(learner):
    with pytest.raises(ValueError, match="features"):
        clone(learner).fit(FEATURES).transform(FEATURES[:, :-1])


@pytest.mark.parametrize("wrong", [{"iterations": 0}, {"batch_size": 1}, {"learning_rate": 0.0}, {"num_inputs": 0}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        SiameseChart(**{**QUICK, **wrong}).fit(FEATURES)
    with pytest.raises(ValueError):
        TripletChart(**QUICK, window_steps=0).fit(FEATURES)


def test_dissimilarities_are_checked():
    lengths = charting_dissimilarity(MUNICH, connect=True)
    wrong = [lengths[:-1], -lengths, lengths + np.triu(np.ones_like(lengths)), np.where(lengths > 2, np.inf, lengths), np.zeros_like(lengths), lengths + np.eye(150)]
    for matrix in wrong:
        with pytest.raises(ValueError):
            SiameseChart(**QUICK).fit(FEATURES, dissimilarities=matrix)
    assert np.isfinite(check_dissimilarities(None, FEATURES)).all()
    for times in (MUNICH.times[:-1], np.full(150, np.nan)):
        with pytest.raises(ValueError):
            TripletChart(**QUICK).fit(FEATURES, times=times)


def test_siamese_chart_has_the_streets():
    lengths = charting_dissimilarity(MUNICH, connect=True)
    points = SiameseChart(iterations=300, progress=False).fit(FEATURES, dissimilarities=lengths).transform(FEATURES)
    assert min(trustworthiness_continuity(MUNICH.positions, points)) > 0.93
    assert kruskal_stress(MUNICH.positions, points) < 0.4


def test_siamese_recovers_a_plane():
    flat = np.random.default_rng(0).uniform(size=(120, 2))
    distance = np.linalg.norm(flat[:, None] - flat[None], axis=2)
    assert kruskal_stress(flat, SiameseChart(iterations=300, progress=False).fit(flat, dissimilarities=distance).transform(flat)) < 0.05


def test_triplets_listen_to_time_not_to_rows():
    order = np.random.default_rng(1).permutation(150)
    settings = dict(iterations=120, batch_size=256, window_steps=3, progress=False)
    timed = TripletChart(**settings).fit(FEATURES[order], times=MUNICH.times[order]).transform(FEATURES)
    untimed = TripletChart(**settings).fit(FEATURES[order]).transform(FEATURES)
    scores = [trustworthiness_continuity(MUNICH.positions, points)[0] for points in (timed, untimed)]
    assert scores[0] > 0.85 > scores[1]


def test_equal_features_do_not_make_nan():
    """The square root at distance zero: half of the users coincide."""
    features = np.r_[np.repeat(FEATURES[:1], 60, axis=0), FEATURES[:30]]
    for learner in (SiameseChart(**QUICK), TripletChart(**QUICK)):
        assert np.isfinite(clone(learner).fit(features).transform(features)).all()


def test_loss_falls():
    for learner in LEARNERS[1:]:
        curve = clone(learner).set_params(iterations=120).fit(FEATURES).loss_curve_
        assert np.mean(curve[-20:]) < 0.8 * np.mean(curve[:5])


def test_networks_are_small_and_shaped():
    network = perceptron((5, 7, 2), 0)
    assert [tuple(p.shape) for p in network.parameters()] == [(7, 5), (7,), (2, 7), (2,)]
    assert "seed" in inspect.signature(SiameseChart).parameters


@pytest.mark.full
def test_full_walk_reaches_literature_level():
    """3,600 users where the full file is there: Siamese TW and CT at least .99, K = 5 %."""
    walk = load_munich()
    features = autocorrelation_features(walk.csi)
    points = SiameseChart(progress=False).fit(features, dissimilarities=charting_dissimilarity(walk)).transform(features)
    scores = trustworthiness_continuity(walk.positions, points)
    print("TW, CT, KS:", *scores, kruskal_stress(walk.positions, points))
    assert min(scores) > 0.99
