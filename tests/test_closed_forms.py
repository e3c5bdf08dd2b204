"""Closed forms on gradients: identities, exact recovery, completion under masks, and what is refused."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from privfl import inversion
from privfl.closed_forms import (PATCH_ATTEMPTS, april_closed_form, april_completion, complete_low_rank,
                                 complete_with_retries, condition_number, cut_patches, equations_per_unknown,
                                 join_patches, least_squares, patches_by_completion, patches_from_position_gradient,
                                 patches_from_row_space, patches_from_tokens, rank1_inputs, union_over_rounds)

SIDE, WIDTH = 8, 96


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class FirstBlockBare(nn.Module):
    """A timm block reduced to mlp(norm(attention))."""

    def __init__(self, block):
        super().__init__()
        self.attn, self.norm2, self.mlp = block.attn, block.norm2, block.mlp

    def forward(self, tokens, *args, **kwargs):
        return self.mlp(self.norm2(self.attn(tokens)))


def transformer(bare: bool, width: int = WIDTH, side: int = SIDE):
    timm = pytest.importorskip("timm")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.models.vision_transformer.VisionTransformer(
            img_size=32, patch_size=side, embed_dim=width, depth=2, num_heads=3, num_classes=10)
    if bare:
        model.blocks[0] = FirstBlockBare(model.blocks[0])
    return model.double().eval()


def gradients(model, images, labels):
    names = dict(model.named_parameters())
    return dict(zip(names, torch.autograd.grad(F.cross_entropy(model(images), labels), list(names.values()))))


def picture(count: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=seeded(3), dtype=torch.float64)


def relative(a, b) -> float:
    return float((a - b).norm() / b.norm())


def attention(model, slopes):
    width = slopes["pos_embed"].shape[-1]
    shape = (3, width, width)
    return (slopes["pos_embed"][0], model.blocks[0].attn.qkv.weight.detach().reshape(shape),
            slopes["blocks.0.attn.qkv.weight"].reshape(shape))


def known_part(model):
    known = model.pos_embed.detach()[0].clone()
    known[0] += model.cls_token.detach()[0, 0]
    known[1:] += model.patch_embed.proj.bias.detach()
    return known


@pytest.fixture(scope="module")
def standard():
    slopes = gradients(transformer(bare=False), picture(), torch.tensor([3]))
    return slopes["pos_embed"][0, 1:], slopes["patch_embed.proj.weight"].flatten(1), cut_patches(picture()[0], SIDE)


@pytest.fixture(scope="module")
def modified():
    model = transformer(bare=True)
    position, weights, slopes = attention(model, gradients(model, picture(), torch.tensor([3])))
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(picture()))[0]
    return model, position, weights, slopes, tokens


# --- patches ---------------------------------------------------------------------------------------------------------

@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_cutting_and_joining_are_inverse(channels, rows, columns, side):
    image = torch.randn(channels, rows * side, columns * side, generator=seeded())
    patches = cut_patches(image, side)
    assert patches.shape == (rows * columns, channels * side * side)
    assert torch.equal(join_patches(patches, side, height=rows * side), image)


def test_patches_are_read_as_the_patch_embedding_reads_them():
    conv = nn.Conv2d(3, 7, 4, 4, bias=False, dtype=torch.float64)
    image = picture()
    expected = conv(image).flatten(2).transpose(1, 2)[0]
    torch.testing.assert_close(cut_patches(image[0], 4) @ conv.weight.flatten(1).T, expected)


def test_bad_patches_are_refused():
    for call in (lambda: cut_patches(torch.zeros(3, 10, 8), 4), lambda: join_patches(torch.zeros(5, 48), 4),
                 lambda: join_patches(torch.zeros(4, 47), 4), lambda: join_patches(torch.zeros(5, 48), 4, height=8)):
        with pytest.raises(ValueError):
            call()


# --- position-patch form ---------------------------------------------------------------------------------------------

def test_the_position_patch_identity_holds_with_norms_and_skips(standard):
    position, patch, patches = standard
    assert relative(position.T @ patches, patch) < 1e-12


def test_patches_come_back_exactly_and_from_float32_nearly(standard):
    position, patch, patches = standard
    assert relative(patches_from_position_gradient(position, patch, max_residual=1e-9), patches) < 1e-6
    from_float = patches_from_position_gradient(position.float(), patch.float())
    assert from_float.dtype == torch.float64 and relative(from_float, patches) < 1e-2


def test_trap_24_a_batch_of_two_leaves_a_residual():
    slopes = gradients(transformer(bare=False), picture(2), torch.tensor([3, 5]))
    with pytest.raises(ValueError, match="more than one image"):
        patches_from_position_gradient(slopes["pos_embed"][0, 1:], slopes["patch_embed.proj.weight"].flatten(1), max_residual=1e-6)


def test_position_patch_contracts(standard):
    position, patch, _ = standard
    for arguments, message in [
        ((torch.ones(20, 8), torch.ones(8, 3)), "p <= e"),
        ((torch.zeros(4, 8), torch.ones(8, 3)), "fixed position"),
        ((position[None], patch), "ONE image"),
        ((position, patch[1:]), "patch_gradient is"),
        ((position * float("nan"), patch), "finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            patches_from_position_gradient(*arguments)


@pytest.mark.parametrize("masking_rate", [0.2, 0.4])
def test_the_completed_form_beats_the_naive_one(standard, masking_rate):
    position, patch, patches = standard
    masks = [torch.rand(value.shape, generator=seeded(k)) >= masking_rate for k, value in enumerate((position, patch))]
    naive = patches_from_position_gradient(position * masks[0], patch * masks[1])
    hidden = [torch.where(m, v, torch.full_like(v, float("nan"))) for m, v in zip(masks, (position, patch))]
    completed, completion = patches_by_completion(*hidden, *masks)
    assert relative(completed, patches) < 1e-6 < 0.5 < relative(naive, patches)
    assert completion.residual < 1e-10


def test_trap_25_masks_must_be_bool_and_fit(standard):
    position, patch, _ = standard
    right = torch.ones_like(position, dtype=torch.bool), torch.ones_like(patch, dtype=torch.bool)
    for masks in ((right[0].float(), right[1]), (right[0][1:], right[1]), (right[0], right[1][:, 1:])):
        with pytest.raises(ValueError, match="True = shared"):
            patches_by_completion(position, patch, *masks)


# --- APRIL -----------------------------------------------------------------------------------------------------------

def test_april_is_exact_on_the_modified_block(modified):
    model, position, weights, slopes, tokens = modified
    right = torch.einsum("noi,noj->ij", weights, slopes)
    assert relative(position.T @ tokens, right) < 1e-11
    found = april_closed_form(position, weights, slopes, max_residual=1e-8)
    assert relative(found, tokens) < 1e-6 and found.dtype == torch.float64


def test_april_leaves_a_residual_on_a_standard_block():
    model = transformer(bare=False)
    with pytest.raises(ValueError, match="residual"):
        april_closed_form(*attention(model, gradients(model, picture(), torch.tensor([3]))), max_residual=1e-6)


def test_tokens_to_patches_is_exact_for_wide_models_and_a_projection_for_narrow_ones():
    patches = cut_patches(picture()[0], 4)
    for width, exact in ((64, True), (32, False)):
        weight, known = torch.randn(width, 48, generator=seeded(1)).double(), torch.randn(65, width, generator=seeded(2)).double()
        tokens = known + torch.cat([torch.zeros(1, width), patches @ weight.T])
        back = patches_from_tokens(tokens, known, weight)
        assert (relative(back, patches) < 1e-10) == exact
        assert relative(back @ weight.T, patches @ weight.T) < 1e-10


def test_completed_april_beats_naive_april(modified):
    model, position, weights, slopes, tokens = modified
    position_mask = torch.rand(position.shape, generator=seeded(1)) >= 0.2
    weight_mask = torch.rand(slopes.shape, generator=seeded(2)) >= 0.2
    naive = april_closed_form(position * position_mask, weights, slopes * weight_mask)
    hidden = torch.where(weight_mask, slopes, torch.full_like(slopes, float("nan")))
    completed = april_completion(position, weights, hidden, position_mask, weight_mask)
    assert relative(completed, tokens) < 1e-3 < 0.5 < relative(naive, tokens)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-7), (torch.float64, 1e-9)])
def test_completed_april_needs_rows_of_one_size_before_it_cuts_the_row_space(dtype, bound):
    """Value rows of rank one, query and key rows 2^60 times smaller: only these span the tokens. Integers, exact in float32."""
    generator, tokens, width, small = seeded(0), 9, 24, 2.0**-60
    truth = torch.randint(-4, 5, (tokens, width), generator=generator).double()
    share = torch.randint(-3, 4, (3, width, tokens), generator=generator).double()
    share[2] = share[2, :, :1]
    share[:2] *= small
    weights = torch.randint(-3, 4, (3, width, width), generator=generator).double()
    weights[:2] /= small
    slopes, position = share @ truth, torch.einsum("noi,nop->pi", weights, share)
    position_mask = torch.rand(position.shape, generator=generator) >= 0.2
    weight_mask = torch.rand(slopes.shape, generator=generator) >= 0.2
    found = april_completion(*(value.to(dtype) for value in (position, weights, slopes)), position_mask, weight_mask,
                             attempts=[(1.0, 1.0, 10)])
    assert relative(found, truth) < bound


def test_april_contracts(modified):
    _, position, weights, slopes, _ = modified
    full = torch.ones_like(position, dtype=torch.bool), torch.ones_like(slopes, dtype=torch.bool)
    for call, message in [
        (lambda: april_closed_form(torch.ones(9, 8), torch.ones(3, 8, 8), torch.ones(3, 8, 8)), "p <= e"),
        (lambda: april_closed_form(position * 0, weights, slopes), "fixed position"),
        (lambda: april_closed_form(position, weights[:2], slopes), "weights is"),
        (lambda: april_completion(position, weights, slopes, full[0][1:], full[1]), "True = shared"),
        (lambda: april_completion(position, weights, slopes, full[0], full[1][:2]), "True = shared"),
        (lambda: april_completion(position, weights, slopes, full[0] & (torch.arange(WIDTH) < 10), full[1]), "too high"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_the_known_row_space_needs_no_position_gradient():
    model = transformer(bare=True, width=192, side=4)
    slopes = attention(model, gradients(model, picture(), torch.tensor([3])))[2]
    arguments = known_part(model), model.patch_embed.proj.weight.detach().flatten(1)
    patches = cut_patches(picture()[0], 4)
    assert relative(patches_from_row_space(*arguments, slopes), patches) < 1e-4
    mask = torch.rand(slopes.shape, generator=seeded()) >= 0.2
    hidden = torch.where(mask, slopes, torch.full_like(slopes, float("nan")))
    assert relative(patches_from_row_space(*arguments, hidden, mask), patches) < 1e-2
    with pytest.raises(ValueError, match=r"p \+ c"):
        patches_from_row_space(*arguments, slopes, torch.rand(slopes.shape, generator=seeded()) >= 0.8)


@pytest.mark.parametrize("masking_rate, bound", [(0.0, 0.02), (0.2, 0.01)])
def test_the_row_space_weighs_rows_alike_in_float32(masking_rate, bound):
    """Value gradients are far longer than those of queries and keys; with equal weights the error is above .1."""
    model = transformer(bare=True, width=192, side=4).float()
    slopes = attention(model, gradients(model, picture().float(), torch.tensor([3])))[2]
    mask = torch.rand(slopes.shape, generator=seeded()) >= masking_rate
    found = patches_from_row_space(known_part(model), model.patch_embed.proj.weight.detach().flatten(1), slopes, mask, max_rows=200)
    assert relative(found, cut_patches(picture()[0], 4)) < bound


# --- completion ------------------------------------------------------------------------------------------------------

@given(st.integers(1, 4), st.floats(0, 6), st.floats(0.05, 0.5), st.integers(0, 5))
def test_completion_is_exact_for_low_rank_matrices_of_any_spectrum(rank, decades, masking_rate, seed):
    generator = seeded(seed)
    left, right = torch.randn(60, rank, generator=generator).double(), torch.randn(50, rank, generator=generator).double()
    matrix = (left * torch.logspace(0, -decades, rank, dtype=torch.float64)) @ right.T
    done = complete_low_rank(matrix, torch.rand(matrix.shape, generator=generator) >= masking_rate, rank)
    assert relative(done.matrix, matrix) < 1e-6


def test_completion_ignores_what_is_hidden_and_rows_or_columns_of_zeros():
    matrix = torch.outer(torch.arange(12.0), torch.arange(9.0)).double()
    mask = torch.rand(matrix.shape, generator=seeded()) >= 0.3
    hidden = torch.where(mask, matrix, torch.full_like(matrix, float("inf")))
    assert relative(complete_low_rank(hidden, mask, 1).matrix, matrix) < 1e-9
    empty = complete_low_rank(torch.zeros(4, 5), torch.ones(4, 5, dtype=torch.bool), 1)
    assert torch.equal(empty.matrix, torch.zeros(4, 5).double())


def test_the_textbook_method_fails_where_ours_succeeds(standard):
    position, patch, _ = standard
    joint = torch.cat([position.T, patch], 1)
    seen = torch.rand(joint.shape, generator=seeded(1)) >= 0.3
    plain = complete_low_rank(joint, seen, len(position), steps=60, grow_rank=False, rounds=0, row_power=0, column_power=0)
    ours = complete_low_rank(joint, seen, len(position), row_power=0, column_power=1)
    assert relative(ours.matrix, joint) < 1e-8 < 1e-2 < relative(plain.matrix, joint)


def test_completion_contracts():
    matrix = torch.ones(4, 5)
    for arguments in ((matrix, torch.ones(4, 5), 1), (matrix, torch.ones(5, 4, dtype=torch.bool), 1),
                      (matrix, torch.ones(4, 5, dtype=torch.bool), 0), (matrix, torch.ones(4, 5, dtype=torch.bool), 5),
                      (matrix, torch.zeros(4, 5, dtype=torch.bool), 1), (matrix[0], torch.ones(5, dtype=torch.bool), 1)):
        with pytest.raises(ValueError):
            complete_low_rank(*arguments)


@pytest.fixture(scope="module")
def uploads():
    """Twenty float32 uploads of a standard ViT of width 192: position and patch gradients, and the patches."""
    model, found = transformer(bare=False, width=192).float(), []
    coarse = F.interpolate(torch.randn(20, 3, 8, 8, generator=seeded(3)), size=32, mode="bilinear")
    for image in coarse + 0.3 * torch.randn(20, 3, 32, 32, generator=seeded(4)):
        slopes = gradients(model, image[None], torch.tensor([3]))
        found.append((slopes["pos_embed"][0, 1:], slopes["patch_embed.proj.weight"].flatten(1), cut_patches(image.double(), SIDE)))
    return found


@pytest.mark.parametrize("masking_rate, needed", [(0.5, 20), (0.8, 15)])
def test_completion_is_reliable_over_twenty_masks_and_says_when_it_failed(uploads, masking_rate, needed):
    """Fixed images and masks, float32 uploads, first attempt only; success is a relative error of the patches below .01."""
    right, told = [], []
    for number, (position, patch, patches) in enumerate(uploads):
        generator = seeded(number)
        masks = [torch.rand(value.shape, generator=generator) >= masking_rate for value in (position, patch)]
        found, done = patches_by_completion(position, patch, *masks, attempts=PATCH_ATTEMPTS[:1])
        right.append(relative(found, patches) < 0.01)
        told.append(done.success)
    assert sum(right) >= needed and sum(a != b for a, b in zip(right, told)) <= 1


def test_retries_stop_at_success_and_else_keep_the_best(standard):
    position, patch, _ = standard
    joint = torch.cat([position.T, patch], 1)
    seen = torch.rand(joint.shape, generator=seeded(1)) >= 0.3
    good, poor = (0.5, 0.0, 10), (0.0, 1.0, 1)
    first = complete_with_retries(joint, seen, len(position), attempts=[good, poor])
    alone = complete_low_rank(joint, seen, len(position), 10, row_power=0.5, column_power=0.0, rounds=20)
    assert first.success and torch.equal(first.matrix, alone.matrix)
    best = complete_with_retries(joint, seen, len(position), attempts=[poor, good, poor], tolerance=1e-30, rounds=0)
    only = complete_with_retries(joint, seen, len(position), attempts=[good], tolerance=1e-30, rounds=0)
    assert not best.success and torch.equal(best.matrix, only.matrix)
    with pytest.raises(ValueError, match="attempts"):
        complete_with_retries(joint, seen, len(position), attempts=[])


def test_fewer_entries_than_unknowns_are_refused(standard, modified):
    position, patch, _ = standard
    masks = [torch.rand(value.shape, generator=seeded(2)) >= 0.9 for value in (position, patch)]
    nothing = [torch.zeros_like(mask) for mask in masks]
    for given in (masks, nothing):
        with pytest.raises(ValueError, match="too high"):
            patches_by_completion(position, patch, *given)
    _, position, weights, slopes, _ = modified
    with pytest.raises(ValueError, match="too high"):
        april_completion(position, weights, slopes, torch.ones_like(position, dtype=torch.bool), torch.zeros_like(slopes, dtype=torch.bool))


def test_the_row_space_of_a_standard_block_needs_its_norm_and_one_image():
    model = transformer(bare=False, width=192, side=4)
    with torch.no_grad():
        model.blocks[0].norm1.bias.add_(0.1 * torch.randn(192, generator=seeded(5)))
    slopes = attention(model, gradients(model, picture(), torch.tensor([3])))[2]
    arguments = known_part(model), model.patch_embed.proj.weight.detach().flatten(1)
    norm = model.blocks[0].norm1.weight.detach(), model.blocks[0].norm1.bias.detach()
    patches = cut_patches(picture()[0], 4)
    assert relative(patches_from_row_space(*arguments, slopes, norm=norm, max_rows=200, max_residual=1e-9), patches) < 1e-4
    with pytest.raises(ValueError, match="residual"):
        patches_from_row_space(*arguments, slopes, max_rows=100, max_residual=1e-6)


def test_union_over_rounds_turns_a_hopeless_mask_into_a_completion(standard):
    """Three masks at R = .8 on one gradient show about half of it."""
    position, patch, patches = standard
    joint = torch.cat([position.flatten(), patch.flatten()])
    masks = torch.rand(3, joint.numel(), generator=seeded(6)) >= 0.8
    values, seen = union_over_rounds(joint.expand(3, -1), masks)
    split = [position.numel(), patch.numel()]
    parts = [part.view(like.shape) for both in (values, seen) for part, like in zip(both.split(split), (position, patch))]
    assert relative(patches_by_completion(*parts)[0], patches) < 1e-6


# --- counting --------------------------------------------------------------------------------------------------------

def test_rank_one_inputs_equal_a_real_layers_input():
    layer, features = nn.Linear(20, 6, dtype=torch.float64), torch.randn(1, 20, generator=seeded()).double()
    weight, bias = torch.autograd.grad(F.cross_entropy(layer(features), torch.tensor([2])), list(layer.parameters()))
    torch.testing.assert_close(rank1_inputs(weight, bias), features[0])


@given(st.integers(2, 8), st.integers(1, 12), st.floats(0, 0.9), st.integers(0, 30))
def test_rank_one_inputs_are_right_where_they_are_given_and_chains_only_add(rows, columns, masking_rate, seed):
    generator = seeded(seed)
    slope, features = torch.randn(rows, generator=generator).double(), torch.randn(columns, generator=generator).double()
    shown = torch.rand(rows, columns + 1, generator=generator) >= masking_rate
    table = torch.outer(slope, torch.cat([features, torch.ones(1).double()]))
    table = torch.where(shown, table, torch.full_like(table, float("nan")))
    arguments = table[:, :-1], table[:, -1], shown[:, :-1], shown[:, -1]
    direct, chained = rank1_inputs(*arguments, chain=False), rank1_inputs(*arguments)
    assert torch.equal(~direct.isnan(), (shown[:, :-1] & shown[:, -1:]).any(0))
    assert not (chained.isnan() & ~direct.isnan()).any()
    for found in (direct, chained):
        torch.testing.assert_close(found[~found.isnan()], features[~found.isnan()], atol=1e-6, rtol=1e-6)


def test_rank_one_contracts():
    for arguments in ((torch.ones(3, 4), torch.ones(2)), (torch.ones(3, 4), torch.ones(3), torch.ones(3, 4)),
                      (torch.ones(3, 4), torch.ones(3), None, torch.ones(4, dtype=torch.bool))):
        with pytest.raises(ValueError):
            rank1_inputs(*arguments)


def test_union_over_rounds_covers_one_minus_r_to_the_t():
    """20,000 coordinates, 4 standard errors: a false alarm in 1 of 16,000 runs."""
    rounds, rate, size = 4, 0.7, 20_000
    masks = torch.rand(rounds, size, generator=seeded()) >= rate
    truth = torch.randn(size, generator=seeded(1)).double()
    values = torch.where(masks, truth, torch.full_like(truth, float("nan")).expand(rounds, -1))
    union, seen = union_over_rounds(values, masks)
    expected = 1 - rate**rounds
    assert abs(float(seen.double().mean()) - expected) < 4 * math.sqrt(expected * (1 - expected) / size)
    torch.testing.assert_close(union[seen], truth[seen])
    assert not union[~seen].any()
    with pytest.raises(ValueError, match="True = shared"):
        union_over_rounds(values, masks[:2])


def test_equations_per_unknown_against_the_counts_by_hand():
    assert equations_per_unknown(1152, 384, 197, 0.2) == pytest.approx(0.8 * 3 * 384**2 / (197 * (4 * 384 - 197)))
    assert equations_per_unknown(5, 4, 1, 0.0) == pytest.approx(20 / 8)
    for arguments in ((5, 4, 5, 0.0), (5, 4, 1, 1.0), (5, 4, 0, 0.5)):
        with pytest.raises(ValueError):
            equations_per_unknown(*arguments)


def test_condition_number_and_least_squares():
    assert condition_number(torch.diag(torch.tensor([4.0, 2.0, 1.0]))) == pytest.approx(4)
    assert condition_number(torch.zeros(3, 2)) == math.inf
    matrix = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(least_squares(matrix, torch.tensor([[2.0], [2.0], [0.0]], dtype=torch.float64)), torch.ones(2, 1, dtype=torch.float64))


def test_the_attacks_are_also_found_in_privfl_inversion():
    for function in (april_closed_form, april_completion, patches_from_position_gradient, rank1_inputs):
        assert getattr(inversion, function.__name__) is function and function.__name__ in inversion.__all__
