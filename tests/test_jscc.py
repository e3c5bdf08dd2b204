"""Deep JSCC: what an SNR means, one fade for a block, transmit power, the two networks, and their training."""
import inspect
import math
import threading
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import privfl.semcom.jscc as jscc
from privfl.metrics import psnr
from privfl.semcom.jscc import (DeepJSCC, awgn, jscc_loss, measured_snr_db, normalise_power, rayleigh, received_psnr,
                                to_features, to_symbols, train_jscc, transmit_power)
from privfl.update import Layout

THIN = {"channels": 4, "widths": (4, 4, 4, 4)}
MANY = 400_000  # real noise: the measured power has a relative error of sqrt(2 / n), .0098 dB; .05 dB is 5 of them (6e-7)


def draw(seed: int = 0) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 6, side: int = 16, seed: int = 0) -> torch.Tensor:
    """Smooth pictures in [0, 1]."""
    coarse = torch.rand(count, 3, 4, 4, generator=draw(seed))
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear")


def unit(kind: torch.dtype, count: int = MANY) -> torch.Tensor:
    """Random symbols of mean power 1."""
    return torch.randn(count, dtype=kind, generator=draw(9))


# ---- white noise ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("snr_db", [-10.0, 0.0, 10.0, 25.0])
def test_trap_19_measured_snr_is_the_one_asked_for(kind, snr_db):
    symbols = torch.ones(MANY, dtype=kind)  # power exactly 1, so only the noise is measured
    received = awgn(symbols, snr_db, draw(1))
    assert received.dtype == kind
    assert abs(measured_snr_db(symbols, received) - snr_db) < 0.05


def test_trap_19_complex_noise_is_split_evenly_and_independently():
    noise = torch.view_as_real(awgn(torch.zeros(MANY, dtype=torch.complex128), 0.0, draw(2)))
    covariance = torch.cov(noise.T)
    assert (covariance - torch.eye(2, dtype=torch.float64) / 2).abs().max() < 5 * 0.5 * math.sqrt(2 / MANY)


def test_trap_19_halved_noise_on_real_symbols_is_found(monkeypatch):
    """The fault put back: real symbols get the half that belongs to a part of a complex one."""
    whole = jscc._normal_like
    monkeypatch.setattr(jscc, "_normal_like", lambda x, *rest: whole(x, *rest) if x.is_complex() else whole(x, *rest) / math.sqrt(2))
    symbols = torch.ones(MANY)
    assert abs(measured_snr_db(symbols, jscc.awgn(symbols, 10.0, draw(1))) - 13.01) < 0.05


def test_infinity_is_the_identity_and_draws_nothing():
    symbols, generator = unit(torch.complex64, 50), draw(3)
    before = generator.get_state()
    received = awgn(symbols, math.inf, generator)
    assert torch.equal(received, symbols) and torch.equal(generator.get_state(), before)
    assert torch.equal(awgn(symbols, math.inf, None), symbols)
    received += 1
    assert not torch.equal(received, symbols)  # new memory


def test_the_same_stream_gives_the_same_noise_scaled():
    zeros = torch.zeros(100)
    loud, soft = awgn(zeros, 0.0, draw(4)), awgn(zeros, 20.0, draw(4))
    assert torch.allclose(loud, 10 * soft, rtol=1e-5)


def test_channels_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    awgn(torch.ones(10), 3.0, draw()), rayleigh(torch.ones(10), 3.0, draw()), DeepJSCC(**THIN)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("channel", [awgn, rayleigh])
@pytest.mark.parametrize("x", [torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool), [1.0, 2.0], None])
def test_what_is_no_symbol_is_refused(channel, x):
    with pytest.raises(ValueError, match="x is"):
        channel(x, 10.0, draw())


@pytest.mark.parametrize("channel", [awgn, rayleigh])
@pytest.mark.parametrize("snr_db", [math.nan, -math.inf, "10", None, True])
def test_what_is_no_snr_is_refused(channel, snr_db):
    with pytest.raises(ValueError, match="snr_db"):
        channel(torch.ones(4), snr_db, draw())


@pytest.mark.parametrize("channel", [awgn, rayleigh])
def test_noise_needs_a_generator_of_its_own(channel):
    with pytest.raises(ValueError, match="generator is None"):
        channel(torch.ones(4), 10.0, None)


def test_measured_snr_at_its_edges():
    assert measured_snr_db(torch.ones(3), torch.ones(3)) == math.inf
    with pytest.raises(ValueError, match="no power"):
        measured_snr_db(torch.zeros(3), torch.ones(3))


@given(st.floats(-20, 60), st.integers(1, 40))
def test_noise_passes_gradients(snr_db, count):
    symbols = torch.ones(count, requires_grad=True)
    awgn(symbols, snr_db, draw()).sum().backward()
    assert torch.equal(symbols.grad, torch.ones(count))


# ---- fades ------------------------------------------------------------------------------------------------------

def test_trap_19_one_complex_fade_for_a_block():
    blocks = torch.ones(MANY // 10, 4, dtype=torch.complex64)
    faded = rayleigh(blocks, math.inf, draw(5))
    assert torch.equal(faded, faded[:, :1].expand_as(faded))  # one for all symbols of a block
    fade = faded[:, 0]
    n = len(fade)
    power = fade.abs().square().double()
    assert abs(float(power.mean()) - 1) < 5 / math.sqrt(n)  # |h|^2 is exponential with mean 1
    for limit in (0.1, 1.0, 2.0):
        share, wanted = float((power < limit).double().mean()), 1 - math.exp(-limit)
        assert abs(share - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / n)
    parts = torch.view_as_real(fade)
    assert abs(float((parts[:, 0] * parts[:, 1]).mean())) < 5 * 0.5 / math.sqrt(n)  # independent parts: the phase is uniform
    turned = torch.angle(fade).abs() > math.pi / 2
    assert abs(float(turned.float().mean()) - 0.5) < 5 * 0.5 / math.sqrt(n)  # two real gains on the parts would also turn, but not as one:
    one = rayleigh(torch.full((n, 1), 1 + 1j, dtype=torch.complex64), math.inf, draw(5))[:, 0]
    assert torch.allclose(one, (1 + 1j) * fade, atol=1e-5)  # the product of complex numbers


def test_trap_19_snr_of_a_faded_block():
    blocks = torch.ones(200, MANY // 200, dtype=torch.complex64)
    faded, noisy = rayleigh(blocks, math.inf, draw(6)), rayleigh(blocks, 10.0, draw(6))
    power_db = 10 * math.log10(float(faded.abs().square().mean()))
    assert abs(measured_snr_db(faded, noisy) - power_db - 10) < 0.05  # noise of .1 per symbol, whatever the fade
    assert not torch.equal(faded[:, 0].abs(), torch.ones(200))


def test_a_vector_is_one_block_and_real_symbols_get_the_magnitude():
    complex_fade = rayleigh(torch.ones(1000, dtype=torch.complex64), math.inf, draw(7))
    real_fade = rayleigh(torch.ones(1000), math.inf, draw(7))
    assert all(torch.equal(fade, fade[:1].expand(1000)) for fade in (complex_fade, real_fade)) and real_fade.dtype == torch.float32
    assert torch.allclose(real_fade, complex_fade.abs(), atol=1e-6)
    noisy = rayleigh(torch.ones(MANY), 10.0, draw(7))
    assert abs(measured_snr_db(real_fade[0] * torch.ones(MANY), noisy) - 20 * math.log10(float(real_fade[0])) - 10) < 0.05


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.complex64])
def test_equalised_without_noise_is_the_identity(kind):
    symbols = torch.randn(20, 7, dtype=kind, generator=draw(8))
    assert torch.allclose(rayleigh(symbols, math.inf, draw(8), equalise=True), symbols, atol=1e-4)
    assert not torch.allclose(rayleigh(symbols, math.inf, draw(8)), symbols, atol=1e-2)


def test_equalised_noise_is_divided_by_the_fade():
    blocks = torch.ones(20, 20_000, dtype=torch.complex64)
    fade = rayleigh(blocks, math.inf, draw(8))[:, 0]
    error = (rayleigh(blocks, 10.0, draw(8), equalise=True) - blocks).abs().square().mean(1)
    assert torch.allclose(error * fade.abs().square(), torch.full((20,), 0.1), rtol=5 / math.sqrt(20_000))


def test_a_scalar_has_no_block():
    with pytest.raises(ValueError, match="scalar"):
        rayleigh(torch.tensor(1.0), 10.0, draw())


# ---- power and pairing ------------------------------------------------------------------------------------------

@given(st.floats(1e-6, 1e6), st.integers(1, 5))
def test_transmit_power_is_one_for_every_image(scale, count):
    features = scale * torch.randn(count, 4, 3, 3, generator=draw(count))
    assert torch.allclose(transmit_power(normalise_power(features)), torch.ones(count), atol=1e-5)
    assert torch.allclose(transmit_power(to_symbols(normalise_power(features))), torch.ones(count), atol=1e-5)


def test_trap_04_silence_stays_finite():
    features = torch.zeros(2, 4, 3, 3, requires_grad=True)
    sent = normalise_power(features)
    sent.square().sum().backward()
    assert not sent.any() and torch.isfinite(features.grad).all()


def test_symbols_and_features_are_inverse():
    features = torch.randn(3, 6, 2, 2, generator=draw())
    symbols = to_symbols(features)
    assert symbols.shape == (3, 3, 2, 2) and symbols.is_complex()
    assert torch.allclose(to_features(symbols), features, atol=1e-6)
    assert torch.allclose(transmit_power(symbols), transmit_power(features), rtol=1e-5)
    for wrong in (torch.ones(1, 3, 2, 2), torch.ones(4), torch.ones(1, 2, dtype=torch.complex64)):
        with pytest.raises(ValueError, match="even number"):
            to_symbols(wrong)


def test_pairing_keeps_the_snr():
    features = torch.ones(10, 16, 50, 50)
    assert abs(measured_snr_db(features, to_features(awgn(to_symbols(features), 7.0, draw()))) - 7) < 0.05


def test_a_loud_encoder_is_refused():
    class Loud(torch.nn.Module):
        def forward(self, images):
            return 2 * torch.ones(len(images), 4, 4, 4)

    model = DeepJSCC(**THIN)
    model.encoder = Loud()
    with pytest.raises(ValueError, match="power 4"):
        model(pictures(2))


# ---- the networks -----------------------------------------------------------------------------------------------

def test_parameters_half_in_the_encoder():
    layout = Layout.of(DeepJSCC())
    of_encoder = int(layout.group(lambda name: name.startswith("encoder.")).sum())
    convolutions = [math.prod(shape) for name, shape in zip(layout.names, layout.shapes)]
    assert layout.size == 156_483 and of_encoder == 78_256 and sum(convolutions) == layout.size
    prelu = sum(math.prod(shape) for name, shape in zip(layout.names, layout.shapes)
                if isinstance(DeepJSCC().get_submodule(name.rpartition(".")[0]), torch.nn.PReLU))
    assert prelu == 240 and layout.size - prelu == 78_128 + 78_115


@pytest.mark.parametrize("channels, ratio", [(8, 1 / 12), (16, 1 / 6), (32, 1 / 3)])
@pytest.mark.parametrize("side", [32, 64])
def test_shapes_and_bandwidth_ratio(channels, ratio, side):
    model = DeepJSCC(channels=channels, widths=(4, 4, 4, 4))
    images = pictures(1, side)
    features = model.encoder(images)
    assert features.shape == (1, channels, side // 4, side // 4)
    received = model.decoder(features).detach()
    assert received.shape == images.shape and 0 <= float(received.min()) <= float(received.max()) <= 1
    assert to_symbols(features)[0].numel() / images[0].numel() == pytest.approx(ratio) == model.bandwidth_ratio


def test_names_that_users_rely_on():
    assert list(inspect.signature(DeepJSCC).parameters)[:2] == ["channels", "widths"]
    for channel in (awgn, rayleigh):
        assert list(inspect.signature(channel).parameters)[:3] == ["x", "snr_db", "generator"]


@pytest.mark.parametrize("settings", [{"channels": 3}, {"channels": 0}, {"channels": 2.5}, {"widths": (4, 4, 4)}, {"widths": 4}, {"widths": (4, 0, 4, 4)}])
def test_wrong_networks_are_refused(settings):
    with pytest.raises(ValueError, match="channels|widths"):
        DeepJSCC(**{**THIN, **settings})


@pytest.mark.parametrize("images", [torch.rand(2, 3, 30, 32), torch.rand(2, 1, 32, 32), torch.rand(3, 32, 32), torch.ones(1, 3, 32, 32, dtype=torch.uint8), None])
def test_wrong_images_are_refused(images):
    with pytest.raises(ValueError, match="images are"):
        DeepJSCC(**THIN)(images)


def test_weights_come_from_the_generator():
    first, again, other = (Layout.of(m).flatten(m) for m in (DeepJSCC(**THIN), DeepJSCC(**THIN), DeepJSCC(**THIN, generator=draw(1))))
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.isfinite(first).all()


def test_the_model_sends_through_the_channel_it_is_given():
    model, images = DeepJSCC(**THIN), pictures(2)
    assert torch.equal(model(images), model.decoder(to_features(to_symbols(model.encoder(images)))))
    seen = []

    def channel(symbols, snr_db, generator):
        seen.append((symbols.is_complex(), tuple(symbols.shape), snr_db))
        return symbols

    model(images, 3.0, draw(), channel)
    assert seen == [(True, (2, 2, 4, 4), 3.0)]


# ---- scores and training ----------------------------------------------------------------------------------------

def test_psnr_is_a_score_per_image_whatever_the_batches():
    model, images = DeepJSCC(**THIN), pictures(7)
    scores = received_psnr(model, images, math.inf, None, batch_size=3)
    with torch.no_grad():
        assert torch.allclose(scores, psnr(model(images), images), atol=1e-4)
    assert received_psnr(model, images[:0], 10.0, draw()).shape == (0,)


def test_training_learns_and_repeats_to_the_bit():
    images, runs = pictures(8), []
    for _ in range(2):
        model = DeepJSCC(**THIN)
        losses = train_jscc(model, images, 120, draw(1), snr_db=10.0, batch_size=4, learning_rate=1e-2)
        runs.append((losses, Layout.of(model).flatten(model)))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    scores = [float(received_psnr(model, images, snr, draw(2)).mean()) for snr in (-15.0, 0.0, 15.0, math.inf)]
    assert scores == sorted(scores)


def test_training_under_fading():
    model = DeepJSCC(**THIN)
    losses = train_jscc(model, pictures(4), 3, draw(1), batch_size=4, channel=partial(rayleigh, equalise=True))
    assert len(losses) == 3 and all(map(math.isfinite, losses))


def test_the_loss_is_the_mean_squared_error():
    model, images = DeepJSCC(**THIN), pictures(3)
    assert torch.isclose(jscc_loss(model, images, math.inf, None), (model(images) - images).square().mean())


def test_trap_09_two_threads_share_nothing():
    model, images, found = DeepJSCC(**THIN), pictures(3), {}

    def work(number):
        found[number] = received_psnr(model, images, 5.0, draw(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert all(torch.equal(found[number], received_psnr(model, images, 5.0, draw(number))) for number in range(4))


@pytest.mark.parametrize("settings", [{"steps": 0}, {"batch_size": 0}, {"learning_rate": 0.0}, {"snr_db": math.nan}])
def test_wrong_training_is_refused(settings):
    with pytest.raises(ValueError):
        train_jscc(DeepJSCC(**THIN), pictures(2), **{"steps": 1, "generator": draw(), **settings})
