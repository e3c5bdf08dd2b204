"""The uplink: budgets in bits, the two groups, top-S with error feedback, features of public images, and a run of all."""
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from privfl.accounting import compose, oneshot_laplace_epsilon, promise_event
from privfl.federation import Client, Clip, Context, GlobalState, Server, Upload, promise_of, run
from privfl.semcom.jscc import DeepJSCC
from privfl.semcom.uplink import (CAPACITIES, Groups, PublicFeatures, Silence, TopS, Uplink, dequantise, private_encoder,
                                  public_window, quantise, sparse_mean, uplink_steps)
from privfl.update import Layout, UpdateError

THIN = {"channels": 4, "widths": (4, 4, 4, 4)}


def draw(seed: int = 0) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def layout_of(size: int) -> Layout:
    """A layout of so many entries."""
    return Layout(("vector",), ((size,),))


def context(size: int = 4, memory: dict | None = None, round: int = 0, client: int = 0, state=None, layout=None) -> Context:
    """What the federation tells a step."""
    return Context(client, round, 1, layout or layout_of(size), state, {} if memory is None else memory)


def send(step, update, memory=None, round=0, seed=0, **more) -> dict:
    """One call of a step on an update."""
    return step({"update": update}, context(len(update), memory, round, **more), draw(seed))


def sparse(client: int, indices: list, values: list, num_examples: int = 1, size: int = 4) -> Upload:
    """A gradient sender's upload."""
    return Upload(client, 0, num_examples, {"indices": torch.tensor(indices, dtype=torch.int64), "values": torch.tensor(values)}, {"size": size})


# ---- bits and groups --------------------------------------------------------------------------------------------

def test_the_default_numbers():
    uplink = Uplink(156_483)
    assert uplink.entry_bits() == 50 and uplink.capacities == CAPACITIES
    assert [uplink.entries(client) for client in range(10)] == [math.floor(share * 156_483) for share in CAPACITIES]
    assert uplink.groups() == Groups((6, 7, 8, 9), (0, 1, 2, 3, 4, 5), ())
    assert uplink.images(0, 1024) == 9  # the tenth would overspend: the fault of counting by rounding


@given(st.integers(1, 10**7), st.floats(0, 1), st.integers(1, 5000), st.integers(1, 64))
def test_no_payload_exceeds_its_budget(size, share, feature_size, value_bits):
    uplink = Uplink(size, (share,), value_bits=value_bits)
    k, budget = uplink.entries(0), uplink.budget_bits(0)
    assert 0 <= k <= size and budget == k * (value_bits + math.ceil(math.log2(size)))
    images = uplink.images(0, feature_size)
    used = images * feature_size * 8 + 64
    assert images == 0 or used <= budget
    assert used + feature_size * 8 > budget  # one more would not fit


@pytest.mark.parametrize("share, size, expected", [(0.29, 100, 29), (0.1, 30, 3), (1.0, 7, 7), (0.7, 10, 7), (0.0, 10, 0)])
def test_shares_that_floats_cannot_hold(share, size, expected):
    assert Uplink(size, (share,)).entries(0) == expected


def test_bits_of_an_upload_are_those_of_the_budget():
    size, uplink = 156_483, Uplink(156_483)
    update = torch.randn(size, generator=draw())
    for client in (0, 6):
        out = send(TopS(uplink.entries(client)), update)
        assert Upload(client, 0, 1, out, {"size": size}).bits() == uplink.budget_bits(client)


@pytest.mark.parametrize("threshold, expected", [
    (0.0, Groups((1, 2, 3), (), (0,))), (0.2, Groups((2, 3), (1,), (0,))), (0.21, Groups((3,), (1, 2), (0,))), (9.0, Groups((), (1, 2, 3), (0,)))])
def test_groups_at_the_threshold_and_empty_groups(threshold, expected):
    assert Uplink(100, (0.0, 0.1, 0.2, 0.3), threshold).groups() == expected


@pytest.mark.parametrize("settings", [{"size": 0}, {"size": 2.5}, {"capacities": ()}, {"capacities": (1.01,)}, {"capacities": (-0.1,)}, {"capacities": (math.nan,)},
                                      {"threshold": -0.1}, {"threshold": math.nan}, {"value_bits": 0}])
def test_wrong_uplinks_are_refused(settings):
    with pytest.raises(ValueError):
        Uplink(**{"size": 10, **settings})


@pytest.mark.parametrize("client", [-1, 10, 0.5])
def test_unknown_clients_are_refused(client):
    with pytest.raises(ValueError, match="client"):
        Uplink(10).entries(client)


# ---- top-S with error feedback ----------------------------------------------------------------------------------

@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 8), st.integers(0, 99))
def test_sent_plus_owed_is_the_sum_of_the_updates(size, k, rounds, seed):
    k, memory, sent, total = min(k, size), {}, torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for round in range(rounds):
        update = torch.randn(size, dtype=torch.float64, generator=draw(100 * seed + round))
        out = send(TopS(k), update, memory, round)
        sent[out["indices"]] += out["values"]
        total += update
        assert out["indices"].tolist() == sorted(set(out["indices"].tolist())) and len(out["values"]) == k
    assert torch.allclose(sent + memory["feedback"], total, atol=1e-12)


def test_trap_12_the_largest_are_sent_and_edges_work():
    update = torch.tensor([1.0, -5.0, 0.0, 3.0])
    assert send(TopS(2), update)["indices"].tolist() == [1, 3]
    assert send(TopS(2), update)["values"].tolist() == [-5.0, 3.0]
    assert send(TopS(0), update)["indices"].numel() == 0 and torch.equal(send(TopS(4), update)["values"], update)


def test_trap_12_ties_are_deterministic():
    zeros = torch.zeros(6)
    assert [send(TopS(2), zeros, round=round)["indices"].tolist() for round in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert all(send(TopS(2, ties="lowest"), zeros, round=round)["indices"].tolist() == [0, 1] for round in range(4))
    assert send(TopS(2), torch.tensor([0.0, 0, 0, 7, 0, 0]), round=2)["indices"].tolist() == [3, 4]  # a real winner, then the rule
    fewer = torch.tensor([0.0, 0.0, 5.0, 0.0])  # fewer non-zeros than k
    assert send(TopS(3), fewer)["indices"].tolist() == [0, 1, 2] == send(TopS(3), fewer, seed=9)["indices"].tolist()


def test_trap_12_ties_behind_a_clip_do_not_starve_the_end():
    update, share = torch.randn(2000, generator=draw(3)), {}
    for ties in ("rotate", "lowest"):
        memory, late = {}, []
        for round in range(40):
            chosen = send(TopS(100, clip=2.0, ties=ties), update, memory, round)["indices"]
            late += [float((chosen < 1000).double().mean())] if round >= 20 else []
        share[ties] = sum(late) / len(late)
    assert share["lowest"] > 0.99 and 0.4 < share["rotate"] < 0.6  # the fault, and its repair


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_trap_12_nan_is_refused_with_client_and_round(bad):
    memory = {"feedback": torch.zeros(3)}
    with pytest.raises(UpdateError, match="client 4, round 2: 1 of 3 entries"):
        send(TopS(1), torch.tensor([1.0, bad, 0.0]), memory, 2, client=4)
    with pytest.raises(UpdateError, match="client 4, round 2"):
        send(TopS(1), torch.ones(3), {"feedback": torch.tensor([bad, 0, 0])}, 2, client=4)
    assert torch.equal(memory["feedback"], torch.zeros(3))


def test_a_k_beyond_the_update_names_client_and_round():
    with pytest.raises(ValueError, match="client 4, round 2: k is 5.*from 0 to 3"):
        send(TopS(5), torch.ones(3), None, 2, client=4)


@pytest.mark.parametrize("settings", [{"k": -1}, {"k": 1.5}, {"index_scale": -1}, {"value_scale": math.nan}, {"clip": 0.0}, {"clip": math.inf},
                                      {"decay": 1.1}, {"decay": -0.1}, {"ties": "random"}])
def test_wrong_steps_are_refused(settings):
    with pytest.raises(ValueError):
        TopS(**{"k": 1, **settings})


def test_a_mask_or_a_second_selection_is_refused():
    for tensors in ({"update": torch.ones(4), "mask": torch.ones(4, dtype=torch.bool)}, {"values": torch.ones(1)}):
        with pytest.raises(UpdateError, match="without a mask"):
            TopS(1)(tensors, context(), draw())


def test_the_clip_comes_after_the_memory():
    memory = {"feedback": torch.full((4,), 3.0)}
    out = send(TopS(4, clip=2.0), torch.tensor([-9.0, 1.0, 0.0, -4.5]), memory)
    assert out["values"].tolist() == [-2.0, 2.0, 2.0, -1.5]  # the released vector is bounded, so the promise has a sensitivity
    send(TopS(0, clip=2.0), torch.full((4,), 50.0), memory)
    assert memory["feedback"].tolist() == [2.0] * 4


def test_memory_is_new_and_neither_update_nor_old_memory_changes():
    update, owed = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4)
    memory = {"feedback": owed}
    send(TopS(1, decay=0.5), update, memory)
    assert torch.equal(owed, torch.ones(4)) and torch.equal(update, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert memory["feedback"].tolist() == [1.5, 2.5, 3.5, 0.0]
    empty = {}
    send(TopS(1, feedback=False), update, empty)
    assert not empty


def test_memory_never_holds_noise():
    """What is owed is a function of the data and of the released indices, as the composition of rounds needs."""
    memory, update = {}, torch.randn(50, generator=draw(1))
    out = send(TopS(10, 0.5, 0.5, clip=5.0), update, memory)
    assert torch.equal(memory["feedback"], update.index_fill(0, out["indices"], 0.0))
    assert not torch.equal(out["values"], update[out["indices"]])


def test_other_tensors_travel_on():
    out = TopS(1)({"update": torch.ones(4), "buffers.mean": torch.ones(2)}, context(), draw())
    assert set(out) == {"indices", "values", "buffers.mean"}


def test_trap_14_noise_of_the_values_has_its_scale():
    update, n, scale = torch.full((2000,), 50.0), 2000, 0.3
    noise = torch.cat([send(TopS(n, 0.1, scale, feedback=False), update, seed=seed)["values"] - 50 for seed in range(10)]).double()
    # |Laplace| has mean b and deviation b: 20,000 draws, 5 standard errors, false alarms 6e-7
    assert abs(float(noise.abs().mean()) - scale) < 5 * scale / math.sqrt(10 * n)


# ---- promises ---------------------------------------------------------------------------------------------------

def test_the_promise_is_that_of_the_mechanism():
    step = TopS(1000, 0.02, 0.05, clip=5e-3)
    for neighbouring, value_sensitivity in (("add_remove", 5e-3), ("replace_one", 1e-2)):
        wanted = oneshot_laplace_epsilon(1000, 0.02, 0.05, 5e-3, value_sensitivity, rounds=7)
        assert math.isclose(compose([(promise_event(step.promise, neighbouring), 7)], 0.0, neighbouring), wanted, rel_tol=1e-12)
    assert promise_of([step]).kind == promise_of([Clip(1.0), step]).kind == "formal"
    assert promise_of([Clip(1.0), step]).epsilon() == step.promise.epsilon()


@pytest.mark.parametrize("settings, kind", [
    ({"index_scale": 0.0}, "none"), ({"value_scale": 0.0}, "none"), ({"clip": None}, "heuristic"), ({"index_scale": 0.0, "clip": None}, "none"), ({}, "formal"), ({"k": 0, "clip": None}, "formal")])
def test_no_epsilon_is_claimed_without_noise_or_bound(settings, kind):
    promise = TopS(**{"k": 5, "index_scale": 0.1, "value_scale": 0.1, "clip": 1.0, **settings}).promise
    assert promise.kind == kind
    if kind == "formal":
        assert promise.epsilon() == (0 if settings else 2 * 5 * 20)
    else:
        assert compose([(promise_event(promise, "replace_one"), 1)], 0.0, "replace_one") == math.inf


# ---- the mean of sparse updates ---------------------------------------------------------------------------------

def test_sparse_mean_equals_the_dense_one():
    state, uploads, dense = GlobalState(0, torch.zeros(20)), [], torch.zeros(20)
    for client, examples in enumerate((3, 0, 5)):
        update = torch.randn(20, generator=draw(client))
        out = send(TopS(7), update)
        uploads.append(Upload(client, 0, examples, out, {"size": 20}))
        dense += examples / 8 * torch.zeros(20).index_add(0, out["indices"], out["values"])
    assert torch.allclose(sparse_mean(uploads, state), dense, atol=1e-6)
    assert torch.equal(sparse_mean(uploads[::-1], state), sparse_mean(uploads, state))  # order does not matter


def test_empty_groups():
    state = GlobalState(0, torch.zeros(4))
    features = Upload(5, 0, 9, {"features": torch.zeros(1, 2, dtype=torch.uint8), "range": torch.zeros(2)}, {"size": 4})
    alone = sparse(0, [1], [2.0])
    assert not sparse_mean([], state).any() and not sparse_mean([features], state).any()  # no gradient sender: no step
    assert torch.equal(sparse_mean([alone, features], state), sparse_mean([alone], state))  # feature senders do not dilute
    assert sparse_mean([alone], state).tolist() == [0.0, 2.0, 0.0, 0.0]


def test_a_dense_update_is_not_silently_left_out():
    with pytest.raises(UpdateError, match="client 1, round 0.*dense"):
        sparse_mean([Upload(1, 0, 2, {"update": torch.ones(4)}, {"size": 4})], GlobalState(0, torch.zeros(4)))


@pytest.mark.parametrize("indices, values", [([4], [1.0]), ([-1], [1.0]), ([1, 1], [1.0, 1.0]), ([2, 1], [1.0, 1.0]), ([1], [1.0, 2.0]), ([1], [math.nan])])
def test_broken_sparse_vectors_name_their_client(indices, values):
    with pytest.raises(UpdateError, match="client 3, round 0"):
        sparse_mean([sparse(3, indices, values)], GlobalState(0, torch.zeros(4)))


# ---- features ---------------------------------------------------------------------------------------------------

@given(st.floats(-100, 100), st.floats(1e-3, 100), st.integers(0, 50))
def test_quantising_is_off_by_half_a_level(low, width, count):
    values = low + width * torch.rand(count, generator=draw(count))
    codes, limits = quantise(values)
    assert codes.dtype == torch.uint8 and codes.shape == values.shape
    if count:
        level = float(limits[1] - limits[0]) / 255
        assert float((dequantise(codes, limits) - values).abs().max()) <= level / 2 + 1e-5 * (abs(low) + width)
        assert int(codes.min()) == 0 and (count == 1 or int(codes.max()) == 255)


def test_quantising_flat_and_broken_values():
    flat = torch.full((3,), -0.25)
    assert torch.equal(dequantise(*quantise(flat)), flat)
    with pytest.raises(ValueError, match="NaN"):
        quantise(torch.tensor([1.0, math.nan]))


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 1000))
def test_the_window_moves_through_the_public_set(num_public, count, round):
    count = min(count, num_public)
    window = public_window(num_public, count, round).tolist()
    assert len(set(window)) == count and all(0 <= index < num_public for index in window)
    if count:
        assert public_window(num_public, count, round + 1)[0] == (window[-1] + 1) % num_public


def test_a_window_beyond_the_public_set_is_refused():
    with pytest.raises(ValueError, match="count"):
        public_window(5, 6, 0)
    with pytest.raises(ValueError, match="count"):
        PublicFeatures(DeepJSCC(**THIN), torch.rand(5, 3, 16, 16), 6, 1)


@pytest.fixture
def sender():
    """A thin model, its layout, a state, public images and an update."""
    model = DeepJSCC(**THIN)
    layout = Layout.of(model)
    public = torch.rand(5, 3, 16, 16, generator=draw(1))
    return model, layout, GlobalState(0, layout.flatten(model)), public, 0.05 * torch.randn(layout.size, generator=draw(2))


def call(step, sender, update=None, round=0, seed=0, **more):
    """A feature sender's call."""
    _, layout, state, _, change = sender
    return step({"update": change if update is None else update}, context(round=round, state=state, layout=layout, **more), draw(seed))


def test_features_are_those_of_the_privatised_encoder(sender):
    model, layout, state, public, change = sender
    step = PublicFeatures(model, public, count=3, k=40)
    out = call(step, sender, round=1)
    of_encoder = layout.group(lambda name: name.startswith("encoder."))
    kept = torch.where(of_encoder, change, 0).abs().topk(40).indices
    other = DeepJSCC(**THIN, generator=draw(7))
    layout.load(other, state.parameters.index_add(0, kept, change[kept]))
    with torch.no_grad():
        wanted = other.encoder(public[[3, 4, 0]])
    level = float(out["range"][1] - out["range"][0]) / 255
    assert float((dequantise(out["features"], out["range"]) - wanted).abs().max()) < 0.51 * level
    assert Upload(0, 1, 1, out, {"size": layout.size}).bits() == wanted.numel() * 8 + 64


def test_the_decoder_never_leaves(sender):
    model, layout, state, public, change = sender
    step = PublicFeatures(model, public, count=3, k=40)
    decoder = layout.group(lambda name: name.startswith("decoder."))
    moved = torch.where(decoder, change + 9, change)
    assert all(torch.equal(a, b) for a, b in zip(call(step, sender).values(), call(step, sender, moved).values()))
    assert set(private_encoder(step, {"update": change}, context(state=state, layout=layout), draw())) == {name for name, _ in model.encoder.named_parameters()}


def test_the_model_and_the_state_stay_as_they_are(sender):
    """Parameters that are views of the global vector would let local work edit the global model."""
    model, layout, state, public, change = sender
    before, weights = state.parameters.clone(), layout.flatten(model)
    call(PublicFeatures(model, public, 3, 40, 0.1, 0.1, clip=0.1), sender)
    assert torch.equal(state.parameters, before) and torch.equal(layout.flatten(model), weights)


def test_features_at_their_edges(sender):
    model, layout, _, public, change = sender
    assert call(PublicFeatures(model, public, 0, 0), sender)["features"].shape == (0, 4, 4, 4)
    encoder = sum(parameter.numel() for parameter in model.encoder.parameters())
    call(PublicFeatures(model, public, 1, encoder), sender)
    with pytest.raises(ValueError, match="client 2, round 6: k is"):
        call(PublicFeatures(model, public, 1, encoder + 1), sender, round=6, client=2)
    with pytest.raises(UpdateError, match="client 2, round 6"):
        call(PublicFeatures(model, public, 1, 1), sender, change * math.nan, round=6, client=2)
    assert PublicFeatures(model, public, 1, 7, 0.1, 0.1, 0.5).promise.epsilon() == TopS(7, 0.1, 0.1, 0.5).promise.epsilon()


# ---- everything in the federation -------------------------------------------------------------------------------

def federation(index_scale=0.0, value_scale=0.0, clip=None, capacities=(0.0, 0.05, 0.3, 0.5), ties="rotate"):
    """A server and clients of all kinds, thin enough to run in a blink."""
    model = DeepJSCC(**THIN)
    images = torch.rand(16, 3, 16, 16, generator=draw(3))
    uplink = Uplink(Layout.of(model).size, capacities)
    steps = uplink_steps(uplink, model, torch.rand(6, 3, 16, 16, generator=draw(4)), index_scale, value_scale, clip)
    clients = [Client(number, model, part, part, mse_loss, "fedavg", batch_size=4, local_steps=2, optimizer=partial(torch.optim.Adam, lr=1e-3), defence=(step,))
               for number, (part, step) in enumerate(zip(images.chunk(len(capacities)), steps))]
    return Server(model, rule=sparse_mean), clients, uplink


def test_every_client_stays_within_its_budget():
    server, clients, uplink = federation()
    seen = []
    state = run(server, clients, rounds=2, seed=0, observers=[lambda state, uploads, round: seen.append(uploads)])
    assert [type(client.defence[0]) for client in clients] == [Silence, PublicFeatures, TopS, TopS]
    for upload in seen[1]:
        assert upload.bits() <= uplink.budget_bits(upload.client)
    assert seen[1][0].bits() == 0 and seen[1][3].bits() == uplink.budget_bits(3)
    assert not torch.equal(state.parameters, server.initial_state().parameters)
    assert torch.equal(server.initial_state().parameters, Layout.of(server.model).flatten(server.model))


def test_trap_09_workers_change_nothing_and_a_run_resumes_to_the_bit(tmp_path):
    results = [run(*federation(0.01, 0.01, 0.1)[:2], rounds=3, seed=1, workers=workers).parameters for workers in (0, 3)]
    path = tmp_path / "run.pt"
    run(*federation(0.01, 0.01, 0.1)[:2], rounds=2, seed=1, checkpoint=path)  # the memory is in the client state
    resumed = run(*federation(0.01, 0.01, 0.1)[:2], rounds=3, seed=1, checkpoint=path).parameters
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], resumed)
    forgetful = federation(0.01, 0.01, 0.1)
    for client in forgetful[1]:
        client.defence = tuple(TopS(step.k, 0.01, 0.01, 0.1, feedback=False) if isinstance(step, TopS) else step for step in client.defence)
    assert not torch.equal(results[0], run(*forgetful[:2], rounds=3, seed=1).parameters)  # and it matters


def test_trap_09_feature_senders_in_threads_share_no_encoder():
    found = []
    for workers in (0, 4):
        server, clients, _ = federation(capacities=(0.05,) * 8)
        run(server, clients, rounds=2, seed=2, workers=workers, observers=[lambda state, uploads, round: found.append([u.tensors["features"] for u in uploads])])
    assert all(torch.equal(a, b) for one, other in zip(found[:2], found[2:]) for a, b in zip(one, other))
    assert not torch.equal(found[0][0], found[0][1])  # each client has its own encoder


@pytest.mark.parametrize("capacities", [(0.05, 0.05), (0.0, 0.0)])
def test_a_run_without_gradient_senders_changes_nothing(capacities):
    server, clients, _ = federation(capacities=capacities)
    state = run(server, clients, rounds=2, seed=0)
    assert torch.equal(state.parameters, server.initial_state().parameters) and state.round == 2


def test_a_budget_below_one_image_is_silence():
    model = DeepJSCC(**THIN)
    steps = uplink_steps(Uplink(Layout.of(model).size, (0.001,)), model, torch.rand(6, 3, 16, 16, generator=draw(4)))
    assert isinstance(steps[0], Silence) and steps[0].promise.kind == "none"


def test_a_sender_works_on_any_model():
    """Top-S knows nothing of semantic communication."""
    model = nn.Linear(3, 2)
    inputs = torch.rand(8, 3, generator=draw(5))
    client = Client(0, model, inputs, inputs[:, :2], mse_loss, "fedavg", batch_size=4, local_steps=2, learning_rate=0.1, defence=(TopS(3),))
    state = run(Server(model, rule=sparse_mean), [client], rounds=2, seed=0)
    assert torch.isfinite(state.parameters).all()
