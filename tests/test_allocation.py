"""Shares of one budget of noise: their energy, the cases they contain, the allocator and its training."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from privfl.federation import Clip, Context, GaussianNoise, Server, promise_of, run
from privfl.radiomap.allocation import (GROUPINGS, AllocatedNoise, AllocatorTraining, NoiseAllocator, ShadowStage,
                                        allocate_noise, atom_sums, atom_variances, bank_variances, grouping_of,
                                        matched_shares, proportional_shares, summarise, task_cost, train_allocator)
from privfl.radiomap.fingerprints import Partition, UploadFeatures, partition_of, upload_bank
from privfl.radiomap.radiounet import RadioMapClient, RadioUNet, predict
from privfl.randomness import Streams
from privfl.update import Layout

BUDGET = 9.0


def net(seed: int = 0) -> RadioUNet:
    """The thinnest network."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return RadioUNet(width=0.02, size=64)


MODEL = net()
LAYOUT = Layout.of(MODEL)
PARTITION = partition_of(MODEL)
THREE, LAYERS = grouping_of(PARTITION, "all_direct"), grouping_of(PARTITION, "layers")
UPDATE = 0.01 * torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(0)) * (PARTITION.expand(torch.tensor([float(s == 1) for s in PARTITION.stages])))


def maps(count: int = 8, seed: int = 0) -> tuple:
    """Inputs and targets."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(count, 2, 64, 64, generator=draw), torch.rand(count, 1, 64, 64, generator=draw)


def planted(layer: str, count: int = 200):
    """A bank at MODEL whose uploads hold the position in one layer, and its feature space."""
    draw, active = torch.Generator().manual_seed(1), PARTITION.expand(torch.tensor([s == 1 for s in PARTITION.stages]))
    positions = 100 + 60 * (2 * torch.rand(count, 2, generator=draw) - 1)
    updates = 1e-3 * torch.randn(count, int(active.sum()), generator=draw)
    columns = PARTITION.atom_of[active] == PARTITION.names.index(layer)
    updates[:, columns] += 2e-3 * ((positions - 100) / 35) @ torch.randn(2, int(columns.sum()), generator=draw)
    inputs, targets = (part.expand(count, -1, -1, -1) for part in maps(1))
    bank = upload_bank(MODEL, inputs, targets, positions, torch.arange(count) // 4, 1, updates=updates)
    return bank, UploadFeatures(4).fit(bank).transform(bank)


def stage_of(layer: str = "first.down.8", **changes) -> ShadowStage:
    """A shadow stage with that leak."""
    return ShadowStage(MODEL, *planted(layer), *maps(4), **{"progress": 0.2, **changes})


def context(turn: int = 0) -> Context:
    """What a step knows."""
    return Context(0, turn, 1, LAYOUT, None, {})


class Constant(NoiseAllocator):
    """An allocator that looks at the update and answers the same all the same."""

    def __init__(self, grouping, shares):
        super().__init__(grouping)
        self.register_buffer("answer", shares)

    def forward(self, summary):
        return self.answer.expand(len(summary), -1)


# ---- the budget -------------------------------------------------------------------------------------------------

@given(st.floats(1e-6, 1e6), st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10**7)), min_size=1, max_size=8))
def test_the_energy_is_the_budget_whatever_the_shares(budget, groups):
    shares = torch.tensor([share for share, _ in groups], dtype=torch.float64) + 1e-9
    sizes = torch.tensor([size for _, size in groups])
    shares = shares / shares.sum()
    variances = allocate_noise(budget, shares, sizes)
    assert variances.dtype == torch.float64 and bool((variances >= 0).all())
    assert float(variances @ sizes.double()) == pytest.approx(budget, rel=1e-12)
    small = allocate_noise(budget, shares.float(), sizes)
    assert small.dtype == torch.float32 and float(small.double() @ sizes.double()) == pytest.approx(budget, rel=1e-6)


def allocations() -> dict:
    """Every allocation of the chapter: grouping and shares."""
    bank, space = planted("first.down.8", 40)
    summary = lambda grouping: summarise(space.energy, space.absolute, space.total, grouping, 0.2, 1)
    trained, _ = train_allocator([stage_of()], LAYERS, BUDGET, Streams(0), AllocatorTraining(steps=2, attacker_steps=1, batch_size=8, task_weight=0.0))
    random = NoiseAllocator(LAYERS).randomise(Streams(0).torch("random"))
    random.calibrate(summary(LAYERS))
    return {"uniform": (THREE, proportional_shares(THREE)), "directed": (THREE, proportional_shares(THREE, True)), "static": (LAYERS, matched_shares(space, LAYERS)),
            "random": (LAYERS, random), "untrained": (THREE, NoiseAllocator(THREE)), "trained": (LAYERS, trained),
            "first layer": (grouping_of(PARTITION, "first_layer"), proportional_shares(grouping_of(PARTITION, "first_layer"), True))}


def test_every_allocation_spends_one_energy():
    """Mean of 12 draws of each; allowed are five standard deviations, sqrt(2 sum d_g sigma_g^4 / 12): 4e-6 false alarms for the seven."""
    for name, (grouping, shares) in allocations().items():
        step = AllocatedNoise(PARTITION, grouping, BUDGET, shares, rounds=5, phase_change=3)
        variances = step.variances(UPDATE, 1).double()
        sizes = torch.tensor(PARTITION.sizes, dtype=torch.float64)
        assert float(variances @ sizes) == pytest.approx(BUDGET, rel=1e-5), name
        draws = [float(((step({"update": UPDATE}, context(1), Streams(0).torch(name, k))["update"] - UPDATE).double() ** 2).sum()) for k in range(12)]
        spread = math.sqrt(2 * float(sizes @ variances**2) / 12)
        assert abs(np.mean(draws) - BUDGET) < 5 * spread, (name, np.mean(draws), spread)


def test_trap_14_each_group_has_the_standard_deviation_it_was_given_and_groups_are_uncorrelated():
    """40 draws; relative error of a group's variance sqrt(2 / (40 d_g)), six of these: 1e-8 for the three."""
    shares = torch.tensor([0.5, 0.3, 0.2])
    step = AllocatedNoise(PARTITION, THREE, BUDGET, shares)
    noise = torch.stack([step({"update": UPDATE}, context(), Streams(k).torch("n"))["update"] - UPDATE for k in range(40)]).double()
    of_coordinate = THREE.group_of[PARTITION.atom_of]
    for group, (share, size) in enumerate(zip(shares, THREE.sizes)):
        found = float((noise[:, of_coordinate == group] ** 2).mean())
        assert found == pytest.approx(float(share) * BUDGET / int(size), rel=6 * math.sqrt(2 / (40 * int(size))))
    first, second = (noise[:, of_coordinate == group][:, :100].flatten() for group in (1, 2))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 6 / math.sqrt(len(first))


# ---- one code path ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", GROUPINGS)
def test_adaptive_contains_uniform_and_directed_noise(kind):
    grouping = grouping_of(PARTITION, kind)
    for directed in (False, True):
        shares = proportional_shares(grouping, directed)
        fixed, adaptive = (AllocatedNoise(PARTITION, grouping, BUDGET, one) for one in (shares, Constant(grouping, shares)))
        assert torch.equal(fixed.variances(UPDATE, 0), adaptive.variances(UPDATE, 0))
        sent = [step({"update": UPDATE}, context(), Streams(0).torch("n"))["update"] for step in (fixed, adaptive)]
        assert torch.equal(*sent)


@pytest.mark.parametrize("kind", GROUPINGS)
def test_shares_in_proportion_to_size_are_uniform_noise_within_one_unit_in_the_last_place(kind):
    """In float64 the shares d_g / d give B / d on every coordinate; float32 rounds the share, the quotient and the product."""
    grouping = grouping_of(PARTITION, kind)
    sizes = grouping.sizes.double()
    exact = allocate_noise(BUDGET, sizes / sizes.sum(), grouping.sizes)
    level = torch.full_like(exact, BUDGET / LAYOUT.size)
    assert bool((exact >= torch.nextafter(level, torch.zeros_like(level))).all() and (exact <= torch.nextafter(level, 2 * level)).all())
    single = allocate_noise(BUDGET, proportional_shares(grouping), grouping.sizes)
    assert torch.allclose(single, level.float(), rtol=3e-7, atol=0)
    uniform = GaussianNoise(math.sqrt(BUDGET / LAYOUT.size))({"update": UPDATE}, context(), Streams(0).torch("n"))["update"]
    ours = AllocatedNoise(PARTITION, grouping, BUDGET, proportional_shares(grouping))({"update": UPDATE}, context(), Streams(0).torch("n"))["update"]
    assert torch.allclose(uniform, ours, rtol=1e-5, atol=1e-7)


def test_residual_at_zero_is_directed_noise():
    sizes = THREE.sizes.double() * THREE.sensitive
    exact = allocate_noise(BUDGET, sizes / sizes.sum(), THREE.sizes)
    level = torch.tensor(BUDGET / 322, dtype=torch.float64)
    assert int(sizes.sum()) == 322 and exact[0] == 0 and THREE.sensitive.tolist() == [False, True, True]
    assert bool((exact[1:] >= torch.nextafter(level, level * 0)).all() and (exact[1:] <= torch.nextafter(level, 2 * level)).all())
    noisy = AllocatedNoise(PARTITION, THREE, BUDGET, proportional_shares(THREE, True))({"update": UPDATE}, context(), Streams(0).torch("n"))["update"]
    moved, slices = noisy != UPDATE, PARTITION.expand(PARTITION.transmitter)
    assert not moved[~slices].any() and moved[slices].all()


def test_the_bank_and_the_step_give_one_variance():
    bank, space = planted("first.down.8", 6)
    allocator = NoiseAllocator(LAYERS).randomise(Streams(0).torch("r"))
    by_bank = bank_variances(space, allocator, LAYERS, BUDGET, 0.5)
    step = AllocatedNoise(PARTITION, LAYERS, BUDGET, allocator, rounds=4, phase_change=9)
    for row in range(6):
        assert torch.allclose(step.variances(bank.full(row), 2), by_bank[row], rtol=1e-4)
    assert atom_variances(torch.tensor([0.5, 0.25, 0.25]), THREE, BUDGET, *atom_sums(UPDATE, PARTITION), 0.0, 1).shape == (1, len(PARTITION))


# ---- groups and summary -----------------------------------------------------------------------------------------

def test_the_groups_of_the_paper_at_full_width():
    with torch.device("meta"):
        model = RadioUNet()
    partition = partition_of(model)
    assert grouping_of(partition, "first_layer").sizes.tolist() == [13_273_797, 54, 180]
    assert grouping_of(partition, "all_direct").sizes.tolist() == [13_272_747, 579, 705]
    layers = grouping_of(partition, "layers")
    assert len(layers) == len(partition) and layers.sizes.tolist() == list(partition.sizes) and torch.equal(layers.sensitive, partition.transmitter)


def test_the_summary_is_what_the_update_says():
    summary = summarise(*atom_sums(UPDATE, PARTITION), THREE, 0.25, 1)[0]
    of_coordinate = THREE.group_of[PARTITION.atom_of]
    for group in range(3):
        part = UPDATE[of_coordinate == group].double()
        for column, value in zip((group, 3 + group, 6 + group), (part.norm(), part.abs().mean(), part.std(unbiased=False))):
            assert float(summary[column]) == pytest.approx(math.log(max(float(value), 1e-8)), abs=1e-4)
    assert summary.shape == (15,) and summary[12:].tolist() == [0.25, 1, 0] and float(summary[9:12].sum()) == pytest.approx(1)
    assert summarise(*atom_sums(UPDATE * 0, PARTITION), THREE, 1.0, 2)[0].isfinite().all()


# ---- the allocator ----------------------------------------------------------------------------------------------

def test_an_untrained_allocator_is_uniform_and_a_random_one_depends_on_the_upload():
    _, space = planted("first.down.8", 40)
    for grouping in (THREE, LAYERS):
        summary = summarise(space.energy, space.absolute, space.total, grouping, 0.2, 1)
        fresh = NoiseAllocator(grouping)
        fresh.calibrate(summary)
        assert torch.allclose(fresh(summary), proportional_shares(grouping).expand(40, -1), rtol=1e-4)
        wild = fresh.randomise(Streams(0).torch("r"))(summary)
        assert float((wild.std(0) / wild.mean(0)).median()) > 0.02 and torch.allclose(wild.sum(1), torch.ones(40), atol=1e-5)


def test_training_repeats_and_leaves_the_global_generator_alone():
    stage, settings, before = stage_of(), AllocatorTraining(steps=2, attacker_steps=2, batch_size=16), torch.get_rng_state()
    runs = [train_allocator([stage], LAYERS, BUDGET, Streams(seed), settings) for seed in (0, 0, 1)]
    same, other = ([torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[k][0].parameters())] for k in (1, 2))
    assert all(same) and not all(other) and runs[0][1] == runs[1][1] and torch.equal(before, torch.get_rng_state())
    assert len(runs[0][1]) == 2 and not any(p.requires_grad for p in runs[0][0].parameters())


def test_the_allocator_moves_the_budget_to_the_layer_that_leaks():
    """The share of the leaking layer rises tenfold over uniform noise; those of the others fall."""
    settings = AllocatorTraining(steps=60, task_weight=0.0, entropy_weight=0.0, batch_size=64, learning_rate=1e-2)
    for layer, other in (("first.down.8", "first.up.7"), ("first.up.7", "first.down.8")):
        stage = stage_of(layer)
        space = stage.features
        allocator, _ = train_allocator([stage], LAYERS, 20.0, Streams(0), settings)
        gained = allocator(summarise(space.energy, space.absolute, space.total, LAYERS, 0.2, 1)).mean(0) / proportional_shares(LAYERS)
        assert float(gained[PARTITION.names.index(layer)]) > 4 and float(gained[PARTITION.names.index(other)]) < 0.8


def test_the_entropy_term_pulls_towards_equal_shares():
    stage, settings = stage_of(), AllocatorTraining(steps=30, attacker_steps=1, batch_size=16, task_weight=0.0, privacy_weight=1e-6, entropy_weight=5.0, learning_rate=1e-2)
    allocator, history = train_allocator([stage], LAYERS, BUDGET, Streams(0), settings)
    space, entropy = stage.features, lambda shares: float(-(shares * shares.clamp(min=1e-12).log()).sum())
    shares = allocator(summarise(space.energy, space.absolute, space.total, LAYERS, 0.2, 1)).mean(0)
    assert entropy(shares) > entropy(proportional_shares(LAYERS)) + 0.2 and history[-1]["entropy"] > history[0]["entropy"] + 0.2


def test_the_task_term_moves_the_budget_to_where_noise_costs_less():
    """On maps that the network predicts nearly perfectly; in phase 1 noise in stage 2 costs nothing, so there is a way out."""
    inputs, _ = maps(4)
    stage = ShadowStage(MODEL, *planted("first.down.8", 20), inputs, predict(MODEL, inputs, 1) + 0.01, 0.2)
    settings = AllocatorTraining(steps=40, attacker_steps=1, batch_size=16, task_weight=1.0, privacy_weight=1e-6, entropy_weight=0.0, learning_rate=1e-2)
    allocator, _ = train_allocator([stage], LAYERS, 100.0, Streams(0), settings)
    costs = [task_cost(stage, shares, LAYERS, 100.0, Streams(0).torch("c"), draws=4) for shares in (allocator, proportional_shares(LAYERS))]
    assert costs[0] < 0.8 * costs[1]


def test_the_power_of_matched_shares_is_a_power():
    """Variance per coordinate is proportional to a group's largest principal variance to the power asked for; power 0 is uniform noise."""
    space = stage_of().features
    per_coordinate = {power: (matched_shares(space, LAYERS, power).double() / LAYERS.sizes).log() for power in (0.0, 0.25, 0.5, 1.0)}
    assert torch.allclose(matched_shares(space, LAYERS, 0.0), proportional_shares(LAYERS), rtol=1e-5)
    active = torch.tensor([stage == 1 for stage in PARTITION.stages])
    steps = {power: (per_coordinate[power] - per_coordinate[0.0])[active] / power for power in (0.25, 0.5, 1.0)}
    centred = [one - one.mean() for one in steps.values()]
    assert float(centred[0].std()) > 0.5 and all(torch.allclose(centred[0], other, atol=1e-3) for other in centred[1:])


def test_noise_costs_and_more_noise_costs_more():
    """On maps that the network predicts nearly perfectly, so that every change hurts."""
    inputs, _ = maps(4)
    targets = predict(MODEL, inputs, 1) + 0.01
    stage = ShadowStage(MODEL, *planted("first.down.8", 20), inputs, targets, 0.2)
    costs = [task_cost(stage, proportional_shares(THREE), THREE, budget, Streams(0).torch("c"), draws=3) for budget in (1e-10, 1.0, 100.0)]
    assert abs(costs[0]) < 1e-2 and 0.01 < costs[1] < costs[2]
    again = task_cost(stage, proportional_shares(THREE), THREE, 1.0, Streams(0).torch("c"), draws=3, clients_per_round=100)
    assert again < costs[1]  # the mean of many noises is quieter


def test_a_stage_refuses_the_bank_of_another_checkpoint_and_another_number_of_features():
    bank, space = planted("first.down.8", 20)
    with pytest.raises(ValueError, match="belongs to checkpoint"):
        ShadowStage(net(1), bank, space, *maps(2))
    with pytest.raises(ValueError, match="transform the same bank"):
        ShadowStage(MODEL, bank, space[:4], *maps(2))


# ---- promises, and a federation ---------------------------------------------------------------------------------

def test_what_each_allocation_promises():
    promises = {name: promise_of((Clip(1.0), AllocatedNoise(PARTITION, grouping, BUDGET, shares))) for name, (grouping, shares) in allocations().items()}
    assert {name: promise.kind for name, promise in promises.items()} == {
        "uniform": "formal", "directed": "none", "static": "none", "random": "heuristic", "untrained": "heuristic", "trained": "heuristic", "first layer": "none"}
    assert promises["uniform"].noise_ratio == pytest.approx(math.sqrt(BUDGET / LAYOUT.size), rel=1e-5)
    uneven = torch.tensor([0.9, 0.05, 0.05])
    quietest = float(allocate_noise(BUDGET, uneven, THREE.sizes).min().sqrt())
    assert promise_of((Clip(2.0), AllocatedNoise(PARTITION, THREE, BUDGET, uneven))).noise_ratio == pytest.approx(quietest / 2, rel=1e-5)
    assert promise_of((AllocatedNoise(PARTITION, THREE, BUDGET, uneven),)).kind == "heuristic"  # no clip before it


@pytest.mark.parametrize("name", ["none", "uniform", "directed", "adaptive"])
def test_a_federation_under_each_defence_resumes_to_the_same_bits(tmp_path, name):
    shares = {"uniform": proportional_shares(LAYERS), "directed": proportional_shares(LAYERS, True), "adaptive": NoiseAllocator(LAYERS).randomise(Streams(0).torch("r"))}.get(name)
    steps = () if name == "none" else (Clip(1.0), AllocatedNoise(PARTITION, LAYERS, 0.05, shares, rounds=2, phase_change=1))
    make = lambda: [RadioMapClient(number, MODEL, *maps(2, number), phase_change=1, local_steps=1, batch_size=2, defence=steps) for number in range(2)]
    whole = run(Server(MODEL), make(), 2, 0)
    run(Server(MODEL), make(), 1, 0, checkpoint=tmp_path / "run.pt")
    assert torch.equal(whole.parameters, run(Server(MODEL), make(), 2, 0, checkpoint=tmp_path / "run.pt").parameters)
    assert torch.equal(whole.parameters, run(Server(MODEL), make(), 2, 0, workers=2).parameters)


# ---- bad input --------------------------------------------------------------------------------------------------

HALF, TWO = torch.tensor([0.5, 0.5]), [3, 4]


@pytest.mark.parametrize("budget", [0, 0.0, -1.0, math.nan, math.inf, None, "9", True])
def test_a_budget_that_is_not_a_positive_number_is_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        allocate_noise(budget, HALF, TWO)
    with pytest.raises(ValueError, match="budget"):
        AllocatedNoise(PARTITION, THREE, budget, proportional_shares(THREE))
    with pytest.raises(ValueError, match="budget"):
        train_allocator([], THREE, budget, Streams(0))


@pytest.mark.parametrize("shares, sizes", [
    ([0.5, 0.6], TWO), ([0.5, 0.4], TWO), ([1.5, -0.5], TWO), ([math.nan, 1.0], TWO), ([math.inf, 0.0], TWO), ([1.0], TWO), (1.0, TWO), ([], []), ([[]], []),
    (None, TWO), ("half", TWO), ([0.5, "x"], TWO), ([[0.5], [0.5, 0.5]], TWO), (HALF, [0, 3]), (HALF, [-1, 3]), (HALF, None), (HALF, "ab"), (HALF, [[3, 4]]), (HALF, 3),
    ([[0.5, 0.5], [0.5, 0.6]], TWO),
])
def test_shares_that_are_no_shares_are_refused(shares, sizes):
    with pytest.raises(ValueError):
        allocate_noise(BUDGET, shares, sizes)


@pytest.mark.parametrize("call", [
    lambda: grouping_of(PARTITION, "groups"), lambda: grouping_of(PARTITION, None), lambda: NoiseAllocator(THREE, hidden=0), lambda: NoiseAllocator(THREE).calibrate(torch.zeros(1, 15)),
    lambda: NoiseAllocator(THREE).calibrate(torch.zeros(4, 14)), lambda: AllocatedNoise(PARTITION, THREE, BUDGET, HALF), lambda: AllocatedNoise(PARTITION, THREE, BUDGET, torch.tensor([0.5, 0.2, 0.2])),
    lambda: AllocatedNoise(PARTITION, THREE, BUDGET, NoiseAllocator(LAYERS)), lambda: AllocatedNoise(PARTITION, THREE, BUDGET, proportional_shares(THREE), rounds=0),
    lambda: AllocatedNoise(replace(PARTITION, names=PARTITION.names[:-1]), THREE, BUDGET, proportional_shares(THREE)),
    lambda: AllocatedNoise(PARTITION, THREE, BUDGET, proportional_shares(THREE))({"update": UPDATE[:-1]}, context(), torch.Generator()),
    lambda: AllocatedNoise(PARTITION, THREE, BUDGET, proportional_shares(THREE))({"update": UPDATE * math.nan}, context(), torch.Generator()),
    lambda: summarise(*atom_sums(UPDATE, PARTITION), THREE, 1.5, 1), lambda: summarise(*atom_sums(UPDATE, PARTITION), THREE, 0.5, 3),
    lambda: AllocatorTraining(steps=0), lambda: AllocatorTraining(privacy_weight=0), lambda: AllocatorTraining(entropy_weight=-1), lambda: AllocatorTraining(batch_size=4),
    lambda: train_allocator([], THREE, BUDGET, Streams(0)), lambda: matched_shares(planted("first.down.8", 4)[1], LAYERS, power=-1),
])
def test_wrong_settings_are_refused(call):
    with pytest.raises(ValueError):
        call()
