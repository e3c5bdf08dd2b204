"""Random selection: masks, aggregation, the rule, the defence step, and the victims."""
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import privfl.selection as selection
from privfl.federation import Client, Clip, GaussianNoise, GlobalState, Server, Upload, mean_rule, promise_of, run
from privfl.randomness import Streams
from privfl.selection import (
    ConvNet, LeNetGELU, Normalise, RandomSelection, added_variance, aggregate_selected, expected_coverage, initialise,
    random_mask, selected_mean,
)
from privfl.update import Layout, UpdateError, buffers_of


def coin(seed: int = 0) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(seed)


@st.composite
def matrices(draw):
    """Values (N, d), masks (N, d) and positive weights (N,)."""
    clients, size, seed = draw(st.integers(1, 6)), draw(st.integers(1, 30)), draw(st.integers(0, 10_000))
    values = torch.randn(clients, size, generator=coin(seed), dtype=draw(st.sampled_from([torch.float32, torch.float64])))
    masks = random_mask(clients * size, draw(st.sampled_from([0.0, 0.2, 0.5, 0.9])), coin(seed + 1)).view(clients, size)
    weights = draw(st.lists(st.integers(1, 50), min_size=clients, max_size=clients))
    return values, masks, weights


# masks

@given(st.integers(0, 200), st.floats(0, 0.99), st.integers(0, 10_000))
def test_mask_is_boolean_of_the_size_and_repeats(size, rate, seed):
    mask = random_mask(size, rate, coin(seed))
    assert mask.dtype == torch.bool and mask.shape == (size,)
    assert torch.equal(mask, random_mask(size, rate, coin(seed)))


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 10_000))
def test_masks_of_one_generator_are_nested(first, second, seed):
    low, high = sorted((first, second))
    assert (random_mask(100, high, coin(seed)) <= random_mask(100, low, coin(seed))).all()


def test_mask_rate_is_what_was_asked_for():
    """n = 200,000 coins per rate, 5 standard errors: false-alarm rate 6e-7 each."""
    for rate in (0.0, 0.01, 0.2, 0.5, 0.8, 0.99):
        share = random_mask(200_000, rate, coin(3)).double().mean()
        assert abs(share - (1 - rate)) <= 5 * np.sqrt(rate * (1 - rate) / 200_000)


@pytest.mark.parametrize("rate", [1.0, 1, -0.01, 2, float("nan"), float("inf"), "half", None])
def test_masking_rate_outside_its_range_says_what_is_allowed(rate):
    for call in (lambda: random_mask(4, rate, coin()), lambda: RandomSelection(rate),
                 lambda: expected_coverage(rate, 3), lambda: added_variance(rate, 3)):
        with pytest.raises(ValueError, match=r"masking_rate is .*\[0, 1\)"):
            call()


def test_mask_draws_from_its_generator_only():
    before = torch.get_rng_state()
    random_mask(1000, 0.5, coin())
    assert torch.equal(before, torch.get_rng_state())


# aggregation

@given(matrices())
def test_aggregate_equals_the_loop(case):
    values, masks, weights = case
    for given_weights in (None, weights):
        sizes = given_weights or [1.0] * len(values)
        result = aggregate_selected(values, masks, weights=given_weights)
        for entry in range(values.shape[1]):
            shared = [(w, float(v)) for w, v, m in zip(sizes, values[:, entry], masks[:, entry]) if m]
            expected = sum(w * v for w, v in shared) / sum(w for w, _ in shared) if shared else 0.0
            assert abs(float(result[entry]) - expected) < 1e-5
        assert result.dtype == values.dtype


@given(matrices(), st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e38]))
def test_hidden_entries_are_ignored_whatever_they_hold(case, rubbish):
    values, masks, weights = case
    dirty = torch.where(masks, values, torch.tensor(rubbish, dtype=values.dtype))
    assert torch.equal(aggregate_selected(dirty, masks, weights=weights), aggregate_selected(values, masks, weights=weights))


@given(matrices())
def test_aggregate_lies_between_the_shared_values_and_falls_back_to_previous(case):
    values, masks, _ = case
    previous = torch.full(values.shape[1:], 7.0)
    result = aggregate_selected(values, masks, previous=previous)
    covered = masks.any(0)
    low = torch.where(masks, values, torch.inf).amin(0)[covered]
    high = torch.where(masks, values, -torch.inf).amax(0)[covered]
    assert (result[covered] >= low - 1e-6).all() and (result[covered] <= high + 1e-6).all()
    assert (result[~covered] == 7).all()
    assert (aggregate_selected(values, masks)[~covered] == 0).all()


@given(matrices(), st.randoms(use_true_random=False))
def test_aggregate_does_not_depend_on_the_scale_of_the_weights(case, random):
    values, masks, weights = case
    scaled = [weight * 3.0 for weight in weights]
    torch.testing.assert_close(aggregate_selected(values, masks, weights=weights),
                               aggregate_selected(values, masks, weights=scaled))


def test_equal_clients_come_out_unchanged():
    row = torch.randn(5000, generator=coin(1))
    masks = random_mask(7 * 5000, 0.5, coin(2)).view(7, -1)
    result = aggregate_selected(row.expand(7, -1), masks)
    assert torch.equal(result, torch.where(masks.any(0), row, 0))


def test_masked_weights_equal_masked_changes():
    """FedAvg on weights with `previous` is the same model as on changes (paper: weights; ours: changes)."""
    before = torch.randn(300, generator=coin(1), dtype=torch.float64)
    local = before + torch.randn(4, 300, generator=coin(2), dtype=torch.float64)
    masks = random_mask(1200, 0.6, coin(3)).view(4, 300)
    torch.testing.assert_close(aggregate_selected(local, masks, previous=before),
                               before + aggregate_selected(local - before, masks), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("change", "message"), [
    ({"masks": torch.ones(2, 2, dtype=torch.bool)}, "one flag per value"),
    ({"masks": torch.ones(2, 3)}, "torch.bool"),
    ({"values": torch.ones(3)}, r"shape \(N, d\)"),
    ({"values": torch.ones(2, 3, dtype=torch.int64)}, "floating point"),
    ({"values": torch.ones(0, 3), "masks": torch.ones(0, 3, dtype=torch.bool)}, "N >= 1"),
    ({"previous": torch.ones(2)}, "previous has shape"),
    ({"weights": [1.0]}, "weights are"),
    ({"weights": [1.0, -1.0]}, "weights are"),
    ({"weights": [0.0, 0.0]}, "weights are"),
    ({"weights": [1.0, float("nan")]}, "weights are"),
    ({"values": torch.tensor([[1.0, 1, 1], [1, float("nan"), 1]])}, "row 1"),
    ({"values": torch.tensor([[1.0, float("inf"), 1], [1, 1, 1]])}, "row 0"),
])
def test_bad_matrices_say_what_is_wrong(change, message):
    good = {"values": torch.ones(2, 3), "masks": torch.ones(2, 3, dtype=torch.bool)}
    with pytest.raises(ValueError, match=message):
        aggregate_selected(**(good | change))


def test_trap_25_zero_weights_are_not_masked_ones():
    """True zeros count in the mean, size weights too; a float mask, which invites guessing, is refused."""
    values = torch.tensor([[0.0, 0.0], [4.0, 0.0]])
    shared = torch.ones(2, 2, dtype=torch.bool)
    assert aggregate_selected(values, shared).tolist() == [2, 0]
    assert aggregate_selected(values, shared, weights=[3, 1]).tolist() == [1, 0]
    assert aggregate_selected(values, shared, previous=torch.full((2,), 9.0)).tolist() == [2, 0]
    step = RandomSelection(0.0)({"update": torch.zeros(5)}, None, coin())
    assert step["mask"].all()  # an update of zeros is shared, not hidden
    state = GlobalState(0, torch.full((2,), 5.0))
    uploads = [Upload(n, 0, 10, {"update": values[n], "mask": shared[n]}) for n in range(2)]
    assert selected_mean(uploads, state).tolist() == [2, 0]


def test_trap_25_a_client_without_weight_shares_nothing_that_counts():
    values, masks = torch.tensor([[1.0], [5.0]]), torch.tensor([[False], [True]])
    assert aggregate_selected(values, masks, weights=[1.0, 0.0], previous=torch.tensor([9.0])).tolist() == [9]


# theory

@pytest.mark.parametrize(("rate", "clients"), [(0.2, 2), (0.5, 2), (0.5, 5), (0.8, 5), (0.8, 10), (0.9, 3)])
def test_expected_update_is_one_minus_r_to_the_n(rate, clients):
    """n = 40,000 entries, 5 standard errors: false-alarm rate 6e-7 per case."""
    held = torch.linspace(0.0, 2.0, clients, dtype=torch.float64)
    masks = random_mask(clients * 40_000, rate, coin(clients)).view(clients, -1)
    draws = aggregate_selected(held[:, None].expand(-1, 40_000), masks)
    assert abs(draws.mean() - (1 - rate**clients)) < 5 * draws.std() / 200
    assert expected_coverage(rate, clients) == 1 - rate**clients
    if rate * clients >= 1:
        assert 1 - rate * clients <= 0 < draws.mean()  # the printed factor has the wrong sign


@pytest.mark.parametrize(("rate", "clients"), [(0.2, 2), (0.5, 5), (0.8, 5), (0.8, 10)])
def test_added_variance_is_exact(rate, clients):
    """Against the sum over all masks: no sampling error."""
    held = np.linspace(-1, 2, clients) ** 2
    mean, second, mass = 0.0, 0.0, 0.0
    for coins in itertools.product((0, 1), repeat=clients):
        shown = np.array(coins)
        if shown.any():
            chance = (1 - rate) ** shown.sum() * rate ** (clients - shown.sum())
            value = (held * shown).sum() / shown.sum()
            mean, second, mass = mean + chance * value, second + chance * value**2, mass + chance
    variance = second / mass - (mean / mass) ** 2
    assert abs(mean / mass - held.mean()) < 1e-12  # unbiased where somebody shares
    assert abs(variance - held.var(ddof=1) * added_variance(rate, clients)) < 1e-12


def test_added_variance_limits_and_bad_counts():
    assert added_variance(0.0, 7) == 0 and added_variance(0.5, 1) == 0
    assert abs(added_variance(1 - 1e-9, 4) - 0.75) < 1e-6
    assert added_variance(0.5, 2000) < 1e-3  # many clients: no overflow
    for call, count in itertools.product((expected_coverage, added_variance), (0, -1, 1.5, float("nan"), True, "2", None)):
        with pytest.raises(ValueError, match=f"num_clients is {count!r}; it must be a whole number"):
            call(0.5, count)


@pytest.mark.parametrize(("size", "generator", "words"), [(1.5, "seeded", "size is 1.5"), (-1, "seeded", "size is -1"), (True, "seeded", "size is True"),
                                                          (3, None, "generator is None")])
def test_a_mask_needs_a_whole_size_and_a_generator(size, generator, words):
    with pytest.raises(ValueError, match=words):
        random_mask(size, 0.5, coin() if generator == "seeded" else generator)


def test_size_weights_are_biased_towards_equal_weights():
    """n = 100,000, 5 standard errors; the large client's weight lies between 1/N and its share."""
    masks = random_mask(2 * 100_000, 0.8, coin(5)).view(2, -1)
    held = torch.tensor([[1.0], [0.0]], dtype=torch.float64).expand(-1, 100_000)
    draws = aggregate_selected(held, masks, weights=[9, 1])[masks.any(0)]
    both, one = 0.2 * 0.2, 0.2 * 0.8
    exact = (both * 0.9 + one * 1.0) / (both + 2 * one)
    assert abs(draws.mean() - exact) < 5 * draws.std() / np.sqrt(len(draws))
    assert 0.5 < exact < 0.9


# the defence step and the rule

def test_step_zeroes_what_it_hides_and_sends_the_mask():
    tensors = RandomSelection(0.5)({"update": torch.ones(1000), "features": torch.ones(2)}, None, coin())
    assert torch.equal(tensors["update"], tensors["mask"].float()) and set(tensors) == {"update", "features", "mask"}
    again = RandomSelection(0.5)(tensors, None, coin(1))
    assert (again["mask"] <= tensors["mask"]).all()  # a second step hides more, and never shows again


def test_step_promises_nothing_formal_and_leaves_the_account_to_the_noise():
    step = RandomSelection(0.5)
    assert step.promise.kind == "heuristic" and "1 - R^k" in step.promise.reason
    with pytest.raises(ValueError, match="no account"):
        step.promise.event()
    alone = promise_of([Clip(2.0), GaussianNoise(3.0)])
    assert promise_of([step]).kind == promise_of([Clip(2.0), step]).kind == "heuristic"
    assert promise_of([Clip(2.0), step, GaussianNoise(3.0)]) == alone == promise_of([Clip(2.0), GaussianNoise(3.0), step])


def test_noise_after_selection_stays_on_shared_entries():
    tensors = RandomSelection(0.5)({"update": torch.ones(1000)}, None, coin())
    noisy = GaussianNoise(1.0)(tensors, None, coin(1))
    assert (noisy["update"][~tensors["mask"]] == 0).all() and (noisy["update"][tensors["mask"]] != 1).all()


def test_rule_ignores_empty_clients_and_order():
    state = GlobalState(0, torch.zeros(3))
    shared = torch.ones(3, dtype=torch.bool)
    uploads = [Upload(n, 0, size, {"update": torch.full((3,), float(n)), "mask": shared}) for n, size in ((1, 30), (2, 10), (9, 0))]
    assert selected_mean(uploads, state).tolist() == selected_mean(uploads[::-1], state).tolist() == [1.5] * 3
    assert partial(selected_mean, by_size=True)(uploads, state).tolist() == [1.25] * 3
    assert selected_mean(uploads[2:], state).tolist() == [0] * 3


def test_rule_names_the_client_that_is_wrong():
    state, shared = GlobalState(0, torch.zeros(3)), torch.ones(3, dtype=torch.bool)
    for tensors in ({"update": torch.ones(3)}, {"update": torch.ones(2), "mask": shared},
                    {"update": torch.tensor([1.0, float("nan"), 0]), "mask": shared}):
        with pytest.raises(UpdateError, match="client 6, round 4"):
            selected_mean([Upload(6, 4, 5, tensors)], state)
    hidden = {"update": torch.tensor([1.0, float("nan"), 0]), "mask": torch.tensor([True, False, True])}
    assert selected_mean([Upload(6, 4, 5, hidden)], state).tolist() == [1, 0, 0]


def problem(clients=4, rate=0.5, sizes=(40, 30, 30, 20), algorithm="fedsgd", **settings):
    """A linear federation on random data."""
    model = initialise(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), coin(1))
    made, generator = [], coin(2)
    for number in range(clients):
        inputs = torch.randn(sizes[number], 6, generator=generator)
        targets = torch.randint(3, (sizes[number],), generator=generator)
        made.append(Client(number, model, inputs, targets, algorithm=algorithm, batch_size=8,
                           defence=(RandomSelection(rate),) if rate is not None else (), **settings))
    return model, made


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_rate_zero_is_the_plain_mean(algorithm):
    model, masked = problem(rate=0.0, algorithm=algorithm)
    _, plain = problem(rate=None, algorithm=algorithm)
    settings = dict(learning_rate=0.1, momentum=0.9)
    first = run(Server(model, rule=selected_mean, **settings), masked, 5, seed=1)
    second = run(Server(model, rule=partial(mean_rule, by_size=False), **settings), plain, 5, seed=1)
    torch.testing.assert_close(first.parameters, second.parameters, rtol=0, atol=1e-6)


def test_masks_are_fresh_per_client_and_round():
    model, clients = problem()
    masks = []
    run(Server(model, rule=selected_mean), clients, 3, seed=1,
        observers=[lambda state, uploads, round: masks.extend(u.tensors["mask"] for u in uploads)])
    assert len(masks) == 12 and len({tuple(mask.tolist()) for mask in masks}) == 12


def test_arms_with_other_rates_see_the_same_batches():
    """Contrasts are paired: the batches, so at R = 0 and R = 0.5 the shared gradients of round 0, are the same."""
    seen = {}
    for rate in (0.0, 0.5):
        model, clients = problem(rate=rate)
        run(Server(model, rule=selected_mean), clients, 1, seed=1,
            observers=[lambda state, uploads, round: seen.setdefault(rate, uploads)])
    for whole, part in zip(seen[0.0], seen[0.5]):
        assert torch.equal(torch.where(part.tensors["mask"], whole.tensors["update"], 0), part.tensors["update"])


def test_where_nobody_shares_neither_weight_nor_velocity_moves():
    model, clients = problem(clients=1, rate=0.7, sizes=(40,))
    server = Server(model, rule=selected_mean, learning_rate=0.1, momentum=0.9)
    states, masks = [server.initial_state()], []

    def watch(state, uploads, round):
        states.append(state)
        masks.append(uploads[0].tensors["mask"])

    run(server, clients, 4, seed=1, observers=[watch])
    for before, after, mask in zip(states, states[1:], masks):
        old = before.memory.get("velocity", torch.zeros_like(mask, dtype=torch.float32))
        assert torch.equal(after.parameters[~mask], before.parameters[~mask])
        assert torch.equal(after.memory["velocity"][~mask], old[~mask])
        assert (after.parameters[mask] != before.parameters[mask]).any()


def test_trap_09_masked_runs_do_not_depend_on_workers_or_order():
    results = []
    for workers, order in ((0, 1), (1, -1), (4, 1), (4, -1)):
        model, clients = problem(algorithm="fedavg", momentum=0.9)
        results.append(run(Server(model, clients_per_round=3, rule=selected_mean, momentum=0.5), clients[::order], 4, 3, workers))
    assert all(torch.equal(results[0].parameters, other.parameters) for other in results[1:])


def test_trap_06_buffers_are_averaged_unmasked():
    model = ConvNet(width=4, norm="batch")
    inputs = torch.rand(24, 3, 32, 32, generator=coin(1))
    clients = [Client(n, model, inputs[n::3], torch.arange(8), batch_size=8, defence=(RandomSelection(0.9),)) for n in range(3)]
    uploads = []
    state = run(Server(model, rule=selected_mean), clients, 1, seed=0, observers=[lambda s, u, r: uploads.extend(u)])
    name = "features.1.running_mean"
    mean = torch.stack([upload.tensors["buffers." + name] for upload in uploads]).mean(0)
    torch.testing.assert_close(state.buffers[name], mean, rtol=0, atol=1e-7)
    assert int(state.buffers["features.1.num_batches_tracked"]) == 1


# models

def test_models_have_the_stated_sizes_and_no_hidden_state():
    images = torch.rand(2, 3, 32, 32, generator=coin(1))
    for model, size in ((LeNetGELU(), 15_826), (ConvNet(width=16, norm="group"), 45_562)):
        assert Layout.of(model).size == size and model(images).shape == (2, 10) and not buffers_of(model)
    assert len(buffers_of(ConvNet(norm="batch"))) == 15
    assert LeNetGELU(num_classes=4)(images).shape == (2, 4)
    with pytest.raises(ValueError, match="norm is 'layer'"):
        ConvNet(norm="layer")


@given(st.integers(1, 20), st.sampled_from(["group", "batch", "none"]))
def test_any_width_works(width, norm):
    with torch.no_grad():
        assert ConvNet(width, norm).eval()(torch.zeros(1, 3, 32, 32)).isfinite().all()


def test_trap_20_building_a_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    models = [LeNetGELU(), ConvNet(), ConvNet(norm="batch"), LeNetGELU(generator=coin(4))]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(models[0].head.weight, LeNetGELU().head.weight)
    assert not torch.equal(models[0].head.weight, models[3].head.weight)
    assert torch.equal(models[3].head.weight, LeNetGELU(generator=coin(4)).head.weight)


def test_initial_weights_follow_torch_s_law():
    """Kolmogorov distance of 76,800 weights to the uniform law; 2.1 / sqrt(n) has a false-alarm rate of 3e-4."""
    layer = initialise(nn.Linear(256, 300), coin(1))
    values = np.sort(layer.weight.detach().flatten().numpy().astype(float))
    expected = (values * 16 + 1) / 2
    distance = np.abs(expected - np.arange(1, len(values) + 1) / len(values)).max()
    assert distance < 2.1 / np.sqrt(len(values)) and values[0] >= -1 / 16 and values[-1] <= 1 / 16
    assert layer.bias.abs().max() <= 1 / 16


def test_normalisation_is_inside_and_follows_the_dtype():
    images = torch.rand(2, 3, 32, 32, generator=coin(1))
    layer = Normalise((0.5,) * 3, (0.25,) * 3)
    torch.testing.assert_close(layer(images), (images - 0.5) / 0.25)
    model = LeNetGELU().double()
    assert model(images.double()).dtype == torch.float64


def test_gradients_can_be_mapped_over_images():
    """The attacks use vmap over images; it must equal the loop."""
    images, labels = torch.rand(3, 3, 32, 32, generator=coin(1)), torch.tensor([1, 2, 3])
    for model in (LeNetGELU(), ConvNet(width=8)):
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(parameters, image, label):
            logits = torch.func.functional_call(model, parameters, (image[None],))
            return nn.functional.cross_entropy(logits, label[None])

        mapped = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, images, labels)
        for index in range(3):
            single = torch.func.grad(loss)(parameters, images[index], labels[index])
            for name in single:
                torch.testing.assert_close(mapped[name][index], single[name], rtol=1e-4, atol=1e-6)


def test_trap_24_the_shared_gradient_is_the_attacker_s_gradient_at_the_true_input():
    """Loss, reduction, mode and normalisation agree: no constant factor between the victim and the attacker."""
    images, labels = torch.rand(2, 3, 32, 32, generator=coin(1)), torch.tensor([3, 7])
    for model in (LeNetGELU(), ConvNet(width=8)):
        client = Client(0, model, images, labels, batch_size=None, defence=(RandomSelection(0.5),))
        tensors = client.fit(Server(model).initial_state(), {}, Streams(0), 0)[0].tensors
        gradients = torch.autograd.grad(nn.functional.cross_entropy(model(images), labels), list(model.parameters()))
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        error = (torch.where(tensors["mask"], flat, 0) - tensors["update"]).norm() / tensors["update"].norm()
        assert error < 1e-6


def test_the_face_exports_what_it_lists():
    assert all(hasattr(selection, name) for name in selection.__all__)
    assert {"random_mask", "aggregate_selected", "RandomSelection", "LeNetGELU", "ConvNet"} <= set(selection.__all__)


def test_streams_give_each_model_its_own_weights():
    first, second = (LeNetGELU(generator=Streams(seed).torch("model")) for seed in (0, 1))
    assert not torch.equal(first.head.weight, second.head.weight)
