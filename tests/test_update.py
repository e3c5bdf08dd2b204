"""Layouts, clipping and buffers: round trips, copies and never views, bounds in every floating-point type."""
import pickle
import warnings
from math import prod, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from privfl.update import (Layout, UpdateError, average_buffers, buffers_of, check_update, clip_by_norm,
                           load_buffers)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=6)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0) -> nn.Module:
    """Convolution, BatchNorm, linear; weights and statistics from the seed alone."""
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    generator = seeded(seed)
    with torch.no_grad():
        for tensor in list(module.parameters()) + [module[1].running_mean]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
        module[1].running_var.copy_(torch.rand(4, generator=generator) + 0.5)
        module[1].num_batches_tracked.fill_(seed + 3)
    return module


def train(module: nn.Module, steps: int = 3) -> None:
    """A few steps of gradient descent on fixed data, in place."""
    inputs, labels = torch.randn(8, 2, 4, 4, generator=seeded(9)), torch.arange(8) % 3
    for _ in range(steps):
        gradients = torch.autograd.grad(F.cross_entropy(module(inputs), labels), list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients):
                parameter -= 0.1 * gradient


# ---- layout ----------------------------------------------------------------------------------------------------

@given(SHAPES, st.integers(0, 2**31))
def test_round_trip_for_any_shapes(shapes, seed):
    layout = Layout(tuple(f"p{number}" for number in range(len(shapes))), tuple(shapes))
    vector = torch.randn(layout.size, generator=seeded(seed))
    pieces = layout.unflatten(vector)
    assert layout.size == sum(prod(shape) for shape in shapes)
    assert [tuple(piece.shape) for piece in pieces.values()] == shapes
    assert torch.equal(layout.flatten(pieces), vector)
    for name, piece in pieces.items():
        assert torch.equal(piece.reshape(-1), vector[layout.slice_of(name)])


@given(SHAPES)
def test_groups_of_single_names_partition_the_vector(shapes):
    layout = Layout(tuple(f"p{number}" for number in range(len(shapes))), tuple(shapes))
    masks = torch.stack([layout.group(lambda name, wanted=wanted: name == wanted) for wanted in layout.names])
    assert masks.dtype == torch.bool and masks.shape == (len(shapes), layout.size)
    assert (masks.sum(0) == 1).all()
    assert layout.group(lambda name: True).all() and not layout.group(lambda name: False).any()


def test_order_and_trainable_parameters_only():
    module = network()
    module[1].weight.requires_grad_(False)
    layout = Layout.of(module)
    assert layout.names == ("0.weight", "0.bias", "1.bias", "4.weight", "4.bias")
    expected = torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])
    assert torch.equal(layout.flatten(module), expected)


def test_tied_parameters_appear_once():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    layout = Layout.of(module)
    assert layout.names == ("0.weight", "0.bias", "1.bias")
    layout.load(module, torch.arange(15.0))
    assert torch.equal(module[1].weight.detach().reshape(-1), torch.arange(9.0))


def test_scalar_parameters_have_one_entry():
    module = nn.Module()
    module.temperature = nn.Parameter(torch.tensor(2.0))
    layout = Layout.of(module)
    assert layout.shapes == ((),) and layout.size == 1
    assert layout.unflatten(torch.tensor([5.0]))["temperature"].shape == ()


def test_a_layout_is_frozen_hashable_comparable_small_and_can_be_pickled():
    layout = Layout.of(network(0))
    other = Layout.of(network(1))
    assert layout == other and hash(layout) == hash(other) and {layout: 1}[other] == 1
    assert layout != Layout.of(nn.Linear(2, 2))
    assert pickle.loads(pickle.dumps(layout)) == layout and len(pickle.dumps(layout)) < 1000
    assert repr(layout) == f"Layout(6 parameters, {layout.size} entries)"
    with pytest.raises(AttributeError):
        layout.size = 3


def test_nothing_that_comes_out_shares_memory():
    module = network()
    layout = Layout.of(module)
    before = layout.flatten(module)
    layout.flatten(module).add_(1)
    assert torch.equal(layout.flatten(module), before)
    vector = before.clone()
    for piece in layout.unflatten(vector).values():
        piece.add_(1)
    assert torch.equal(vector, before)
    single = Layout.of(nn.Linear(3, 2, bias=False))
    lone = {"weight": torch.zeros(2, 3)}
    single.flatten(lone).add_(1)
    assert torch.equal(lone["weight"], torch.zeros(2, 3))


def test_local_training_leaves_the_global_model_alone():
    """The views of vector_to_parameters would make the update zero and train the global model."""
    module, layout = network(1), Layout.of(network(0))
    global_vector = layout.flatten(network(0))
    before = global_vector.clone()
    layout.load(module, global_vector)
    assert torch.equal(layout.flatten(module), global_vector)
    train(module)
    assert torch.equal(global_vector, before)
    assert (layout.flatten(module) - global_vector).norm() > 0.01


def test_load_keeps_the_memory_that_an_optimiser_holds():
    module = network()
    addresses = [p.data_ptr() for p in module.parameters()]
    Layout.of(module).load(module, torch.zeros(Layout.of(module).size))
    assert addresses == [p.data_ptr() for p in module.parameters()]
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype):
    module = network().to(dtype)
    layout = Layout.of(module)
    vector = layout.flatten(module)
    assert vector.dtype == dtype and not vector.requires_grad
    assert {piece.dtype for piece in layout.unflatten(vector).values()} == {dtype}
    assert clip_by_norm(vector, 0.5).dtype == dtype


def test_a_dict_keeps_its_graph():
    layout = Layout.of(network())
    vector = torch.randn(layout.size, generator=seeded(), requires_grad=True)
    back = layout.flatten(layout.unflatten(vector))
    (gradient,) = torch.autograd.grad((back**2).sum(), vector)
    assert torch.allclose(gradient, 2 * vector)


@pytest.mark.parametrize("index", [2, -1, slice(1, 3), (slice(None), 1), (0, 1, slice(None), 2), ..., None,
                                   torch.tensor([0, 3]), torch.tensor([True, False, True, False])], ids=str)
def test_slice_mask_marks_what_indexing_reads(index):
    module = network()
    layout = Layout.of(module)
    mask = layout.slice_mask("0.weight", index)
    inside = torch.zeros(module[0].weight.shape, dtype=torch.bool)
    inside[index] = True
    assert mask.dtype == torch.bool and mask.shape == (layout.size,)
    assert torch.equal(mask[layout.slice_of("0.weight")], inside.reshape(-1))
    assert int(mask.sum()) == int(inside.sum())


@pytest.mark.parametrize("call, words", [
    (lambda layout: Layout.of(nn.ReLU()), "unfreeze"),
    (lambda layout: Layout(("a", "a"), ((1,), (2,))), "distinct"),
    (lambda layout: Layout(("a",), ((1,), (2,))), "2 shapes"),
    (lambda layout: layout.flatten({"0.weight": torch.zeros(4, 2, 3, 3)}), "0.bias is missing"),
    (lambda layout: layout.flatten({name: None for name in layout.names}), "call backward"),
    (lambda layout: layout.flatten(nn.Sequential(nn.Conv2d(1, 4, 3))), "shape (4, 1, 3, 3)"),
    (lambda layout: layout.unflatten(torch.zeros(layout.size + 1)), f"({72 + 4 + 8 + 51 + 1},)"),
    (lambda layout: layout.unflatten(torch.zeros(1, layout.size)), "(1, 135)"),
    (lambda layout: layout.unflatten(np.zeros(layout.size)), "ndarray"),
    (lambda layout: layout.load(network(), torch.zeros(3)), "(3,)"),
    (lambda layout: layout.load(nn.Linear(2, 2), torch.zeros(layout.size)), "is missing"),
    (lambda layout: layout.slice_of("0.wieght"), "0.weight"),
    (lambda layout: layout.slice_mask("0.wieght", 0), "0.weight"),
    (lambda layout: layout.slice_mask("0.weight", 4), "out of bounds"),
    (lambda layout: layout.slice_mask("0.weight", 1.5), "does not index"),
])
def test_layout_errors_say_what_to_do(call, words):
    with pytest.raises(UpdateError) as caught:
        call(Layout.of(network()))
    assert words in str(caught.value)


def test_a_refused_vector_leaves_the_module_as_it_was():
    module = network()
    layout = Layout.of(module)
    before = layout.flatten(module)
    with pytest.raises(UpdateError):
        layout.load(module, torch.zeros(layout.size - 1))
    assert torch.equal(layout.flatten(module), before)


# ---- checking and clipping -------------------------------------------------------------------------------------

@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.floats(-6, 6), st.floats(-3, 3),
       st.sampled_from(FLOATS))
def test_trap_05_a_clipped_update_is_never_longer_than_the_bound(entries, magnitude, bound, dtype):
    update = (torch.tensor(entries, dtype=torch.float64) * 10**magnitude).to(dtype)
    clip_norm = 10**bound
    if not torch.isfinite(update).all() or clip_norm < sqrt(len(entries)) * torch.finfo(dtype).tiny:
        return
    clipped = clip_by_norm(update, clip_norm)
    length, before = float(clipped.double().norm()), float(update.double().norm())
    assert clipped.dtype == dtype and length <= clip_norm * (1 + 1e-6)
    if before <= clip_norm:
        assert torch.equal(clipped, update) and clipped.data_ptr() != update.data_ptr()
    else:
        precision = torch.finfo(dtype).eps
        assert torch.allclose(clipped.double(), update.double() * clip_norm / before, rtol=4 * precision,
                              atol=torch.finfo(dtype).tiny)
        assert length >= clip_norm * (1 - 4 * precision) - sqrt(len(entries)) * torch.finfo(dtype).tiny


@pytest.mark.parametrize("fill", ["normal", "constant"])
def test_trap_05_float32_norm_of_ten_million_entries_does_not_drift(fill):
    size = 10_000_000
    update = torch.randn(size, generator=seeded(1)) if fill == "normal" else torch.full((size,), 0.1)
    length = float(clip_by_norm(update, 1.0).to(torch.float64).norm())
    assert 1 - 1e-6 < length <= 1 + 1e-6


@pytest.mark.parametrize("dtype", FLOATS)
def test_trap_05_zero_stays_zero_without_a_warning(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipped = clip_by_norm(torch.zeros(5, dtype=dtype), 1.0)
    assert torch.equal(clipped, torch.zeros(5, dtype=dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("call", [lambda u: check_update(u, client=3, round=7),
                                  lambda u: clip_by_norm(u, 1.0, client=3, round=7)])
def test_trap_05_bad_entries_name_client_and_round(bad, call):
    update = torch.ones(10)
    update[4] = bad
    with pytest.raises(UpdateError, match=r"client 3, round 7: 1 of 10 entries .* first at 4: lower"):
        call(update)


@pytest.mark.parametrize("scale", [1e-200, 1e-160, 1e160, 1e200])
def test_clipping_survives_squares_that_overflow_or_vanish(scale):
    update = torch.tensor([3.0, -4.0], dtype=torch.float64) * scale
    assert torch.allclose(clip_by_norm(update, scale), torch.tensor([0.6, -0.8], dtype=torch.float64) * scale,
                          rtol=1e-14, atol=0)
    assert torch.equal(clip_by_norm(update, 6 * scale), update)


def test_clipping_is_differentiable_and_keeps_its_input():
    update = torch.randn(6, dtype=torch.float64, generator=seeded(2), requires_grad=True)
    before = update.detach().clone()
    assert torch.autograd.gradcheck(lambda u: clip_by_norm(u, 0.5), (update,))
    assert torch.autograd.gradcheck(lambda u: clip_by_norm(u, 50.0), (update,))
    assert torch.equal(update.detach(), before)


def test_clipping_is_a_projection():
    generator = seeded(3)
    first, second = (torch.randn(500, 3, dtype=torch.float64, generator=generator) * 2 for _ in range(2))
    for u, v in zip(first, second):
        distance = (clip_by_norm(u, 1.0) - clip_by_norm(v, 1.0)).norm()
        assert distance <= min(2.0, (u - v).norm() + 1e-12)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, float("nan"), float("inf"), 1e-40, None, "1"])
def test_clip_norm_must_be_a_usable_number(clip_norm):
    with pytest.raises(UpdateError, match="clip_norm is .* at least"):
        clip_by_norm(torch.ones(3), clip_norm)


@pytest.mark.parametrize("update, size, words", [
    (torch.ones(3), 4, "3 entries, 4 are expected"),
    (torch.ones(1, 3), None, r"\(1, 3\): use Layout.flatten"),
    (torch.tensor(1.0), None, "use Layout.flatten"),
    (torch.arange(3), None, "int64"),
    ([1.0, 2.0], None, "got list"),
])
def test_check_update_refuses_what_is_no_update(update, size, words):
    with pytest.raises(UpdateError, match=words):
        check_update(update, size=size)
    assert check_update(torch.ones(3), size=3) is None


# ---- buffers ---------------------------------------------------------------------------------------------------

def test_trap_06_identical_clients_give_the_identical_model():
    buffers = [buffers_of(network(5)) for _ in range(7)]
    averaged = average_buffers(buffers, weights=[3, 1, 4, 1, 5, 9, 2])
    assert list(averaged) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert all(torch.equal(averaged[name], buffers[0][name]) for name in averaged)
    doubles = [{name: b.double() / 3 if b.is_floating_point() else b for name, b in one.items()} for one in buffers]
    averaged = average_buffers(doubles, weights=[0.1] * 7)
    assert all(torch.equal(averaged[name], doubles[0][name]) for name in averaged)


def test_trap_06_integer_buffers_take_the_maximum_and_keep_their_type():
    averaged = average_buffers([buffers_of(network(seed)) for seed in (4, 0, 2)], weights=[1, 1, 1])
    assert averaged["1.num_batches_tracked"].dtype == torch.int64
    assert int(averaged["1.num_batches_tracked"]) == 4 + 3
    flags = average_buffers([{"seen": torch.tensor([True, False])}, {"seen": torch.tensor([False, False])}], [1, 1])
    assert flags["seen"].tolist() == [True, False]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda weights: sum(weights) > 1e-3))
def test_trap_06_weights_sum_to_one(weights):
    values = [torch.full((3,), float(number), dtype=torch.float64) for number in range(len(weights))]
    averaged = average_buffers([{"mean": value} for value in values], weights)["mean"]
    expected = sum(w * number for number, w in enumerate(weights)) / sum(weights)
    assert torch.allclose(averaged, torch.full((3,), expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_trap_06_buffers_travel_beside_the_parameters():
    """A model rebuilt from parameters and buffers predicts as the original; from parameters alone it does not."""
    trained, rebuilt = network(1), network(2)
    train(trained)
    layout = Layout.of(trained)
    inputs = torch.randn(5, 2, 4, 4, generator=seeded(4))
    layout.load(rebuilt, layout.flatten(trained))
    assert not torch.allclose(rebuilt.eval()(inputs), trained.eval()(inputs))
    load_buffers(rebuilt, buffers_of(trained))
    assert torch.equal(rebuilt(inputs), trained(inputs))


def test_buffers_are_clones_and_only_the_stored_ones():
    module = network()
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    buffers = buffers_of(module)
    assert "scratch" not in buffers
    buffers["1.running_mean"].add_(1)
    assert not torch.equal(module[1].running_mean, buffers["1.running_mean"])
    assert buffers_of(nn.Linear(2, 2)) == {} and average_buffers([{}, {}], [1, 1]) == {}


def test_a_client_of_weight_zero_is_left_out():
    good, broken = {"mean": torch.ones(2)}, {"mean": torch.full((2,), float("nan"))}
    assert torch.equal(average_buffers([broken, good], [0, 2])["mean"], torch.ones(2))


@pytest.mark.parametrize("buffers, weights, words", [
    ([{"a": torch.ones(1)}], [1, 1], "as many finite weights"),
    ([{"a": torch.ones(1)}] * 2, [0, 0], "not all 0"),
    ([{"a": torch.ones(1)}] * 2, [1, -1], ">= 0"),
    ([{"a": torch.ones(1)}] * 2, [1, float("nan")], "finite"),
    ([{"a": torch.ones(1)}] * 2, [1, float("inf")], "finite"),
    ([], [], "0 clients"),
    ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], [1, 1], "buffer a is only in"),
    ([{"a": torch.ones(1)}, {"a": torch.ones(2)}], [1, 1], r"shape \(2,\)"),
    ([{"a": torch.ones(1)}, {"a": torch.full((1,), float("inf"))}], [1, 1], "buffer a of a client is NaN or infinite"),
])
def test_average_buffers_refuses(buffers, weights, words):
    with pytest.raises(UpdateError, match=words):
        average_buffers(buffers, weights)


def test_refused_buffers_leave_the_module_as_it_was():
    module = network()
    before = buffers_of(module)
    wrong = {**buffers_of(network(1)), "1.running_var": torch.ones(9)}
    for bad in (wrong, {"1.running_mean": torch.zeros(4)}):
        with pytest.raises(UpdateError):
            load_buffers(module, bad)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(module).items())
