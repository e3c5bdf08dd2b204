"""The networks under attack: sizes, stems, the two first blocks, weights from a generator, and the attacks by one call."""
import math
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from privfl.closed_forms import PATCH_ATTEMPTS
from privfl.data import DataNotFound
from privfl.federation import Client, Server, mean_rule, run
from privfl.metrics import psnr
from privfl.selection import RandomSelection, random_mask, selected_mean
from privfl.selection.models import AprilBlock, ConvNet, LeNetGELU, ResNet34, ViT, vit_small
from privfl.selection.transformers import (FixedPosition, april_attack, known_tokens, position_patch_attack,
                                           row_space_attack)
from privfl.update import Layout, buffers_of


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_images(count: int = 1) -> torch.Tensor:
    """Images in [0, 1] with structure on every scale."""
    coarse = F.interpolate(torch.rand(count, 3, 8, 8, generator=seeded(3)), size=32, mode="bilinear")
    return (0.8 * coarse + 0.2 * torch.rand(count, 3, 32, 32, generator=seeded(4))).clamp(0, 1)


def gradients_of(model, images, labels=(3,)):
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(F.cross_entropy(model(images), torch.tensor(labels)), list(names.values()))))


def masks_for(gradients, rate, seed=0):
    generator = seeded(seed)
    return {name: random_mask(value.numel(), rate, generator).view(value.shape) for name, value in gradients.items()}


def decibel(found, images) -> float:
    return float(psnr(found.image, images))


# --- networks --------------------------------------------------------------------------------------------------------

def test_the_april_variant_of_vit_small_has_the_published_size():
    assert Layout.of(vit_small(num_classes=1000, first_block="april")).size == 22_049_896


def test_vit_small_has_the_names_and_shapes_of_timm():
    timm = pytest.importorskip("timm")
    ours = {name: value.shape for name, value in vit_small(num_classes=1000).network.state_dict().items()}
    with torch.random.fork_rng(), torch.device("meta"):
        theirs = timm.create_model("vit_small_patch16_224")
    assert ours == {name: value.shape for name, value in theirs.state_dict().items()}
    assert sum(math.prod(shape) for shape in ours.values()) == 22_050_664


def test_a_vit_computes_what_timm_computes_after_normalising():
    from timm.models.vision_transformer import VisionTransformer

    model, images = ViT(), smooth_images(2)
    with torch.random.fork_rng():
        reference = VisionTransformer(img_size=32, patch_size=8, embed_dim=192, depth=2, num_heads=3, num_classes=10).eval()
    reference.load_state_dict(model.network.state_dict())
    torch.testing.assert_close(model.eval()(images), reference(model.normalise(images)), atol=1e-5, rtol=1e-5)


def test_the_april_block_has_no_first_norm_and_no_skip():
    model, tokens = ViT(first_block="april"), torch.randn(1, 17, 192, generator=seeded())
    block = model.network.blocks[0]
    assert isinstance(block, AprilBlock) and not hasattr(block, "norm1")
    torch.testing.assert_close(block(tokens), block.mlp(block.norm2(block.attn(tokens))))
    assert Layout.of(ViT()).size - Layout.of(model).size == 2 * 192


def test_a_vit_has_second_derivatives_for_attacks_by_search():
    model, images = ViT(dim=24, patch_size=16), smooth_images().requires_grad_()
    first = torch.autograd.grad(F.cross_entropy(model(images), torch.tensor([1])), list(model.parameters()), create_graph=True)
    second = torch.autograd.grad(sum(part.square().sum() for part in first), images)[0]
    assert second.isfinite().all() and second.any()


@pytest.mark.parametrize("stem, side, norm, size, buffers", [
    ("cifar", 32, "group", 21_282_122, 0), ("imagenet", 64, "batch", 21_289_802, 108)])
def test_resnet34_stems_and_norms(stem, side, norm, size, buffers):
    model = ResNet34(stem=stem, norm=norm).eval()
    assert Layout.of(model).size == size and len(buffers_of(model)) == buffers
    with torch.no_grad():
        assert model(torch.rand(1, 3, side, side, generator=seeded())).shape == (1, 10)
        seen = model.network.layer1(model.network.maxpool(model.network.conv1(torch.zeros(1, 3, 32, 32))))
    assert seen.shape[-1] == (32 if stem == "cifar" else 8)


def test_building_leaves_the_global_generator_alone_and_repeats():
    before = torch.get_rng_state()
    for make in (ViT, ResNet34, lambda **k: ViT(first_block="april", **k)):
        first, again, other = make(), make(), make(generator=seeded(5))
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
        assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters()))
        assert all(parameter.isfinite().all() for parameter in first.parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_the_law_of_the_initial_vit_weights():
    """73,728 values of standard deviation .02 (cut at 100 sigma, so uncut), 5 standard errors: false alarm 6e-7."""
    weight = ViT().network.blocks[1].attn.proj.weight.detach().double()
    error = 0.02 / math.sqrt(2 * weight.numel())
    assert abs(float(weight.std()) - 0.02) < 5 * error and abs(float(weight.mean())) < 5 * 0.02 / math.sqrt(weight.numel())


@pytest.mark.parametrize("make, message", [
    (lambda: ConvNet(width=0), "width"), (lambda: ConvNet(width=1.5), "width"), (lambda: ConvNet(num_classes=0), "num_classes"),
    (lambda: LeNetGELU(num_classes=-1), "num_classes"), (lambda: ResNet34(stem="small"), "stem"), (lambda: ResNet34(norm="none"), "norm"),
    (lambda: ViT(patch_size=5), "divide"), (lambda: ViT(patch_size=0), "patch_size"), (lambda: ViT(dim=100), "heads"),
    (lambda: ViT(depth=0), "depth"), (lambda: ViT(first_block="bare"), "first_block"), (lambda: vit_small(num_classes=True), "num_classes")])
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_pretrained_weights_offline_say_what_to_do(monkeypatch, tmp_path):
    def unreachable(*_):
        raise socket.gaierror("no network")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    with pytest.raises(DataNotFound, match="pretrained=False"):
        vit_small(pretrained=True)


# --- one call per attack ---------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def standard():
    model = ViT()
    return model, smooth_images(), gradients_of(model, smooth_images())


def test_the_position_patch_attack_inverts_any_vit(standard):
    model, images, gradients = standard
    found = position_patch_attack(model, gradients)
    assert found.success and found.image.shape == (1, 3, 32, 32) and found.image.dtype == torch.float32
    assert 0 <= float(found.image.min()) and float(found.image.max()) <= 1 and decibel(found, images) > 60
    april = ViT(first_block="april")
    assert decibel(position_patch_attack(april, gradients_of(april, images)), images) > 40


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_each_adaptive_attack_beats_the_naive_one_on_a_fixed_case(standard, rate):
    model, images, gradients = standard
    masks = masks_for(gradients, rate)
    naive, aware = (position_patch_attack(model, gradients, masks, flag) for flag in (False, True))
    assert aware.success and decibel(aware, images) > 40 > 20 > decibel(naive, images)
    assert not naive.success


def test_the_position_patch_attack_tries_again():
    """A fixed mask on which the first attempt fails and a later one finds the image."""
    model, images = ViT(dim=96, patch_size=8, depth=1).double(), smooth_images().double()
    gradients = gradients_of(model, images)
    masks = masks_for(gradients, 0.7, 7)
    once = position_patch_attack(model, gradients, masks, attempts=PATCH_ATTEMPTS[:1])
    again = position_patch_attack(model, gradients, masks)
    assert decibel(again, images) > 25 > 20 > decibel(once, images)
    assert again.residual < 1e-9 and not once.success  # `again` fits all that is shown; no success, since the mask leaves columns undetermined


def test_hidden_values_are_never_read(standard):
    model, images, gradients = standard
    masks = masks_for(gradients, 0.3)
    spoilt = {name: torch.where(masks[name], value, torch.full_like(value, float("nan"))) for name, value in gradients.items()}
    for flag in (False, True):
        assert torch.equal(position_patch_attack(model, spoilt, masks, flag).image, position_patch_attack(model, gradients, masks, flag).image)


def test_trap_24_the_attacker_sees_that_a_batch_of_two_failed(standard):
    model = standard[0]
    found = position_patch_attack(model, gradients_of(model, smooth_images(2), (3, 5)))
    assert not found.success and found.residual > 1e-3


def test_april_by_one_call_with_and_without_masks():
    model, images = ViT(first_block="april"), smooth_images()
    model.double()
    gradients = gradients_of(model, images.double())
    masks = masks_for(gradients, 0.2)
    assert april_attack(model, gradients).success and decibel(april_attack(model, gradients), images) > 60
    assert decibel(april_attack(model, gradients, masks), images) > 40 > 20 > decibel(april_attack(model, gradients, masks, False), images)
    standard_model = ViT().double()
    assert not april_attack(standard_model, gradients_of(standard_model, images.double())).success


@pytest.mark.parametrize("first_block", ["standard", "april"])
def test_the_row_space_breaks_fixed_positions(first_block):
    model, images = ViT(patch_size=4, dim=192, first_block=first_block), smooth_images()
    if first_block == "standard":
        with torch.no_grad():  # a norm that is not the identity
            model.network.blocks[0].norm1.weight.mul_(1 + 0.2 * torch.randn(192, generator=seeded(1)))
            model.network.blocks[0].norm1.bias.add_(0.1 * torch.randn(192, generator=seeded(2)))
    model.double()
    gradients = {name: value for name, value in gradients_of(model, images.double()).items() if "pos_embed" not in name}
    masks = masks_for(gradients, 0.2)
    aware, naive = (row_space_attack(model, gradients, masks, flag, max_rows=250) for flag in (True, False))
    assert decibel(aware, images) > 40 > 20 > decibel(naive, images)
    with pytest.raises(ValueError, match=r"p \+ c"):
        row_space_attack(model, gradients, masks_for(gradients, 0.6))


def test_known_tokens_are_the_tokens_of_a_black_network_input():
    model = ViT().eval()
    torch.nn.init.ones_(model.network.cls_token)
    images = model.normalise.mean.expand(3, 32, 32)[None]  # zero after normalising
    with torch.no_grad():
        tokens = model.network._pos_embed(model.network.patch_embed(model.normalise(images)))[0]
    torch.testing.assert_close(known_tokens(model), tokens, atol=1e-5, rtol=1e-5)


def test_attacks_refuse_what_they_cannot_read(standard):
    model, _, gradients = standard
    masks = masks_for(gradients, 0.2)
    for call, message in [
        (lambda: position_patch_attack(LeNetGELU(), gradients), "ViT"),
        (lambda: position_patch_attack(model, {}), "lack"),
        (lambda: position_patch_attack(model, gradients, {}), "masks lack"),
        (lambda: position_patch_attack(model, {**gradients, "network.pos_embed": gradients["network.pos_embed"] * 0}), "fixed position"),
        (lambda: position_patch_attack(model, gradients, masks_for(gradients, 0.95)), "too high"),
        (lambda: position_patch_attack(model, {**gradients, "network.pos_embed": gradients["network.pos_embed"] * float("nan")}), "finite"),
        (lambda: position_patch_attack(model, gradients, {name: mask & False for name, mask in masks.items()}), "too high"),
        (lambda: row_space_attack(model, gradients, masks), r"p \+ c"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


# --- fixed positions -------------------------------------------------------------------------------------------------

def upload_with(defence):
    model, kept = ViT(dim=24, patch_size=16, depth=1), []
    client = Client(0, model, smooth_images(), torch.tensor([3]), batch_size=1, defence=defence)
    run(Server(model, rule=selected_mean if any(isinstance(step, RandomSelection) for step in defence) else mean_rule,
               learning_rate=0.1), [client], rounds=1, seed=0, observers=[lambda state, uploads, round: kept.extend(uploads)])
    return model, client, Layout.of(model).unflatten(kept[0].tensors["update"])


@pytest.mark.parametrize("steps", [[FixedPosition()], [FixedPosition(), RandomSelection(0.5)], [RandomSelection(0.5), FixedPosition()]])
def test_fixed_positions_are_sent_as_zero_and_nothing_else_changes(steps):
    model, client, sent = upload_with(steps)
    others = [step for step in steps if not isinstance(step, FixedPosition)]
    _, _, reference = upload_with(others)
    assert not sent["network.pos_embed"].any() and client.promise().kind == "heuristic"
    if len(steps) == 1:  # with masks, the random draws of a step depend on its place in the chain
        assert all(torch.equal(sent[name], reference[name]) for name in sent if name != "network.pos_embed")


def test_fixed_positions_need_such_a_parameter():
    with pytest.raises(ValueError, match="no parameters"):
        client = Client(0, LeNetGELU(), smooth_images(), torch.tensor([3]), batch_size=1, defence=[FixedPosition()])
        run(Server(LeNetGELU(), learning_rate=0.1), [client], rounds=1, seed=0)


@given(st.sampled_from([(16, 4, 24), (16, 8, 48), (32, 16, 96)]), st.integers(0, 20))
def test_the_position_patch_form_holds_for_any_sizes(sizes, seed):
    side, patch, dim = sizes
    model = ViT(image_size=side, patch_size=patch, dim=dim, depth=1, generator=seeded(seed)).double()
    images = F.interpolate(smooth_images(), size=side).double()
    assert decibel(position_patch_attack(model, gradients_of(model, images)), images.float()) > 40
