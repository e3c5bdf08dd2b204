"""Random selection against cosine attackers, on fixed cases: who beats whom, and by how much at least.

The cases are fixed (seeds, images, steps), so no test can raise a false alarm by chance; each states its sample size.
"""
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from privfl.federation import Client, Server
from privfl.inversion import CosineInversion, cosine_distance, infer_label, upload_function
from privfl.metrics import pair_images, ssim
from privfl.randomness import Streams
from privfl.selection import LeNetGELU, RandomSelection, random_mask
from privfl.update import Layout

SHAPE = (3, 32, 32)
HALF = 0.5


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, seed: int = 5) -> torch.Tensor:
    """Smooth colour pictures with an edge, in [0, 1]."""
    images = F.interpolate(torch.rand(count, 3, 5, 5, generator=seeded(seed)), size=32, mode="bicubic", align_corners=True)
    images[:, :, 10:22, 8:20] = 1 - images[:, :, 10:22, 8:20]
    return images.clamp(0, 1)


def invert(model, shared, labels, mask, mask_aware, steps: int = 130, weight: float = 3e-2) -> torch.Tensor:
    """One image per row, every row from the same start."""
    attack = CosineInversion(model, SHAPE, steps, weight, mask_aware=mask_aware)
    return attack.many(shared, labels[:, None], [seeded(3) for _ in labels], mask)[:, 0]


@pytest.fixture(scope="module")
def case():
    """Three images, their gradients at LeNet-GELU's first weights, and a mask of half of the entries for each."""
    model, images, labels = LeNetGELU(), pictures(3), torch.tensor([3, 8, 0])
    upload = upload_function(model)
    gradients = torch.stack([upload(images[[i]], labels[[i]]).detach() for i in range(3)])
    masks = torch.stack([random_mask(gradients.shape[1], HALF, seeded(i)) for i in range(3)])
    return model, images, labels, gradients, masks


# --- what the attacker is given is what the client sends ------------------------------------------------------------

@pytest.mark.parametrize("local", [dict(), dict(local_steps=3, local_learning_rate=0.05)])
def test_trap_24_a_masked_upload_is_the_attackers_function_where_it_was_shared(local):
    model, images, labels = LeNetGELU(), pictures(2), torch.tensor([3, 8])
    training = dict(algorithm="fedavg", local_steps=3, learning_rate=0.05) if local else dict(algorithm="fedsgd")
    client = Client(0, model, images, labels, batch_size=2, defence=(RandomSelection(HALF),), **training)
    upload, _ = client.fit(Server(model).initial_state(), {}, Streams(0), 0)
    mine, mask = upload_function(model, **local)(images, labels).detach(), upload.tensors["mask"]
    sent = upload.tensors["update"]
    assert (sent[~mask] == 0).all() and 0.4 < mask.double().mean() < 0.6
    assert (sent[mask] - mine[mask]).norm() < 2e-5 * mine[mask].norm()
    assert float(cosine_distance(mine, sent, mask)) < 1e-6


def test_labels_are_read_from_masked_uploads_of_one_image(case):
    """10 labels, gradients and changes of weights (the sign turns), half of the entries hidden."""
    model, layout = case[0], Layout.of(case[0])
    for local in (dict(), dict(local_steps=2, local_learning_rate=0.05)):
        for label in range(10):
            upload = upload_function(model, **local)(pictures(1, seed=label), torch.tensor([label])).detach()
            slope = layout.unflatten(-upload if local else upload)
            seen = layout.unflatten(random_mask(layout.size, HALF, seeded(label)).float())
            masks = seen["head.weight"] > 0, seen["head.bias"] > 0
            assert infer_label(slope["head.weight"], slope["head.bias"], *masks) == label


# --- who beats whom --------------------------------------------------------------------------------------------------

def test_the_mask_aware_attacker_beats_the_naive_one(case):
    """n = 3 images, R = .5, 130 steps. Fails when the mask is ignored: the two attackers are one then."""
    model, images, labels, gradients, masks = case
    shared = torch.where(masks, gradients, 0.0)
    naive, aware = (ssim(invert(model, shared, labels, masks, knows), images) for knows in (False, True))
    assert (aware > naive + 0.1).all() and aware.mean() > naive.mean() + 0.15 and aware.mean() > 0.6


def test_the_mask_is_used_in_the_objective(case):
    """At the true image the mask-aware distance is 0, the naive one is not (n = 3); garbage under the mask changes nothing."""
    model, images, labels, gradients, masks = case
    for gradient, mask in zip(gradients, masks):
        assert float(cosine_distance(gradient, gradient * mask, mask)) < 1e-6
        assert float(cosine_distance(gradient, gradient * mask)) > 0.05
    spoilt = torch.where(masks, gradients, torch.full_like(gradients, float("nan")))
    clean, dirty = (invert(model, shared, labels, masks, True, steps=2) for shared in (gradients * masks, spoilt))
    assert torch.equal(clean, dirty)


def test_several_rounds_beat_one_and_fresh_masks_beat_a_kept_one():
    """n = 2 images, R = .95, three rounds, 80 steps: the model moves a little between the rounds."""
    models, images, labels = [LeNetGELU()], pictures(2, seed=11), torch.tensor([1, 4])
    for number in range(2):
        models.append(deepcopy(models[-1]))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter += 1e-3 * torch.randn(parameter.shape, generator=seeded(number))
    uploads = [upload_function(model) for model in models]
    series = torch.stack([torch.stack([upload(images[[i]], labels[[i]]).detach() for upload in uploads]) for i in range(2)])
    fresh = torch.stack([torch.stack([random_mask(series.shape[2], 0.95, seeded(10 * i + t)) for t in range(3)]) for i in range(2)])
    kept = fresh[:, :1].expand(-1, 3, -1)
    one = ssim(invert(models[0], torch.where(fresh, series, 0.0)[:, 0], labels, fresh[:, 0], True, 80, 1e-1), images)
    with_kept, with_fresh = (ssim(invert(models, torch.where(masks, series, 0.0), labels, masks, True, 80, 1e-1), images) for masks in (kept, fresh))
    assert with_fresh.mean() > one.mean() + 0.05 and with_fresh.mean() > with_kept.mean() + 0.05
    assert (with_fresh > one).all()


def test_a_mask_that_is_not_sent_is_guessed_from_zeros_even_with_relu(case):
    """n = 3 images, R = .5: true zeros of dead units are taken for masked, and the guess still serves."""
    model, images, labels = deepcopy(case[0]), case[1], case[2]
    for place, layer in enumerate(model.features):
        if isinstance(layer, nn.GELU):
            model.features[place] = nn.LeakyReLU(0.2) if place < 4 else nn.ReLU()
    upload = upload_function(model)
    gradients = torch.stack([upload(images[[i]], labels[[i]]).detach() for i in range(3)])
    shared, masks = torch.where(case[4], gradients, 0.0), case[4]
    assert ((shared == 0) & masks).sum() > 100  # the guess is wrong there
    naive, guessed = (ssim(invert(model, shared, labels, None, knows), images) for knows in (False, "zeros"))
    told = ssim(invert(model, shared, labels, masks, True), images)
    assert (guessed > naive).all() and guessed.mean() > naive.mean() + 0.05 and guessed.mean() > told.mean() - 0.05


def test_updates_of_fedavg_are_inverted_through_the_mask(case):
    """n = 1 image, R = .5, two local steps."""
    model, images, labels, _, masks = case
    local = dict(local_steps=2, local_learning_rate=0.05)
    shared = torch.where(masks[0], upload_function(model, **local)(images[:1], labels[:1]).detach(), 0.0)
    score = {knows: float(ssim(CosineInversion(model, SHAPE, 100, 3e-2, mask_aware=knows, **local)(shared, labels[:1], seeded(3), masks[0]),
                               images[:1])) for knows in (False, True)}
    assert score[True] > score[False] + 0.08


def test_a_batch_comes_back_through_the_mask_whatever_its_order(case):
    """n = 2 images in one gradient, R = .5; the score does not depend on the order of the reconstructions."""
    model, images, labels, _, masks = case
    shared = torch.where(masks[0], upload_function(model)(images[:2], labels[:2]).detach(), 0.0)
    score = {}
    for knows in (False, True):
        found = CosineInversion(model, SHAPE, 120, 3e-2, mask_aware=knows)(shared, labels[:2], seeded(3), masks[0])
        score[knows] = ssim(found[pair_images(found, images[:2])], images[:2])
        turned = found.flip(0)
        assert torch.equal(turned[pair_images(turned, images[:2])], found[pair_images(found, images[:2])])
    assert score[True].mean() > score[False].mean() + 0.1


# --- theory ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_the_naive_cosine_at_the_truth_is_the_root_of_the_shared_part(case, rate):
    """200 masks: the mean square within 5 standard errors of 1 - R (two-sided false-alarm rate 6e-7, were the seed free)."""
    gradient = case[3][0].double()
    masks = torch.stack([random_mask(len(gradient), rate, seeded(seed)) for seed in range(200)])
    square = torch.stack([1 - cosine_distance(gradient, gradient * mask) for mask in masks]).square().mean()
    error = (rate * (1 - rate) * gradient.pow(4).sum() / gradient.square().sum() ** 2 / 200).sqrt()
    assert abs(float((square - (1 - rate)) / error)) < 5
