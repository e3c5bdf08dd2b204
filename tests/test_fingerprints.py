"""Uploads in an attacker's feature space, the attackers, and what they find: planted leaks, and nothing where nothing is."""
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from privfl.metrics import localisation_error
from privfl.radiomap.fingerprints import (FeatureBank, NeighbourAttack, NetworkAttack, Observed, Partition, RidgeAttack,
                                          UploadBank, UploadFeatures, attack_family, attack_uploads, leakage_map, match_candidates,
                                          outside_buildings, partition_of, principal_components, sample_gradients,
                                          strongest, upload_bank, view_columns, whitened)
from privfl.radiomap.radiounet import RadioUNet, phase_loss
from privfl.randomness import Streams
from privfl.update import Layout

SIZES = (40, 60, 9, 20)  # a layer that may leak, another one, one transmitter kernel, the idle stage
NAMES = ("first.down.1", "first.up.0", "first.down.0 tx", "second.up.0")
SMALL = Partition(NAMES, SIZES, (1, 1, 1, 2), torch.arange(4).repeat_interleave(torch.tensor(SIZES)))


def synthetic(count: int = 400, leaking: int | None = 0, seed: int = 0, shuffled: bool = False) -> UploadBank:
    """Uploads of length about one; one atom holds the position linearly, or none does."""
    draw = torch.Generator().manual_seed(seed)
    positions = 100 + 60 * (2 * torch.rand(count, 2, generator=draw) - 1)
    active = SMALL.atom_of < 3
    updates = 0.05 * torch.randn(count, int(active.sum()), generator=draw)
    directions = torch.randn(2, SIZES[leaking or 0], generator=draw)
    if leaking is not None:
        updates[:, SMALL.atom_of[active] == leaking] += 0.1 * ((positions - 100) / 35) @ directions
    if shuffled:
        positions = positions[torch.randperm(count, generator=draw)]
    return UploadBank(updates, active, positions, torch.arange(count) // 4, SMALL, 1, 1.0, "none")


def in_space(bank: UploadBank, components: int = 6) -> FeatureBank:
    """The bank in feature space."""
    return UploadFeatures(components).fit(bank).transform(bank)


def parts(space: FeatureBank) -> tuple:
    """Attacker's own uploads, validation victims, victims."""
    return space[:260], space[260:320], space[320:]


def net(seed: int = 0) -> RadioUNet:
    """The thinnest network."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return RadioUNet(width=0.02, size=64)


def pairs(count: int = 6) -> tuple:
    """Inputs, targets, positions and cities of a few maps."""
    draw = torch.Generator().manual_seed(1)
    return (torch.rand(count, 2, 64, 64, generator=draw), torch.rand(count, 1, 64, 64, generator=draw), 256 * torch.rand(count, 2, generator=draw), torch.arange(count))


# ---- atoms and banks --------------------------------------------------------------------------------------------

def test_atoms_cover_every_coordinate_once_and_the_slices_are_the_raster_s():
    with torch.device("meta"):
        model = RadioUNet()
    with torch.device("cpu"):
        partition = partition_of(model)
    sizes = dict(zip(partition.names, partition.sizes))
    assert sum(partition.sizes) == 13_274_031 == len(partition.atom_of) and len(set(partition.names)) == len(partition)
    assert [sizes[f"{stage}.{place} tx"] for stage in ("first", "second") for place in ("down.0", "merge", "output")] == [54, 500, 25, 180, 500, 25]
    assert [sum(size for size, stage in zip(partition.sizes, partition.stages) if stage == number) for number in (1, 2)] == [10_921_405, 2_352_626]


@pytest.mark.parametrize("phase", [1, 2])
def test_gradients_side_by_side_are_those_of_each_pair_alone(phase):
    model, (inputs, targets, *_) = net(), pairs(3)
    found = sample_gradients(model, inputs, targets, phase)
    stage = model.first if phase == 1 else model.second
    for row in range(3):
        alone = torch.autograd.grad(phase_loss(model, inputs[row:row + 1], targets[row:row + 1], phase), stage.parameters())
        alone = torch.cat([piece.reshape(-1) for piece in alone])
        assert torch.allclose(found[row], alone, rtol=1e-3, atol=1e-5 * float(alone.abs().max()))


def test_a_bank_is_clipped_at_the_median_length_and_knows_its_coordinates():
    model, given = net(), pairs(7)
    bank = upload_bank(model, *given, phase=1, clip_norm=2.0)
    lengths = bank.updates.norm(dim=1)
    assert float(lengths.max()) <= 2 * (1 + 1e-5) and int((lengths > 2 * (1 - 1e-5)).sum()) == 4  # the median and the longer ones
    gradient = sample_gradients(model, *given[:2], 1)
    assert all(torch.cosine_similarity(-gradient[row], bank.updates[row], dim=0) > 1 - 1e-5 for row in range(7))
    full = bank.full(2)
    assert torch.equal(full[bank.active], bank.updates[2]) and not full[~bank.active].any() and len(full) == Layout.of(model).size


def test_a_bank_refuses_another_checkpoint():
    model = net()
    bank = upload_bank(model, *pairs(3), phase=1)
    bank.check(model)
    layout = Layout.of(model)
    moved = layout.flatten(model)
    moved[-1] += 1e-6
    layout.load(model, moved)
    with pytest.raises(ValueError, match="belongs to checkpoint"):
        bank.check(model)


def test_an_upload_of_several_pairs_is_their_mean_and_so_is_its_position():
    model, given = net(), pairs(4)
    members = torch.tensor([[0, 1], [2, 3]])
    bank, single = upload_bank(model, *given, phase=1, members=members), sample_gradients(model, *given[:2], 1)
    for row, own in enumerate(members):
        assert torch.cosine_similarity(-single[own].mean(0), bank.updates[row], dim=0) > 1 - 1e-5
        assert torch.allclose(bank.positions_m[row], given[2][own].mean(0))
    real = upload_bank(model, *given, phase=1, updates=3 * torch.eye(4, single.shape[1]))
    assert torch.allclose(real.updates, torch.eye(4, single.shape[1]))  # real changes are clipped, not rescaled


# ---- the feature space ------------------------------------------------------------------------------------------

def test_components_are_the_leading_singular_vectors():
    rows = torch.randn(30, 80, generator=torch.Generator().manual_seed(0)) * torch.linspace(3, 0.1, 80)
    found = principal_components(rows, 5)
    exact = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][:5]
    assert torch.allclose(found @ found.T, torch.eye(5), atol=1e-5) and torch.allclose((found @ exact.T).abs(), torch.eye(5), atol=1e-3)
    assert principal_components(torch.ones(4, 7), 3).shape == (0, 7) and principal_components(torch.randn(3, 50, generator=torch.Generator()), 9).shape == (2, 50)


def test_noise_in_feature_space_is_noise_on_the_whole_update():
    """Two samples of n = 1,500 draws; at most 30 Kolmogorov-Smirnov tests at 1e-5 each, so a false alarm in 1 of 3,000 runs."""
    count, bank = 1_500, synthetic()
    features = UploadFeatures(6).fit(bank)
    variances = torch.tensor([2e-3, 5e-2, 1e-2, 0.3])
    short = features.transform(bank)[torch.zeros(count, dtype=torch.int64)].noised(variances, Streams(0).torch("short"))
    draw = Streams(0).torch("long")
    noisy = bank.full(0) + SMALL.expand(variances).sqrt() * torch.randn(count, sum(SIZES), generator=draw)
    long = Observed(features._linear(noisy[:, bank.active]), torch.zeros(count, 4).index_add_(1, SMALL.atom_of, noisy**2))
    tests = [(a[:, i], b[:, i]) for a, b in ((short.linear, long.linear), (short.energy, long.energy)) for i in range(a.shape[1])]
    assert len(tests) <= 30 and min(stats.ks_2samp(a, b).pvalue for a, b in tests) > 1e-5
    both = [np.corrcoef(torch.cat([one.linear, one.energy], 1).T) for one in (short, long)]
    assert np.abs(both[0] - both[1]).max() < 6 * math.sqrt(2 / count)  # also the dependence between features and energies


def test_no_noise_shows_the_clean_upload_and_averaging_divides_the_variance():
    space = in_space(synthetic(20))
    clean = space.noised(torch.zeros(4), Streams(0).torch("a"))
    assert torch.equal(clean.linear, space.linear) and torch.allclose(clean.energy, space.energy.float(), rtol=1e-4)
    quarter = space.noised(torch.full((4,), 0.25), Streams(0).torch("a"))
    averaged = space.noised(torch.ones(4), Streams(0).torch("a"), rounds=4)
    assert torch.equal(quarter.linear, averaged.linear) and torch.equal(quarter.energy, averaged.energy)


def test_trap_14_noise_has_the_asked_variance_and_atoms_are_uncorrelated():
    """n = 2,000 draws of 21 features; relative error of a variance 0.032, 6 of these: 1e-7 for all."""
    space = in_space(synthetic(30))[torch.zeros(2_000, dtype=torch.int64)]
    variances = torch.tensor([0.01, 4.0, 0.25, 1.0])
    noise = space.noised(variances, Streams(1).torch("n")).linear - space.linear
    assert torch.allclose(noise.var(0) / variances[space.atom], torch.ones(space.linear.shape[1]), atol=6 * math.sqrt(2 / 2_000))
    assert float((torch.corrcoef(noise.T) - torch.eye(noise.shape[1])).abs().max()) < 6 / math.sqrt(2_000)


def test_a_clip_per_atom_is_a_factor_in_feature_space():
    bank = synthetic(12)
    features, factor = UploadFeatures(5).fit(bank), torch.tensor([0.5, 1.0, 0.1, 1.0])
    small = features.transform(replace(bank, updates=bank.updates * SMALL.expand(factor)[bank.active]))
    scaled = features.transform(bank).scaled(factor.double().expand(12, -1))
    for name in ("linear", "energy", "absolute", "total"):
        assert torch.allclose(getattr(small, name).double(), getattr(scaled, name).double(), rtol=1e-4, atol=1e-6)


def test_whitening_takes_out_a_noise_level_that_differs_from_upload_to_upload():
    """Half the uploads get 400 times the variance; whitened, both halves have one spread (n = 120 x 33 numbers each: 6 % is five standard deviations)."""
    space = in_space(synthetic(240, leaking=None), 12)
    level = torch.where(torch.arange(len(space)) < 120, 0.05, 20.0)
    standard, logs, scale = whitened(space, space.noised(level[:, None].expand(-1, 4), Streams(0).torch("n")))
    quiet, loud = float(standard[:120].std()), float(standard[120:].std())
    assert abs(loud / quiet - 1) < 0.06 and 0.8 < quiet < 1.2
    assert standard.shape == scale.shape and float((logs[120:, 1].exp() / 20).mean()) == pytest.approx(1, abs=0.1)  # the level is readable


# ---- attackers --------------------------------------------------------------------------------------------------

ATTACKS = {"ridge": RidgeAttack, "neighbours": NeighbourAttack, "network": lambda view="all": NetworkAttack(view, hidden=64, epochs=60),
           "kernels": lambda view="transmitter": NetworkAttack("transmitter", kernels=True, hidden=64, epochs=60)}


def over_chance(make, bank: UploadBank, variance: float = 1e-4) -> float:
    """RMSE of an attacker on the victims over that of the attacker's mean position."""
    own, validation, victims = parts(in_space(bank))
    variances = torch.full((4,), variance)
    attack = make().fit(own, variances, validation, variances, Streams(0))
    guess = attack.predict(victims, victims.noised(variances, Streams(0).torch("victims")))
    chance = localisation_error(own.positions_m.mean(0).expand(len(victims), 2), victims.positions_m)
    return float((localisation_error(guess, victims.positions_m).square().mean() / chance.square().mean()).sqrt())


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attacker_finds_a_planted_leak_and_nothing_among_shuffled_positions(name):
    """80 victims: the RMSE over chance of a guess without information has a standard deviation of about 0.06."""
    leaking = 2 if name == "kernels" else 0
    assert over_chance(ATTACKS[name], synthetic(leaking=leaking)) < 0.65
    assert 0.85 < over_chance(ATTACKS[name], synthetic(leaking=leaking, shuffled=True)) < 1.3


@pytest.mark.parametrize("name", ["ridge", "network"])
def test_a_view_sees_its_own_atoms_only(name):
    make = ATTACKS[name]
    assert over_chance(lambda: make("residual"), synthetic(leaking=0)) < 0.65 < 0.85 < over_chance(lambda: make("transmitter"), synthetic(leaking=0))
    assert over_chance(lambda: make("transmitter"), synthetic(leaking=2)) < 0.65 < 0.85 < over_chance(lambda: make("residual"), synthetic(leaking=2))


def test_noise_drives_every_attacker_to_chance_and_averaging_brings_it_back():
    own, validation, victims = parts(in_space(synthetic()))
    chance = float(localisation_error(own.positions_m.mean(0).expand(len(victims), 2), victims.positions_m).square().mean().sqrt())
    loud = lambda bank: torch.full((4,), 3.0)
    found = {rounds: attack_uploads(own, validation, victims, loud, Streams(1), {"ridge, all": RidgeAttack}, rounds)["ridge, all"]["victims"] / chance for rounds in (1, 4_000)}
    assert found[1] > 0.85 and found[4_000] < 0.65


def test_ridge_is_the_limit_of_many_noise_draws():
    """One thousand draws; the solution's relative error falls as their root, 0.1 is four times what is seen."""
    from privfl.radiomap.fingerprints import _mean_noise
    own, variances = parts(in_space(synthetic()))[0], torch.full((4,), 0.3)
    x, noise, _ = _mean_noise(own, variances, "residual")
    y, size = own.positions_m.double() - own.positions_m.double().mean(0), torch.tensor(SIZES)
    expected = Observed(own.linear, (own.energy + variances * size).float())
    scale, draw = whitened(own, expected, "residual")[2].double(), Streams(0).torch("d")
    gram, cross = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64), torch.zeros(x.shape[1], 2, dtype=torch.float64)
    for _ in range(1_000):
        noisy = x + math.sqrt(0.3) / scale * torch.randn(x.shape, generator=draw, dtype=torch.float64)
        gram, cross = gram + noisy.T @ noisy / 1_000, cross + noisy.T @ y / 1_000
    exact = RidgeAttack("residual", penalties=(1e-12,), added=(0.0,)).fit(own, variances, own, variances, Streams(0)).weights
    assert torch.allclose(exact, torch.linalg.solve(x.T @ x + torch.diag(noise[0]), x.T @ y), rtol=1e-6)
    assert float((torch.linalg.solve(gram, cross) - exact).norm() / exact.norm()) < 0.1
    assert float((torch.linalg.solve(x.T @ x, x.T @ y) - exact).norm() / exact.norm()) > 0.2  # without the noise it is another one


def test_the_family_and_the_choice_of_the_strongest():
    own, validation, victims = parts(in_space(synthetic()))
    names = list(attack_family())
    assert {name.rpartition(", ")[2] for name in names} == {"transmitter", "residual", "all"} and len(names) == 8
    quick = {"ridge, all": RidgeAttack, "ridge, transmitter": lambda: RidgeAttack("transmitter")}
    found = attack_uploads(own, validation, victims, lambda bank: torch.full((4,), 1e-3), Streams(0), quick)
    assert strongest(found) == "ridge, all" and strongest(found, "transmitter") == "ridge, transmitter"
    assert found["ridge, all"]["errors"].shape == (len(victims),)
    swapped = {"a, all": {"validation": 1.0, "victims": 9.0}, "b, all": {"validation": 2.0, "victims": 0.5}}
    assert strongest(swapped) == "a, all"  # the victims have no say


def test_attackers_meet_one_noise_on_the_victims_and_repeat():
    own, validation, victims = parts(in_space(synthetic()))
    variances = lambda bank: torch.full((4,), 0.05)
    twice = {"x, all": RidgeAttack, "y, all": RidgeAttack}
    first, second = (attack_uploads(own, validation, victims, variances, Streams(2), twice) for _ in range(2))
    assert all(torch.equal(first[name]["errors"], second[name]["errors"]) for name in twice)
    drawn = []

    class Spy(RidgeAttack):
        def predict(self, bank, observed):
            drawn.append(observed.linear)
            return super().predict(bank, observed)

    attack_uploads(own, validation, victims, variances, Streams(2), {"x, all": Spy, "y, all": Spy})
    assert torch.equal(drawn[1], drawn[3]) and torch.equal(drawn[0], drawn[2])


def test_the_leakage_map_names_the_layer():
    found = leakage_map(*parts(in_space(synthetic(leaking=1))), lambda bank: torch.full((4,), 1e-4), Streams(0))
    assert set(found) == set(NAMES[:3]) and min(found, key=found.get) == "first.up.0"
    assert found["first.up.0"] < 0.7 * min(found["first.down.1"], found["first.down.0 tx"])


# ---- the building map -------------------------------------------------------------------------------------------

def test_a_guess_leaves_the_buildings_for_the_nearest_free_centre_and_stays_where_it_is_free():
    draw = torch.Generator().manual_seed(0)
    for share, pixel in ((0.2, 1.0), (0.9, 4.0)):
        built = torch.rand(20, 12, 9, generator=draw) < share
        guesses = pixel * (torch.rand(20, 2, generator=draw) * torch.tensor([16.0, 13.0]) - 2)
        moved = outside_buildings(guesses, built, pixel)
        for guess, new, walls in zip(guesses, moved, built):
            row, column = (guess / pixel).floor().long().tolist()
            if 0 <= row < 12 and 0 <= column < 9 and not walls[row, column]:
                assert torch.equal(guess, new)
                continue
            centres = ((~walls).nonzero() + 0.5) * pixel
            assert (centres == new).all(1).any() and float((new - guess).norm()) <= float((centres - guess).norm(dim=1).min()) + 1e-4
        assert torch.equal(moved, outside_buildings(guesses, built.float(), pixel))


def test_a_true_transmitter_is_never_moved():
    """Positions are centres of free pixels; pixel i reaches from i to i + 1."""
    built = torch.ones(1, 6, 6, dtype=torch.bool)
    built[0, 3, 2] = False
    assert torch.equal(outside_buildings(torch.tensor([[3.5, 2.5]]), built, 1.0), torch.tensor([[3.5, 2.5]]))
    assert torch.equal(outside_buildings(torch.tensor([[3.99, 2.99]]), built, 1.0), torch.tensor([[3.99, 2.99]]))
    assert torch.equal(outside_buildings(torch.tensor([[2.99, 2.5]]), built, 1.0), torch.tensor([[3.5, 2.5]]))


# ---- bad input --------------------------------------------------------------------------------------------------

FREE = torch.zeros(1, 4, 4, dtype=torch.bool)
SPOT = torch.ones(1, 2)


@pytest.mark.parametrize("call", [
    lambda: outside_buildings(SPOT, ~FREE, 1.0), lambda: outside_buildings(SPOT, FREE.float() + 1, 1.0), lambda: outside_buildings(SPOT, FREE, 0.0),
    lambda: outside_buildings(SPOT, FREE, -1.0), lambda: outside_buildings(SPOT, FREE, "m"), lambda: outside_buildings(SPOT * math.nan, FREE, 1.0),
    lambda: outside_buildings(torch.ones(2, 2), FREE, 1.0), lambda: outside_buildings(torch.ones(2), FREE, 1.0),
    lambda: upload_bank(net(), *pairs(2), phase=3), lambda: upload_bank(net(), *pairs(2), phase="first"), lambda: upload_bank(net(), *pairs(2), phase=1, clip_norm=0),
    lambda: upload_bank(net(), *pairs(2)[:3], torch.arange(3), phase=1), lambda: upload_bank(net(), *pairs(2), phase=1, members=torch.tensor([[0, 2]])),
    lambda: upload_bank(net(), *pairs(2), phase=1, members=torch.tensor([0, 1])), lambda: upload_bank(net(), *pairs(2), phase=1, updates=torch.zeros(2, 5)),
    lambda: upload_bank(net(), torch.zeros(2, 2, 65, 65), torch.zeros(2, 1, 65, 65), *pairs(2)[2:], phase=1),
    lambda: UploadFeatures(0), lambda: UploadFeatures(3).fit(synthetic(1)), lambda: in_space(synthetic(4)).noised(torch.tensor([1.0, 1.0]), torch.Generator()),
    lambda: in_space(synthetic(4)).noised(torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.Generator()), lambda: in_space(synthetic(4)).noised("loud", torch.Generator()),
    lambda: in_space(synthetic(4)).noised(torch.full((4,), math.nan), torch.Generator()), lambda: in_space(synthetic(4)).noised(torch.ones(4), torch.Generator(), rounds=0),
    lambda: view_columns(in_space(synthetic(4)), "slices"), lambda: strongest({}), lambda: strongest({"ridge, all": {"validation": 1.0}}, "residual"),
    lambda: NetworkAttack("all", kernels=True).fit(*[in_space(synthetic(8)), torch.ones(4)] * 2, Streams(0)),
    lambda: NetworkAttack(epochs=0).fit(*[in_space(synthetic(8)), torch.ones(4)] * 2, Streams(0)),
])
def test_wrong_input_is_refused(call):
    with pytest.raises(ValueError):
        call()


def test_matching_finds_the_planted_candidate_and_guesses_on_pure_noise():
    """40 candidates, 400 uploads. Pure noise hits with probability 1/40: more than 30 hits have probability below 1e-7."""
    generator = torch.Generator().manual_seed(3)
    candidates, places = torch.randn(40, 300, generator=generator), torch.arange(80.0).reshape(40, 2)
    truth = torch.randint(40, (400,), generator=generator)
    loud = torch.where(torch.arange(300) < 150, 100.0, 0.25)  # half of the coordinates are drowned
    noise = torch.randn(400, 300, generator=generator)
    hits = lambda uploads, variances: int((match_candidates(uploads, candidates, places, variances) == places[truth]).all(1).sum())
    planted = candidates[truth] + loud.sqrt() * noise
    assert hits(planted, loud) > 390 > 1.3 * hits(planted, torch.ones(300))  # who knows where the noise is loud does far better
    assert hits(noise, torch.ones(300)) <= 30


@pytest.mark.parametrize("change", [lambda u, c, p, v: (u[:, 1:], c, p, v), lambda u, c, p, v: (u, c[:1], p[:1], v), lambda u, c, p, v: (u, c, p[1:], v), lambda u, c, p, v: (u[0], c, p, v)])
def test_matching_refuses_what_does_not_fit(change):
    with pytest.raises(ValueError, match="do not fit"):
        match_candidates(*change(torch.zeros(2, 5), torch.ones(3, 5), torch.zeros(3, 2), torch.ones(5)))
