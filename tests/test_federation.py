"""The loop: the same bits whatever the workers, the order or a kill; defences, accounts, averages, bad input."""
import copy
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from privfl import federation
from privfl.federation import (
    CheckpointError, Client, Clip, Context, GaussianNoise, GlobalState, Promise, Recorder, Server, Upload, batches,
    contributors, load_checkpoint, mean_rule, promise_of, run, save_checkpoint,
)
from privfl.randomness import Streams
from privfl.selection import initialise
from privfl.update import Layout, UpdateError

FOLDER = Path(__file__).parent


def coin(seed: int = 0) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(seed)


class KeepLargest:
    """Top-k with error feedback: a step with a memory."""

    promise = Promise("heuristic", "the choice depends on the data")

    def __init__(self, k: int):
        self.k = k

    def __call__(self, tensors, context, generator):
        wanted = tensors["update"] + context.memory.get("left_out", 0)
        mask = torch.zeros_like(wanted, dtype=torch.bool)
        mask[wanted.abs().topk(self.k).indices] = True
        context.memory["left_out"] = torch.where(mask, 0, wanted)
        return {**tensors, "update": torch.where(mask, wanted, 0)}


def network(norm: bool = False) -> nn.Module:
    """A small network with known weights; with BatchNorm if asked."""
    layers = [nn.Linear(6, 5), nn.BatchNorm1d(5) if norm else nn.Identity(), nn.ReLU(), nn.Linear(5, 3)]
    model = nn.Sequential(*layers)
    generator = coin(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return model


def make(model=None, sizes=(20, 30, 10, 25), kind=Client, **settings) -> tuple[nn.Module, list[Client]]:
    """A model and one client per size, on fixed random data."""
    model, generator, clients = model or network(), coin(2), []
    for number, size in enumerate(sizes):
        inputs = torch.randn(size, 6, generator=generator)
        targets = torch.randint(3, (size,), generator=generator)
        clients.append(kind(number, model, inputs, targets, **{"batch_size": 8, **settings}))
    return model, clients


EVERYTHING = dict(algorithm="fedavg", local_steps=3, momentum=0.9, keep_optimizer=True,
                  defence=(Clip(1.0), KeepLargest(20), GaussianNoise(0.01)))


def everything(rounds: int, order: int = 1, server: dict | None = None, seed: int = 7, **how) -> GlobalState:
    """A run that uses every kind of state: buffers, client optimiser, error feedback, server velocity, sampling."""
    model, clients = make(network(norm=True), **EVERYTHING)
    settings = {"clients_per_round": 3, "learning_rate": 0.5, "momentum": 0.9} | (server or {})
    return run(Server(model, **settings), clients[::order], rounds, seed, **how)


def equal(first: GlobalState, second: GlobalState) -> bool:
    """The same bits everywhere."""
    return first.round == second.round and torch.equal(first.parameters, second.parameters) and all(
        list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in ((first.buffers, second.buffers), (first.memory, second.memory)))


# uploads

def test_bits_are_counted():
    mask = torch.arange(100) < 30
    assert Upload(0, 0, 1, {"update": torch.zeros(100)}).bits() == 3200
    assert Upload(0, 0, 1, {"update": torch.zeros(100), "mask": mask}).bits(16) == 30 * 16 + 100
    sparse = {"indices": torch.arange(5), "values": torch.zeros(5)}
    assert Upload(0, 0, 1, sparse, {"size": 1025}).bits() == 5 * (11 + 32)
    assert Upload(0, 0, 1, sparse, {"size": 1024}).bits() == 5 * (10 + 32)
    assert Upload(0, 0, 1, {"buffers.count": torch.tensor(3)}).bits() == 64
    assert Upload(0, 0, 1, {"features": torch.zeros(2, 3, 4)}).bits(8) == 24 * 8


def test_contributors_are_sorted_and_hold_data():
    uploads = [Upload(client, 0, size, {}) for client, size in ((4, 1), (2, 0), (1, 9))]
    assert [upload.client for upload in contributors(uploads)] == [1, 4]
    with pytest.raises(UpdateError, match="one upload per client"):
        contributors([*uploads, uploads[0]])


# batches

@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 3), st.integers(0, 999))
def test_every_pass_uses_every_example_once(n, size, epochs, seed):
    found = list(batches(n, size, coin(seed), local_epochs=epochs))
    per_pass = len(found) // epochs
    for start in range(0, len(found), per_pass):
        assert sorted(torch.cat(found[start:start + per_pass]).tolist()) == list(range(n))


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 25))
def test_local_steps_are_counted(n, size, steps):
    assert len(list(batches(n, size, coin(), local_steps=steps))) == steps


# algorithms

def test_fedsgd_is_the_gradient_of_one_batch():
    model, clients = make()
    state, streams = Server(model).initial_state(), Streams(5)
    upload, memory = clients[1].fit(state, {}, streams, 4)
    batch = next(batches(30, 8, streams.torch("batch", 4, 1)))
    cross_entropy(model(clients[1].inputs[batch]), clients[1].targets[batch]).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(upload.tensors["update"], gradient)
    assert upload.meta == {"size": Layout.of(model).size, "quantity": "gradient"} and memory == {}
    assert (upload.client, upload.round, upload.num_examples) == (1, 4, 30)


def test_fedavg_is_the_change_of_weights_of_torch_s_own_training():
    model, clients = make(algorithm="fedavg", local_epochs=2, learning_rate=0.3, momentum=0.9)
    state, streams = Server(model).initial_state(), Streams(5)
    upload, _ = clients[0].fit(state, {}, streams, 2)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3, momentum=0.9)
    for batch in batches(20, 8, streams.torch("batch", 2, 0), local_epochs=2):
        optimizer.zero_grad()
        cross_entropy(twin(clients[0].inputs[batch]), clients[0].targets[batch]).backward()
        optimizer.step()
    layout = Layout.of(model)
    torch.testing.assert_close(upload.tensors["update"], layout.flatten(twin) - layout.flatten(model))
    assert upload.meta["quantity"] == "change"


def test_one_local_step_equals_fedsgd():
    results = []
    for settings, rate in (({"algorithm": "fedsgd"}, 0.2), ({"algorithm": "fedavg", "local_steps": 1, "learning_rate": 0.2}, 1.0)):
        model, clients = make(**settings)
        results.append(run(Server(model, learning_rate=rate), clients, 5, seed=1).parameters)
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)


def test_full_batches_and_equal_sizes_are_gradient_descent():
    model, clients = make(sizes=(15, 15, 15), batch_size=None)
    state = run(Server(model, learning_rate=0.2, momentum=0.9), clients, 20, seed=1)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.2, momentum=0.9)
    inputs, targets = (torch.cat([getattr(client, name) for client in clients]) for name in ("inputs", "targets"))
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(twin(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(state.parameters, Layout.of(twin).flatten(twin), rtol=0, atol=1e-5)


def test_learning_rate_may_follow_the_round():
    model, clients = make()
    frozen = run(Server(model, learning_rate=lambda round: 0.0 if round else 0.1), clients, 3, seed=1)
    once = run(Server(model, learning_rate=0.1), clients, 1, seed=1)
    assert torch.equal(frozen.parameters, once.parameters)


class PhaseClient(Client):
    """Trains the last layer only, from round 1 on; earlier layers get no gradient at all."""

    def batch_loss(self, model, batch, round):
        inputs = self.inputs[batch]
        hidden = model[:3](inputs)
        return self.loss(model[3](hidden if round == 0 else hidden.detach()), self.targets[batch])


@pytest.mark.parametrize("settings", [{}, {"algorithm": "fedavg", "optimizer": partial(torch.optim.Adam, lr=0.01)}])
def test_a_phase_that_freezes_parameters_sends_zero_for_them(settings):
    model, clients = make(kind=PhaseClient, **settings)
    state, first = Server(model).initial_state(), Layout.of(model).group(lambda name: name.startswith("0."))
    moving, frozen = (clients[0].fit(state, {}, Streams(0), round)[0].tensors["update"] for round in (0, 1))
    assert (moving[first] != 0).any() and (frozen[first] == 0).all() and (frozen[~first] != 0).any()


def test_features_instead_of_updates():
    """A step may send something else; a server may aggregate in its own way."""

    class SendFeatures:
        promise, post_processing = Promise("none", "example"), True

        def __call__(self, tensors, context, generator):
            encoder = context.layout.unflatten(context.state.parameters + tensors["update"])["0.weight"]
            return {"features": torch.ones(2, 6) @ encoder.T}

    class FeatureServer(Server):
        def aggregate(self, state, uploads, round):
            mean = torch.stack([upload.tensors["features"].mean() for upload in contributors(uploads)]).mean()
            return replace(state, round=round + 1, memory={"mean": mean})

    model, clients = make(algorithm="fedavg", defence=(SendFeatures(),))
    state = run(FeatureServer(model), clients, 2, seed=1)
    assert state.round == 2 and state.memory["mean"].isfinite()


def test_client_state_is_not_changed_in_place():
    model, clients = make(**EVERYTHING)
    state, memory = Server(model).initial_state(), {}
    for round in range(3):
        before = copy.deepcopy(memory)
        _, after = clients[0].fit(state, memory, Streams(1), round)
        flat = lambda m: [m["defence"]["left_out"], *(s["momentum_buffer"] for s in m["optimizer"]["state"].values())] if m else []
        assert all(torch.equal(a, b) for a, b in zip(flat(before), flat(memory)))
        memory = after
    assert not torch.equal(memory["defence"]["left_out"], before["defence"]["left_out"])


def test_kept_optimiser_makes_local_momentum_one_long_run():
    """With one client, full batches and server rate 1, two rounds of one step equal one round of two steps."""
    settings = dict(sizes=(20,), algorithm="fedavg", batch_size=None, learning_rate=0.2, momentum=0.9)
    ends = []
    for steps, rounds, keep in ((1, 2, True), (2, 1, False), (1, 2, False)):
        model, clients = make(**settings, local_steps=steps, keep_optimizer=keep)
        ends.append(run(Server(model), clients, rounds, seed=1).parameters)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)
    assert not torch.allclose(ends[2], ends[1], atol=1e-4)


# the same bits

def test_trap_09_workers_and_client_order_do_not_change_a_bit():
    reference = everything(6)
    for workers, order in ((1, 1), (4, 1), (4, -1), (0, -1)):
        assert equal(everything(6, order, workers=workers), reference)


def test_trap_09_a_new_defence_shifts_neither_batches_nor_other_noise():
    """Without noise of its own, an extra step leaves the upload as it is: every draw has a stream of its own."""

    class Draws:
        promise, post_processing = Promise("none", "example"), True

        def __call__(self, tensors, context, generator):
            torch.rand(17, generator=generator)
            return tensors

    def first_upload(*steps):
        model, clients = make(defence=steps)
        return clients[2].fit(Server(model).initial_state(), {}, Streams(3), 0)[0].tensors["update"]

    noise = GaussianNoise(0.1)
    assert torch.equal(first_upload(), first_upload(Draws()))
    assert torch.equal(first_upload(noise), first_upload(Draws(), noise))
    twice = first_upload(noise, noise) - first_upload()
    once = first_upload(noise) - first_upload()
    assert not torch.allclose(twice, 2 * once)  # the second step of a kind has its own draws


def test_every_client_and_round_draws_its_own_noise():
    model, clients = make(sizes=(10, 10), defence=(GaussianNoise(1.0),))
    clients[1].inputs, clients[1].targets = clients[0].inputs, clients[0].targets
    state = Server(model).initial_state()
    draws = [client.fit(state, {}, Streams(1), round)[0].tensors["update"] for client in clients for round in (0, 1)]
    assert all(not torch.allclose(a, b) for i, a in enumerate(draws) for b in draws[:i])


def test_the_global_generator_and_the_thread_setting_stay_as_they_were():
    model, clients = make(network(norm=True), **EVERYTHING)
    before = torch.get_rng_state()
    torch.set_num_threads(2)
    try:
        seen = []
        run(Server(model, clients_per_round=3), clients, 2, 1, 2, observers=[lambda s, u, r: seen.append(torch.get_num_threads())])
        assert torch.get_num_threads() == 2 and set(seen) == {1}
    finally:
        torch.set_num_threads(1)
    assert torch.equal(before, torch.get_rng_state())


def test_blueprint_and_initial_state_are_never_trained():
    model, clients = make(network(norm=True))
    server = Server(model)
    before, start = copy.deepcopy(model.state_dict()), server.initial_state()
    kept = start.parameters.clone()
    run(server, clients, 2, seed=1, workers=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(kept, start.parameters)
    assert all(parameter.grad is None for parameter in model.parameters())


# stop and resume

SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
import torch
torch.set_num_threads(1)
from test_federation import everything

def announce(state, uploads, round):
    print(round, flush=True)
    time.sleep(0.05)

everything(200, checkpoint={path!r}, observers=[announce])
"""


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    path = tmp_path / "run.pt"
    script = SCRIPT.format(folder=str(FOLDER), path=str(path))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"TQDM_DISABLE": "1"})
    try:
        for line in process.stdout:
            if int(line) >= 4:
                break
        time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    done = load_checkpoint(path)["round"]
    assert 4 <= done < 200
    resumed = everything(done + 3, order=-1, workers=4, checkpoint=path, observers=[lambda s, u, r: None])
    assert equal(resumed, everything(done + 3))


@pytest.mark.parametrize("every", [1, 3, 100])
def test_ctrl_c_keeps_every_finished_round_and_the_curve(tmp_path, every):
    path, curve = tmp_path / "run.pt", Recorder(lambda state: state.parameters.norm())

    def interrupt(state, uploads, round):
        if round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        everything(8, checkpoint=path, checkpoint_every=every, workers=2, observers=[curve, interrupt])
    assert "4 rounds were finished; the checkpoint run.pt holds 4" in caught.value.__notes__[0]
    assert load_checkpoint(path)["round"] == 4 and caught.value.state.round == 4
    again, whole = (Recorder(lambda state: state.parameters.norm()) for _ in range(2))
    resumed = everything(8, checkpoint=path, observers=[again, lambda s, u, r: None])
    assert equal(resumed, everything(8, observers=[whole])) and again.state_dict() == whole.state_dict()
    assert again.rounds == list(range(1, 9))


def test_a_finished_run_is_not_repeated_and_can_be_prolonged(tmp_path):
    path, calls = tmp_path / "run.pt", []
    observers = [lambda state, uploads, round: calls.append(round)]
    first = everything(3, checkpoint=path, observers=observers)
    assert equal(first, everything(3, checkpoint=path, observers=observers)) and calls == [0, 1, 2]
    assert equal(everything(5, checkpoint=path, observers=observers), everything(5)) and calls == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="has 5 rounds already, 2 are asked for"):
        everything(2, checkpoint=path)


@pytest.mark.parametrize(("change", "named"), [
    ({"seed": 8}, "seed was 7, now it is 8"), ({"server": {"momentum": 0.5}}, "server momentum was 0.9, now it is 0.5"),
    ({"server": {"rule": partial(mean_rule, by_size=False)}}, "server rule"),
])
def test_a_checkpoint_of_another_run_is_refused(tmp_path, change, named):
    everything(1, checkpoint=tmp_path / "run.pt")
    with pytest.raises(CheckpointError, match=named):
        everything(2, checkpoint=tmp_path / "run.pt", **change)


def test_a_changed_defence_is_refused(tmp_path):
    model, clients = make(defence=(Clip(1.0),))
    run(Server(model), clients, 1, 0, checkpoint=tmp_path / "run.pt")
    model, clients = make(defence=(Clip(2.0),))
    with pytest.raises(CheckpointError, match="client defence was .*1.0.* now it is .*2.0"):
        run(Server(model), clients, 2, 0, checkpoint=tmp_path / "run.pt")


@given(st.floats(0, 1))
def test_a_damaged_checkpoint_names_the_file_and_the_remedy(tmp_path_factory, share):
    folder = tmp_path_factory.mktemp("damaged")
    save_checkpoint(folder / "whole.pt", {"round": 1, "parameters": torch.zeros(50)})
    whole = (folder / "whole.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: int(share * (len(whole) - 1))])
    with pytest.raises(CheckpointError, match="cut.pt.*delete it to start again"):
        load_checkpoint(folder / "cut.pt")


def test_other_files_are_refused(tmp_path):
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    torch.save(network(), tmp_path / "pickle.pt")  # a pickled module: weights_only refuses it
    (tmp_path / "text.pt").write_text("hello")
    for name in ("other.pt", "pickle.pt", "text.pt", "missing.pt"):
        with pytest.raises(CheckpointError, match=name):
            load_checkpoint(tmp_path / name)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    everything(2, checkpoint=path)
    before = path.read_bytes()

    def full(content, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(federation.torch, "save", full)
    with pytest.raises(CheckpointError, match="run.pt.*No space left.*previous one is untouched") as caught:
        everything(4, checkpoint=path)
    assert path.read_bytes() == before and caught.value.state.round == 3
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    monkeypatch.undo()
    assert equal(everything(4, checkpoint=path), everything(4))


# aggregation

@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 40)), min_size=1, max_size=6, unique_by=lambda pair: pair[0]),
       st.randoms(use_true_random=False))
def test_mean_rule_is_the_weighted_mean_in_any_order(clients, random):
    state = GlobalState(0, torch.zeros(9))
    uploads = [Upload(number, 0, size, {"update": torch.randn(9, generator=coin(number))}) for number, size in clients]
    result = mean_rule(uploads, state)
    shuffled = list(uploads)
    random.shuffle(shuffled)
    assert torch.equal(result, mean_rule(shuffled, state))
    total = sum(size for _, size in clients)
    expected = sum(u.num_examples / max(total, 1) * u.tensors["update"].double() for u in uploads)
    torch.testing.assert_close(result.double(), torch.as_tensor(expected, dtype=torch.float64).expand(9), rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11])
def test_trap_06_identical_clients_give_the_identical_model(count):
    """Parameters, float buffers and the integer counter; weights sum to one, whatever the sizes."""
    model, (one,) = make(network(norm=True), sizes=(20,), batch_size=None)
    clients = [Client(number, model, one.inputs, one.targets, batch_size=None) for number in range(count)]
    server = Server(model, learning_rate=0.3)
    assert equal(run(server, clients, 3, seed=1), run(server, [one], 3, seed=1))


def test_trap_06_buffers_travel_and_are_averaged_by_rule():
    model, clients = make(network(norm=True), sizes=(8, 24))
    uploads = []
    state = run(Server(model), clients, 1, seed=1, observers=[lambda s, u, r: uploads.extend(u)])
    means = [upload.tensors["buffers.1.running_mean"] for upload in uploads]
    torch.testing.assert_close(state.buffers["1.running_mean"], 0.25 * means[0] + 0.75 * means[1])
    assert int(state.buffers["1.num_batches_tracked"]) == 1 and state.buffers["1.num_batches_tracked"].dtype == torch.int64
    model, clients = make(network(norm=True), share_buffers=False)
    state = run(Server(model), clients, 2, seed=1)
    assert int(state.buffers["1.num_batches_tracked"]) == 0


def test_trap_07_empty_clients_take_part_but_do_not_count():
    model, clients = make(sizes=(20, 0, 10))
    for rule in (mean_rule, partial(mean_rule, by_size=False)):
        uploads, server = [], Server(model, rule=rule)
        with_empty = run(server, clients, 3, seed=1, observers=[lambda s, u, r: uploads.extend(u)])
        without = run(server, [clients[0], clients[2]], 3, seed=1)
        assert torch.equal(with_empty.parameters, without.parameters)
        assert len(uploads) == 9 and all((u.tensors["update"] == 0).all() for u in uploads if u.client == 1)


def test_trap_08_an_empty_client_still_adds_noise_and_is_sent():
    """Its absence would be a message, so it is defended and counted like any other."""
    model, clients = make(sizes=(20, 0), defence=(Clip(1.0), GaussianNoise(1.0)))
    upload, _ = clients[1].fit(Server(model).initial_state(), {}, Streams(1), 0)
    assert upload.num_examples == 0 and upload.tensors["update"].std() > 0.5
    assert clients[1].promise() == clients[0].promise()


def test_trap_08_a_round_without_uploads_moves_nothing_but_the_round():
    class Nobody(Server):
        def sample(self, round, num_clients, streams):
            return []

    model, clients = make()
    state = run(Nobody(model, momentum=0.9), clients, 2, seed=1)
    assert state.round == 2 and torch.equal(state.parameters, Layout.of(model).flatten(model))


def test_server_momentum_is_torch_s():
    model, clients = make(sizes=(20,), batch_size=None)
    state = run(Server(model, learning_rate=0.1, momentum=0.9), clients, 4, seed=1)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(twin(clients[0].inputs), clients[0].targets).backward()
        optimizer.step()
    torch.testing.assert_close(state.parameters, Layout.of(twin).flatten(twin), rtol=0, atol=1e-6)


def test_hidden_everywhere_means_no_move_of_weight_or_velocity():
    size = Layout.of(network()).size
    shared = torch.arange(size) % 3 == 0
    state = GlobalState(0, torch.ones(size), memory={"velocity": torch.full((size,), 5.0)})
    rule = lambda uploads, state: torch.where(shared, 1.0, 0.0)
    uploads = [Upload(0, 0, 4, {"update": torch.ones(size) * shared, "mask": shared})]
    after = Server(network(), rule=rule, learning_rate=0.1, momentum=0.9).aggregate(state, uploads, 0)
    assert (after.memory["velocity"][~shared] == 5).all() and (after.parameters[~shared] == 1).all()
    torch.testing.assert_close(after.memory["velocity"][shared], torch.full((int(shared.sum()),), 5.5))
    uploads.append(Upload(1, 0, 0, {"update": torch.zeros(size), "mask": torch.ones(size, dtype=torch.bool)}))
    again = Server(network(), rule=rule, learning_rate=0.1, momentum=0.9).aggregate(state, uploads, 0)
    assert equal(after, again)  # an empty client's mask covers nothing


def test_masked_uploads_need_a_rule_that_knows_masks():
    state = GlobalState(0, torch.zeros(2))
    masked = Upload(3, 1, 5, {"update": torch.ones(2), "mask": torch.tensor([True, False])})
    with pytest.raises(UpdateError, match="client 3, round 1.*selected_mean"):
        mean_rule([masked], state)


def test_sampling_is_uniform_without_replacement_and_paired():
    """n = 2,000 rounds, 14 clients, 4.5 standard deviations: false-alarm rate below 1e-4."""
    server, counts = Server(network(), clients_per_round=6), np.zeros(14)
    for round in range(2000):
        chosen = server.sample(round, 14, Streams(4))
        assert len(set(chosen)) == 6 and chosen == sorted(chosen)
        counts[chosen] += 1
    assert np.abs(counts - 2000 * 6 / 14).max() < 4.5 * np.sqrt(2000 * (6 / 14) * (8 / 14))
    assert server.sample(3, 14, Streams(4)) == server.sample(3, 14, Streams(4))
    with pytest.raises(ValueError, match="a round needs 6 clients"):
        server.sample(0, 5, Streams(4))


def test_model_at_gives_the_network_of_a_state():
    model, clients = make(network(norm=True))
    server = Server(model)
    state = run(server, clients, 2, seed=1)
    made = server.model_at(state)
    assert not made.training and torch.equal(Layout.of(made).flatten(made), state.parameters)
    assert torch.equal(made[1].running_mean, state.buffers["1.running_mean"])


# defences and their promises

def test_trap_05_clip_keeps_zero_bounds_the_norm_and_names_the_client():
    context = Context(3, 8, 5, Layout.of(network()), GlobalState(8, torch.zeros(1)), {})
    with np.errstate(all="raise"):
        assert (Clip(1.0)({"update": torch.zeros(9)}, context, coin())["update"] == 0).all()
    long = Clip(0.7)({"update": torch.randn(1_000_000, generator=coin())}, context, coin())["update"]
    assert long.double().norm() <= 0.7 * (1 + 1e-6)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UpdateError, match="client 3, round 8"):
            Clip(1.0)({"update": torch.tensor([1.0, bad])}, context, coin())
    with pytest.raises(ValueError, match="clip_norm is 0"):
        Clip(0)


def test_noise_has_the_stated_scale():
    """n = 400,000, 5 standard errors: false-alarm rate 6e-7; a vector gives each entry its own scale."""
    tensors = {"update": torch.full((400_000,), 3.0)}
    noise = GaussianNoise(0.2)(tensors, None, coin(1))["update"] - 3
    assert abs(float(noise.double().std()) - 0.2) < 5 * 0.2 / np.sqrt(800_000)
    scales = torch.where(torch.arange(400_000) < 200_000, 0.5, 0.1)
    noise = GaussianNoise(scales)(tensors, None, coin(1))["update"] - 3
    for part, scale in ((noise[:200_000], 0.5), (noise[200_000:], 0.1)):
        assert abs(float(part.double().std()) - scale) < 5 * scale / np.sqrt(400_000)


def test_formal_promises_need_a_clip_right_before_the_noise():
    noise, clip, own = GaussianNoise(3.0), Clip(2.0), KeepLargest(1)
    kinds = {"": (), "c": (clip,), "n": (noise,), "cn": (clip, noise), "nc": (noise, clip), "ckn": (clip, own, noise),
             "kcn": (own, clip, noise), "cnk": (clip, noise, own), "cnc": (clip, noise, clip)}
    found = {name: promise_of(steps).kind for name, steps in kinds.items()}
    assert {name for name, kind in found.items() if kind == "formal"} == {"cn", "cnc"}  # own may send its choice
    own.blind_side_tensors = True
    assert promise_of((own, clip, noise)).kind == "formal"
    assert promise_of((clip, own, noise)).kind == "heuristic"  # it may lengthen what the clip had bounded
    assert found[""] == found["c"] == "none" and found["n"] == found["nc"] == found["cnk"] == found["kcn"] == "heuristic"
    assert promise_of((clip, Clip(5.0), noise)).noise_ratio == 1.5  # the tighter clip counts
    assert promise_of((clip, GaussianNoise(torch.tensor([4.0, 1.0])))).noise_ratio == 0.5  # the quietest entry
    assert promise_of((clip, GaussianNoise(torch.tensor([4.0, 0.0])))).kind == "none"


def test_trap_14_replace_one_doubles_the_sensitivity():
    promise = promise_of((Clip(2.0), GaussianNoise(3.0)))
    assert promise.event("add_remove").noise_multiplier == 1.5
    assert promise.event("replace_one").noise_multiplier == promise.event().noise_multiplier == 0.75
    with pytest.raises(ValueError, match="neighbouring is 'other'"):
        promise.event("other")
    with pytest.raises(ValueError, match="no account"):
        Promise("none", "nothing").event()


def test_buffers_void_the_promise_unless_they_stay():
    steps = (Clip(1.0), GaussianNoise(1.0))
    assert make(defence=steps)[1][0].promise().kind == "formal"
    assert make(network(norm=True), defence=steps)[1][0].promise().kind == "none"
    assert make(network(norm=True), defence=steps, share_buffers=False)[1][0].promise().kind == "formal"


def test_the_promise_gives_an_account():
    accounting = pytest.importorskip("privfl.accounting")
    promise = promise_of((Clip(1.0), GaussianNoise(10.0)))
    one, ten = (accounting.compose(events=[(promise.event("replace_one"), count)], delta=1e-5, neighbouring="replace_one")
                for count in (1, 10))
    assert 0 < one < ten < float("inf")


# bad input

@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_client_is_named_and_nothing_is_lost(tmp_path, bad, workers):
    class Breaks(Client):
        def local_update(self, model, state, memory, streams, round):
            update = super().local_update(model, state, memory, streams, round)
            return update * bad if (self.client_id, round) == (2, 3) else update

    model, clients = make(kind=Breaks)
    path, states = tmp_path / "run.pt", []
    with pytest.raises(UpdateError, match="client 2, round 3:.*3 rounds were finished; the checkpoint run.pt holds 3") as caught:
        run(Server(model), clients, 6, 1, workers, path, [lambda s, u, r: states.append(s)], checkpoint_every=10)
    assert equal(caught.value.state, states[-1]) and load_checkpoint(path)["round"] == 3
    assert threads_of_the_pool() == 0


def threads_of_the_pool() -> int:
    """Worker threads that are still alive."""
    import threading
    return sum(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate())


def test_bad_uploads_name_client_and_round():
    server, state = Server(network()), Server(network()).initial_state()
    size = len(state.parameters)
    good = Upload(4, 0, 3, {"update": torch.ones(size)}, {"quantity": "change"})
    for tensors in ({"update": torch.full((size,), float("nan"))}, {"update": torch.ones(3)}):
        with pytest.raises(UpdateError, match="client 4, round 0"):
            server.aggregate(state, [replace(good, tensors=tensors)], 0)
    with pytest.raises(UpdateError, match="uploads of rounds"):
        server.aggregate(state, [good], 1)
    with pytest.raises(UpdateError, match="mix"):
        server.aggregate(state, [good, replace(good, client=5, meta={"quantity": "gradient"})], 0)
    broken_rule = Server(network(), rule=lambda uploads, state: torch.zeros(2))
    with pytest.raises(UpdateError, match="the server's rule returned what is no update"):
        broken_rule.aggregate(state, [good], 0)


@pytest.mark.parametrize(("settings", "message"), [
    ({"algorithm": "sgd"}, "algorithm is 'sgd'"), ({"batch_size": 0}, "batch_size is 0"),
    ({"local_steps": 0}, "local_steps is 0"), ({"local_epochs": -1}, "local_epochs is -1"),
    ({"learning_rate": 0.0}, "learning_rate is 0"), ({"momentum": 1.0}, r"momentum is 1.0; it must be a number in \[0, 1\)"),
    ({"learning_rate": float("nan")}, "learning_rate is nan"), ({"learning_rate": float("inf")}, "learning_rate is inf"),
    ({"local_epochs": 2.5}, "local_epochs is 2.5"), ({"batch_size": 2.5}, "batch_size is 2.5"), ({"batch_size": True}, "batch_size is True"),
    ({"local_steps": "3"}, "local_steps is '3'"), ({"momentum": "0"}, "momentum is '0'"), ({"learning_rate": None}, "learning_rate is None"),
    ({"algorithm": "fedavg", "local_epochs": None}, "local_steps and local_epochs are both None"),
])
def test_bad_client_settings(settings, message):
    with pytest.raises(ValueError, match=f"client 0: .*{message}"):
        make(**settings)


def test_bad_runs_are_refused_before_anything_is_trained():
    model, clients = make()
    with pytest.raises(ValueError, match="0 clients"):
        run(Server(model), [], 1, 0)
    with pytest.raises(ValueError, match="none with an example"):
        run(Server(model), make(sizes=(0, 0))[1], 1, 0)
    with pytest.raises(ValueError, match="distinct"):
        run(Server(model), [clients[0], clients[0]], 1, 0)
    for settings in ({"rounds": -1}, {"rounds": 1, "workers": -1}):
        with pytest.raises(ValueError, match="is -1; it must be a whole number, at least 0"):
            run(Server(model), clients, seed=0, **settings)
    with pytest.raises(ValueError, match="one model"):
        run(Server(nn.Linear(2, 2)), clients, 1, 0)
    with pytest.raises(ValueError, match="3 inputs but 2 targets"):
        Client(0, model, torch.zeros(3, 6), torch.zeros(2, dtype=torch.long))
    for settings in ({"momentum": 1.0}, {"clients_per_round": 0}):
        with pytest.raises(ValueError, match="must be"):
            Server(model, **settings)
    with pytest.raises(ValueError, match="clients"):
        run(Server(model, clients_per_round=9), clients, 1, 0)


@pytest.mark.parametrize("name", ["rounds", "workers", "checkpoint_every"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5, True, np.True_, torch.tensor(True), "1", None, -1])
def test_counts_of_a_run_are_whole_numbers(name, value):
    model, clients = make()
    with pytest.raises(ValueError, match=f"{name} is .*whole number, at least {1 if name == 'checkpoint_every' else 0}"):
        run(Server(model), clients, **{"rounds": 1, "seed": 0, name: value})


def test_a_run_takes_a_server_clients_and_functions():
    model, clients = make()
    for given in (None, clients[0], [None], [*clients, 3]):
        with pytest.raises(ValueError, match="^clients .* a Client"):
            run(Server(model), given, 1, 0)
    for given in (None, model):
        with pytest.raises(ValueError, match="it must be a Server"):
            run(given, clients, 1, 0)
    for given in (None, [3], 3):
        with pytest.raises(ValueError, match="^observers .* a function"):
            run(Server(model), clients, 1, 0, observers=given)
    with pytest.raises(ValueError, match="checkpoint_every is 0"):
        run(Server(model), clients, 1, 0, checkpoint_every=0)
    seen = []
    run(Server(model), iter(clients), np.int64(1), 0, observers=iter([lambda *args: seen.append(args[2])]))
    assert seen == [0]


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0, "1", True, None])
def test_the_server_s_rate_is_finite_and_above_zero(rate):
    model, clients = make()
    with pytest.raises(ValueError, match="^learning_rate is .*finite number above 0"):
        Server(model, learning_rate=rate)
    server = Server(model, learning_rate=lambda round: rate if round == 1 else 0.1)
    with pytest.raises(ValueError, match="^round 1: the value of the server's learning_rate is .*finite number of at least 0") as caught:
        run(server, clients, 3, 0)
    assert caught.value.state.round == 1 and caught.value.state.parameters.isfinite().all()


def test_bad_numbers_of_a_server_and_of_the_steps():
    for settings in ({"learning_rate": 0.0}, {"momentum": "0"}, {"momentum": float("nan")}, {"clients_per_round": 1.5}, {"clients_per_round": True}):
        with pytest.raises(ValueError, match="it must be"):
            Server(network(), **settings)
    for bad in (True, "1", None, -1.0, float("inf"), float("nan"), torch.ones(2)):
        with pytest.raises(ValueError, match="clip_norm is .*finite number above 0"):
            Clip(bad)
    for bad in (True, "1", None, -1.0, float("inf"), float("nan"), 1j, torch.tensor([1.0, -1.0]), torch.tensor([1.0, torch.nan]), torch.ones(0)):
        with pytest.raises(ValueError, match="(?s)sigma is .*finite and at least 0"):
            GaussianNoise(bad)
    assert promise_of((Clip(1.0), GaussianNoise(0.0))).kind == "none"


def test_dropout_is_refused_because_it_uses_the_global_generator():
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))
    with pytest.raises(ValueError, match="dropout with p = 0.5"):
        make(model)
    make(model, training=False)
    make(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)))


def test_a_checkpoint_knows_its_data_weights_functions_and_observers(tmp_path):
    """Same sizes and the same seed are not the same run."""
    inputs, path, factor = torch.randn(60, 4, generator=coin(5)), tmp_path / "run.pt", 2.0

    def settings(shift=0.0, weights=0, loss=torch.nn.functional.cross_entropy, rate=0.1):
        model = initialise(torch.nn.Linear(4, 2), coin(weights))
        labels = (inputs[:, 0] > 0).long()
        return Server(model, learning_rate=rate), [Client(n, model, inputs[n::3] + shift, labels[n::3], loss=loss) for n in range(3)]

    run(*settings(), 2, 1, checkpoint=path)
    scaled = lambda outputs, labels: factor * torch.nn.functional.cross_entropy(outputs, labels)  # noqa: E731
    for changed in ({"shift": 1.0}, {"weights": 1}, {"loss": scaled}, {"rate": lambda round: 0.1}):
        with pytest.raises(CheckpointError, match="belongs to another run"):
            run(*settings(**changed), 3, 1, checkpoint=path)
    with pytest.raises(CheckpointError, match="memories of 0 observers, this run has 1"):
        run(*settings(), 3, 1, checkpoint=path, observers=[Recorder(lambda state: 0.0)])
    before = federation._plain(scaled)
    factor = 3.0
    assert federation._plain(scaled) != before and federation._plain(scaled) == federation._plain(scaled)
    assert run(*settings(), 3, 1, checkpoint=path).round == 3


def test_a_failing_client_is_named():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    lonely = Client(7, model, torch.ones(1, 4), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="client 7, round 0: training failed: Expected more than 1 value"):
        run(Server(model), [lonely], 1, 0)
