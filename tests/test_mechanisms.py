"""Mechanisms: distributions, quantiles and calibrations against closed forms and references, and their edges."""
import inspect

import mpmath
import numpy as np
import pytest
import torch
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from privfl import mechanisms
from privfl.mechanisms import (add_gaussian_noise, gaussian_delta, gaussian_sigma, laplace_noise,
                               oneshot_laplace_top_k, planar_laplace, planar_laplace_radius)
from privfl.randomness import Streams

STREAMS = Streams(2024)
KINDS = {"numpy": STREAMS.numpy, "torch": STREAMS.torch}


def exact_radius(probability: float) -> mpmath.mpf:
    """The radius for epsilon = 1, 60 digits, by the textbook formula."""
    with mpmath.workdps(60):
        return -(mpmath.lambertw((mpmath.mpf(probability) - 1) / mpmath.e, -1).real + 1)


def exact_delta(epsilon: float, sigma: float) -> mpmath.mpf:
    """Delta of Gaussian noise at sensitivity 1, 60 digits."""
    with mpmath.workdps(60):
        shift, epsilon = 1 / (2 * mpmath.mpf(sigma)), mpmath.mpf(epsilon)
        return mpmath.ncdf(shift - epsilon * sigma) - mpmath.exp(epsilon) * mpmath.ncdf(-shift - epsilon * sigma)


# ---- planar Laplace --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [0.05, 20.0])
def test_trap_13_radius_is_gamma_and_angle_uniform(kind, epsilon):
    """n = 100,000; three tests at false-alarm rate 1e-4 each: radius, angle, and their independence."""
    points = np.asarray(planar_laplace(100_000, epsilon, KINDS[kind]("planar", kind)))
    radius, angle = np.hypot(*points.T), np.mod(np.arctan2(points[:, 1], points[:, 0]), 2 * np.pi)
    assert stats.kstest(radius, "gamma", args=(2, 0, 1 / epsilon)).pvalue > 1e-4
    assert stats.kstest(angle, "uniform", args=(0, 2 * np.pi)).pvalue > 1e-4
    assert stats.spearmanr(radius, angle).pvalue > 1e-4


def test_trap_13_two_laplace_draws_would_be_noticed():
    """The same test at the same size rejects a Laplace draw for each coordinate."""
    points = KINDS["numpy"]("planar").laplace(scale=20, size=(100_000, 2))
    assert stats.kstest(np.hypot(*points.T), "gamma", args=(2, 0, 20)).pvalue < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_trap_14_planar_scale_is_not_inverted(kind):
    """n = 100,000: E r = 2 / epsilon and E r^2 = 6 / epsilon^2 within 4.4 standard errors (1e-5 each)."""
    points = np.asarray(planar_laplace(100_000, 0.1, KINDS[kind]("moments")))
    radius = np.hypot(*points.T)
    assert abs(radius.mean() - 20) < 4.4 * np.sqrt(2) * 10 / np.sqrt(100_000)
    assert abs((radius**2).mean() - 600) < 4.4 * np.sqrt(84) * 100 / np.sqrt(100_000)
    assert abs(np.corrcoef(points.T)[0, 1]) < 4.4 / np.sqrt(100_000)


@pytest.mark.parametrize("kind, array", [("numpy", np.ndarray), ("torch", torch.Tensor)])
def test_planar_laplace_comes_in_the_kind_of_its_generator(kind, array):
    noise = planar_laplace(num_points=7, epsilon=1.0, generator=KINDS[kind]("kind"))
    again = planar_laplace(7, 1.0, KINDS[kind]("kind"))
    assert isinstance(noise, array) and noise.shape == (7, 2) and (noise == again).all()
    assert noise.dtype in (np.float64, torch.float64)
    assert planar_laplace(0, 1.0, KINDS[kind]("kind")).shape == (0, 2)


def test_trap_23_the_unit_of_epsilon_is_named_and_scales_the_noise():
    for function in (planar_laplace, planar_laplace_radius):
        (line,) = [line for line in inspect.getsource(function).splitlines() if line.strip().startswith("epsilon:")]
        assert "per unit of distance" in line and "1/metre" in line
    metres = planar_laplace(1000, 0.05, KINDS["numpy"]("units"))
    kilometres = planar_laplace(1000, 50.0, KINDS["numpy"]("units"))
    assert np.allclose(metres, 1000 * kilometres, rtol=1e-12, atol=0)
    assert np.isclose(planar_laplace_radius(0.5, 0.05), 1000 * planar_laplace_radius(0.5, 50.0), rtol=1e-12)


@pytest.mark.parametrize("epsilon", [0, -1.0, float("nan"), float("inf"), "1", None])
def test_planar_epsilon_must_be_positive(epsilon):
    for call in (lambda: planar_laplace(3, epsilon, KINDS["numpy"]("a")), lambda: planar_laplace_radius(0.5, epsilon)):
        with pytest.raises(ValueError, match="epsilon is .* above 0"):
            call()


@pytest.mark.parametrize("count", [-1, 2.5, "3", None])
def test_num_points_must_be_a_count(count):
    with pytest.raises(ValueError, match="num_points"):
        planar_laplace(count, 1.0, KINDS["numpy"]("a"))


@pytest.mark.parametrize("generator", [None, 0, np.random])
def test_a_generator_is_needed(generator):
    for call in (lambda: planar_laplace(3, 1.0, generator), lambda: laplace_noise(3, 1.0, generator),
                 lambda: add_gaussian_noise(torch.ones(3), 1.0, generator),
                 lambda: oneshot_laplace_top_k(torch.ones(3), 1, 1.0, 0.0, generator)):
        with pytest.raises(ValueError, match="generator"):
            call()


# ---- quantile of the radius ------------------------------------------------------------------------------------

def test_trap_13_quantile_is_exact_at_both_ends():
    grid = np.concatenate([np.logspace(-12, -0.3, 100), 1 - np.logspace(-12, -0.3, 100)])
    for probability, radius in zip(grid, planar_laplace_radius(grid, 1.0)):
        assert abs(mpmath.mpf(float(radius)) / exact_radius(float(probability)) - 1) < 1e-12


@given(st.floats(0, 1), st.floats(1e-6, 1e6))
def test_quantile_inverts_the_distribution_function(probability, epsilon):
    radius = planar_laplace_radius(probability, epsilon)
    assert isinstance(radius, float) and radius >= 0
    assert abs(stats.gamma.cdf(radius, 2, scale=1 / epsilon) - probability) < 1e-12


def test_quantile_keeps_shape_and_kind():
    grid = np.linspace(0, 1, 12).reshape(3, 4)
    radii = planar_laplace_radius(grid, 2.0)
    assert radii.shape == (3, 4) and radii.dtype == np.float64
    assert radii[0, 0] == 0 and radii[-1, -1] == np.inf and (np.diff(radii.ravel()) > 0).all()
    tensor = planar_laplace_radius(torch.tensor(grid), 2.0)
    assert isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64 and np.array_equal(tensor, radii)
    assert isinstance(planar_laplace_radius(1, 2.0), float) and type(planar_laplace_radius(np.float64(0.5), 2.0)) is float
    assert planar_laplace_radius(np.float32([0.5]), 1.0).dtype == np.float64


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan"), [0.5, 2.0]])
def test_a_probability_is_between_0_and_1(probability):
    with pytest.raises(ValueError, match="from 0 to 1"):
        planar_laplace_radius(probability, 1.0)


# ---- Gaussian --------------------------------------------------------------------------------------------------

@given(st.floats(-3, 3), st.floats(-12, -0.1), st.floats(-3, 3))
def test_sigma_delivers_delta_and_not_less(log_epsilon, log_delta, log_sensitivity):
    epsilon, delta, sensitivity = 10**log_epsilon, 10**log_delta, 10**log_sensitivity
    sigma = gaussian_sigma(epsilon, delta, sensitivity)
    exact = exact_delta(epsilon, sigma / sensitivity)
    assert abs(exact / delta - 1) < 1e-6
    assert exact_delta(epsilon, sigma / sensitivity * (1 - 1e-5)) > delta


@pytest.mark.parametrize("epsilon", [1e-2, 0.3, 1.0, 4.0, 30.0, 300.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
def test_sigma_agrees_with_dp_accounting(epsilon, delta):
    sigma = gaussian_sigma(epsilon, delta, 2.0)
    loss = GaussianPrivacyLoss(standard_deviation=sigma, sensitivity=2.0)
    assert abs(loss.get_delta_for_epsilon(epsilon) / delta - 1) < 1e-5
    assert abs(gaussian_delta(epsilon, sigma, 2.0) / delta - 1) < 1e-9


def test_sigma_falls_in_epsilon_and_delta_and_is_proportional_to_sensitivity():
    by_epsilon = [gaussian_sigma(epsilon, 1e-5, 1.0) for epsilon in np.logspace(-6, 6, 49)]
    by_delta = [gaussian_sigma(1.0, delta, 1.0) for delta in np.logspace(-300, -0.01, 40)]
    assert (np.diff(by_epsilon) < 0).all() and (np.diff(by_delta) < 0).all()
    assert np.isfinite(by_epsilon).all() and np.isfinite(by_delta).all()
    assert np.isclose(gaussian_sigma(1.0, 1e-5, 7.0), 7 * gaussian_sigma(1.0, 1e-5, 1.0), rtol=1e-14)


def test_the_classical_formula_wastes_below_one_and_fails_above_nine():
    def classical(epsilon: float) -> float:
        return np.sqrt(2 * np.log(1.25e5)) / epsilon

    assert gaussian_sigma(0.5, 1e-5, 1.0) < classical(0.5)
    assert gaussian_sigma(9.0, 1e-5, 1.0) > classical(9.0)


@pytest.mark.parametrize("arguments, name", [
    ((0, 1e-5, 1), "epsilon"), ((-1, 1e-5, 1), "epsilon"), ((float("inf"), 1e-5, 1), "epsilon"), ((1, 0, 1), "delta"),
    ((1, 1, 1), "delta"), ((1, float("nan"), 1), "delta"), ((1, "small", 1), "delta"), ((1, 1e-5, 0), "sensitivity"),
    ((1, 1e-5, -1), "sensitivity")])
def test_gaussian_sigma_refuses(arguments, name):
    with pytest.raises(ValueError, match=name):
        gaussian_sigma(*arguments)


def test_trap_14_standard_deviation_is_multiplier_times_sensitivity():
    """n = 200,000, within 4.4 standard errors (1e-5): a sum under add-remove (C) and replace-one (2C), a mean (C / N)."""
    clip_norm, clients, multiplier = 0.5, 10, 3.0
    for number, sensitivity in enumerate((clip_norm, 2 * clip_norm, clip_norm / clients)):
        noisy = add_gaussian_noise(torch.zeros(200_000), multiplier * sensitivity, STREAMS.torch("std", number))
        assert abs(float(noisy.double().std()) / (multiplier * sensitivity) - 1) < 4.4 / np.sqrt(400_000)
    assert np.isclose(gaussian_sigma(1.0, 1e-5, 2 * clip_norm), 2 * gaussian_sigma(1.0, 1e-5, clip_norm))


def test_trap_14_sigma_is_a_standard_deviation_per_entry():
    """n = 100,000 in each of two groups, within 4.4 standard errors (1e-5)."""
    sigma = torch.cat([torch.full((100_000,), 0.1), torch.full((100_000,), 4.0)])
    noise = add_gaussian_noise(torch.zeros(200_000), sigma, STREAMS.torch("groups")).double()
    for part, expected in ((noise[:100_000], 0.1), (noise[100_000:], 4.0)):
        assert abs(float(part.std()) / expected - 1) < 4.4 / np.sqrt(200_000)
    assert abs(float(torch.corrcoef(torch.stack(noise.split(100_000)))[0, 1])) < 4.4 / np.sqrt(100_000)


def test_trap_14_two_keys_give_uncorrelated_noise():
    """n = 100,000, correlation within 4.4 standard errors (1e-5); one key twice would give 1."""
    noise = [add_gaussian_noise(torch.zeros(100_000), 1.0, STREAMS.torch("defence", 0, 0, group)) for group in (0, 1)]
    assert abs(float(torch.corrcoef(torch.stack(noise))[0, 1])) < 4.4 / np.sqrt(100_000)


def test_gaussian_noise_is_normal_also_in_float32():
    """n = 200,000, Kolmogorov-Smirnov at 1e-4."""
    noise = add_gaussian_noise(torch.zeros(200_000), 2.0, STREAMS.torch("normal"))
    assert stats.kstest(noise.numpy(), "norm", args=(0, 2)).pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gaussian_noise_keeps_dtype_input_and_graph(dtype):
    update = torch.randn(50, generator=STREAMS.torch("update")).to(dtype).requires_grad_()
    before = update.detach().clone()
    noisy = add_gaussian_noise(update, 0.5, STREAMS.torch("noise"))
    noisy.sum().backward()
    assert noisy.dtype == dtype and torch.equal(update.detach(), before) and torch.equal(update.grad, torch.ones_like(before))
    assert torch.equal(add_gaussian_noise(before, 0.0, STREAMS.torch("noise")), before)
    assert torch.equal(add_gaussian_noise(before, torch.tensor(0.5), STREAMS.torch("noise")), noisy.detach())


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf"), torch.ones(3), torch.tensor([1.0, -1, 1, 1])], ids=str)
def test_sigma_must_be_finite_and_fit(sigma):
    with pytest.raises(ValueError, match="sigma"):
        add_gaussian_noise(torch.zeros(4), sigma, STREAMS.torch("a"))


def test_a_broken_update_gets_no_noise():
    with pytest.raises(ValueError, match="NaN or infinite"):
        add_gaussian_noise(torch.tensor([1.0, float("nan")]), 1.0, STREAMS.torch("a"))


# ---- Laplace and the one-shot mechanism ------------------------------------------------------------------------

def test_trap_14_laplace_scale_is_the_mean_magnitude():
    """n = 200,000: Kolmogorov-Smirnov at 1e-4; E|L| = b and sd = sqrt(2) b within 4.4 standard errors (1e-5)."""
    noise = laplace_noise(200_000, 0.3, STREAMS.torch("laplace")).numpy()
    assert stats.kstest(noise, "laplace", args=(0, 0.3)).pvalue > 1e-4
    assert abs(np.abs(noise).mean() / 0.3 - 1) < 4.4 / np.sqrt(200_000)
    assert abs((noise**2).mean() / 0.18 - 1) < 4.4 * np.sqrt(5 / 200_000)


def test_laplace_noise_is_finite_at_the_edges_of_its_uniform_number(monkeypatch):
    corners = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(mechanisms, "_uniform", lambda shape, generator: corners.clone())
    noise = laplace_noise(4, 2.0, STREAMS.torch("a"))
    assert torch.isfinite(noise).all() and noise[0] < -70 and noise[2] == 0 and noise[3] > 70


def reference_top_k(scores: list, k: int) -> list:
    """Indices of the k largest, ties to the lowest index, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:k])


@given(st.lists(st.integers(-3, 3), max_size=30), st.data(), st.booleans(),
       st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_trap_12_ties_go_to_the_lowest_index(entries, data, by_magnitude, dtype):
    k = data.draw(st.integers(0, len(entries)))
    values = torch.tensor(entries, dtype=dtype)
    indices, released = oneshot_laplace_top_k(values, k, 0.0, 0.0, STREAMS.torch("a"), by_magnitude=by_magnitude)
    expected = reference_top_k([abs(entry) for entry in entries] if by_magnitude else entries, k)
    assert indices.tolist() == expected and indices.dtype == torch.int64
    assert torch.equal(released, values[indices]) and released.dtype == dtype


def test_trap_12_fewer_non_zeros_than_k():
    values = torch.zeros(1000)
    values[500] = -2.0
    indices, _ = oneshot_laplace_top_k(values, 4, 0.0, 0.0, STREAMS.torch("a"))
    assert indices.tolist() == [0, 1, 2, 500]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_trap_12_nan_is_rejected(bad):
    with pytest.raises(ValueError, match="NaN or infinite"):
        oneshot_laplace_top_k(torch.tensor([1.0, bad, 0.0]), 1, 0.0, 0.0, STREAMS.torch("a"))


@pytest.mark.parametrize("k", [0, 1, 999, 1000])
def test_trap_12_every_k_works_with_noise(k):
    values = torch.randn(1000, generator=STREAMS.torch("values"))
    indices, released = oneshot_laplace_top_k(values=values, k=k, index_scale=1.0, value_scale=0.5,
                                              generator=STREAMS.torch("noise", k))
    assert indices.shape == released.shape == (k,) and released.dtype == torch.float32
    assert (indices.diff() > 0).all() and torch.isfinite(released).all()


@pytest.mark.parametrize("device_path", [True, False])
def test_both_thresholds_agree(monkeypatch, device_path):
    """The path that accelerators take gives the same selection as the one for the CPU."""
    if device_path:
        monkeypatch.setattr(mechanisms, "_kth_largest", lambda scores, k: torch.topk(scores, k, sorted=False).values.min())
    values = torch.randint(-50, 50, (5000,), generator=STREAMS.torch("values")).float()
    for k in (1, 37, 2500, 5000):
        indices, _ = oneshot_laplace_top_k(values, k, 0.0, 0.0, STREAMS.torch("a"))
        assert indices.tolist() == reference_top_k(values.abs().tolist(), k)


def test_selection_probability_equals_the_closed_form():
    """d = 2, k = 1, gap g, scale b = 2: 1 - (1 + g/2b) e^(-g/b) / 2; n = 1,500 calls, 4.4 standard errors (1e-5)."""
    generator = STREAMS.torch("two")
    for gap in (0.0, 2.0, 5.0):
        values = torch.tensor([0.0, gap])
        hits = sum(int(oneshot_laplace_top_k(values, 1, 2.0, 0.0, generator)[0]) == 1 for _ in range(1500))
        expected = 1 - 0.5 * (1 + gap / 4) * np.exp(-gap / 2)
        assert abs(hits / 1500 - expected) < 4.4 * np.sqrt(expected * (1 - expected) / 1500)


def test_trap_14_released_values_carry_fresh_noise():
    """k = 20,000 of 100,000 equal entries: value noise is Laplace around 0 whatever noise won the selection."""
    values = torch.full((100_000,), 5.0, dtype=torch.float64)
    indices, released = oneshot_laplace_top_k(values, 20_000, 3.0, 0.5, STREAMS.torch("fresh"))
    noise = (released - 5.0).numpy()
    assert stats.kstest(noise, "laplace", args=(0, 0.5)).pvalue > 1e-4
    exact = oneshot_laplace_top_k(values, 20_000, 3.0, 0.0, STREAMS.torch("fresh"))
    assert torch.equal(exact[0], indices) and torch.equal(exact[1], values[indices])


def test_selection_noise_is_symmetric_over_positions():
    """Equal entries: each of 50 is selected in 10 of 50 slots; chi-square over 2,000 selections of 10 at 1e-4.

    Selections without replacement are negatively correlated, which makes the statistic smaller, never larger."""
    generator, counts = STREAMS.torch("even"), np.zeros(50)
    for _ in range(2000):
        counts[oneshot_laplace_top_k(torch.ones(50), 10, 1.0, 0.0, generator)[0].numpy()] += 1
    assert ((counts - 400) ** 2 / 400).sum() < stats.chi2.isf(1e-4, 49)


def test_signed_values_and_selection_by_value():
    values = torch.tensor([0.2, -3.0, 1.5, 2.5])
    assert oneshot_laplace_top_k(values, 2, 0.0, 0.0, STREAMS.torch("a"))[1].tolist() == [-3.0, 2.5]
    assert oneshot_laplace_top_k(values, 2, 0.0, 0.0, STREAMS.torch("a"), by_magnitude=False)[1].tolist() == [1.5, 2.5]


def test_ten_million_entries_give_the_set_of_a_top_k():
    values = torch.randperm(10**7, generator=STREAMS.torch("large")).float()
    indices, _ = oneshot_laplace_top_k(values, 10**6, 0.0, 0.0, STREAMS.torch("a"))
    assert torch.equal(indices, (values >= 9e6).nonzero().squeeze(1))


@pytest.mark.parametrize("changes, name", [
    ({"k": 4}, "k is 4"), ({"k": -1}, "k is -1"), ({"k": 1.5}, "k is 1.5"), ({"index_scale": -1.0}, "index_scale"),
    ({"index_scale": float("nan")}, "index_scale"), ({"value_scale": float("inf")}, "value_scale"),
    ({"value_scale": "1"}, "value_scale"), ({"values": torch.ones(2, 2)}, "floating-point tensor"),
    ({"values": torch.arange(3)}, "int64")])
def test_oneshot_refuses(changes, name):
    good = {"values": torch.tensor([1.0, 2.0, 3.0]), "k": 1, "index_scale": 1.0, "value_scale": 1.0}
    with pytest.raises(ValueError, match=name):
        oneshot_laplace_top_k(**{**good, **changes}, generator=STREAMS.torch("a"))


def test_values_stay_differentiable():
    values = torch.tensor([1.0, -4.0, 3.0], requires_grad=True)
    _, released = oneshot_laplace_top_k(values, 2, 0.0, 0.1, STREAMS.torch("a"))
    released.sum().backward()
    assert values.grad.tolist() == [0.0, 1.0, 1.0]


# ---- what all of them owe --------------------------------------------------------------------------------------

@pytest.mark.parametrize("sampler", [planar_laplace, add_gaussian_noise, laplace_noise, oneshot_laplace_top_k])
def test_trap_21_samplers_say_that_their_noise_is_for_research(sampler):
    assert "research noise" in sampler.__doc__


def test_trap_21_low_bits_of_a_double_give_the_value_away_and_one_rounding_closes_the_holes():
    """n = 20,000 reports of the value 1: most doubles could not come from 0, no float32 is ruled out."""
    def reachable(reports, value, dtype):
        offset = reports.double() - value
        middle = (-torch.expm1(-offset.abs()) / 2 * 2.0**53).round()
        found = torch.zeros(len(reports), dtype=torch.bool)
        for step in range(-12, 13):
            found |= (value + torch.log1p(-2 * (middle + step) / 2.0**53).copysign(offset)).to(dtype) == reports
        return found.double().mean()

    noise = laplace_noise(20_000, 1.0, STREAMS.torch("bits"))
    assert reachable(1.0 + noise, 1.0, torch.float64) == 1 and reachable(1.0 + noise, 0.0, torch.float64) < 0.5
    assert reachable((1.0 + noise).float(), 0.0, torch.float32) == 1


def test_trap_20_the_global_random_state_is_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for generator in (STREAMS.torch("a"), STREAMS.numpy("a")):
        planar_laplace(10, 1.0, generator)
    oneshot_laplace_top_k(torch.ones(10), 3, 1.0, 1.0, STREAMS.torch("a"))
    add_gaussian_noise(torch.ones(10), 1.0, STREAMS.torch("a"))
    assert torch.equal(torch.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("sigma", [None, "loud", [[1.0], [1.0, 2.0]]])
def test_a_sigma_that_is_no_number_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma is"):
        add_gaussian_noise(torch.ones(3), sigma, STREAMS.torch("a"))


def test_delta_at_ratios_beyond_a_float():
    assert gaussian_delta(1.0, 1e-200, 1e200) == 1.0 and gaussian_delta(1.0, 1e200, 1e-200) == 0.0
