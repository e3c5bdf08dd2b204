"""RadioUNet: the number of its parameters, where the transmitter touches it, its two phases, and its clients."""
import math

import pytest
import torch
from torch import nn

from privfl.federation import Server, run
from privfl.metrics import mse_db
from privfl.radiomap.radiounet import (RadioMapClient, RadioUNet, nmse, phase_loss, predict, train_radiounet,
                                       transmitter_slices)
from privfl.update import Layout


def tiny(seed: int = 0, **settings) -> RadioUNet:
    """The thinnest network: four or more channels in each layer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return RadioUNet(**{"width": 0.02, "size": 64, **settings})


def full() -> RadioUNet:
    """The network at full width without memory behind it."""
    with torch.device("meta"):
        return RadioUNet()


def data(count: int = 4, seed: int = 0) -> tuple:
    """Inputs with a one-hot transmitter, and targets."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.zeros(count, 2, 64, 64)
    inputs[:, 0] = (torch.rand(count, 64, 64, generator=draw) > 0.7).float()
    spots = torch.randint(8, 56, (count, 2), generator=draw)
    inputs[torch.arange(count), 1, spots[:, 0], spots[:, 1]] = 1
    rows = torch.arange(64)
    distance = (rows[None, :, None] - spots[:, :1, None]).abs() + (rows[None, None] - spots[:, 1:, None]).abs()
    return inputs, (1 - distance / 64).clamp(0)[:, None]


class Calls:
    """Counts how often a module runs."""

    def __init__(self, module: nn.Module):
        self.count, self.handle = 0, module.register_forward_hook(self)

    def __call__(self, *_):
        self.count += 1


# ---- counts -----------------------------------------------------------------------------------------------------

def test_the_paper_s_number_of_parameters():
    model = full()
    first, second = (sum(p.numel() for p in stage.parameters()) for stage in (model.first, model.second))
    assert (first, second, first + second) == (10_921_405, 2_352_626, 13_274_031)


@pytest.mark.parametrize("reinjected, expected", [(False, [54, 180]), (True, [579, 705])])
def test_the_weights_that_multiply_the_raster(reinjected, expected):
    model = full()
    shapes = {name: p for name, p in model.named_parameters()}
    counted = [sum(shapes[name][index].numel() for name, index in places) for places in transmitter_slices(model, reinjected).values()]
    assert counted == expected and sum(expected) == (1_284 if reinjected else 234)


def test_without_those_weights_the_network_is_blind_to_the_transmitter_and_with_any_of_them_it_is_not():
    model, (inputs, _) = tiny(), data(1)
    layout = Layout.of(model)
    hidden = inputs.clone()
    hidden[:, 1] = 0
    places = [place for stage in transmitter_slices(model).values() for place in stage]
    cut = layout.flatten(model)
    for place in places:
        cut[layout.slice_mask(*place)] = 0
    blind = tiny()
    layout.load(blind, cut)
    assert all(torch.equal(a, b) for a, b in zip(blind(inputs), blind(hidden)))
    for place in places:
        one = cut.clone()
        one[layout.slice_mask(*place)] = 0.5
        layout.load(blind, one)
        assert any(not torch.equal(a, b) for a, b in zip(blind(inputs), blind(hidden))), place


def test_the_output_is_not_dead_at_the_start():
    for seed in range(5):
        stages = tiny(seed)(data(2)[0])
        assert all(stage.shape == (2, 1, 64, 64) and float((stage > 0).float().mean()) > 0.5 for stage in stages)


# ---- phases -----------------------------------------------------------------------------------------------------

def test_phase_1_does_not_run_the_second_network():
    model, (inputs, targets) = tiny(), data(2)
    first, second = Calls(model.first), Calls(model.second)
    assert model(inputs, 1)[1] is None
    phase_loss(model, inputs, targets, 1).backward()
    predict(model, inputs, stage=1)
    train_radiounet(model, inputs, targets, (2, 0), torch.Generator().manual_seed(0), batch_size=2)
    assert (first.count, second.count) == (5, 0)
    phase_loss(model, inputs, targets, 2)
    assert second.count == 1


@pytest.mark.parametrize("phase, idle", [(1, "second"), (2, "first")])
def test_no_gradient_reaches_the_other_stage(phase, idle):
    model, (inputs, targets) = tiny(), data(2)
    phase_loss(model, inputs, targets, phase).backward()
    assert all((p.grad is None) == name.startswith(idle) for name, p in model.named_parameters())


def test_central_training_learns_repeats_and_leaves_the_global_generator_alone():
    inputs, targets = data(12)
    before, ends = torch.get_rng_state(), []
    for _ in range(2):
        model = tiny()
        start = mse_db(predict(model, inputs, 1), targets)
        losses = train_radiounet(model, inputs, targets, (25, 3), torch.Generator().manual_seed(3), learning_rate=5e-3)
        ends.append(Layout.of(model).flatten(model))
        assert len(losses) == 28 and mse_db(predict(model, inputs, 1), targets) < start - 1
    assert torch.equal(*ends) and torch.equal(before, torch.get_rng_state())


def test_predictions_do_not_depend_on_the_batches():
    model, (inputs, _) = tiny(), data(5)
    for stage in (1, 2):
        whole = predict(model, inputs, stage)
        assert torch.allclose(whole, predict(model, inputs, stage, batch_size=2), atol=1e-6) and not whole.requires_grad


def test_nmse_is_error_energy_over_signal_energy():
    target = torch.tensor([[[[0.0, 2.0]]]])
    assert nmse(target, target) == 0 and nmse(torch.zeros_like(target), target) == 1 and nmse(target + 1, target) == pytest.approx(0.5)


# ---- clients ----------------------------------------------------------------------------------------------------

def clients_of(model: RadioUNet, **settings) -> list:
    """Two clients with four maps each."""
    return [RadioMapClient(number, model, *data(4, number), local_steps=1, batch_size=2, **{"phase_change": 1, **settings}) for number in range(2)]


def test_the_idle_stage_leaves_as_exact_zeros():
    model, seen = tiny(), []
    run(Server(model), clients_of(model), 2, 0, observers=[lambda state, uploads, turn: seen.extend(u.tensors["update"] for u in uploads)])
    second = Layout.of(model).group(lambda name: name.startswith("second"))
    for turn, updates in enumerate((seen[:2], seen[2:])):
        idle = second if turn == 0 else ~second
        assert all(not update[idle].any() and update[~idle].any() for update in updates)


def test_a_federation_resumes_to_the_same_bits(tmp_path):
    model = tiny()
    whole = run(Server(model), clients_of(model), 3, 0)
    run(Server(model), clients_of(model), 1, 0, checkpoint=tmp_path / "run.pt")
    resumed = run(Server(model), clients_of(model), 3, 0, checkpoint=tmp_path / "run.pt")
    assert torch.equal(whole.parameters, resumed.parameters) and resumed.round == 3


# ---- bad input --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("side", [0, 1, 32, 63, 65, 100, 130])
def test_a_side_that_six_poolings_do_not_divide_is_refused(side):
    with pytest.raises(ValueError, match="multiple of 64" if side else "size|multiple of 64"):
        tiny(size=side)
    with pytest.raises(ValueError, match="multiple of 64"):
        tiny(size=None)(torch.zeros(1, 2, 64, side))
    with pytest.raises(ValueError, match="multiple of 64"):
        tiny(size=None)(torch.zeros(1, 2, side, 64))


@pytest.mark.parametrize("inputs", [torch.zeros(1, 3, 64, 64), torch.zeros(2, 64, 64), torch.zeros(1, 2, 64, 64, dtype=torch.int64), None, "map", [[0.0]]])
def test_inputs_of_another_kind_are_refused(inputs):
    with pytest.raises(ValueError, match="inputs are"):
        tiny()(inputs)


@pytest.mark.parametrize("call", [
    lambda: RadioUNet(width=0), lambda: RadioUNet(width=-1), lambda: RadioUNet(width=math.nan), lambda: RadioUNet(width="wide"),
    lambda: RadioUNet(inputs=0), lambda: RadioUNet(inputs=1.5), lambda: RadioUNet(size="64"), lambda: tiny()(torch.zeros(1, 2, 128, 128)),
    lambda: tiny()(data(1)[0], phase=3), lambda: tiny()(data(1)[0], phase="first"), lambda: tiny()(data(1)[0], phase=True),
    lambda: phase_loss(tiny(), *data(1), 3), lambda: phase_loss(tiny(), *data(1), None), lambda: phase_loss(tiny(), data(2)[0], data(1)[1], 1),
    lambda: predict(tiny(), data(1)[0], stage=0), lambda: predict(tiny(), data(1)[0], batch_size=0),
    lambda: nmse(torch.zeros(1, 1), torch.zeros(1, 1)), lambda: nmse(torch.ones(1, 2), torch.ones(2, 1)),
    lambda: train_radiounet(tiny(), *data(1), (-1, 0), torch.Generator()), lambda: train_radiounet(tiny(), *data(1), (1, 1), torch.Generator(), learning_rate=0),
    lambda: train_radiounet(tiny(), *data(1), (1, 1), torch.Generator(), batch_size=0),
    lambda: RadioMapClient(0, tiny(), *data(1), phase_change=-1), lambda: RadioMapClient(0, tiny(), *data(1), local_steps=0),
    lambda: RadioMapClient(0, tiny(), *data(1), learning_rate=0),
])
def test_wrong_settings_are_refused(call):
    with pytest.raises(ValueError):
        call()
