"""Noise with an account: the best split of the energy, clips from public information, the filter over rounds."""
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from privfl.accounting import Budget, BudgetExceeded, compose, gaussian_parameter
from privfl.federation import Clip, Context, GaussianNoise, GlobalState, Server, Upload, promise_of, run
from privfl.radiomap.accounting import (AccountableNoise, AccountableServer, accountable_sigmas, multiplier_for,
                                        next_clips)
from privfl.radiomap.allocation import grouping_of
from privfl.radiomap.fingerprints import partition_of
from privfl.radiomap.radiounet import RadioMapClient, RadioUNet
from privfl.randomness import Streams
from privfl.update import Layout, UpdateError

with torch.random.fork_rng():
    torch.manual_seed(0)
    MODEL = RadioUNet(width=0.02, size=64)
LAYOUT, PARTITION = Layout.of(MODEL), partition_of(MODEL)
LAYERS = grouping_of(PARTITION, "layers")
OF_COORDINATE = LAYERS.group_of[PARTITION.atom_of]
SIZES = LAYERS.sizes.double()
NOISE = AccountableNoise(PARTITION, LAYERS, budget=9.0, clip_norm=1.0)


def server(**changes) -> AccountableServer:
    """A server with the settings of NOISE."""
    return AccountableServer(MODEL, **{"partition": PARTITION, "grouping": LAYERS, "clip_norm": 1.0, "budget": 9.0, **changes})


def lengths(update: torch.Tensor) -> torch.Tensor:
    """Length of each group."""
    return torch.zeros(len(LAYERS), dtype=torch.float64).index_add_(0, OF_COORDINATE, update.double() ** 2).sqrt()


def context(clips, turn: int = 0) -> Context:
    """A client in a round with announced clips."""
    memory = {} if clips is None else {"clips": clips}
    return Context(3, turn, 1, LAYOUT, GlobalState(turn, torch.zeros(LAYOUT.size), {}, memory), {})


def upload(client: int, update: torch.Tensor, examples: int = 1, turn: int = 0) -> Upload:
    """What a client sends."""
    return Upload(client, turn, examples, {"update": update}, {"size": LAYOUT.size, "quantity": "change"})


def random_update(seed: int, scale: float = 1.0) -> torch.Tensor:
    """A vector of length about `scale`."""
    return scale / math.sqrt(LAYOUT.size) * torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(seed))


groups = st.lists(st.tuples(st.floats(1e-3, 10), st.integers(1, 10**6)), min_size=1, max_size=6)


# ---- the split --------------------------------------------------------------------------------------------------

@given(groups, st.floats(1e-3, 1e4), st.integers(0, 2**31))
def test_no_other_split_of_the_energy_has_a_smaller_parameter(found, budget, seed):
    clips, sizes = (torch.tensor(column, dtype=torch.float64) for column in zip(*found))
    best = accountable_sigmas(clips, sizes, budget)
    parameter = lambda sigmas: float((2 * clips / sigmas).norm())
    assert float(sizes @ best**2) == pytest.approx(budget, rel=1e-9)
    assert parameter(best) == pytest.approx(2 * float(clips @ sizes.sqrt()) / math.sqrt(budget), rel=1e-9)
    other = best * torch.exp(0.5 * torch.randn(len(best), generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    other *= math.sqrt(budget / float(sizes @ other**2))
    assert parameter(other) >= parameter(best) * (1 - 1e-12)


@given(groups, st.floats(1e-3, 1e4))
def test_the_event_never_exceeds_that_of_uniform_noise(found, budget):
    clips, sizes = (torch.tensor(column, dtype=torch.float64) for column in zip(*found))
    grouping = replace(LAYERS, names=tuple(map(str, range(len(clips)))), sizes=sizes.long())
    noise = AccountableNoise(PARTITION, grouping, budget, float(clips.norm()))
    uniform = gaussian_parameter(noise.promise.event("replace_one"))
    assert uniform == pytest.approx(2 * float(clips.norm()) * math.sqrt(float(sizes.sum()) / budget), rel=1e-9)
    assert gaussian_parameter(noise.event(clips)) <= uniform * (1 + 1e-9)
    assert gaussian_parameter(noise.event(clips.norm() * (sizes / sizes.sum()).sqrt())) == pytest.approx(uniform, rel=1e-9)


def test_trap_14_replacing_a_client_is_twice_adding_one():
    clips = server().initial_state().memory["clips"]
    twice, once = (gaussian_parameter(NOISE.event(clips, relation)) for relation in ("replace_one", "add_remove"))
    assert twice == pytest.approx(2 * once) and once == pytest.approx(math.sqrt(LAYOUT.size) / 3, rel=1e-5)


# ---- the step ---------------------------------------------------------------------------------------------------

def test_every_group_is_clipped_on_its_own():
    """With hardly any noise, what leaves has in every group the announced length at most; a short group stays."""
    quiet = AccountableNoise(PARTITION, LAYERS, budget=1e-16, clip_norm=1.0)
    clips = server().initial_state().memory["clips"]
    update = random_update(0, 5.0)
    update[OF_COORDINATE == 3] = update[OF_COORDINATE == 3] * 1e4
    update[OF_COORDINATE == 5] = update[OF_COORDINATE == 5] * 1e-3
    update[OF_COORDINATE == 6] = 0
    sent = quiet({"update": update}, context(clips), torch.Generator().manual_seed(0))["update"]
    assert bool((lengths(sent) <= clips.double() * (1 + 1e-5) + 1e-7).all()) and float(lengths(sent).norm()) <= 1 + 1e-5
    assert float(lengths(sent)[3]) == pytest.approx(float(clips[3]), rel=1e-4)
    for group in (5, 6):
        assert torch.allclose(sent[OF_COORDINATE == group], update[OF_COORDINATE == group], atol=1e-7)
    assert torch.cosine_similarity(sent[OF_COORDINATE == 3], update[OF_COORDINATE == 3], dim=0) > 1 - 1e-5


def test_trap_14_the_noise_has_the_standard_deviation_of_the_split_and_the_budget_as_energy():
    """30 draws; relative error of a group's variance sqrt(2 / (30 d_g)), six of these in each of 44 groups: 1e-7 in all."""
    clips = torch.full((len(LAYERS),), 1 / math.sqrt(len(LAYERS)))
    sigmas = accountable_sigmas(clips, LAYERS.sizes, 9.0)
    draws = torch.stack([NOISE({"update": torch.zeros(LAYOUT.size)}, context(clips), Streams(k).torch("n"))["update"] for k in range(30)]).double()
    for group in range(len(LAYERS)):
        count = 30 * int(SIZES[group])
        assert float((draws[:, OF_COORDINATE == group] ** 2).mean()) == pytest.approx(float(sigmas[group] ** 2), rel=6 * math.sqrt(2 / count))
    assert float((draws**2).sum(1).mean()) == pytest.approx(9.0, rel=6 * math.sqrt(2 / 30 * float(SIZES @ sigmas**4)) / 9)
    first, second = (draws[:, OF_COORDINATE == group][:, :25].flatten() for group in (0, 1))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 6 / math.sqrt(len(first))


def test_a_client_refuses_a_state_without_clips_or_with_longer_ones():
    clips = server().initial_state().memory["clips"]
    for wrong in (None, clips * 1.01):
        with pytest.raises(UpdateError, match="client 3, round 4"):
            NOISE({"update": random_update(0)}, context(wrong, 4), torch.Generator())
    with pytest.raises(UpdateError, match="client 3"):
        NOISE({"update": random_update(0) * math.nan}, context(clips), torch.Generator())


def test_the_promise_is_formal_with_the_worst_case_and_what_follows_must_not_look_again():
    promise = promise_of((NOISE,))
    assert promise.kind == "formal" and promise.noise_ratio == pytest.approx(3 / math.sqrt(LAYOUT.size))
    assert promise_of((NOISE, Clip(1.0))).kind == "formal" and promise_of((Clip(2.0), NOISE)).kind == "formal"
    assert promise_of((NOISE, NOISE)).kind == "heuristic"
    assert promise_of((Clip(1.0), GaussianNoise(3 / math.sqrt(LAYOUT.size)))).noise_ratio == pytest.approx(promise.noise_ratio)


# ---- public clips -----------------------------------------------------------------------------------------------

def test_the_clips_are_a_function_of_the_public_states_alone():
    """Anybody with two successive states and the settings computes them; other uploads with the same mean change nothing."""
    own = server(learning_rate=0.5)
    state = own.initial_state()
    uploads = [upload(k, random_update(k, 2.0)) for k in range(3)]
    after = own.aggregate(state, uploads, 0)
    change = (after.parameters - state.parameters) / 0.5
    energy, clips = next_clips(change, state.memory["energy"], state.memory["clips"], 3, own)
    assert torch.equal(clips, after.memory["clips"]) and torch.equal(energy, after.memory["energy"])
    moved = random_update(9, 2.0)
    others = [upload(0, uploads[0].tensors["update"] + moved), upload(1, uploads[1].tensors["update"] - moved), uploads[2]]
    assert torch.allclose(own.aggregate(state, others, 0).memory["clips"], clips, rtol=1e-3)
    assert set(after.memory) == {"energy", "clips"}


def test_the_clips_have_one_joint_length_a_floor_and_follow_the_signal():
    own, state, loud = server(), server().initial_state(), torch.zeros(LAYOUT.size)
    loud[OF_COORDINATE == 7] = 1.0
    assert torch.allclose(state.memory["clips"].double(), (SIZES / SIZES.sum()).sqrt(), rtol=1e-5)
    for turn in range(12):
        state = own.aggregate(state, [upload(k, loud + random_update(10 * turn + k, 3.0), turn=turn) for k in range(2)], turn)
        clips = state.memory["clips"].double()
        assert float(clips.norm()) == pytest.approx(1, rel=1e-5) and bool((clips**2 >= 0.3 * SIZES / SIZES.sum() * (1 - 1e-4)).all())
        assert float(state.memory["energy"].sum()) == pytest.approx(1, abs=1e-4)
    assert float(clips[7] ** 2) > 0.6  # nearly all of what is not the floor


def test_pure_noise_leaves_the_shares_where_they_are_within_the_noise_of_the_noise():
    """The known energy of the noise is taken off: in the mean over 12 rounds no group gains much."""
    own = server(smoothing=0.9)
    state = own.initial_state()
    for turn in range(12):
        noisy = [NOISE({"update": torch.zeros(LAYOUT.size)}, context(state.memory["clips"]), Streams(turn).torch("n", k))["update"] for k in range(4)]
        state = own.aggregate(state, [upload(k, one, turn=turn) for k, one in enumerate(noisy)], turn)
    assert float(state.memory["clips"].norm()) == pytest.approx(1, rel=1e-5)
    large = SIZES > 1_000
    gained = (state.memory["energy"] / (SIZES / SIZES.sum()))[large]
    assert 0.3 < float(gained.min()) and float(gained.max()) < 3
    raw = torch.zeros(LAYOUT.size)
    energy, _ = next_clips(raw, state.memory["energy"], state.memory["clips"], 4, own)
    assert torch.allclose(energy, state.memory["energy"], atol=1e-6)  # nothing above the noise: the shares stay


def test_the_known_energy_of_the_noise_is_taken_off():
    """An update whose groups hold just the noise's energy, and one group some more: that group gets all of the shares."""
    own = server(smoothing=0.0)
    memory = own.initial_state().memory
    per_coordinate = accountable_sigmas(memory["clips"], LAYERS.sizes, 9.0) ** 2 / 4
    per_coordinate[7] += 0.5 / SIZES[7]
    energy, _ = next_clips(per_coordinate.sqrt()[OF_COORDINATE], memory["energy"], memory["clips"], 4, own)
    assert float(energy[7]) > 0.99


def test_unequal_clients_average_less_noise_away():
    """Weights 9 : 1 leave .82 of one upload's noise, not a half; with a half the noise would pass for signal."""
    from privfl.radiomap.accounting import _effective_uploads
    assert _effective_uploads([upload(0, random_update(0), 9), upload(1, random_update(1), 1)]) == pytest.approx(1 / 0.82)
    assert _effective_uploads([upload(k, random_update(k), 5) for k in range(6)]) == 6
    assert _effective_uploads([]) == _effective_uploads([upload(0, random_update(0), 0)]) == 0
    own = server()
    state = own.initial_state()
    assert torch.equal(own.aggregate(state, [upload(0, random_update(0), 0)], 0).memory["clips"], state.memory["clips"])
    rests = server(learning_rate=lambda turn: 0.0)
    assert torch.equal(rests.aggregate(state, [upload(0, random_update(0))], 0).memory["clips"], state.memory["clips"])


def clients_of(noise) -> list:
    """Two clients with two maps each."""
    draw = torch.Generator().manual_seed(0)
    data = [(torch.rand(2, 2, 64, 64, generator=draw), torch.rand(2, 1, 64, 64, generator=draw)) for _ in range(2)]
    return [RadioMapClient(number, MODEL, *own, phase_change=2, local_steps=1, batch_size=2, defence=(noise,)) for number, own in enumerate(data)]


def test_a_federation_resumes_to_the_same_bits_clips_included(tmp_path):
    noise, own, seen = AccountableNoise(PARTITION, LAYERS, 0.05, 0.1), server(clip_norm=0.1, budget=0.05), []
    whole = run(own, clients_of(noise), 3, 0, observers=[lambda state, uploads, turn: seen.append(state.memory["clips"])])
    run(own, clients_of(noise), 1, 0, checkpoint=tmp_path / "run.pt")
    resumed = run(own, clients_of(noise), 3, 0, checkpoint=tmp_path / "run.pt")
    assert torch.equal(whole.parameters, resumed.parameters)
    assert all(torch.equal(whole.memory[name], resumed.memory[name]) for name in ("clips", "energy")) and not torch.equal(seen[0], seen[-1])
    assert clients_of(noise)[0].promise().kind == "formal"
    with pytest.raises(UpdateError, match="AccountableServer"):
        run(Server(MODEL), clients_of(noise), 1, 0)


# ---- the account ------------------------------------------------------------------------------------------------

def test_the_filter_lets_pass_what_uniform_noise_would_and_a_little_more_then_refuses():
    uploads, epsilon, delta = 10, 4.0, 1e-5
    nu = multiplier_for(epsilon, delta, LAYOUT.size, uploads)
    noise, sizes = AccountableNoise(PARTITION, LAYERS, nu**2, 1.0), SIZES / SIZES.sum()
    for clips, least, most in ((sizes.sqrt(), uploads, uploads), (torch.full_like(sizes, 1 / math.sqrt(len(sizes))), uploads, 60)):
        account, passed = Budget(epsilon * (1 + 1e-6), delta, "replace_one", rule="gdp"), 0
        with pytest.raises(BudgetExceeded):
            while passed < 500:
                account.spend(0, passed, noise.event(clips))
                passed += 1
        saved = gaussian_parameter(noise.event(clips)) ** 2 * passed
        assert least <= passed <= most and saved <= 4 * LAYOUT.size * uploads / nu**2 * (1 + 1e-5)
    assert passed > uploads


@pytest.mark.parametrize("epsilon, size, uploads", [(1.0, 1_000, 1), (8.0, 213_091, 22), (8.0, 13_274_031, 22)])
def test_the_multiplier_gives_the_epsilon(epsilon, size, uploads):
    nu = multiplier_for(epsilon, 1e-5, size, uploads)
    event = dp_accounting.GaussianDpEvent(nu / (2 * math.sqrt(size)))  # sigma = nu C / sqrt(d), sensitivity 2 C
    assert compose([(event, uploads)], 1e-5, "replace_one") == pytest.approx(epsilon, rel=1e-3)
    assert multiplier_for(epsilon, 1e-5, 4 * size, uploads) == pytest.approx(2 * nu)


def test_the_paper_s_multiplier_is_no_formal_protection():
    assert gaussian_parameter(AccountableNoise(PARTITION, replace(LAYERS, sizes=torch.tensor([13_274_031]), names=("all",)), 9.0, 1.0).promise.event()) == pytest.approx(2 * math.sqrt(13_274_031) / 3)


# ---- bad input --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call", [
    lambda: accountable_sigmas([1.0], [3, 4], 9.0), lambda: accountable_sigmas([1.0, 0.0], [3, 4], 9.0), lambda: accountable_sigmas([1.0, math.nan], [3, 4], 9.0),
    lambda: accountable_sigmas([1.0, math.inf], [3, 4], 9.0), lambda: accountable_sigmas("clips", [3, 4], 9.0), lambda: accountable_sigmas(None, [3, 4], 9.0),
    lambda: accountable_sigmas([1.0, 1.0], [3, 0], 9.0), lambda: accountable_sigmas([1.0, 1.0], [3, 4], 0), lambda: accountable_sigmas([1.0, 1.0], [3, 4], "9"), lambda: accountable_sigmas([], [], 9.0),
    lambda: AccountableNoise(PARTITION, LAYERS, 0, 1.0), lambda: AccountableNoise(PARTITION, LAYERS, 9.0, -1.0), lambda: NOISE.event(torch.ones(3)),
    lambda: NOISE.event(torch.ones(len(LAYERS)), "remove"), lambda: server(budget=0), lambda: server(clip_norm=0), lambda: server(floor=0), lambda: server(floor=1.5),
    lambda: server(smoothing=1.0), lambda: server(momentum=0.9), lambda: server(partition=None), lambda: server(grouping="layers"),
    lambda: next_clips(torch.zeros(3), torch.ones(1), torch.ones(1), 1, server()), lambda: next_clips(torch.zeros(LAYOUT.size), *server().initial_state().memory.values(), 0, server()),
    lambda: multiplier_for(0, 1e-5, 10, 1), lambda: multiplier_for(1.0, 0, 10, 1), lambda: multiplier_for(1.0, 1e-5, 0, 1), lambda: multiplier_for(1.0, 1e-5, 10, 0), lambda: multiplier_for(1.0, 1e-5, 10, 1.5),
])
def test_wrong_settings_are_refused(call):
    with pytest.raises(ValueError):
        call()
