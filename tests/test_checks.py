"""The checks of arguments, and that every module of the mechanisms, accounts, audits and charts uses them."""
import ast
import inspect
import re
from fractions import Fraction
from math import inf, nan
from pathlib import Path

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from notebook_tools import ROOT
from scipy.spatial.distance import cdist

from privfl import accounting, audit, mechanisms
from privfl.charting import attacks, charts, csi, metrics, sound
from privfl.charting import mechanisms as chart_mechanisms
from privfl.checks import as_array, between, choice, finite, instance, positive, whole
from privfl.federation import Clip, Promise
from privfl.inversion import cosine_distance
from privfl.selection.models import LeNetGELU, Normalise
from privfl.update import UpdateError, clip_by_norm


def named(value) -> str:
    """An id that is the same in every process: no memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


NO_NUMBER = [None, "3", "", b"3", [3], (3,), {}, 3j, object(), True, False, np.True_, torch.tensor(True), np.array(True), np.ones(1), torch.ones(1),
             np.datetime64(3, "ns"), np.timedelta64(3, "s"), np.array("3"), np.complex128(3), torch.tensor(3j), nan, np.float32("nan"), torch.tensor(nan)]
KINDS = [int, float, np.int8, np.uint64, np.float32, np.float64, np.longdouble, np.array, torch.tensor, Fraction]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_every_kind_are_taken_and_come_back_plain(kind):
    assert whole("x", kind(3)) == 3 and type(whole("x", kind(3))) is int
    for number in (positive("x", kind(3)), between("x", kind(3), 0, 3)):
        assert number == 3 and type(number) is float


@pytest.mark.parametrize("value", NO_NUMBER, ids=named)
@pytest.mark.parametrize("check", [whole, positive, lambda name, value: between(name, value, -inf, inf)])
def test_everything_else_is_refused(check, value):
    with pytest.raises(ValueError, match="^sigma is .*; it must be a"):
        check("sigma", value)


@given(st.integers())
def test_whole_numbers_are_exact_however_large(number):
    assert whole("seed", number, lowest=None) == number
    with pytest.raises(ValueError):
        whole("seed", number, lowest=number + 1)
    with pytest.raises(ValueError):
        whole("seed", number, lowest=None, highest=number - 1)


@given(st.floats())
def test_a_float_is_whole_when_it_equals_an_integer(number):
    if number == number and abs(number) < inf and number == int(number):
        assert whole("x", number, lowest=None) == number
    else:
        with pytest.raises(ValueError):
            whole("x", number, lowest=None)
    with pytest.raises(ValueError):
        whole("x", number, lowest=None, floats=False)


@given(st.floats(), st.floats(allow_nan=False), st.floats(allow_nan=False), st.booleans(), st.booleans())
def test_an_interval_takes_what_lies_in_it(number, low, high, open_low, open_high):
    inside = (low < number if open_low else low <= number) and (number < high if open_high else number <= high)
    try:
        assert between("x", number, low, high, open_low, open_high) == number and inside
    except ValueError:
        assert not inside


@given(st.floats(), st.booleans())
def test_positive_is_finite_and_above_zero(number, zero):
    inside = 0 < number < inf or (zero and number == 0)
    try:
        assert positive("x", number, zero) == number and inside
    except ValueError:
        assert not inside


def test_messages_say_what_was_given_what_is_allowed_and_what_to_do():
    for call, message in [
        (lambda: whole("rounds", 0), "rounds is 0; it must be a whole number, at least 1"),
        (lambda: whole("k", 9, 0, 5, ", the size"), "k is 9; it must be a whole number from 0 to 5, the size"),
        (lambda: positive("sigma", -1, zero=True), "sigma is -1; it must be a finite number of at least 0"),
        (lambda: between("delta", 1, 0, 1, open_high=True), "delta is 1; it must be a number in [0, 1)"),
        (lambda: choice("kind", ["a"], ("a", "b")), "kind is ['a']; choose from 'a', 'b'"),
        (lambda: instance("generator", None, (np.random.Generator, torch.Generator)), "generator is None; it must be a Generator or Generator"),
        (lambda: finite("chart", [[0.0, nan]], ("n", 2), ": drop it"), "chart holds NaN or infinity in 1 of 2 entries: drop it"),
        (lambda: as_array("chart", np.ones(3), ("n", 2)), "chart has shape (3,); expected (n, 2)"),
        (lambda: as_array("index", np.ones(3), (4,)), "index has shape (3,); expected (4,)"),
    ]:
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == message
    with pytest.raises(UpdateError, match="ndarray of shape"):
        positive("sigma", np.ones(10**6), error=UpdateError)
    with pytest.raises(ValueError) as caught:
        whole("x", "y" * 10**6)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("values", [None, "a", ["1"], [None], [[1.0], [1.0, 2.0]], object(), [object()], np.ones(2, complex), True, torch.ones(2, dtype=torch.complex64),
                                    np.array(["2020-01-01"], dtype="datetime64[D]"), {}, set()], ids=named)
def test_arrays_are_real_numbers(values):
    with pytest.raises(ValueError, match="points is .*; it must be an array of real numbers"):
        as_array("points", values)


def test_arrays_come_back_as_float64_without_a_needless_copy():
    held = np.ones((3, 2))
    assert as_array("x", held) is held and finite("x", held, ("n", 2)) is held
    for values in ([[1, 2]], np.ones((1, 2), np.float16), torch.ones(1, 2, requires_grad=True), np.ones((1, 2), bool)):
        assert finite("x", values, ("n", 2)).dtype == np.float64
    assert as_array("x", [nan, inf]).size == 2
    for bad in (nan, inf, -inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            finite("x", [0.0, bad])


GENERATOR = np.random.default_rng(0)
CHART = GENERATOR.normal(size=(12, 2))
NOISY = CHART + 0.1 * GENERATOR.normal(size=(12, 2))
FEATURES = GENERATOR.normal(size=(12, 4))
PLANAR = chart_mechanisms.PlanarLaplace(2.0).fit(CHART)
ELLIPTIC = chart_mechanisms.MahalanobisPlanarLaplace(2.0, 4, 0.1, 0.9).fit(CHART, FEATURES)
TWO = sound.TwoStepMahalanobis(1.0, 0.5, 4).fit(CHART)
TWO.transform(CHART, GENERATOR)
CHANNELS = csi.street_grid_csi(12, num_antennas=3, num_subcarriers=4)
UNLIKE = csi.tap_dissimilarity(CHANNELS.csi)
WEIGHTS = sound.posterior(NOISY, PLANAR)
ONE = dpa.GaussianDpEvent(2.0)
LEDGER = accounting.Ledger("add_remove")
LEDGER.record(0, 0, ONE)


def fitted(kind, **settings):
    "A mechanism or chart learner of these settings, fitted."
    is_learner = issubclass(kind, (charts.PCAChart, charts.NetworkChart))
    return kind(**settings).fit(*([FEATURES] if is_learner else [CHART, FEATURES]))


def coin():
    "A torch generator."
    return torch.Generator().manual_seed(0)


EPSILON = {"epsilon": 1.0}
VARIANCES = {"variance_principal": 0.1, "variance_orthogonal": 0.9}
SHAPES = {"covariance": np.eye(2), "other": 2 * np.eye(2)}
LEARNER = {"hidden": (4,), "iterations": 1, "batch_size": 3, "learning_rate": 0.1, "num_inputs": 3, "seed": 0}
TOP_K = {"k": 1, "index_scale": 1.0, "value_scale": 1.0, "magnitude_sensitivity": 1.0, "value_sensitivity": 1.0}
SCORES = {"scores_in": [1.0, 2.0, 3.0], "scores_out": [1.0, 2.0, 0.0]}
PRIVACY = {"epsilon": 1.0, "delta": 0.1}

CALLS = [  # a function and valid arguments: each argument is replaced in turn
    (metrics.trustworthiness_continuity, {"original": CHART, "embedded": NOISY, "n_neighbors": 3, "block_rows": 3}),
    (metrics.kruskal_stress, {"original": CHART, "embedded": NOISY}), (metrics.quality_loss, {"points": CHART, "noisy": NOISY}),
    (metrics.range_query_error, {"points": CHART, "noisy": NOISY, "radius": 0.5, "kind": "count", "count_floor": 1}),
    (chart_mechanisms.unit_chart, {"chart": CHART}), (chart_mechanisms.chart_diameter, {"chart": CHART}),
    (chart_mechanisms.feature_neighbors, {"features": FEATURES, "n_neighbors": 3}),
    (chart_mechanisms.principal_directions, {"chart": CHART, "neighbors": ELLIPTIC.neighbors_}),
    (chart_mechanisms.shape_matrices, {"principal": ELLIPTIC.principal_, **VARIANCES}),
    (chart_mechanisms.loss_on_circle, {**SHAPES, **EPSILON, "offset": np.ones(2), "radius": 2.0, "num_directions": 8}),
    (chart_mechanisms.audit_on_circles, {"mechanism": ELLIPTIC, "num_directions": 4}), (chart_mechanisms.tail_radius, {"delta": 0.1}),
    (chart_mechanisms.shape_ratio, SHAPES), (chart_mechanisms.relaxed_loss, {**SHAPES, **PRIVACY, "offset": np.ones(2)}),
    (chart_mechanisms.matched_variances, {"ratio": 9.0, "matching": "trace"}),
    (fitted, {"kind": chart_mechanisms.PlanarLaplace, **EPSILON}), (fitted, {"kind": chart_mechanisms.GaussianMechanism, **PRIVACY, "sensitivity": 1.0}),
    (fitted, {"kind": chart_mechanisms.MahalanobisPlanarLaplace, **EPSILON, "n_neighbors": 3, **VARIANCES}),
    (fitted, {"kind": sound.GlobalMahalanobis, **EPSILON, "shrinkage": 0.5, "covariance": np.eye(2)}),
    (fitted, {"kind": sound.TwoStepMahalanobis, "epsilon_first": 1.0, "epsilon_second": 1.0, "n_neighbors": 3, **VARIANCES}),
    (fitted, {"kind": sound.GeodesicExponential, **EPSILON, "n_neighbors": 4}), (fitted, {"kind": sound.BalancedExponential, **EPSILON, "n_landmarks": 4}),
    (chart_mechanisms.MahalanobisPlanarLaplace(1.0, 3).fit, {"chart": CHART, "features": FEATURES}),
    *[(mechanism.transform, {"chart": CHART, "generator": GENERATOR}) for mechanism in (PLANAR, ELLIPTIC, TWO)],
    *[(mechanism.log_density, {"noisy": NOISY, "index": np.arange(12)}) for mechanism in (PLANAR, ELLIPTIC, TWO)],
    *[(mechanism.log_density_matrix, {"noisy": NOISY}) for mechanism in (PLANAR, ELLIPTIC, TWO)],
    (TWO.log_density, {"noisy": NOISY, "index": np.arange(12), "first": TWO.first_}), (sound.posterior, {"noisy": NOISY, "mechanism": PLANAR}),
    (sound.geometric_median, {"weights": WEIGHTS, "points": CHART, "iterations": 3, "tolerance": 0.1}),
    (sound.bayes_remap, {"noisy": NOISY, "chart": CHART, "mechanism": PLANAR, "loss": "squared"}), (sound.snap_to_chart, {"noisy": NOISY, "chart": CHART}),
    (sound.matrix_roots, {"matrices": np.eye(2)[None], "power": 0.5}), (sound.lipschitz, {"values": np.arange(3.0), "distances": np.ones((3, 3))}),
    (sound.farthest_points, {"chart": CHART, "n_landmarks": 4}), (sound.balanced_weights, {"distances": cdist(CHART, CHART), "inner_epsilon": 1.0}),
    (sound.table_level, {"log_table": np.log(np.ones((3, 3)) / 3), "distances": np.ones((3, 3))}),
    (sound.optimal_mechanism, {"landmarks": CHART[:4], **EPSILON, "prior": np.ones(4) / 4, "losses": np.ones((4, 4))}),
    (attacks.errors_in_metres, {"guess": CHART, "positions": NOISY}), (attacks.chance_errors, {"positions": CHART, "generator": GENERATOR}),
    (attacks.summarise_errors, {"errors": np.ones(3)}), (attacks.AnchorAttack().fit, {"anchor_chart": CHART, "anchor_positions": CHART}),
    (attacks.AnchorAttack().fit(CHART, CHART).predict, {"noisy": NOISY}), (attacks.posterior_positions, {"weights": WEIGHTS, "positions": CHART}),
    (attacks.strongest_error, {"noisy": NOISY, "mechanism": PLANAR, "positions": CHART}), (attacks.repeated_posterior, {"reports": NOISY[None], "mechanism": PLANAR}),
    (attacks.kalman_smooth, {"noisy": NOISY, "times": np.arange(12.0), "noise_variance": 0.1, "accelerations": np.ones(2)}),
    (attacks.step_transition, {"chart": CHART, "typical_step": 0.5}),
    (attacks.hmm_posterior, {"log_likelihood": PLANAR.log_density_matrix(NOISY), "transition": attacks.step_transition(CHART, 0.5)}),
    (attacks.orientation_leakage, {"mechanism": ELLIPTIC, "turn_degrees": 30.0, "generator": GENERATOR, "repeats": 1}),
    (csi.CSIDataset, {"csi": CHANNELS.csi, "positions": CHANNELS.positions, "times": CHANNELS.times, "source": "made up"}),
    (csi.street_grid_csi, {"num_users": 12, "seed": 0, "num_antennas": 2, "num_subcarriers": 2, "bandwidth_hz": 1e6, "frequency_hz": 1e9, "blocks": 2,
                           "block_m": 10.0, "step_m": 1.0}),
    (csi.reduce_csi, {"dataset": CHANNELS, "num_taps": 2}), (csi.restore_csi, {"arrays": csi.reduce_csi(CHANNELS, 2)}), (CHANNELS.take, {"index": np.arange(3)}),
    (csi.autocorrelation_features, {"csi": CHANNELS.csi, "num_lags": 1, "power_exponent": 1.0}), (csi.tap_dissimilarity, {"csi": CHANNELS.csi}),
    (csi.fuse_time, {"dissimilarity": UNLIKE, "times": CHANNELS.times, "window_steps": 4.0, "quantile": 0.2}),
    (csi.geodesic_distances, {"dissimilarity": UNLIKE, "n_neighbors": 8}), (csi.charting_dissimilarity, {"dataset": CHANNELS, "n_neighbors": 8}),
    (csi.rss_dissimilarity, {"rss_db": FEATURES, "min_common": 1}), (csi.rss_features, {"rss_db": FEATURES}),
    (charts.PCAChart().fit, {"features": FEATURES}), (fitted(charts.PCAChart).transform, {"features": FEATURES}),
    (fitted, {"kind": charts.AutoencoderChart, **LEARNER}), (fitted, {"kind": charts.TripletChart, **LEARNER, "window_steps": 2}),
    (charts.SiameseChart((4,), 1).fit, {"features": FEATURES, "dissimilarities": UNLIKE}), (charts.TripletChart((4,), 1).fit, {"features": FEATURES, "times": CHANNELS.times}),
    (fitted(charts.AutoencoderChart, **LEARNER).transform, {"features": FEATURES}), (charts.perceptron, {"sizes": (2, 3), "seed": 0}),
    (accounting.l2_sensitivity, {"clip_norm": 1.0, "neighbouring": "add_remove"}), (accounting.pure_event, EPSILON),
    (accounting.gaussian_event, {"sigma": 1.0, "sensitivity": 1.0}), (accounting.laplace_event, {"scale": 1.0, "sensitivity": 1.0}),
    (accounting.grouped_gaussian_event, {"sigmas": [1.0, 2.0], "sensitivities": [1.0, 1.0]}), (accounting.oneshot_laplace_epsilon, {**TOP_K, "rounds": 1}),
    (accounting.oneshot_laplace_event, TOP_K), (accounting.poisson_sampled, {"event": ONE, "rate": 0.5}),
    (accounting.sampled_without_replacement, {"event": ONE, "population": 5, "sample": 2}), (accounting.gaussian_epsilon, {"noise_multiplier": 1.0, "delta": 0.1}),
    (accounting.compose, {"events": [(ONE, 1)], "delta": 0.1, "neighbouring": "add_remove", "accountant": "auto"}),
    (accounting.Ledger, {"neighbouring": "add_remove", "unit": "client"}), (LEDGER.account, {"delta": 0.1, "client": 0, "runs": 1}),
    (LEDGER.record, {"client": 0, "round": 0, "event": ONE, "count": 1}), (LEDGER.clipped_gaussian, {"client": 0, "round": 0, "sigma": 1.0, "clip_norm": 1.0}),
    (LEDGER.table, {"delta": 0.1}), (LEDGER.watch, {"event_of": ONE}), (LEDGER.events, {"client": 0}),
    (accounting.promise_event, {"promise": Promise("none", "no noise"), "neighbouring": "add_remove"}),
    (accounting.calibrate_noise_multiplier, {**PRIVACY, "neighbouring": "add_remove", "events_at": lambda noise: [(dpa.GaussianDpEvent(noise), 1)],
                                             "relative_tolerance": 0.1}),
    (accounting.gaussian_parameter, {"event": ONE}), (accounting.GaussianFilter, PRIVACY), (accounting.GaussianFilter(9.0, 0.1).admits, {"event": ONE, "count": 1}),
    (accounting.RenyiFilter, {**PRIVACY, "neighbouring": "add_remove", "order": 9.0}), (accounting.RenyiFilter(1.0, 0.1, "add_remove").cost, {"event": ONE}),
    (accounting.Budget, {**PRIVACY, "neighbouring": "add_remove", "unit": "client", "rule": "fixed"}),
    (accounting.Budget(9.0, 0.1, "add_remove").admits, {"client": 0, "event": ONE, "count": 1}),
    (accounting.mask_delta_floor, {"masking_rate": 0.5, "num_different": 1}), (accounting.mask_event, {"masking_rate": 0.5}),
    (audit.clopper_pearson, {"hits": 1, "trials": 2, "alpha": 0.1}), (audit.audit_scores, {**SCORES, "delta": 0.0, "confidence": 0.9, "threshold": 0.5}),
    (audit.audit_scores, {**SCORES, "generator": GENERATOR}), (audit.gaussian_parameter_lower_bound, {**SCORES, "confidence": 0.9}),
    (audit.audit_mechanism, {**{name: lambda number, generator: generator.normal(size=(number, 1)) for name in ("sampler_a", "sampler_b")}, "num_samples": 9,
                             "statistic": lambda outputs: outputs[:, 0], "delta": 0.0, "confidence": 0.9, "batch_size": 5}),
    (audit.one_run_epsilon, {"num_correct": 1, "num_guesses": 2, "num_canaries": 3, "delta": 0.1, "confidence": 0.9}),
    (audit.one_run_p_value, {"num_correct": 1, "num_guesses": 2, "num_canaries": 3, **PRIVACY}),
    (audit.one_run_audit, {"scores": [1.0, 2.0], "included": np.array([True, False]), "num_guesses": 1, "delta": 0.0, "confidence": 0.9}),
    (audit.audit_metric_privacy, {"log_density": PLANAR, "points": CHART, "outputs": NOISY, **EPSILON, "distance": cdist(CHART, CHART)}),
    (audit.probe_outputs, {"points": CHART, "radii": [1.0], "num_directions": 3}),
    (audit.plot_epsilons, {"names": ["a"], "claimed": [1.0], "accounted": [1.0], "audited": [1.0]}),
    (mechanisms.planar_laplace, {"num_points": 3, **EPSILON, "generator": coin()}), (mechanisms.planar_laplace_radius, {"probability": 0.5, **EPSILON}),
    (mechanisms.gaussian_delta, {**EPSILON, "sigma": 1.0, "sensitivity": 1.0}), (mechanisms.gaussian_sigma, {**PRIVACY, "sensitivity": 1.0}),
    (mechanisms.add_gaussian_noise, {"update": torch.ones(3), "sigma": 1.0, "generator": coin()}), (mechanisms.laplace_noise, {"size": 3, "scale": 1.0, "generator": coin()}),
    (mechanisms.oneshot_laplace_top_k, {"values": torch.ones(3), "k": 1, "index_scale": 1.0, "value_scale": 1.0, "generator": coin()}),
]
GENERATOR_OF_SAMPLERS = {audit.audit_mechanism: {"generator": GENERATOR}}  # handed on, never looked at


def may_be_none(function, name: str) -> bool:
    "Whether None stands for a default there."
    if function is fitted:
        return name in ("sensitivity", "covariance")
    parameter = inspect.signature(function).parameters.get(name)
    return parameter is not None and ("None" in str(parameter.annotation) or parameter.default is None)


@pytest.mark.parametrize("function, arguments", CALLS, ids=lambda value: getattr(value, "__qualname__", "arguments"))
def test_wrong_types_are_value_errors(function, arguments):
    extra = GENERATOR_OF_SAMPLERS.get(function, {})
    function(**arguments, **extra)
    for name in arguments:
        if name == "kind" and function is fitted:
            continue
        for bad in (None, "text", [[1.0], [1.0, 2.0]], object(), nan):
            if bad is None and may_be_none(function, name) or isinstance(bad, str) and name == "source":
                continue
            with pytest.raises(ValueError):
                print(name, repr(bad), function(**{**arguments, name: bad}, **extra))


@pytest.mark.parametrize("bad", [nan, inf])
def test_nan_is_never_silent(bad):
    broken = NOISY.copy()
    broken[3, 1] = bad
    for call in (lambda: PLANAR.log_density(broken, np.arange(12)), lambda: ELLIPTIC.log_density_matrix(broken), lambda: sound.bayes_remap(broken, CHART, PLANAR),
                 lambda: sound.bayes_remap(NOISY, broken, PLANAR), lambda: cosine_distance(torch.ones(2), torch.tensor([1.0, bad])),
                 lambda: cosine_distance(torch.tensor([1.0, bad]), torch.ones(2)), lambda: Normalise((0.5, bad, 0.5)), lambda: Normalise(std=(0.5, bad, 0.5))):
        with pytest.raises(ValueError):
            call()
    shown = torch.tensor([True, False])
    assert abs(float(cosine_distance(torch.ones(2), torch.tensor([1.0, bad]), shown))) < 1e-6  # what is hidden may hold anything


def test_normalise_refuses_a_spread_of_zero_and_whole_numbers():
    for call in (lambda: Normalise(std=(0.2, 0.0, 0.2)), lambda: Normalise((0.5,), (0.2, 0.2)), lambda: Normalise((), ()), lambda: Normalise("abc"),
                 lambda: LeNetGELU()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))):
        with pytest.raises(ValueError):
            call()


def test_what_the_check_gives_back_is_what_is_used():
    assert Clip(torch.tensor(2)).clip_norm == 2.0 and LeNetGELU(num_classes=3.0).head.out_features == 3
    with pytest.raises(UpdateError, match="clip_norm is True"):
        clip_by_norm(torch.ones(3), True)


def test_a_failed_fit_leaves_nothing_fitted():
    mechanism = chart_mechanisms.PlanarLaplace(-1.0)
    with pytest.raises(ValueError, match="epsilon"):
        mechanism.fit(CHART)
    with pytest.raises(ValueError, match="not fitted"):
        mechanism.log_density(NOISY, np.arange(12))


def test_no_module_keeps_a_check_of_its_own():
    old = {"_whole", "_positive", "_check_whole", "_check_count", "_check_number", "_is_flag", "check_positive"}
    for path in sorted((ROOT / "privfl").rglob("*.py")):
        if path.name == "cli.py":  # text of the command line, where "3" is a number
            continue
        names = {node.name for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.FunctionDef)}
        assert not names & old, (path.name, names & old)
