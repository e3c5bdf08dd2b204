"""FedSFR: clients that train through a channel, feature payloads, refinement, selection, and the server with its empty groups."""
import copy
from functools import partial

import pytest
import torch

from privfl.federation import GlobalState, Recorder, Server, Upload, UpdateError, run
from privfl.randomness import Streams
from privfl.semcom.fedsfr import (REFINEMENTS, FeaturePairs, FedSFRServer, JSCCClient, feature_pairs, public_error,
                                  reconstruction_loss, refine)
from privfl.semcom.jscc import DeepJSCC, jscc_loss, rayleigh, received_psnr, train_jscc
from privfl.semcom.uplink import Uplink, dequantise, public_window, quantise, sparse_mean, uplink_steps
from privfl.update import Layout

SHAPE = (4, 2, 2)  # features of an 8 x 8 image


def draw(seed: int = 0) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0) -> DeepJSCC:
    """A very small network."""
    return DeepJSCC(4, (4, 4, 4, 4), generator=draw(seed))


def pictures(count: int, seed: int = 1) -> torch.Tensor:
    """Smooth random images of 8 x 8 pixels."""
    coarse = torch.rand(count, 3, 2, 2, generator=draw(seed))
    return torch.nn.functional.interpolate(coarse, size=8, mode="bilinear")


def features(client: int, count: int, round: int = 0, seed: int = 2) -> Upload:
    """A feature sender's upload."""
    codes, limits = quantise(torch.randn(count, *SHAPE, generator=draw(seed + client)))
    return Upload(client, round, 10, {"features": codes, "range": limits})


def server(**settings) -> FedSFRServer:
    """A server with a public set of 20 images and 10 held out."""
    return FedSFRServer(settings.pop("model", network()), **{"public_images": pictures(20), "held_out": pictures(10, 3), "steps": 3, "batch_size": 4, **settings})


def uploads_of(shares=(0.1, 0.1, 0.3, 0.4), round: int = 0) -> tuple[list[Upload], GlobalState]:
    """A round of two feature and two gradient senders."""
    model, public = network(), pictures(20)
    steps = uplink_steps(Uplink(Layout.of(model).size, shares), model, public)
    state = Server(model).initial_state()
    clients = [JSCCClient(n, model, pictures(12, 10 + n), batch_size=4, local_steps=2, defence=(step,)) for n, step in enumerate(steps)]
    return [client.fit(state, {}, Streams(0), round)[0] for client in clients], state


# ---- the client -------------------------------------------------------------------------------------------------

def test_trap_views_local_training_leaves_the_global_model_alone():
    state = Server(network()).initial_state()
    before = state.parameters.clone()
    update = JSCCClient(0, network(), pictures(12), batch_size=4).fit(state, {}, Streams(0), 0)[0].tensors["update"]
    assert torch.equal(state.parameters, before) and float(update.abs().max()) > 1e-3


def test_a_client_is_adam_through_the_channel_step_by_step():
    """The same by hand: batches, channel noise of round and client, Adam."""
    from privfl.federation import batches
    model, images, streams = network(), pictures(12), Streams(5)
    layout = Layout.of(model)
    state = Server(model).initial_state()
    client = JSCCClient(3, model, images, batch_size=4, local_steps=4, learning_rate=2e-3, snr_db=7.0)
    update = client.fit(state, {}, streams, 2)[0].tensors["update"]
    copy_, noise = copy.deepcopy(model), streams.torch("channel", 2, 3)
    adam = torch.optim.Adam(copy_.parameters(), lr=2e-3)
    for batch in batches(12, 4, streams.torch("batch", 2, 3), 4):
        adam.zero_grad()
        jscc_loss(copy_, images[batch], 7.0, noise).backward()
        adam.step()
    assert torch.allclose(update, layout.flatten(copy_) - state.parameters, atol=1e-7)


def test_every_setting_of_the_client_reaches_its_update():
    base = dict(batch_size=4, local_steps=2)
    state = Server(network()).initial_state()
    update = lambda **more: JSCCClient(0, network(), pictures(12), **{**base, **more}).fit(state, {}, Streams(0), 0)[0].tensors["update"]
    first = update()
    for more in ({"snr_db": 3.0}, {"channel": partial(rayleigh, equalise=True)}, {"learning_rate": 2e-3}, {"local_steps": 3}, {"batch_size": 5}, {"algorithm": "fedsgd"}):
        assert not torch.equal(first, update(**more)), more


def test_channel_noise_belongs_to_round_and_client():
    state = Server(network()).initial_state()
    update = lambda client, round: JSCCClient(client, network(), pictures(4), batch_size=None, local_steps=1).fit(state, {}, Streams(0), round)[0].tensors["update"]
    found = [update(0, 0), update(1, 0), update(0, 1)]
    assert torch.equal(found[0], update(0, 0)) and not torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.parametrize("workers", [0, 3])
def test_workers_and_other_clients_change_nothing(workers):
    model, public = network(), pictures(20)
    steps = uplink_steps(Uplink(Layout.of(model).size, (0.1, 0.1, 0.3, 0.4)), model, public, 0.01, 0.01, 0.005)
    clients = [JSCCClient(n, model, pictures(12, 10 + n), batch_size=4, local_steps=2, defence=(step,)) for n, step in enumerate(steps)]
    states = [run(server(model=model, selection="held-out"), order, 3, 0, workers=workers) for order in (clients, clients[::-1])]
    assert torch.equal(states[0].parameters, states[1].parameters)
    reference = run(server(model=model, selection="held-out"), clients, 3, 0)
    assert torch.equal(states[0].parameters, reference.parameters)


def test_a_run_that_was_interrupted_continues_to_the_same_bits(tmp_path):
    model, public = network(), pictures(20)
    steps = uplink_steps(Uplink(Layout.of(model).size, (0.1, 0.4)), model, public, 0.01, 0.01, 0.005)
    clients = [JSCCClient(n, model, pictures(12, 10 + n), batch_size=4, local_steps=2, defence=(step,)) for n, step in enumerate(steps)]
    make = lambda: server(model=model, selection="held-out")
    run(make(), clients, 2, 0, checkpoint=tmp_path / "run.pt")
    resumed = run(make(), clients, 4, 0, checkpoint=tmp_path / "run.pt")
    straight = run(make(), clients, 4, 0)
    assert torch.equal(resumed.parameters, straight.parameters) and torch.equal(resumed.memory["selection"], straight.memory["selection"])


# ---- features ---------------------------------------------------------------------------------------------------

def test_pairs_are_the_images_of_the_round_and_every_sender_counts_the_same():
    pairs = feature_pairs([features(1, 3, 4), features(0, 5, 4)], 20, SHAPE, 4)
    assert pairs.positions.tolist() == public_window(20, 5, 4).tolist() + public_window(20, 3, 4).tolist()
    assert torch.allclose(pairs.weights, torch.tensor([0.1] * 5 + [1 / 6] * 3))
    assert torch.allclose(pairs.features.square().flatten(1).mean(1), torch.ones(8), atol=1e-5)
    codes = features(0, 5, 4).tensors
    ratio = pairs.features[:5] / dequantise(codes["features"], codes["range"])
    assert torch.allclose(ratio, ratio[:, :1, :1, :1].expand_as(ratio), rtol=1e-3)  # only the power is restored


def test_pairs_without_senders_are_empty():
    for uploads in ([], [features(0, 0)], [Upload(0, 0, 5, {})], [Upload(0, 0, 0, features(0, 3).tensors)]):
        pairs = feature_pairs(uploads, 20, SHAPE, 0)
        assert len(pairs) == 0 and pairs.features.shape == (0, *SHAPE) and pairs.weights.shape == (0,)


BAD = {
    "another shape": lambda good: {**good, "features": good["features"][:, :2]}, "floats": lambda good: {**good, "features": good["features"].float()},
    "too many": lambda good: {**good, "features": good["features"].repeat(9, 1, 1, 1)}, "no range": lambda good: {"features": good["features"]},
    "range of NaN": lambda good: {**good, "range": torch.tensor([0.0, float("nan")])}, "range turned": lambda good: {**good, "range": torch.tensor([1.0, 0.0])},
}


@pytest.mark.parametrize("fault", BAD)
def test_a_broken_payload_is_refused_with_client_and_round(fault):
    good = features(7, 5, 2)
    with pytest.raises(UpdateError, match="client 7, round 2"):
        feature_pairs([Upload(7, 2, 10, BAD[fault](good.tensors))], 20, SHAPE, 2)


# ---- the loss and the steps -------------------------------------------------------------------------------------

def test_the_loss_is_the_sum_of_its_two_terms():
    model, images = network(), pictures(6)
    codes = torch.randn(6, *SHAPE, generator=draw(4))
    with torch.no_grad():
        decoder = (model.decoder(codes) - images).square().mean()
        encoder = (model.encoder(images) - codes).square().mean()
        for beta in (0.0, 0.1, 2.0):
            assert torch.isclose(reconstruction_loss(model, images, codes, draw(), beta), decoder + beta * encoder, rtol=1e-5)
        noisy = [reconstruction_loss(model, images, codes, draw(), 0.0, 5.0) for _ in range(2)]
    assert noisy[0] == noisy[1] != decoder


def pairs_of(count: int = 6) -> FeaturePairs:
    """Features of one sender."""
    return feature_pairs([features(0, count)], 20, SHAPE, 0)


@pytest.mark.parametrize("kind", REFINEMENTS)
def test_refinements_read_what_they_say(kind):
    """Other features change the result exactly where features are read; another public set (same features) where images are."""
    def weights(pairs, public):
        model = network()
        refine(model, public, pairs, draw(), kind, steps=3, batch_size=4)
        return Layout.of(model).flatten(model)
    first, public = pairs_of(), pictures(20)
    other = FeaturePairs(first.positions, -first.features, first.weights)
    base = weights(first, public)
    assert torch.equal(base, weights(first, public))
    assert torch.equal(base, weights(other, public)) == (kind in ("none", "public"))
    assert torch.equal(base, weights(first, 1 - public)) == (kind == "none")
    assert torch.equal(base, Layout.of(network()).flatten(network())) == (kind == "none")


def test_refinement_settings_are_used():
    def weights(**more):
        model = network()
        losses = refine(model, pictures(20), pairs_of(), draw(), **{"kind": "both", "steps": 3, "batch_size": 4, **more})
        return Layout.of(model).flatten(model), len(losses)
    base, count = weights()
    assert count == 3
    for more in ({"steps": 4}, {"learning_rate": 3e-3}, {"batch_size": 5}, {"beta": 5.0}, {"snr_db": 0.0}, {"feature_snr_db": 0.0}, {"channel": rayleigh}):
        assert not torch.equal(base, weights(**more)[0]), more


def test_the_encoder_moves_towards_the_features_only_with_beta():
    pairs, public = pairs_of(), pictures(20)
    gap = lambda model: float((model.encoder(public[pairs.positions]) - pairs.features).square().mean().detach())
    gaps = {}
    for beta in (0.0, 1.0):
        model = network()
        refine(model, public, pairs, draw(), "features", steps=40, batch_size=6, learning_rate=5e-3, beta=beta)
        gaps[beta] = gap(model)
    assert gaps[0.0] == pytest.approx(gap(network()), abs=1e-6) and gaps[1.0] < 0.9 * gaps[0.0]


# ---- the server -------------------------------------------------------------------------------------------------

def test_without_refinement_it_is_federated_averaging():
    uploads, state = uploads_of()
    plain = Server(network(), rule=sparse_mean).aggregate(state, uploads, 0)
    assert torch.equal(server(refinement="none").aggregate(state, uploads, 0).parameters, plain.parameters)


def test_empty_groups():
    uploads, state = uploads_of()
    gradients = [upload for upload in uploads if "indices" in upload.tensors]
    sparse = state.parameters + sparse_mean(uploads, state)
    assert torch.equal(server().aggregate(state, gradients, 0).parameters, sparse)  # nothing to reconstruct from
    alone = server().aggregate(state, [upload for upload in uploads if "features" in upload.tensors], 0)
    assert not torch.equal(alone.parameters, state.parameters)
    assert server().aggregate(state, [], 0).parameters is state.parameters
    assert not torch.equal(server(refinement="public").aggregate(state, gradients, 0).parameters, sparse)


@pytest.mark.parametrize("selection", ["public", "held-out"])
def test_selection_keeps_the_smaller_error_on_the_images_that_it_names(selection):
    uploads, state = uploads_of()
    kept = set()
    for rate in (1e-2, 30.0):  # the second destroys the model
        chooser = server(selection=selection, refinement="public", refinement_rate=rate, steps=60, held_out=pictures(20)[::2])
        chosen = chooser.aggregate(state, uploads, 0)
        averaged = server(refinement="none").aggregate(state, uploads, 0)
        refined = server(refinement="public", refinement_rate=rate, steps=60).aggregate(state, uploads, 0)
        images = chooser.public_images if selection == "public" else chooser.held_out
        errors = [public_error(chooser.model_at(one), images, 10.0, Streams(0).torch("selection", 0)) for one in (averaged, refined)]
        assert chosen.memory["selection"].tolist() == pytest.approx(errors)
        best = averaged if errors[0] < errors[1] else refined
        assert torch.equal(chosen.parameters, best.parameters)
        kept.add(best is refined)
    assert kept == {True, False}


def test_public_error_is_the_mean_over_all_images():
    model, images = network(), pictures(7)
    whole = float((model(images) - images).square().mean().detach())
    assert public_error(model, images, float("inf"), draw(), batch_size=3) == pytest.approx(whole, rel=1e-5)


def test_clean_features_are_an_option_and_the_seed_counts():
    uploads, state = uploads_of()
    base = server().aggregate(state, uploads, 0).parameters
    assert not torch.equal(base, server(channel_in_refinement=False).aggregate(state, uploads, 0).parameters)
    assert not torch.equal(base, server(seed=1).aggregate(state, uploads, 0).parameters)
    assert torch.equal(base, server().aggregate(state, uploads, 0).parameters)


def test_a_federation_learns():
    """PSNR rises by more than .3 dB over eight rounds of the control; fixed seeds, no statistics."""
    model, public = network(), pictures(20)
    steps = uplink_steps(Uplink(Layout.of(model).size, (0.3, 0.4)), model, public)
    clients = [JSCCClient(n, model, pictures(24, 10 + n), batch_size=8, learning_rate=5e-3, defence=(step,)) for n, step in enumerate(steps)]
    test = pictures(20, 99)
    boss = server(model=model, public_images=pictures(200, 7), refinement="public", refinement_rate=5e-3, steps=30, batch_size=8, selection="held-out")
    watch = Recorder(lambda state: received_psnr(boss.model_at(state), test, 10.0, draw()).mean())
    run(boss, clients, 8, 0, observers=(watch,))
    assert watch.values[-1] > watch.values[0] + 0.3


@pytest.mark.parametrize("settings, words", [
    ({"refinement": "feature"}, "refinement"), ({"selection": "held out"}, "selection"), ({"public_images": None}, "public_images"), ({"held_out": None, "selection": "held-out"}, "held_out"),
    ({"public_images": torch.rand(4, 1, 8, 8)}, "public_images"), ({"public_images": 2 * pictures(4)}, "public_images"), ({"public_images": pictures(4)[:0]}, "public_images"),
    ({"public_images": pictures(4) * float("nan")}, "public_images"), ({"steps": 0}, "steps"), ({"batch_size": 2.5}, "batch_size"), ({"refinement_rate": 0}, "refinement_rate"), ({"beta": -1}, "beta"),
    ({"snr_db": float("nan")}, "snr_db"), ({"seed": -1}, "seed"), ({"selection": "public", "refinement": "none"}, "selection"), ({"model": torch.nn.Linear(2, 2)}, "model"), ({"public_images": "x"}, "public_images"),
])
def test_bad_settings_of_the_server(settings, words):
    with pytest.raises(ValueError, match=words):
        server(**settings)


@pytest.mark.parametrize("settings, words", [({"snr_db": "x"}, "snr_db"), ({"learning_rate": 0.0}, "learning_rate"), ({"model": torch.nn.Linear(2, 2)}, "model"), ({"local_steps": 0}, "local_steps")])
def test_bad_settings_of_the_client(settings, words):
    with pytest.raises(ValueError, match=words):
        JSCCClient(**{"client_id": 0, "model": network(), "inputs": pictures(4), **settings})


@pytest.mark.parametrize("settings, words", [({"kind": "x"}, "kind"), ({"steps": 0}, "steps"), ({"learning_rate": -1}, "learning_rate")])
def test_bad_settings_of_the_refinement(settings, words):
    with pytest.raises(ValueError, match=words):
        refine(network(), pictures(20), pairs_of(), draw(), **settings)


def test_infinite_snr_is_a_channel_without_noise():
    uploads, state = uploads_of()
    assert torch.isfinite(server(snr_db=float("inf"), selection="held-out").aggregate(state, uploads, 0).parameters).all()
    assert train_jscc(network(), pictures(8), 1, draw(), float("inf"))
