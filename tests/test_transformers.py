"""Closed forms on transformers under random selection, on fixed cases: who beats whom, and whether the attacker can tell.

The cases are fixed (seeds, images), so no test can raise a false alarm by chance; each states its sample size.
"""
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from privfl.federation import Client, Server
from privfl.metrics import psnr
from privfl.randomness import Streams
from privfl.selection import FixedPosition, LeNetGELU, RandomSelection, ViT, april_attack, position_patch_attack, row_space_attack
from privfl.update import Layout


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(seed: int = 5) -> torch.Tensor:
    """One smooth colour picture with an edge, in [0, 1]."""
    image = F.interpolate(torch.rand(1, 3, 5, 5, generator=seeded(seed)), size=32, mode="bicubic", align_corners=True)
    image[:, :, 10:22, 8:20] = 1 - image[:, :, 10:22, 8:20]
    return image.clamp(0, 1)


def sent(model, image, *defence):
    """Gradients and masks (None without) by parameter name, as a client with one image sends them."""
    client = Client(0, model, image, torch.tensor([3]), batch_size=1, defence=defence, training=False)
    tensors, layout = client.fit(Server(model).initial_state(), {}, Streams(0), 0)[0].tensors, Layout.of(model)
    return layout.unflatten(tensors["update"]), layout.unflatten(tensors["mask"]) if "mask" in tensors else None


CASES = {
    "position-patch, R = 0.5": (ViT, position_patch_attack, (RandomSelection(0.5),)),
    "position-patch, R = 0.8": (ViT, position_patch_attack, (RandomSelection(0.8),)),
    "APRIL, R = 0.2": (partial(ViT, first_block="april"), april_attack, (RandomSelection(0.2),)),
    "APRIL, R = 0.8": (partial(ViT, first_block="april"), april_attack, (RandomSelection(0.8),)),
    "row space, R = 0.1, fixed position": (partial(ViT, dim=256, heads=4), partial(row_space_attack, max_rows=60), (FixedPosition(), RandomSelection(0.1))),
}


@pytest.mark.parametrize("name", CASES)
def test_the_attacker_who_reads_the_mask_beats_the_naive_one_and_both_can_tell(name):
    """n = 1 image for each form: above 35 dB against below 20, and `success` says so."""
    build, attack, defence = CASES[name]
    model, image = build(), picture()
    gradients, masks = sent(model, image, *defence)
    naive, aware = (attack(model, gradients, masks, mask_aware=knows) for knows in (False, True))
    assert float(psnr(aware.image, image)) > 35 and float(psnr(naive.image, image)) < 20
    assert aware.success is True and naive.success is False
    assert aware.residual < 1e-5 < 1e-2 < naive.residual


def test_success_is_not_claimed_for_pixels_that_are_not_determined():
    """A column of the patch embedding's gradient that shows fewer entries than there are patches leaves one pixel of each patch open (n = 1)."""
    model, image = ViT(), picture()
    gradients, masks = sent(model, image, RandomSelection(0.2))
    full = position_patch_attack(model, gradients, masks)
    masks = {name: mask.clone().bool() for name, mask in masks.items()}
    masks["network.patch_embed.proj.weight"].flatten(1)[:, 100] = False
    masks["network.patch_embed.proj.weight"].flatten(1)[:10, 100] = True
    gradients = {name: torch.where(masks[name], value, 0.0) for name, value in gradients.items()}
    open_pixel = position_patch_attack(model, gradients, masks)
    assert full.success is True and float(psnr(full.image, image)) > 60
    assert open_pixel.success is False and open_pixel.residual < 1e-5 and float(psnr(open_pixel.image, image)) < 60


def test_rows_that_are_not_determined_do_no_harm():
    """Rows of the joint matrix that show fewer entries than there are patches are left out of the last solve (n = 1)."""
    model, image = ViT(), picture()
    gradients, masks = sent(model, image, RandomSelection(0.2))
    masks = {name: mask.clone().bool() for name, mask in masks.items()}
    masks["network.patch_embed.proj.weight"][:20] = False
    masks["network.pos_embed"][..., :20] = False
    found = position_patch_attack(model, gradients, masks)
    assert found.success is True and float(psnr(found.image, image)) > 60


def test_success_is_not_claimed_where_patches_are_wider_than_the_embedding():
    """Width 96, 192 numbers in a patch: the tokens are right, and the image is a projection (n = 1)."""
    model, image = ViT(dim=96, first_block="april"), picture()
    gradients, masks = sent(model, image, RandomSelection(0.1))
    for found in (april_attack(model, gradients, masks), april_attack(model, sent(model, image)[0])):
        assert found.residual < 1e-5 and found.success is False and float(psnr(found.image, image)) < 40


def test_a_completion_of_april_on_a_standard_block_is_seen_to_fail():
    """Its equations do not hold there (n = 1)."""
    model = ViT()
    found = april_attack(model, *sent(model, picture(), RandomSelection(0.2)))
    assert found.success is False and found.residual > 1e-3


BAD = {
    "a network without positions": (LeNetGELU(), {}, None),
    "gradients as a list": (None, [1, 2], None),
    "no gradients": (None, None, None),
    "a missing tensor": (None, {}, None),
    "an array": (None, "numpy", None),
    "another shape": (None, "short", None),
    "whole numbers": (None, "whole", None),
    "masks as a tensor": (None, "right", torch.ones(3)),
    "masks of another shape": (None, "right", "short"),
    "masks that are no flags": (None, "right", "gradients"),
}


@pytest.mark.parametrize("attack", [position_patch_attack, april_attack, row_space_attack])
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_attacked_is_refused(attack, name):
    model, gradients, masks = BAD[name]
    model = model or ViT(dim=48, heads=3, patch_size=16)
    right = {key: torch.ones_like(value) for key, value in model.named_parameters()}
    made = {"right": right, "numpy": {key: value.detach().numpy() for key, value in right.items()}, "short": {key: value[:, :1] if value.ndim > 1 else value[:1] for key, value in right.items()},
            "whole": {key: value.long() for key, value in right.items()}, "gradients": {key: value + 0.5 for key, value in right.items()}}
    with pytest.raises(ValueError, match="give"):
        attack(model, made.get(gradients, gradients) if isinstance(gradients, str) else gradients, made[masks] if isinstance(masks, str) else masks)


def test_masks_of_zeros_and_ones_are_masks():
    """`Layout.unflatten` of a float mask gives numbers; they count as flags (n = 1)."""
    model, image = ViT(), picture()
    gradients, masks = sent(model, image, RandomSelection(0.2))
    as_numbers = {name: mask.float() for name, mask in masks.items()}
    assert torch.equal(position_patch_attack(model, gradients, as_numbers).image, position_patch_attack(model, gradients, {name: mask.bool() for name, mask in masks.items()}).image)
