"""Repairs of random selection: row masks and the attack that waits, common masks, secure sums and their account."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from privfl.accounting import compose
from privfl.federation import Client, Clip, Context, GaussianNoise, GlobalState, Server, Upload, promise_of, run
from privfl.randomness import Streams
from privfl.selection.masks import RandomSelection, selected_mean
from privfl.selection.models import LeNetGELU, initialise
from privfl.selection.repairs import (CommonSelection, RowSelection, masked_gaussian_epsilon, patches_over_rounds, random_row_mask, secure_mean, secure_sum,
                                      secure_sum_event)
from privfl.update import Layout, UpdateError
from torch import nn

LAYOUT = Layout.of(LeNetGELU())


def coin(seed=0):
    return torch.Generator().manual_seed(seed)


def context(round=0, layout=LAYOUT):
    return Context(0, round, 1, layout, GlobalState(round, torch.zeros(layout.size), {}, {}), {})


def upload(client, values, mask=None, size=1):
    tensors = {"update": torch.tensor(values)} | ({} if mask is None else {"mask": torch.tensor(mask)})
    return Upload(client, 0, size, tensors)


# --- whole rows ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8])
def test_row_masks_are_constant_on_rows_and_have_the_rate(rate):
    shown = []
    for seed in range(200):
        parts = LAYOUT.unflatten(random_row_mask(LAYOUT, rate, coin(seed)).double())
        for value in parts.values():
            rows = value.flatten(1) if value.dim() > 1 else value[:, None]
            assert ((rows == rows[:, :1]).all()) and set(rows.unique().tolist()) <= {0.0, 1.0}
            shown += rows[:, 0].tolist()
    error = math.sqrt(rate * (1 - rate) / len(shown))
    assert abs(sum(shown) / len(shown) - (1 - rate)) <= 5 * error  # 200 masks; false-alarm rate 6e-7


def test_a_leading_axis_of_one_is_no_row():
    module = nn.Module()
    module.position = nn.Parameter(torch.zeros(1, 8, 5))
    module.scale = nn.Parameter(torch.zeros(1))
    parts = Layout.of(module).unflatten(random_row_mask(Layout.of(module), 0.5, coin(3)).double())
    tokens = parts["position"][0]
    assert (tokens == tokens[:, :1]).all() and 0 < tokens[:, 0].sum() < 8 and parts["scale"].numel() == 1


def test_row_selection_is_random_selection_with_another_mask():
    step, update = RowSelection(0.5), torch.arange(1.0, LAYOUT.size + 1)
    sent = step({"update": update}, context(), coin(1))
    assert torch.equal(sent["update"], update * sent["mask"]) and torch.equal(sent["mask"], random_row_mask(LAYOUT, 0.5, coin(1)))
    assert step.promise == RandomSelection(0.5).promise and step.contracts and step.blind_side_tensors
    with pytest.raises(ValueError, match="masking_rate is 1"):
        RowSelection(1.0)


# --- the attack that waits -----------------------------------------------------------------------------------------

def uploads_of_rounds(rounds, patches=5, width=24, pixels=12, rate=0.5, seed=0):
    """Position and patch gradients of one image with fresh row masks, and the patches."""
    truth = torch.randn(patches, pixels, generator=coin(seed), dtype=torch.float64)
    positions = torch.randn(rounds, patches, width, generator=coin(seed + 1), dtype=torch.float64)
    gradients = torch.einsum("tpe,pc->tec", positions, truth)
    tokens = torch.rand(rounds, patches, generator=coin(seed + 2)) >= rate
    rows = torch.rand(rounds, width, generator=coin(seed + 3)) >= 0.3
    hidden = torch.full_like(positions, float("nan"))
    return truth, torch.where(tokens[..., None], positions, hidden), gradients, tokens, rows


def test_fresh_row_masks_leave_one_round_open_and_give_the_image_away_over_several():
    errors = {1: [], 12: []}
    for seed in range(20):  # 20 images: one round leaves as many dimensions open as positions are hidden
        truth, positions, gradients, tokens, rows = uploads_of_rounds(12, seed=10 * seed)
        for rounds in errors:
            found = patches_over_rounds(positions[:rounds], gradients[:rounds], tokens[:rounds], rows[:rounds])
            seen = tokens[:rounds].any(0)
            assert torch.equal(found.isnan().any(1), ~seen)
            errors[rounds].append(float((found - truth)[seen].norm() / truth[seen].norm()) if seen.any() else 1.0)
    assert max(errors[12]) < 1e-6 and sorted(errors[1])[10] > 0.1


def test_hidden_values_are_never_read():
    truth, positions, gradients, tokens, rows = uploads_of_rounds(12)
    other = torch.where(tokens[..., None], positions, torch.full_like(positions, 7.0))
    torn = torch.where(rows[..., None], gradients, torch.full_like(gradients, float("nan")))
    assert torch.equal(patches_over_rounds(positions, gradients, tokens, rows), patches_over_rounds(other, torn, tokens, rows))


def test_the_attack_refuses_what_does_not_fit():
    _, positions, gradients, tokens, rows = uploads_of_rounds(3)
    with pytest.raises(ValueError, match="shapes do not fit"):
        patches_over_rounds(positions, gradients, tokens[:2], rows)
    with pytest.raises(ValueError, match="bool masks"):
        patches_over_rounds(positions, gradients, tokens.long(), rows)
    with pytest.raises(ValueError, match="at least one round"):
        patches_over_rounds(positions[:0], gradients[:0], tokens[:0], rows[:0])
    with pytest.raises(ValueError, match="NaN or infinite"):
        patches_over_rounds(positions, torch.full_like(gradients, float("nan")), tokens, rows)
    with pytest.raises(ValueError, match="4 rows of the patch embedding are shown for 5 patches"):
        patches_over_rounds(positions, gradients, tokens, torch.arange(24).expand(3, 24) < 4)


# --- common masks and secure sums ----------------------------------------------------------------------------------

@given(st.integers(0, 50), st.integers(0, 50), st.sampled_from([0.2, 0.5, 0.8]))
def test_a_common_mask_depends_on_seed_and_round_only(seed, round, rate):
    update = torch.ones(300)
    first, second = (CommonSelection(rate, seed)({"update": update}, context(round), coin(client))["mask"] for client in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, CommonSelection(rate, seed)({"update": update}, context(round + 1), coin())["mask"])
    assert not torch.equal(first, CommonSelection(rate, seed + 1)({"update": update}, context(round), coin())["mask"])


def test_a_secure_sum_is_the_sum_on_the_mask_and_leaves_empty_clients_out():
    mask = [True, False, True]
    total, common, count = secure_sum([upload(1, [1.0, 9.0, 2.0], mask), upload(0, [3.0, 9.0, 4.0], mask), upload(2, [5.0, 5.0, 5.0], mask, size=0)])
    assert total.tolist() == [4.0, 0.0, 6.0] and common.tolist() == mask and count == 2
    state = GlobalState(0, torch.zeros(3), {}, {})
    assert secure_mean([upload(0, [1.0, 2.0, 4.0]), upload(1, [3.0, 2.0, 0.0])], state).tolist() == [2.0, 2.0, 2.0]
    assert secure_mean([], state).tolist() == [0.0] * 3
    with_empty = [upload(0, [1.0, 2.0, 4.0]), upload(1, [3.0, 2.0, 0.0]), upload(2, [9.0, 9.0, 9.0], size=0)]
    assert secure_mean(with_empty, state).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(UpdateError, match="3 entries, the model 9"):
        secure_mean(with_empty, GlobalState(0, torch.zeros(9), {}, {}))


@pytest.mark.parametrize(("uploads", "words"), [
    ([upload(0, [1.0])], "at least 2 clients"),
    ([upload(0, [1.0]), Upload(1, 7, 1, {"update": torch.ones(1)})], r"of one round, got 2 of rounds \[0, 7\]"),
    ([upload(0, [1.0, 1.0], [True, False]), upload(4, [1.0, 1.0], [False, True])], "client 4, round 0: its mask differs"),
    ([upload(0, [1.0, 1.0], [1.0, 1.0]), upload(4, [1.0, 1.0], [1.0, 1.0])], "client 0, round 0: a secure sum takes"),
    ([upload(0, [1.0, 1.0], [True]), upload(4, [1.0, 1.0], [True])], "a secure sum takes"),
    ([upload(0, [1, 1]), upload(4, [1, 1])], "floating-point `update`"),
    ([Upload(0, 0, 1, {"values": torch.ones(1)}), upload(1, [1.0])], "client 0, round 0: a secure sum takes"),
    ([upload(0, [1.0, 1.0], [True, False]), upload(4, [1.0, 1.0], [True, True])], "client 4, round 0: its mask differs"),
    ([upload(0, [1.0, 1.0], [True, True]), upload(4, [float("nan"), 1.0], [True, True])], "the sum is not finite"),
])
def test_a_secure_sum_refuses(uploads, words):
    with pytest.raises(UpdateError, match=words):
        secure_sum(uploads)


def test_under_a_common_mask_the_secure_mean_is_the_selected_mean():
    model = initialise(nn.Linear(6, 3))
    inputs, targets = torch.randn(40, 6, generator=coin(1)), torch.arange(40) % 3
    clients = [Client(n, model, inputs[n::4], targets[n::4], batch_size=None, defence=(CommonSelection(0.5, 9),)) for n in range(4)]
    found = [run(Server(model, rule=rule, learning_rate=0.2), clients, 5, seed=2).parameters for rule in (secure_mean, selected_mean)]
    assert torch.allclose(*found, atol=1e-6) and not torch.equal(found[0], Layout.of(model).flatten(model))


def test_the_event_of_a_secure_sum_is_that_of_its_noise():
    one = compose([(secure_sum_event(2.0, 1.0, 1), 10)], 1e-5, "replace_one")
    assert one == compose([(promise_of((Clip(1.0), GaussianNoise(2.0))).event("replace_one"), 10)], 1e-5, "replace_one")
    assert abs(compose([(secure_sum_event(1.0, 1.0, 4), 10)], 1e-5, "replace_one") - one) < 1e-9
    assert secure_sum_event(1.0, 1.0, 4, "add_remove") == secure_sum_event(2.0, 1.0, 4, "replace_one")
    for honest in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="honest is"):
            secure_sum_event(1.0, 1.0, honest)
    for sigma in (0.0, -1.0, float("inf"), float("nan"), None, "1", True):
        with pytest.raises(ValueError, match="sigma is"):
            secure_sum_event(sigma, 1.0, 2)


def test_the_amplified_account_by_hand_and_at_its_ends():
    multiplier, rounds, delta = 2.5, 100, 1e-5
    plain = compose([(secure_sum_event(multiplier, 0.5, 1), rounds)], delta, "replace_one")
    assert masked_gaussian_epsilon(multiplier, 0.0, rounds, delta) == plain
    found = [masked_gaussian_epsilon(multiplier, rate, rounds, delta) for rate in (0.0, 0.2, 0.5, 0.8)]
    assert all(first > second for first, second in zip(found, found[1:]))
    order = 3.0  # Canonne, Kamath and Steinke's conversion, by hand, at one order: never below the minimum over orders
    renyi = rounds * math.log(0.5 + 0.5 * math.exp(order * (order - 1) / (2 * multiplier**2))) / (order - 1)
    by_hand = renyi + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
    assert found[2] <= by_hand < 1.5 * found[2]
    with pytest.raises(ValueError, match="masking_rate is 1"):
        masked_gaussian_epsilon(multiplier, 1.0, rounds, delta)


def test_the_amplified_account_covers_the_exact_loss_of_one_coordinate():
    """One round, difference in one entry: P(loss > eps) is known in closed form, and must not exceed delta."""
    multiplier, rate, delta = 1.0, 0.5, 1e-3
    epsilon = masked_gaussian_epsilon(multiplier, rate, 1, delta)
    normal = torch.distributions.Normal(0.0, 1.0)
    hockey_stick = (1 - rate) * (normal.cdf(torch.tensor(0.5 / multiplier - epsilon * multiplier, dtype=torch.float64))
                                 - math.exp(epsilon) * normal.cdf(torch.tensor(-0.5 / multiplier - epsilon * multiplier, dtype=torch.float64)))
    assert 0 < float(hockey_stick) <= delta


def test_the_noise_of_the_sum_is_what_the_event_says():
    clients, sigma, draws = 5, 0.3, 40_000
    layout = Layout.of(nn.Linear(draws, 1, bias=False))
    step = GaussianNoise(sigma)
    noise = [Upload(n, 0, 1, step({"update": torch.zeros(draws)}, context(layout=layout), Streams(n).torch("noise"))) for n in range(clients)]
    total, _, _ = secure_sum(noise)
    claimed = secure_sum_event(sigma, 0.5, clients).noise_multiplier  # sensitivity 1
    assert abs(float(total.std()) / claimed - 1) < 5 / math.sqrt(2 * draws)  # false-alarm rate 6e-7
