"""Scores: SSIM and PSNR against trusted libraries, pairing, distances, accuracy, and their errors."""
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from privfl.metrics import accuracy, localisation_error, mse_db, pair_images, psnr, ssim


def batch(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random images in [0, 1]."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def scikit_ssim(image: torch.Tensor, reference: torch.Tensor, data_range: float) -> list[float]:
    """The reference: scikit-image with the window of the original paper."""
    return [structural_similarity(y, x, data_range=data_range, gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
                                  channel_axis=0) for x, y in zip(image.double().numpy(), reference.double().numpy())]


# Trap 10: the data range, flat images, one perfect image

@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4), st.integers(11, 40), st.integers(11, 40),
       st.sampled_from([1.0, 255.0, 79.3]), st.floats(0.0, 1.0))
def test_trap_10_ssim_equals_scikit_image(seed, count, channels, height, width, data_range, mix):
    reference = data_range * batch(seed, count, channels, height, width)
    image = (1 - mix) * reference + mix * data_range * batch(seed + 1, count, channels, height, width)
    ours = ssim(image, reference, data_range=data_range)
    assert ours.shape == (count,) and ours.dtype == torch.float64
    assert np.allclose(ours.numpy(), scikit_ssim(image, reference, data_range), rtol=0, atol=1e-6)


def test_trap_10_ssim_in_float32_is_as_exact_as_its_type():
    reference = 0.9 + 0.01 * batch(0, 4, 3, 32, 32, dtype=torch.float32)  # nearly flat: variances cancel
    image = (reference + 0.01 * batch(1, 4, 3, 32, 32, dtype=torch.float32)).float()
    ours = ssim(image, reference)
    assert ours.dtype == torch.float32
    assert np.allclose(ours.numpy(), scikit_ssim(image, reference, 1.0), rtol=0, atol=1e-6)


def test_ssim_agrees_with_torchmetrics_where_the_window_fits():
    """torchmetrics also counts windows over mirrored borders; without those 5 pixels the two are the same."""
    torchmetrics = pytest.importorskip("torchmetrics.functional.image")
    reference, noise = batch(2, 3, 3, 32, 40), batch(3, 3, 3, 32, 40)
    image = 0.8 * reference + 0.2 * noise
    _, everywhere = torchmetrics.structural_similarity_index_measure(
        image, reference, data_range=1.0, sigma=1.5, reduction="none", return_full_image=True)
    inside = everywhere[..., 5:-5, 5:-5].flatten(1).mean(1)
    assert torch.allclose(ssim(image, reference), inside.double(), atol=1e-6)


@pytest.mark.parametrize("value", [0.0, 1e-3, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trap_10_flat_equal_images_give_exactly_one(value, dtype):
    flat = torch.full((2, 3, 17, 23), value, dtype=dtype)
    assert ssim(flat, flat).tolist() == [1.0, 1.0]


def test_trap_10_flat_unequal_images_are_finite_and_follow_the_luminance_term():
    one = torch.ones(1, 1, 12, 12, dtype=torch.float64)
    for a, b in ((0.0, 1.0), (0.2, 0.9), (1.0, 0.0)):
        assert ssim(a * one, b * one).item() == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4), abs=1e-12)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(11, 37), st.integers(11, 37))
def test_exact_copies_give_exactly_one_and_the_cap(seed, channels, height, width):
    image = batch(seed, 2, channels, height, width, dtype=torch.float32)
    assert ssim(image, image.clone()).tolist() == [1.0, 1.0]
    assert psnr(image, image.clone()).tolist() == [100.0, 100.0]


def test_trap_10_the_range_is_an_argument_that_changes_the_score():
    reference = batch(4, 1, 3, 32, 32)
    image = (reference + 0.2 * (batch(5, 1, 3, 32, 32) - 0.5))
    right, wrong = ssim(image, reference, data_range=1.0).item(), ssim(image, reference, data_range=255.0).item()
    assert right < 0.99 and wrong > 0.9995
    assert ssim(255 * image, 255 * reference, data_range=255.0).item() == pytest.approx(right, abs=1e-9)
    assert psnr(255 * image, 255 * reference, data_range=255.0).item() == pytest.approx(psnr(image, reference).item(), abs=1e-9)


def test_trap_10_values_beyond_the_range_give_a_warning():
    bytes_like = 255 * batch(6, 1, 1, 16, 16)
    for score in (ssim, psnr):
        with pytest.warns(UserWarning, match="data_range"):
            score(bytes_like, bytes_like)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            score(bytes_like, bytes_like, data_range=255.0)


def test_trap_10_one_perfect_image_does_not_make_the_mean_infinite():
    reference = batch(7, 4, 3, 16, 16)
    image = reference + 0.1
    image[2] = reference[2]
    scores = psnr(image, reference)
    assert scores[2] == 100.0 and scores[0].item() == pytest.approx(20.0)
    assert torch.isfinite(scores.mean()) and scores.mean().item() == pytest.approx(40.0)
    assert psnr(image, reference, cap_db=60.0)[2] == 60.0
    tiny = psnr(reference + 1e-9, reference)
    assert (tiny == 100.0).all()  # below the cap's error, not above the cap


def test_psnr_equals_scikit_image_image_by_image():
    reference = batch(8, 5, 3, 20, 9)
    image = reference + 0.3 * batch(9, 5, 3, 20, 9)
    theirs = [peak_signal_noise_ratio(y, x, data_range=1.0) for x, y in zip(image.numpy(), reference.numpy())]
    assert np.allclose(psnr(image, reference).numpy(), theirs, atol=1e-9)


def test_scores_of_a_batch_are_those_of_its_images():
    reference, image = batch(10, 6, 3, 24, 24), batch(11, 6, 3, 24, 24)
    for score in (ssim, psnr):
        together = score(image, reference)
        alone = torch.cat([score(image[i:i + 1], reference[i:i + 1]) for i in range(6)])
        assert torch.allclose(together, alone, atol=1e-12)
        assert score(image[:0], reference[:0]).shape == (0,)


def test_ssim_is_symmetric_and_at_most_one():
    reference, image = batch(12, 8, 3, 20, 20), batch(13, 8, 3, 20, 20)
    assert torch.equal(ssim(image, reference), ssim(reference, image))
    assert (ssim(image, reference) < 1).all() and (ssim(1 - reference, reference) < 0).all()


@pytest.mark.parametrize("score", [ssim, psnr])
@pytest.mark.parametrize("change, words", [
    (lambda x: x[0], "N, C, H, W"),
    (lambda x: (255 * x).to(torch.uint8), "float"),
    (lambda x: x.numpy(), "torch tensor"),
    (lambda x: x[..., :12], "shapes must agree"),
    (lambda x: torch.where(x > 2, x, torch.nan), r"NaN or infinity in images \[0, 1\]"),
    (lambda x: x / 0, "NaN or infinity"),
])
def test_bad_images_are_refused_in_words(score, change, words):
    good = batch(14, 2, 3, 16, 16) + 0.1
    with pytest.raises(ValueError, match=words):
        score(change(good), good)
    with pytest.raises(ValueError):
        score(good, change(good))


@pytest.mark.parametrize("score", [ssim, psnr])
@pytest.mark.parametrize("data_range", [0.0, -1.0, math.nan, math.inf])
def test_a_senseless_range_is_refused(score, data_range):
    with pytest.raises(ValueError, match="data_range"):
        score(batch(0, 1, 1, 16, 16), batch(1, 1, 1, 16, 16), data_range=data_range)


@pytest.mark.parametrize("height, width", [(10, 32), (32, 10), (1, 1)])
def test_images_smaller_than_the_window_are_refused(height, width):
    with pytest.raises(ValueError, match="at least 11 x 11"):
        ssim(batch(0, 1, 3, height, width), batch(1, 1, 3, height, width))
    assert ssim(batch(0, 1, 3, 11, 11), batch(1, 1, 3, 11, 11)).shape == (1,)


# Trap 24: images paired wrongly in a batch

@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 9))
def test_trap_24_pairing_is_invariant_to_permutation(seed, count):
    reference = batch(seed, count, 3, 6, 6)
    noisy = reference + 0.05 * batch(seed + 1, count, 3, 6, 6)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    permutation = pair_images(noisy[order], reference)
    assert permutation.dtype == torch.int64
    assert torch.equal(noisy[order][permutation], noisy)
    assert torch.equal(psnr(noisy[order][permutation], reference), psnr(noisy, reference))


def test_trap_24_each_reconstruction_is_used_once():
    reference = torch.stack([torch.full((1, 4, 4), v) for v in (0.0, 0.4, 1.0)])
    guesses = torch.stack([torch.full((1, 4, 4), v) for v in (0.3, 0.35, 0.32)])  # all nearest to the middle one
    permutation = pair_images(guesses, reference)
    assert sorted(permutation.tolist()) == [0, 1, 2]
    best = min(sum((guesses[p[i]] - reference[i]).square().sum() for i in range(3))
               for p in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)))
    assert (guesses[permutation] - reference).square().sum() == best


def test_pairing_takes_more_reconstructions_but_not_fewer():
    reference = batch(15, 3, 1, 5, 5)
    spare = torch.cat([batch(16, 2, 1, 5, 5) + 3, reference])
    assert pair_images(spare, reference).tolist() == [2, 3, 4]
    for bad in (reference[:2], reference[..., :4], torch.full_like(reference, math.nan)):
        with pytest.raises(ValueError):
            pair_images(bad, reference)


# Decibels, metres, shares

def test_mse_db():
    target = batch(17, 7, 5)
    assert mse_db(target + 0.1, target) == pytest.approx(-20.0)
    assert mse_db(target, target) == -math.inf
    assert mse_db(target.numpy() + 1, target.numpy()) == pytest.approx(0.0)
    assert isinstance(mse_db(target + 1, target), float)
    for prediction, truth in ((target[:2], target), (target[:0], target[:0]), (target * math.nan, target)):
        with pytest.raises(ValueError):
            mse_db(prediction, truth)


def test_localisation_error_values_types_and_errors():
    estimate = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    error = localisation_error(estimate, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert error.tolist() == [5.0, 0.0] and error.dtype == torch.float32
    assert localisation_error(estimate.double(), estimate.double()).dtype == torch.float64
    for bad in (estimate[:, :1], estimate[0], torch.full((2, 2), math.nan)):
        with pytest.raises(ValueError):
            localisation_error(bad, estimate if bad.shape == estimate.shape else bad)


def test_localisation_error_of_gaussian_errors_has_the_rayleigh_mean():
    """n = 40,000; the mean lies within five standard errors but for one run in about two million."""
    count, spread = 40_000, 7.0
    generator = torch.Generator().manual_seed(0)
    position = 500 * torch.rand(count, 2, generator=generator, dtype=torch.float64)
    error = localisation_error(position + spread * torch.randn(count, 2, generator=generator, dtype=torch.float64), position)
    assert abs(error.mean() - spread * math.sqrt(math.pi / 2)) < 5 * spread * math.sqrt((2 - math.pi / 2) / count)


def test_accuracy_counts_and_refuses():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [math.nan, 1.0, 0.0], [0.0, 0.0, -1.0]])
    assert accuracy(logits, torch.tensor([0, 1, 0, 0])) == 0.75  # NaN is wrong, a tie goes to the first class
    assert accuracy(logits, torch.tensor([1, 0, 1, 2])) == 0.0
    for labels in (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, -1]), torch.tensor([0, 1]), torch.zeros(4)):
        with pytest.raises(ValueError, match="labels"):
            accuracy(logits, labels)
    with pytest.raises(ValueError):
        accuracy(logits[:0], torch.zeros(0, dtype=torch.int64))
