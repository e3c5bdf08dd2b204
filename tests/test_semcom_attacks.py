"""Attacks on Deep JSCC uploads: they win where the signal is, fail where it is not, and refuse what makes no sense."""
import pytest
import torch

from privfl.federation import Context, GlobalState
from privfl.randomness import Streams
from privfl.semcom.attacks import (ReconstructionError, ShadowDiscriminant, encoder_shifts, fingerprint_sender, jscc_inversion, membership_result,
                                   neighbouring_means, per_image_gradients, predicted_shift, recover_encoder, release_entries)
from privfl.semcom.jscc import DeepJSCC
from privfl.semcom.uplink import PublicFeatures, TopS, dequantise
from privfl.update import Layout

STREAMS = Streams(0)
NETWORK = DeepJSCC(2, (2, 2, 2, 2), STREAMS.torch("weights"))
LAYOUT = Layout.of(NETWORK)
OF_ENCODER = LAYOUT.group(lambda name: name.startswith("encoder."))
ENCODER_SIZE = int(OF_ENCODER.sum())
IMAGES = torch.rand(6, 3, 16, 16, generator=STREAMS.torch("images"))


def easy_game(scale: float) -> tuple:
    """Observations of 150 shadow and 150 real pairs; one image in four is the target, whose gradient stands out."""
    pool = torch.randn(60, 80, generator=STREAMS.torch("pool"))
    target = 3 * torch.randn(80, generator=STREAMS.torch("target"))
    sides = neighbouring_means(pool, target, 4, 300, STREAMS.torch("game"))
    sent = [release_entries(side, 40, 5.0, scale, scale, STREAMS.torch("noise", number))[0] for number, side in enumerate(sides)]
    return [side[:150] for side in sent], [side[150:] for side in sent], target


def test_both_attackers_win_the_easy_game():
    """The adaptive one by more; both intervals exclude chance."""
    shadow, real, target = easy_game(0.0)
    naive = membership_result(*(side @ target for side in real))
    adaptive = membership_result(*map(ShadowDiscriminant(*shadow), real))
    assert 0.8 < naive.low and 0.9 < adaptive.low and adaptive.epsilon > 1


def test_strong_noise_leaves_chance():
    """150 runs on either side: the interval misses .5 in at most about 5 % of seeds."""
    shadow, real, target = easy_game(1e4)
    for found in (membership_result(*(side @ target for side in real)), membership_result(*map(ShadowDiscriminant(*shadow), real))):
        assert found.low < 0.5 < found.high and found.epsilon < 0.5


def test_interval_is_wilson_and_never_empty():
    """Perfect separation keeps a lower limit below 1; swapped scores mirror the result."""
    perfect = membership_result([2.0, 3.0, 4.0], [0.0, 1.0, -1.0])
    mirrored = membership_result([0.0, 1.0, -1.0], [2.0, 3.0, 4.0])
    assert perfect.auc == 1 and 0.4 < perfect.low < 0.45 and perfect.high == 1  # 3 / (3 + 1.96^2) = .438
    assert mirrored.auc == 0 and abs(mirrored.high - (1 - perfect.low)) < 1e-12


def test_gradients_are_those_of_the_training_loss():
    """One channel draw per image, in the layout's order, whatever the chunk size."""
    rows = per_image_gradients(NETWORK, IMAGES, 10.0, STREAMS.torch("channel"))
    again = per_image_gradients(NETWORK, IMAGES, 10.0, STREAMS.torch("channel"), chunk_size=4)
    noise = 10**-0.5 * torch.randn((6, 1, 2, 4, 4), generator=STREAMS.torch("channel"))
    loss = ReconstructionError(NETWORK, noise[3])(IMAGES[3:4]).mean()
    direct = LAYOUT.flatten(dict(zip(LAYOUT.names, torch.autograd.grad(loss, [dict(NETWORK.named_parameters())[name] for name in LAYOUT.names]))))
    assert torch.allclose(rows[3], direct, atol=1e-6) and torch.allclose(rows, again, atol=1e-6)


def context() -> Context:
    """Client 0 in round 0 at the network's weights."""
    return Context(0, 0, 10, LAYOUT, GlobalState(0, LAYOUT.flatten(NETWORK), {}, {}), {})


def test_release_is_that_of_the_uplink():
    """Without noise, `TopS` sends the same entries with the same values."""
    update = 0.01 * torch.randn(LAYOUT.size, generator=STREAMS.torch("update"))
    sent = TopS(20, clip=1.0)({"update": update}, context(), STREAMS.torch("release"))
    rows, support = release_entries(update[None], 20, 1.0, 0.0, 0.0, STREAMS.torch("release"))
    assert torch.equal(support[0].nonzero().squeeze(1), sent["indices"]) and torch.equal(rows[0][sent["indices"]], sent["values"])


def test_shifts_are_those_of_the_uplink():
    """`PublicFeatures` sends what `encoder_shifts` decodes."""
    update = 0.01 * torch.randn(LAYOUT.size, generator=STREAMS.torch("update"))
    sent = PublicFeatures(NETWORK, IMAGES, 6, 20, clip=1.0)({"update": update}, context(), STREAMS.torch("release"))
    change, _ = release_entries(update[OF_ENCODER][None], 20, 1.0, 0.0, 0.0, STREAMS.torch("release"))
    shift = encoder_shifts(NETWORK, change, IMAGES)[0]
    with torch.no_grad():
        expected = dequantise(sent["features"], sent["range"]) - NETWORK.encoder(IMAGES)
    step = float((sent["range"][1] - sent["range"][0]) / 255)
    assert float((shift - expected.flatten()).abs().max()) < 1.01 * step  # a tie in rounding may fall either way
    assert float((shift - expected.flatten()).abs().mean()) < 0.01 * step


def test_noisy_releases_have_the_laplace_spread():
    """Mean magnitude of 20,000 draws: scale, within four standard errors; the same state gives the same noise."""
    zero = torch.zeros(100, 200)
    rows, _ = release_entries(zero, 200, 1.0, 0.0, 0.3, STREAMS.torch("laplace"))
    again, _ = release_entries(zero, 200, 1.0, 0.0, 0.3, STREAMS.torch("laplace"))
    assert torch.equal(rows, again) and abs(float(rows.abs().mean()) - 0.3) < 4 * 0.3 / 20_000**0.5


def test_fingerprint_finds_the_client_and_noise_hides_it():
    """Five clients, 40 uploads each; under noise a hit rate in the 99.9 % range of chance."""
    centres = torch.randn(5, 1, 100, generator=STREAMS.torch("centres"))
    noisy = centres + 0.3 * torch.randn(5, 40, 100, generator=STREAMS.torch("uploads"))
    truth = torch.arange(5).repeat_interleave(40)
    for scale, low, high in ((0.0, 0.99, 1.0), (1e4, 0.11, 0.30)):  # chance .2, standard error .028
        supports = [release_entries(noisy.flatten(0, 1), 20, 5.0, scale, 0.0, STREAMS.torch("index", part))[1] for part in range(2)]
        nearest, overlap = fingerprint_sender(supports[0], supports[1].unflatten(0, (5, 40)))
        assert low <= float((nearest == truth).float().mean()) <= high and overlap.shape == (200, 5)


def test_recovery_beats_guessing_and_needs_a_change():
    """More than twice the share that guessing finds; features of the global encoder lead back to nothing."""
    k = ENCODER_SIZE // 10
    update = 0.02 * torch.randn(1, ENCODER_SIZE, generator=STREAMS.torch("encoder"))
    change, support = release_entries(update, k, 0.1, 0.0, 0.0, STREAMS.torch("release"))
    with torch.no_grad():
        base = NETWORK.encoder(IMAGES)
    seen = encoder_shifts(NETWORK, change, IMAGES)[0].view_as(base) + base
    estimate = recover_encoder(NETWORK, IMAGES, seen, k, 0.03)
    assert float(support[0][estimate.abs().topk(k).indices].float().mean()) > 0.2
    assert float(recover_encoder(NETWORK, IMAGES, base, k, 0.03).abs().max()) < 1e-6


def test_prediction_is_linear():
    """Twice the change, twice the shift."""
    change = torch.randn(ENCODER_SIZE, generator=STREAMS.torch("change"))
    once, twice = (predicted_shift(NETWORK, factor * change, IMAGES) for factor in (1, 2))
    assert torch.allclose(2 * once, twice, rtol=1e-4, atol=1e-4)


def test_inversion_runs_naive_and_aware():
    """Images in [0, 1] of the right shape; the mask-aware attack needs the mask."""
    label = torch.zeros(1, dtype=torch.long)
    attack = jscc_inversion(NETWORK, 16, 2)
    shared = attack.upload(IMAGES[:1], label).detach()
    found = attack(shared, label, STREAMS.torch("start"))
    assert found.shape == (1, 3, 16, 16) and 0 <= float(found.min()) and float(found.max()) <= 1
    aware = jscc_inversion(NETWORK, 16, 2, mask_aware=True)
    assert aware(shared, label, STREAMS.torch("start"), torch.ones_like(shared).bool()).shape == found.shape
    with pytest.raises(ValueError, match="mask"):
        aware(shared, label, STREAMS.torch("start"))


ROWS, GENERATOR = torch.ones(4, 10), torch.Generator()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: ReconstructionError(torch.nn.Linear(1, 1)), "model"),
    (lambda: ReconstructionError(NETWORK, torch.zeros(2, 4, 4)), "noise"),
    (lambda: per_image_gradients(NETWORK, IMAGES[0], 10.0, GENERATOR), "images"),
    (lambda: per_image_gradients(NETWORK, IMAGES, float("nan"), GENERATOR), "snr_db"),
    (lambda: neighbouring_means(ROWS, ROWS[0, :3], 2, 5, GENERATOR), "target"),
    (lambda: neighbouring_means(ROWS, ROWS[0], 5, 5, GENERATOR), "count"),
    (lambda: release_entries(ROWS, 11, 1.0, 0.0, 0.0, GENERATOR), "k is 11"),
    (lambda: release_entries(ROWS, 2, 0.0, 0.0, 0.0, GENERATOR), "clip"),
    (lambda: release_entries(ROWS, 2, 1.0, -1.0, 0.0, GENERATOR), "index_scale"),
    (lambda: release_entries(ROWS * float("nan"), 2, 1.0, 0.0, 0.0, GENERATOR), "updates"),
    (lambda: encoder_shifts(NETWORK, ROWS, IMAGES), "changes"),
    (lambda: predicted_shift(NETWORK, ROWS[0], IMAGES), "change"),
    (lambda: ShadowDiscriminant(ROWS[:1], ROWS), "two of each kind"),
    (lambda: ShadowDiscriminant(ROWS, ROWS[:, :3]), "shadow_out"),
    (lambda: ShadowDiscriminant(ROWS, ROWS, 0.0), "shrinkage"),
    (lambda: ShadowDiscriminant(ROWS, ROWS)(ROWS[:, :3]), "observed"),
    (lambda: membership_result([], [1.0]), "scores_in"),
    (lambda: membership_result([float("nan")], [1.0]), "NaN"),
    (lambda: membership_result([1.0], [1.0], confidence=1.0), "confidence"),
    (lambda: fingerprint_sender(ROWS, ROWS[None]), "bool"),
    (lambda: fingerprint_sender(torch.zeros(1, 3).bool(), torch.ones(2, 1, 3).bool()), "empty"),
    (lambda: recover_encoder(NETWORK, IMAGES, torch.zeros(6, 2, 4, 3), 5, 0.1), "features"),
    (lambda: recover_encoder(NETWORK, IMAGES, torch.zeros(6, 2, 4, 4), 0, 0.1), "k is 0"),
    (lambda: jscc_inversion(NETWORK, 3, 2), "image_size"),
])
def test_bad_input_is_refused(call, message):
    """By name, before anything is computed."""
    with pytest.raises(ValueError, match=message):
        call()
