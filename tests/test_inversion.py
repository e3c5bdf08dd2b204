"""Attacks on updates: the client's function exactly, finite ends, chunking, and who beats whom."""
import inspect
from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from privfl.inversion import (CosineInversion, ThreatModel, cosine_distance, descend, infer_label, infer_labels, step_decay,
                              total_variation, upload_function)
from privfl.metrics import pair_images, psnr, ssim
from privfl.update import Layout

SHAPE = (3, 32, 32)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Net(nn.Module):
    """Three strided convolutions with GELU and a linear head, weights from the seed alone."""

    def __init__(self, seed: int = 0, dtype=torch.float32, width: int = 12, classes: int = 10):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 5, 2, 2), nn.GELU(), nn.Conv2d(width, width, 5, 2, 2), nn.GELU(),
                                  nn.Conv2d(width, width, 5, 1, 2), nn.GELU(), nn.Flatten())
        self.head = nn.Linear(width * 64, classes)
        generator = seeded(seed)
        for parameter in self.parameters():
            bound = (parameter[0].numel() if parameter.ndim > 1 else 75) ** -0.5
            nn.init.uniform_(parameter, -bound, bound, generator=generator)
        self.to(dtype)

    def forward(self, images):
        return self.head(self.body((images - 0.47) / 0.25))


def pictures(count: int, seed: int = 5) -> torch.Tensor:
    """Smooth colour pictures with an edge, in [0, 1]."""
    generator = seeded(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    images = F.interpolate(coarse, size=32, mode="bicubic", align_corners=True)
    images[:, :, 10:22, 8:20] = 1 - images[:, :, 10:22, 8:20]
    return images.clamp(0, 1)


def by_backward(model, images, labels):
    model = deepcopy(model)
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return Layout.of(model).flatten({name: p.grad for name, p in model.named_parameters()})


def relative(a, b) -> float:
    return float(((a - b).norm() / b.norm()).detach())


# --- the client's function -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_trap_24_the_attackers_gradient_at_the_true_input_is_the_shared_gradient(functional, count):
    images, labels = pictures(count), torch.arange(count)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        model = Net(dtype=dtype)
        mine = upload_function(model, functional=functional)(images.to(dtype), labels)
        assert relative(mine, by_backward(model, images.to(dtype), labels)) < tolerance


def test_trap_24_holds_for_the_victims_of_the_selection_paper():
    models = pytest.importorskip("privfl.selection.models")
    for model in (models.LeNetGELU(), models.ConvNet(16)):
        images, labels = pictures(2), torch.tensor([3, 7])
        assert relative(upload_function(model)(images, labels), by_backward(model, images, labels)) < 1e-6


def test_trap_24_a_sum_loss_in_place_of_the_mean_is_seen_as_another_function():
    images, labels, model = pictures(3), torch.arange(3), Net(dtype=torch.float64)
    summed = upload_function(model, loss=lambda out, y: F.cross_entropy(out, y, reduction="sum"))(images.double(), labels)
    assert relative(summed, by_backward(model, images.double(), labels)) > 1.5


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("local_batch_size", [None, 2, 5])
def test_trap_24_local_steps_equal_an_optimiser(functional, local_batch_size):
    model, images, labels = Net(dtype=torch.float64), pictures(3).double(), torch.tensor([1, 4, 9])
    trained, optimiser_steps, rate = deepcopy(model), 4, 0.03
    optimiser = torch.optim.SGD(trained.parameters(), lr=rate)
    for step in range(optimiser_steps):
        part = [0, 1, 2] if local_batch_size in (None, 5) else [(2 * step) % 3, (2 * step + 1) % 3]
        optimiser.zero_grad()
        F.cross_entropy(trained(images[part]), labels[part]).backward()
        optimiser.step()
    layout = Layout.of(model)
    expected = layout.flatten(trained) - layout.flatten(model)
    upload = upload_function(model, optimiser_steps, rate, local_batch_size, functional=functional)
    assert relative(upload(images, labels), expected) < 1e-11


def test_the_model_is_copied_and_left_alone():
    model = Net().train()
    before = Layout.of(model).flatten(model)
    attack = CosineInversion(model, SHAPE, steps=2, total_variation=0.0)
    images, labels = pictures(1), torch.tensor([2])
    first = attack.upload(images, labels).detach()
    attack(first, labels, seeded())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(Layout.of(model).flatten(model), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(attack.upload(images, labels).detach(), first)


def test_frozen_parameters_and_buffers_stay_out_of_the_upload():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 1024, 10))
    model[0].weight.requires_grad_(False)
    layout, images, labels = Layout.of(model), pictures(2), torch.tensor([0, 1])
    for functional in (False, True):
        assert upload_function(model, functional=functional)(images, labels).shape == (layout.size,)
    attack = CosineInversion(model, SHAPE, steps=2, total_variation=0.0, vectorise=True)
    assert attack(attack.upload(images, labels), labels, seeded()).shape == (2, *SHAPE)


# --- the yardstick ---------------------------------------------------------------------------------------------------

finite_vectors = st.lists(st.floats(-1e3, 1e3, width=32), min_size=6, max_size=6)


@given(finite_vectors, finite_vectors, st.floats(1e-3, 1e3), st.lists(st.booleans(), min_size=6, max_size=6))
def test_cosine_distance_is_bounded_scale_free_and_local_to_the_mask(a, b, scale, mask):
    a, b, mask = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), torch.tensor(mask)
    value = cosine_distance(a, b, mask)
    assert -1e-9 <= value <= 2 + 1e-9
    if (a * mask).norm() > 1e-6 and (b * mask).norm() > 1e-6:
        torch.testing.assert_close(cosine_distance(scale * a, b, mask), value, atol=1e-6, rtol=0)
        torch.testing.assert_close(cosine_distance(a, scale * b, mask), value, atol=1e-6, rtol=0)
    garbage = torch.where(mask, b, torch.full_like(b, float("nan")))
    assert torch.equal(cosine_distance(a, garbage, mask), value)


def test_cosine_distance_equals_torch():
    a, b = torch.randn(2, 50, generator=seeded(), dtype=torch.float64)
    torch.testing.assert_close(cosine_distance(a, b), 1 - F.cosine_similarity(a, b, dim=0))


def test_total_variation_by_hand_and_its_derivative_on_flat_images():
    image = torch.tensor([[[[0.0, 1.0], [0.0, 3.0]]]])
    assert float(total_variation(image)) == pytest.approx((0 + 2) / 2 + (1 + 3) / 2)
    flat = torch.full((2, 3, 4, 4), 0.3, requires_grad=True)
    total_variation(flat).backward()
    assert torch.equal(flat.grad, torch.zeros_like(flat))


# --- trap 4 ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trap_04_zero_gradients_and_flat_images_end_finite(vectorise, dtype):
    model, labels = Net(dtype=dtype), torch.tensor([[1], [1]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    size = Layout.of(model).size
    shared = torch.stack([torch.zeros(size, dtype=dtype), torch.ones(size, dtype=dtype)])
    for tv in (0.0, 1e-2):
        for aware in (False, True):
            attack = CosineInversion(model, SHAPE, 3, tv, mask_aware=aware, vectorise=vectorise)
            images = attack.many(shared, labels, seeded(), torch.zeros_like(shared, dtype=torch.bool))
            for value in (images, attack.matching_, attack.matchings_, attack.history_):
                assert torch.isfinite(value).all()
            assert images.min() >= 0 and images.max() <= 1


def test_trap_04_the_derivative_of_the_distance_is_finite_at_zero():
    for target in (torch.zeros(5), torch.ones(5), 1e-30 * torch.ones(5)):
        candidate = torch.zeros(5, requires_grad=True)
        cosine_distance(candidate, target).backward()
        assert torch.isfinite(candidate.grad).all()


def test_trap_04_a_flat_private_image_is_attacked_without_nan():
    model, labels = Net(), torch.tensor([0])
    shared = upload_function(model)(torch.full((1, *SHAPE), 0.5), labels).detach()
    attack = CosineInversion(model, SHAPE, 20, 1e-1)
    assert torch.isfinite(attack(shared, labels, seeded())).all() and torch.isfinite(attack.matching_).all()


def test_trap_04_the_best_state_survives_nan():
    target, calls = torch.full((2, 1, 3, 4, 4), 0.3), []

    def evaluate(candidate):
        calls.append(1)
        value = (candidate - target).square().mean((1, 2, 3, 4))
        value = value * (float("nan") if len(calls) > 60 else 1.0)
        return 2 * (candidate - target) * (float("nan") if len(calls) > 60 else 1.0), value, value

    search = descend(evaluate, torch.zeros_like(target), steps=100, learning_rate=0.02)
    assert torch.isfinite(search.best).all() and (search.objective < 1e-2).all()
    search = descend(lambda c: (c * float("nan"), c.sum((1, 2, 3, 4)) * float("nan"), c.sum((1, 2, 3, 4)) * float("nan")),
                     torch.zeros_like(target), steps=3)
    assert torch.equal(search.best, torch.zeros_like(target))


def test_trap_04_one_nan_slope_does_not_end_the_search():
    target, calls = torch.full((1, 1, 3, 4, 4), 0.5), []

    def evaluate(candidate):
        calls.append(1)
        value = (candidate - target).square().mean((1, 2, 3, 4))
        return 2 * (candidate - target) * (float("nan") if len(calls) == 3 else 1.0), value, value

    assert float(descend(evaluate, torch.zeros_like(target), steps=60, learning_rate=0.05).objective) < 1e-3


def test_step_decay_falls_at_three_five_and_seven_eighths():
    factors = [step_decay(step, 8) for step in range(8)]
    assert factors == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.001])


# --- the attack ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def fixed_case():
    model, images, labels = Net(), pictures(2), torch.tensor([3, 8])
    shared = torch.stack([by_backward(model, images[[i]], labels[[i]]) for i in range(2)])
    return model, images, labels, shared


def test_undefended_images_come_back(fixed_case):
    model, images, labels, shared = fixed_case
    attack = CosineInversion(model, SHAPE, steps=120, total_variation=1e-2)
    recovered = attack.many(shared, labels[:, None], seeded())[:, 0]
    chance = ssim(images.flip(0), images)
    assert (ssim(recovered, images) > 0.6).all() and (ssim(recovered, images) > chance + 0.3).all()


def test_the_mask_aware_attacker_beats_the_naive_one(fixed_case):
    model, images, labels, shared = fixed_case
    mask = torch.rand(shared[0].shape, generator=seeded(1)) >= 0.5
    settings = dict(model=model, input_shape=SHAPE, steps=120, total_variation=1e-2)
    naive = CosineInversion(**settings)(shared[0] * mask, labels[:1], seeded(2), mask)
    aware = CosineInversion(**settings, mask_aware=True)(shared[0] * mask, labels[:1], seeded(2), mask)
    assert float(ssim(aware, images[:1])) > float(ssim(naive, images[:1])) + 0.2


def test_trap_25_masks_are_explicit(fixed_case):
    model, _, labels, shared = fixed_case
    attack = CosineInversion(model, SHAPE, 3, 1e-2, mask_aware=True)
    with pytest.raises(ValueError, match="never guessed"):
        attack(shared[0] * (torch.arange(shared.shape[1]) % 2), labels[:1], seeded())
    mask = torch.rand(shared[0].shape, generator=seeded()) >= 0.5
    clean = attack(shared[0] * mask, labels[:1], seeded(), mask)
    dirty = attack(torch.where(mask, shared[0], torch.full_like(shared[0], float("nan"))), labels[:1], seeded(), mask)
    assert torch.equal(clean, dirty)
    naive = CosineInversion(model, SHAPE, 3, 1e-2)
    assert torch.equal(naive(shared[0], labels[:1], seeded(), mask), naive(shared[0], labels[:1], seeded()))


def test_rows_do_not_depend_on_chunks_engine_or_neighbours():
    model, images, labels = Net(dtype=torch.float64), pictures(5).double(), torch.arange(5)
    shared = torch.stack([by_backward(model, images[[i]], labels[[i]]) for i in range(5)])
    mask = torch.rand(shared.shape, generator=seeded()) >= 0.5
    weights = torch.tensor([0.0, 1e-3, 1e-2, 1e-1, 1.0])

    def attack(**way):
        return CosineInversion(model, SHAPE, 6, 0.5, restarts=2, mask_aware=True, **way)

    reference = attack(vectorise=False).many(shared, labels[:, None], seeded(), mask, weights)
    for way in (dict(vectorise=True, chunk_size=10), dict(vectorise=True, chunk_size=3), dict(chunk_size=1)):
        torch.testing.assert_close(attack(**way).many(shared, labels[:, None], seeded(), mask, weights), reference, atol=1e-9, rtol=0)
    alone = attack(vectorise=False)
    alone.total_variation = float(weights[0])
    torch.testing.assert_close(alone(shared[0], labels[:1], seeded(), mask[0]), reference[0], atol=1e-9, rtol=0)


def test_same_generator_same_start_and_one_generator_per_row(fixed_case):
    model, _, labels, shared = fixed_case
    attack = CosineInversion(model, SHAPE, 2, 0.0)
    first, again, other = (attack(shared[0], labels[:1], seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    rows = attack.many(shared[[0, 0]], labels[[0, 0], None], [seeded(0), seeded(0)])
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[0], first)


def test_global_random_state_is_untouched(fixed_case):
    model, _, labels, shared = fixed_case
    state = torch.random.get_rng_state()
    CosineInversion(model, SHAPE, 2, 0.0)(shared[0], labels[:1], seeded())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_restart_with_the_lowest_distance_wins(fixed_case):
    model, _, labels, shared = fixed_case
    attack = CosineInversion(model, SHAPE, 20, 0.0, restarts=4)
    image = attack(shared[0], labels[:1], seeded())
    assert attack.matchings_.shape == (1, 4) and attack.history_.shape == (1, 4, 20)
    assert float(attack.matching_) == float(attack.matchings_.min()) == pytest.approx(float(attack.history_.min(2).values.min()))
    own = cosine_distance(attack.upload(image, labels[:1]), shared[0]).detach()
    assert float(own) == pytest.approx(float(attack.matching_), abs=1e-5)


def test_a_clipped_upload_is_the_same_upload(fixed_case):
    model, _, labels, shared = fixed_case
    model, shared = deepcopy(model).double(), shared.double()
    attack = CosineInversion(model, SHAPE, 6, 1e-2)
    torch.testing.assert_close(attack(shared[0], labels[:1], seeded()), attack(shared[0] / 1024, labels[:1], seeded()), atol=1e-9, rtol=0)


def test_a_guessed_mask_is_the_mask_where_no_true_entry_is_zero(fixed_case):
    model, _, labels, shared = fixed_case
    mask = (torch.rand(shared[0].shape, generator=seeded()) >= 0.5) & (shared[0] != 0)
    told = CosineInversion(model, SHAPE, 4, 1e-2, mask_aware=True)(shared[0] * mask, labels[:1], seeded(), mask)
    guessed = CosineInversion(model, SHAPE, 4, 1e-2, mask_aware="zeros")
    assert torch.equal(guessed(shared[0] * mask, labels[:1], seeded()), told)
    assert "guessed" in str(guessed.threat_model) and "the mask of" not in str(guessed.threat_model)
    assert torch.isfinite(guessed(torch.zeros_like(shared[0]), labels[:1], seeded())).all()
    with pytest.raises(ValueError, match="NaN or infinity"):
        guessed(shared[0] * float("nan"), labels[:1], seeded())


@pytest.mark.parametrize("vectorise", [False, True])
def test_several_rounds_are_matched_by_the_mean_of_their_distances(vectorise):
    models, images, labels = [Net(seed, dtype=torch.float64) for seed in range(3)], pictures(1).double(), torch.tensor([4])
    shared = torch.stack([by_backward(model, images, labels) for model in models])
    mask = torch.rand(shared.shape, generator=seeded()) >= 0.5
    attack = CosineInversion(models, SHAPE, 3, 1e-2, mask_aware=True, vectorise=vectorise)
    torch.testing.assert_close(attack.upload(images, labels).detach(), shared)
    image = attack(shared, labels, seeded(), mask)
    own = torch.stack([cosine_distance(*one) for one in zip(attack.upload(image, labels), shared, mask)]).mean()
    assert float(own.detach()) == pytest.approx(float(attack.matching_))
    assert "3 uploads of the same batch" in str(attack.threat_model)
    once = CosineInversion(models[:1], SHAPE, 3, 1e-2, mask_aware=True, vectorise=vectorise)
    alone = CosineInversion(models[0], SHAPE, 3, 1e-2, mask_aware=True, vectorise=vectorise)
    assert torch.equal(once(shared[0], labels, seeded(), mask[0]), alone(shared[0], labels, seeded(), mask[0]))
    for wrong in (shared[0], shared[:2], shared[None]):
        with pytest.raises(ValueError, match="3 model"):
            attack(wrong, labels, seeded(), torch.ones_like(wrong, dtype=torch.bool))


def test_batches_come_back_in_some_order():
    model, images, labels = Net(), pictures(2, seed=9), torch.tensor([1, 6])
    shared = by_backward(model, images, labels)
    attack = CosineInversion(model, SHAPE, 120, 1e-2)
    recovered = attack(shared, labels, seeded())
    assert recovered.shape == images.shape
    paired = recovered[pair_images(recovered, images)]
    assert (ssim(paired, images) > ssim(images.flip(0), images) + 0.1).all()


def test_updates_of_local_training_are_inverted():
    model, images, labels = Net(), pictures(1), torch.tensor([4])
    local = dict(local_steps=2, local_learning_rate=0.05)
    shared = upload_function(model, **local)(images, labels).detach()
    recovered = CosineInversion(model, SHAPE, 100, 1e-2, **local)(shared, labels, seeded())
    blurred = F.avg_pool2d(F.pad(images, (8, 8, 8, 8), mode="reflect"), 17, 1)
    assert float(ssim(recovered, images)) > float(ssim(blurred, images)) + 0.15


# --- labels ----------------------------------------------------------------------------------------------------------

def test_labels_are_read_from_the_last_layer():
    model, images = Net(dtype=torch.float64), pictures(10).double()
    layout = Layout.of(model)
    for label in range(10):
        parts = layout.unflatten(by_backward(model, images[[label]], torch.tensor([label])))
        assert infer_label(parts["head.weight"], parts["head.bias"]) == label
        assert infer_label(parts["head.weight"]) == label


def test_a_masked_label_is_read_from_the_rows_that_are_seen():
    model, images = Net(dtype=torch.float64), pictures(10).double()
    layout = Layout.of(model)
    for label in range(10):
        parts = layout.unflatten(by_backward(model, images[[label]], torch.tensor([label])))
        weight_mask = torch.rand(parts["head.weight"].shape, generator=seeded(label)) >= 0.8
        for bias_mask in (torch.arange(10) != label, torch.zeros(10, dtype=torch.bool), torch.ones(10, dtype=torch.bool)):
            garbage = torch.where(weight_mask, parts["head.weight"], torch.full_like(parts["head.weight"], float("nan")))
            assert infer_label(garbage, parts["head.bias"], weight_mask, bias_mask) == label
        assert infer_label(garbage, None, weight_mask) == label


def test_labels_of_a_batch_are_exact_where_the_mean_softmax_is_known():
    model, images, labels = Net(dtype=torch.float64), pictures(8).double(), torch.tensor([3, 3, 0, 9, 1, 1, 1, 7])
    gradient = Layout.of(model).unflatten(by_backward(model, images, labels))["head.bias"]
    mean = model(images).softmax(1).mean(0).detach()
    assert torch.equal(infer_labels(gradient, 8, mean), labels.sort().values)
    assert torch.equal(infer_labels(gradient, 8, mean), infer_labels(gradient, 8, mean).sort().values)
    pair = Layout.of(model).unflatten(by_backward(model, images[:2], labels[[0, 3]]))["head.bias"]
    assert infer_labels(pair, 2).tolist() == [3, 9]


@pytest.mark.parametrize("gradient, count, mean", [
    (torch.zeros(4, 3), 2, None), (torch.zeros(4), 0, None), (torch.zeros(4), 1.5, None), (torch.zeros(4), 2, torch.zeros(3)),
    (torch.full((4,), float("nan")), 2, None)])
def test_labels_of_a_batch_that_cannot_be_read(gradient, count, mean):
    with pytest.raises(ValueError, match="give|whole number"):
        infer_labels(gradient, count, mean)


def test_masks_of_the_head_are_checked():
    for masks in ((torch.ones(4, 3), None), (torch.ones(3, 4, dtype=torch.bool), None), (None, torch.ones(3, dtype=torch.bool))):
        with pytest.raises(ValueError, match="_mask is"):
            infer_label(torch.ones(4, 3), torch.ones(4), *masks)
    with pytest.raises(ValueError, match="nothing but zeros"):
        infer_label(torch.zeros(4, 3))


@pytest.mark.parametrize("weight, bias, message", [
    (torch.zeros(4), None, "classes, features"),
    (torch.zeros(4, 3), torch.zeros(3), "classes, features"),
    (torch.full((4, 3), float("nan")), None, "NaN"),
    (torch.ones(2, 3), None, "two classes"),
    (torch.zeros(4, 3), torch.tensor([0.1, 0.2, 0.0, 0.3]), "no entry is negative"),
])
def test_labels_that_cannot_be_read(weight, bias, message):
    with pytest.raises(ValueError, match=message):
        infer_label(weight, bias)


# --- contracts -------------------------------------------------------------------------------------------------------

def test_public_signatures():
    names = list(inspect.signature(CosineInversion).parameters)
    assert names[:6] == ["model", "input_shape", "steps", "total_variation", "restarts", "mask_aware"]
    assert inspect.signature(CosineInversion).parameters["restarts"].default == 1
    assert inspect.signature(CosineInversion).parameters["mask_aware"].default is False
    assert list(inspect.signature(CosineInversion.__call__).parameters)[1:] == ["shared", "labels", "generator", "mask"]


def test_the_threat_model_names_the_mask_only_where_it_is_used():
    naive, aware = (CosineInversion(Net(), SHAPE, 1, 0.0, mask_aware=aware).threat_model for aware in (False, True))
    assert isinstance(naive, ThreatModel)
    assert "the mask of" not in str(naive) and "the mask of" in str(aware) and "passive" in str(aware)
    local = CosineInversion(Net(), SHAPE, 1, 0.0, local_steps=3, local_learning_rate=0.1).threat_model
    assert "3 local steps" in str(local)


@pytest.mark.parametrize("change, message", [
    *[({name: value}, name) for name in ("steps", "restarts", "chunk_size")
      for value in (0, -1, 1.5, float("inf"), float("nan"), True, "3", None)],
    *[({name: value}, name) for name in ("total_variation", "learning_rate", "pixel_scale")
      for value in (-1.0, float("inf"), float("nan"), "0.1", None)],
    *[(dict(local_steps=2, local_learning_rate=0.1, local_batch_size=value), "local_batch_size") for value in (1.5, float("inf"), True, -1)],
    *[(dict(local_steps=value, local_learning_rate=0.1), "local_steps") for value in (1.5, float("inf"), float("nan"), True)],
    (dict(local_steps=1, local_learning_rate=float("nan")), "local_learning_rate"),
    *[(dict(input_shape=value), "input_shape") for value in ((3, 32, 0), (3, 32.5, 32), 3, (3, 32, float("inf")))],
    *[(dict(mask_aware=value), "mask_aware") for value in ("guess", None, 1)],
    (dict(model=nn.GELU()), "trainable"), (dict(model=[Net(), Net(width=8)]), "one of the same kind"), (dict(model=Net), "model"),
])
def test_settings_at_the_boundary(change, message):
    with pytest.raises(ValueError, match=message):
        CosineInversion(**{**dict(model=Net(), input_shape=SHAPE, steps=2, total_variation=0.0), **change})


@pytest.mark.parametrize("local", [dict(), dict(local_steps=1, local_learning_rate=0.1)])
@pytest.mark.parametrize("images, labels, message", [
    (pictures(2), torch.tensor([0.0, 1.0]), "class indices"), (pictures(2), torch.tensor([True, False]), "class indices"),
    (pictures(2), torch.tensor([0, -100]), "index is >= 0"), (pictures(2), torch.tensor([0, 10]), "10 classes"),
    (pictures(2), torch.tensor([0]), "one for each"), (pictures(2), torch.tensor(0), "one for each"),
    (pictures(2)[:0], torch.tensor([], dtype=torch.int64), "N >= 1"), (pictures(2)[:, :0], torch.tensor([0, 1]), "N >= 1"),
    ((255 * pictures(2)).to(torch.uint8), torch.tensor([0, 1]), "floats"),
])
def test_batches_at_the_boundary(local, images, labels, message):
    with pytest.raises(ValueError, match=message):
        upload_function(Net(), **local)(images, labels)


def test_another_loss_may_have_real_targets():
    model, images, targets = Net(classes=1), pictures(2), torch.tensor([0.3, 0.7])
    upload = upload_function(model, loss=lambda out, y: (out[:, 0] - y).square().mean())
    assert torch.isfinite(upload(images, targets)).all()
    attack = CosineInversion(model, SHAPE, 2, 0.0, loss=lambda out, y: (out[:, 0] - y).square().mean())
    assert attack(upload(images, targets).detach(), targets, seeded()).shape == images.shape


def test_total_variation_and_psnr_of_hardly_any_image():
    assert float(total_variation(torch.ones(1, 3, 1, 1))) == 0
    assert float(total_variation(torch.tensor([[0.0, 1.0, 3.0]]))) == pytest.approx(1.5)
    assert float(total_variation(torch.tensor([[0.0], [1.0]]))) == 1
    dot = torch.ones(1, 3, 1, 1, requires_grad=True)
    total_variation(dot).backward()
    assert torch.equal(dot.grad, torch.zeros_like(dot))
    for empty in (torch.zeros(1, 0, 4, 4), torch.zeros(0, 3, 4, 4), torch.zeros(1, 3, 0, 4), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="at least one pixel"):
            total_variation(empty)
    assert float(psnr(torch.ones(1, 3, 1, 1), torch.zeros(1, 3, 1, 1))) == pytest.approx(0.0)
    for empty in (torch.zeros(1, 0, 4, 4), torch.zeros(1, 3, 0, 4)):
        with pytest.raises(ValueError, match="no pixel"):
            psnr(empty, empty)


def test_yardstick_and_search_at_the_boundary():
    for arguments in ((torch.ones(3), torch.ones(4)), (torch.ones(3), torch.ones(3), torch.ones(1, dtype=torch.bool)),
                      (torch.ones(1, 3), torch.ones(1, 3)), (torch.tensor(1.0), torch.tensor(1.0))):
        with pytest.raises(ValueError, match="one length"):
            cosine_distance(*arguments)
    start = torch.zeros(1, 2)
    for change, message in ((dict(steps=0), "steps"), (dict(steps=float("inf")), "steps"), (dict(bounds=(1.0, -1.0)), "bounds"),
                            (dict(start=start[:0]), "start"), (dict(start=start * float("nan")), "start"), (dict(learning_rate=0), "learning_rate")):
        with pytest.raises(ValueError, match=message):
            descend(**{**dict(evaluate=lambda c: (c, c.sum(1), c.sum(1)), start=start, steps=1), **change})
    for step, steps in ((0, 0), (3, 3), (-1, 3)):
        with pytest.raises(ValueError):
            step_decay(step, steps)


def test_a_threat_model_takes_tuples():
    with pytest.raises(ValueError, match="known is the text"):
        ThreatModel("curious server", observed=("the upload",), known="the model")


@pytest.mark.parametrize("change, message", [
    (dict(input_shape=(32, 32)), "input_shape"), (dict(steps=0), "steps"), (dict(restarts=0), "restarts"),
    (dict(steps=2.5), "steps"), (dict(total_variation=-1.0), "total_variation"),
    (dict(total_variation=float("nan")), "total_variation"), (dict(learning_rate=0.0), "learning_rate"),
    (dict(pixel_scale=-1.0), "pixel_scale"), (dict(chunk_size=0), "chunk_size"),
    (dict(local_learning_rate=0.1), "local_steps"), (dict(local_steps=2), "local_learning_rate"),
    (dict(local_steps=0, local_learning_rate=0.1), "local_steps"),
    (dict(local_steps=1, local_learning_rate=0.1, local_batch_size=0), "local_batch_size"),
])
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        CosineInversion(**{**dict(model=Net(), input_shape=SHAPE, steps=2, total_variation=0.0), **change})


def test_bad_uploads_are_refused(fixed_case):
    model, _, labels, shared = fixed_case
    attack, label = CosineInversion(model, SHAPE, 1, 0.0, mask_aware=True), labels[:1]
    mask = torch.ones_like(shared[0], dtype=torch.bool)
    for arguments, message in [
        ((shared[0, 1:], label, seeded(), mask[1:]), "trainable parameters"),
        ((shared[0], label, seeded(), mask[1:]), "mask is"),
        ((shared[0], label, seeded(), mask.float()), "mask is"),
        ((shared[0] * float("inf"), label, seeded(), mask), "NaN or infinity"),
        ((shared[0], torch.tensor([10]), seeded(), mask), "labels"),
        ((shared[0], torch.tensor([-1]), seeded(), mask), "labels"),
        ((shared[0], label[:0], seeded(), mask), "labels"),
        ((shared[0], label.float(), seeded(), mask), "class indices"),
        ((shared[0], label > 0, seeded(), mask), "class indices"),
        ((shared[0].long(), label, seeded(), mask), "floats"),
        ((shared[0], label, None, mask), "generator"),
        ((shared[0], label, 5, mask), "generator"),
        ((shared[0], label, [None], mask), "generator"),
        ((shared[0].tolist(), label, seeded(), mask), "tensor"),
        ((shared[0], 3, seeded(), mask), "tensor"),
        ((shared[0], label, seeded(), mask.tolist()), "tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            attack(*arguments)
    with pytest.raises(ValueError, match="generators"):
        attack.many(shared, labels[:, None], [seeded()], mask.expand(2, -1))
    with pytest.raises(ValueError, match="B >= 1"):
        attack.many(shared[:0], labels[:0, None], seeded(), mask.expand(0, -1))
    with pytest.raises(ValueError, match="mask is"):  # the naive attacker does not use a mask, but a wrong one is a mistake
        CosineInversion(model, SHAPE, 1, 0.0)(shared[0], label, seeded(), mask[1:])
    with pytest.raises(ValueError, match="total_variation"):
        attack.many(shared, labels[:, None], seeded(), mask.expand(2, -1), torch.tensor([0.1]))
