"""Streams: unambiguous keys, independence, and results that no worker, order or process changes."""
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from privfl import randomness
from privfl.randomness import Streams

KEYS = st.lists(st.integers() | st.text("ab1-is", max_size=4), max_size=4).map(tuple)
KNOWN = {(0, ("batch", 0, 0)): 3539079504064681214}  # blake2b is the same everywhere, so this number is too


def client_draws(client: int, round: int = 2, seed: int = 0) -> list:
    """What one client draws in one round."""
    streams = Streams(seed)
    return (torch.randn(3, generator=streams.torch("defence", round, client)).tolist()
            + streams.numpy("batch", round, client).integers(0, 100, 3).tolist())


def test_the_same_question_has_the_same_answer():
    for maker in ("torch", "numpy"):
        first, second = (getattr(Streams(7), maker)("batch", 3, "a") for _ in range(2))
        draw = (lambda g: torch.randn(4, generator=g).tolist()) if maker == "torch" else (lambda g: g.normal(size=4).tolist())
        assert first is not second and draw(first) == draw(second)
    assert repr(Streams(7)) == "Streams(seed=7)"


def test_seeds_do_not_depend_on_the_platform():
    for (seed, call), number in KNOWN.items():
        assert Streams(seed).seed(*call) == number


@given(st.integers(), KEYS, st.integers(), KEYS)
def test_different_questions_have_different_answers(seed, key, other_seed, other_key):
    same = (seed, key) == (other_seed, other_key)
    assert (Streams(seed).digest("x", *key) == Streams(other_seed).digest("x", *other_key)) == same


@pytest.mark.parametrize("first, second", [
    (("a", 1), ("a1",)), (("a", 1), ("a", "1")), (("a", 1, 1), ("a", 11)), (("a", "b"), ("ab",)), (("a",), ("a", "")),
    (("a", 1, 2), ("a", 2, 1)), (("a", -1), ("a", "-1")), (("a", "i"), ("ai",)), (("a", 0), ("a",))], ids=str)
def test_keys_are_unambiguous(first, second):
    assert Streams(0).digest(*first) != Streams(0).digest(*second)
    drawn = [torch.randn(4, generator=Streams(0).torch(*call)) for call in (first, second)]
    assert not torch.equal(*drawn)


def test_seed_and_key_do_not_mix():
    assert len({Streams(seed).seed("a", key) for seed, key in product(range(30), range(30))}) == 900


def test_integer_types_are_one():
    expected = Streams(3).seed("a", 5)
    for five in (np.int8(5), np.uint64(5), torch.tensor(5), np.array(5)):
        assert Streams(3).seed("a", five) == expected
    assert Streams(np.int64(3)).seed("a", 5) == expected


@pytest.mark.parametrize("part", [1.0, True, None, b"a", (1,), np.float64(2), np.bool_(True), torch.tensor(True),
                                  torch.tensor(1.5), torch.tensor([1, 2])], ids=str)
def test_other_types_are_refused(part):
    with pytest.raises(ValueError, match="whole number or a string"):
        Streams(0).seed("a", part)
    with pytest.raises(ValueError):
        Streams(part)


@pytest.mark.parametrize("purpose", ["", 3, None])
def test_a_purpose_is_a_word(purpose):
    with pytest.raises(ValueError, match="purpose"):
        Streams(0).torch(purpose)


def test_a_new_defence_never_shifts_the_batch_order():
    def batches(noise_draws: int) -> list:
        drawn = []
        for round, client in product(range(3), range(4)):
            drawn.append(torch.randperm(20, generator=Streams(1).torch("batch", round, client)).tolist())
            torch.randn(noise_draws, generator=Streams(1).torch("defence", round, client))
        return drawn

    assert batches(0) == batches(5) == batches(100_000)


def test_trap_09_workers_and_order_change_nothing():
    clients = list(range(14))
    reference = {client: client_draws(client) for client in clients}
    for workers in (1, 4):
        for order in (clients, clients[::-1], clients[1::2] + clients[::2]):
            with ThreadPoolExecutor(workers) as pool:
                assert dict(zip(order, pool.map(client_draws, order))) == reference
    assert len(set(map(str, reference.values()))) == 14


def test_trap_09_another_process_draws_the_same():
    code = ("import torch\nfrom privfl.randomness import Streams\n"
            "print(torch.randn(3, generator=Streams(0).torch('defence', 2, 5)).tolist()"
            " + Streams(0).numpy('batch', 2, 5).integers(0, 100, 3).tolist())")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300,
                         env={**os.environ, "PYTHONHASHSEED": "123"})
    assert run.stdout.strip() == str(client_draws(5))


def test_trap_09_workers_do_not_repeat_each_other():
    """A generator for each worker: the draws of 4 workers, 50 clients and 20 rounds are all different."""
    drawn = {tuple(client_draws(client, round)) for client, round in product(range(50), range(20))}
    assert len(drawn) == 1000


def test_trap_20_the_global_random_state_is_left_alone():
    torch.rand(1), np.random.rand(1)
    before = torch.get_rng_state(), np.random.get_state()
    randomness._state_is_known.cache_clear()
    client_draws(1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), before[1]))


def test_a_torch_stream_uses_all_bits_of_its_digest():
    """torch keeps 32 bits of a seed on the CPU; here streams of one seed differ if their digests do."""
    plain = [torch.randn(4, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7 + 2**32)]
    assert torch.equal(*plain)
    ours = [torch.randn(4, generator=randomness._torch_generator(digest, 7, "cpu")) for digest in (bytes(16), b"x" * 16)]
    assert not torch.equal(*ours)


def test_a_filled_state_is_the_state_that_was_meant():
    digest = bytes(range(16))
    drawn = torch.rand(700, dtype=torch.float64, generator=randomness._torch_generator(digest, 7, "cpu"))
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": randomness._twister_words(digest), "pos": 624}}
    raw = twister.random_raw(1400).astype(np.uint64)
    expected = ((raw[0::2] << np.uint64(32) | raw[1::2]) & np.uint64(2**53 - 1)) / 2.0**53
    assert randomness._state_is_known() and np.array_equal(drawn.numpy(), expected)


def test_a_stream_remembers_its_seed_and_can_be_resumed():
    generator = Streams(0).torch("batch", 1)
    assert generator.initial_seed() == Streams(0).seed("batch", 1) < 2**63
    torch.randn(17, generator=generator)
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    assert torch.equal(torch.randn(1000, generator=generator), torch.randn(1000, generator=copy))


def test_an_unknown_state_layout_falls_back_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(randomness, "_WORDS", slice(2, 626))
    randomness._state_is_known.cache_clear()
    with caplog.at_level(logging.WARNING, logger="privfl"):
        generator = Streams(0).torch("batch", 1)
    randomness._state_is_known.cache_clear()
    expected = torch.Generator().manual_seed(Streams(0).seed("batch", 1))
    assert torch.equal(torch.randn(5, generator=generator), torch.randn(5, generator=expected))
    assert "32 bits" in caplog.text


@pytest.mark.parametrize("maker", ["torch", "numpy"])
def test_first_numbers_of_neighbouring_keys_are_uniform(maker):
    """n = 5,000 keys; Kolmogorov-Smirnov at false-alarm rate 1e-4."""
    streams = Streams(11)
    drawn = [torch.rand(1, dtype=torch.float64, generator=streams.torch("a", round, client)).item() if maker == "torch"
             else streams.numpy("a", round, client).random() for round in range(50) for client in range(100)]
    assert stats.kstest(drawn, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("maker", ["torch", "numpy"])
def test_neighbouring_streams_are_uncorrelated(maker):
    """60 streams of n = 2,000; the largest of 1,770 correlations at false-alarm rate 1e-4 (Bonferroni)."""
    streams = Streams(12)
    table = np.stack([torch.randn(2000, generator=streams.torch("a", client)).numpy() if maker == "torch"
                      else streams.numpy("a", client).normal(size=2000) for client in range(60)])
    correlations = np.corrcoef(table)[np.triu_indices(60, 1)]
    assert np.abs(correlations).max() < stats.norm.isf(0.5e-4 / correlations.size) / np.sqrt(2000)


def test_neighbouring_seeds_flip_half_of_the_bits():
    """126,000 bits; share of flips within 3.9 standard errors, false-alarm rate 1e-4."""
    streams = Streams(13)
    flips = sum((streams.seed("a", n) ^ streams.seed("a", n + 1)).bit_count() for n in range(2000))
    assert abs(flips / 126_000 - 0.5) < 3.9 * 0.5 / np.sqrt(126_000)


def test_pairing_makes_a_contrast_sharper():
    """Two arms that share their batches: 60 seeds, variance ratio above the 0.999 quantile of F(59, 59)."""
    def result(seed: int, extra: int, paired: bool) -> float:
        shared, total = np.random.default_rng(seed), 0.0
        for step in range(20):
            batch = Streams(seed).numpy("batch", step) if paired else shared
            total += batch.normal(size=4).sum()
            noise = Streams(seed).numpy("defence", step) if paired else shared
            total += 0.1 * noise.normal(size=extra).sum() if extra else 0.0
        return total

    difference = {paired: np.array([result(seed, 3, paired) - result(seed, 0, paired) for seed in range(60)])
                  for paired in (True, False)}
    ratio = difference[False].var(ddof=1) / difference[True].var(ddof=1)
    assert ratio > stats.f.ppf(0.999, 59, 59)
