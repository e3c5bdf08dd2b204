"""Loaders, file checks, the download path without a network, and partitions."""
import errno
import http.server
import logging
import math
import os
import pickle
import random
import socket
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from privfl import data
from privfl.data import (
    CIFAR10_CLASSES,
    DataError,
    DataNotFound,
    Field,
    balanced_subset,
    content_checksum,
    label_counts,
    load_cifar10,
    load_faces,
    load_photographs,
    partition_dirichlet,
    partition_iid,
    read_npz,
    to_unit_images,
    write_npz,
)

REAL_DATA = os.environ.get("PRIVFL_DATA")


def pretend_cifar(num_train: int = 60, num_test: int = 30, seed: int = 0) -> dict[str, np.ndarray]:
    """Random pixels in the format of cifar10.npz."""
    numbers = np.random.default_rng(seed)
    arrays = {"classes": np.array(CIFAR10_CLASSES)}
    for part, count in (("train", num_train), ("test", num_test)):
        arrays[f"x_{part}"] = numbers.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{part}"] = numbers.permutation(np.arange(count, dtype=np.uint8) % 10)
    return arrays


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty machine without PRIVFL_DATA, offline, with an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIVFL_DATA", raising=False)
    monkeypatch.setenv("PRIVFL_OFFLINE", "1")
    monkeypatch.setattr(data, "_SILENT", {})
    return tmp_path


class FakeCIFAR10:
    """torchvision's class without its network: `download=True` writes a file, then the data are there."""
    url, arrays, calls, failure = data.CIFAR10_URL, pretend_cifar(), [], None

    def __init__(self, root, train=True, download=False):
        type(self).calls.append((Path(root).name, train, download))
        if download:
            Path(root, "cifar-10-python.tar.gz").write_bytes(b"archive")
            if self.failure:
                raise self.failure
        part = "train" if train else "test"
        self.data, self.targets = self.arrays[f"x_{part}"], self.arrays[f"y_{part}"].tolist()
        self.classes = list(CIFAR10_CLASSES)


@pytest.fixture
def network(machine, monkeypatch):
    """A machine whose network answers, with a fake torchvision behind it."""
    import torchvision.datasets

    fake = type("CIFAR10", (FakeCIFAR10,), {"calls": []})
    monkeypatch.setenv("PRIVFL_OFFLINE", "0")
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fake)
    monkeypatch.setattr(data, "_answers_head", lambda url, timeout_s: True)
    return fake


# Folders

def test_folders_in_order_and_the_project_of_a_subfolder(machine, monkeypatch):
    (machine / "privfl").mkdir()
    (machine / "settings.ini").touch()
    (machine / "nbs" / "00_core").mkdir(parents=True)
    monkeypatch.chdir(machine / "nbs" / "00_core")
    assert data.data_folders() == [machine / ".data"]
    (machine / "mine").mkdir()
    monkeypatch.setenv("PRIVFL_DATA", str(machine / "mine"))
    assert data.data_folders() == [machine / "mine", machine / ".data"]
    (machine / ".data").mkdir()
    (machine / ".data" / "a.npz").touch()
    assert data.find_data("a.npz") == machine / ".data" / "a.npz"
    (machine / "mine" / "a.npz").touch()
    assert data.find_data("a.npz") == machine / "mine" / "a.npz"
    assert data.find_data("b.npz") is None


def test_a_data_folder_that_is_not_there_is_an_error_and_no_fallback(machine, monkeypatch):
    monkeypatch.setenv("PRIVFL_DATA", str(machine / "nowhere"))
    with pytest.raises(DataError, match="PRIVFL_DATA"):
        load_cifar10(10, 10)


# Broken files

def good_file(folder: Path) -> Path:
    """A sound cifar10.npz in .data."""
    path = folder / ".data" / "cifar10.npz"
    write_npz(path, pretend_cifar())
    return path


def test_a_sound_file_is_used_and_named(machine, caplog):
    good_file(machine)
    with caplog.at_level(logging.INFO, logger="privfl"):
        images = load_cifar10(20, 10)
    assert images.source == "CIFAR-10 (file cifar10.npz)" and not images.fallback and images.classes == CIFAR10_CLASSES
    assert images.source in caplog.text and str(machine) not in images.source
    assert images.train_images.dtype == torch.float32 and images.train_images.shape == (20, 3, 32, 32)
    assert images.train_labels.dtype == torch.int64 and torch.bincount(images.train_labels).tolist() == [2] * 10


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.99, 0.9999])
def test_a_truncated_file_is_an_error_that_names_it_and_no_fallback(machine, share):
    path = good_file(machine)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"cifar10\.npz: cannot be read.*truncated.*Replace it") as caught:
        load_cifar10(10, 10)
    assert str(machine) not in str(caught.value)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255))
def test_a_damaged_byte_is_either_harmless_or_an_error(tmp_path, place, change):
    path, arrays = tmp_path / "damaged.npz", {"x": np.arange(500, dtype=np.uint8).reshape(5, 100), "y": np.arange(5)}
    schema = {"x": Field("uint8", ("n", 100)), "y": Field("integer", ("n",))}
    np.savez_compressed(path, **arrays)
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= change
    path.write_bytes(bytes(content))
    try:
        read = read_npz(path, schema)
    except DataError as error:
        assert "damaged.npz" in str(error)
    else:
        assert all(np.array_equal(read[name], arrays[name]) for name in arrays)


@pytest.mark.parametrize("change, words", [
    (lambda a: a.pop("y_test"), "lacks y_test"),
    (lambda a: a.update(x_train=a["x_train"] / np.float32(255)), "x_train holds float32, expected uint8"),
    (lambda a: a.update(x_train=a["x_train"].transpose(0, 3, 1, 2)), r"x_train has shape \(60, 3, 32, 32\)"),
    (lambda a: a.update(y_train=a["y_train"][:-1]), r"y_train has shape \(59,\), expected \(60,\)"),
    (lambda a: a.update(y_train=a["y_train"] + 1), "y_train goes up to 10"),
    (lambda a: a.update(y_train=a["y_train"].astype(np.int64) - 1), "y_train goes down to -1"),
    (lambda a: a.update(y_train=a["y_train"].astype(float)), "y_train holds float64"),
    (lambda a: a.update(classes=a["classes"][::-1]), "not those of CIFAR-10"),
    (lambda a: a.update(x_test=a["x_test"][:0], y_test=a["y_test"][:0]), "x_test is empty"),
])
def test_a_mislabelled_file_is_an_error_that_says_what_is_wrong(machine, change, words):
    arrays = pretend_cifar()
    change(arrays)
    write_npz(machine / ".data" / "cifar10.npz", arrays)
    with pytest.raises(DataError, match=r"cifar10\.npz.*" + words):
        load_cifar10(10, 10)


def test_another_data_set_under_the_name_is_an_error(machine):
    write_npz(machine / ".data" / "cifar10_10k2k.npz", {"x": np.zeros((4, 64, 64, 3), np.uint8), "identity": np.arange(4)})
    with pytest.raises(DataError, match=r"cifar10_10k2k\.npz: lacks .* not what its name says"):
        load_cifar10(10, 10)
    write_npz(machine / ".data" / "cifar10_10k2k.npz", pretend_cifar())
    with pytest.raises(DataError, match=r"\(10000, 32, 32, 3\)"):
        load_cifar10(10, 10)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"\x93NUMPY", b"PK\x03\x04"])
def test_a_file_of_another_kind_is_an_error(tmp_path, content):
    (tmp_path / "odd.npz").write_bytes(content)
    with pytest.raises(DataError, match="odd.npz"):
        read_npz(tmp_path / "odd.npz", {"x": Field("uint8", ("n",))})
    np.save(tmp_path / "single.npy", np.zeros(3))
    with pytest.raises(DataError, match="single.npy"):
        read_npz(tmp_path / "single.npy", {"x": Field("uint8", ("n",))})


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_are_never_opened(tmp_path):
    victim = tmp_path / "owned"
    np.savez(tmp_path / "evil.npz", x=np.array([Trap(str(victim))], dtype=object))
    (tmp_path / "plain.npz").write_bytes(pickle.dumps(Trap(str(victim))))
    for name in ("evil.npz", "plain.npz"):
        with pytest.raises(DataError, match=name):
            read_npz(tmp_path / name, {"x": Field("uint8", ("n",))})
    assert not victim.exists()
    with pytest.raises(ValueError, match="pickles"):
        write_npz(tmp_path / "evil2.npz", {"x": np.array([{}])})


def test_permuted_labels_are_seen_by_the_checksum(tmp_path):
    arrays = pretend_cifar()
    known = content_checksum(arrays)
    write_npz(tmp_path / "a.npz", arrays | {"y_train": np.roll(arrays["y_train"], 1)})
    with pytest.raises(DataError, match=r"a\.npz.*checksum"):
        read_npz(tmp_path / "a.npz", data.cifar10_schema("n", "m"), known)
    np.savez_compressed(tmp_path / "b.npz", **arrays)  # packed otherwise, the same values
    assert content_checksum(read_npz(tmp_path / "b.npz", data.cifar10_schema("n", "m"), known)) == known


def test_fields_of_other_kinds():
    gains = np.ones((3, 2), dtype=np.complex64)
    assert Field("complex64", ("users", 2)).fault(gains, {}) is None
    assert "NaN" in Field("complex64", ("users", 2)).fault(gains * np.nan, {})
    assert "NaN" in Field("float16", ("n",), allow_nan=True).fault(np.array([np.inf], np.float16), {})
    assert Field("float16", ("n",), -200, 0, allow_nan=True).fault(np.array([-100, np.nan], np.float16), {}) is None
    assert Field("bool", ("n",)).fault(np.array([True]), {}) is None
    assert "shape" in Field("bool", ("n", "m")).fault(np.array([True]), {})


@pytest.mark.skipif(not REAL_DATA, reason="needs PRIVFL_DATA")
def test_the_known_subset_and_the_faces_are_recognised_and_permuted_labels_are_not(machine, monkeypatch):
    monkeypatch.setenv("PRIVFL_DATA", REAL_DATA)
    if not (path := data.find_data("cifar10_10k2k.npz")):
        pytest.skip("cifar10_10k2k.npz is not in PRIVFL_DATA")
    images = load_cifar10(50, 50)
    assert "balanced subset" in images.source and images.train_images.min() == 0 and images.train_images.max() == 1
    if data.find_data("faces_64_2k.npz"):
        faces = load_faces()
        assert not faces.showable and set(faces.train_labels.tolist()).isdisjoint(faces.test_labels.tolist())
        assert len(faces.train_labels) + len(faces.test_labels) == 2000
    arrays = data.read_cifar10(path)
    monkeypatch.delenv("PRIVFL_DATA")
    write_npz(machine / ".data" / path.name, arrays | {"y_train": np.roll(arrays["y_train"], 1)})
    with pytest.raises(DataError, match="checksum"):
        load_cifar10(50, 50)


# Writing

def test_a_failed_write_leaves_the_old_file_and_no_stump(tmp_path, monkeypatch):
    write_npz(tmp_path / "a.npz", {"x": np.arange(3)})

    def full_disk(stream, **arrays):
        stream.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(OSError):
        write_npz(tmp_path / "a.npz", {"x": np.arange(4)})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert read_npz(tmp_path / "a.npz", {"x": Field("integer", ("n",))})["x"].tolist() == [0, 1, 2]


# The network

def test_offline_never_tries_the_network(machine, monkeypatch, caplog):
    def forbidden(*args, **kwargs):
        raise AssertionError("the network was tried")

    monkeypatch.setattr(data.urllib.request, "urlopen", forbidden)
    monkeypatch.setattr(data, "_answers_head", forbidden)
    monkeypatch.setattr(socket, "create_connection", forbidden)
    for value in ("1", "yes", "TRUE"):
        monkeypatch.setenv("PRIVFL_OFFLINE", value)
        images = load_cifar10(20, 10)
    assert images.fallback and data._SILENT == {}
    assert "not CIFAR-10" in images.source and "not CIFAR-10" in caplog.text and "PRIVFL_OFFLINE" in caplog.text
    assert images.classes[0] == "digit 0" and not set(images.classes) & set(CIFAR10_CLASSES)


def test_a_dead_network_is_given_up_while_it_is_still_silent(machine, monkeypatch):
    monkeypatch.setenv("PRIVFL_OFFLINE", "0")
    released, waited_for, asked = threading.Event(), threading.Event(), []

    def silent(request, timeout):
        asked.append(request.full_url)
        if not released.wait(60):
            waited_for.set()
        raise OSError("timed out")

    monkeypatch.setattr(data.urllib.request, "urlopen", silent)
    before = socket.getdefaulttimeout()
    assert not data.network_answers("http://example.invalid/file", timeout_s=0.01)
    assert not waited_for.is_set()  # it answered although the look-up still hangs
    assert not data.network_answers("http://example.invalid/file", timeout_s=0.01)
    released.set()
    assert len(asked) == 1  # remembered
    assert socket.getdefaulttimeout() is before


def test_a_refused_connection_leads_to_the_fallback(machine, monkeypatch):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRIVFL_OFFLINE", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(data, "CIFAR10_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/file")
        assert load_cifar10(10, 10).fallback


class Quiet(http.server.BaseHTTPRequestHandler):
    """Has /file and nothing else."""

    def do_HEAD(self):
        self.send_response(200 if self.path == "/file" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_a_server_that_has_the_file_answers(machine, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRIVFL_OFFLINE", "")
    server = http.server.HTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        place = f"http://127.0.0.1:{server.server_port}"
        assert data.network_answers(f"{place}/file", timeout_s=30)
        assert not data.network_answers(f"{place}/else", timeout_s=30)
    finally:
        server.shutdown()
        server.server_close()


def test_our_address_is_the_one_that_torchvision_asks():
    from torchvision.datasets import CIFAR10

    assert data.CIFAR10_URL == CIFAR10.url


def test_a_download_is_used_named_and_kept(network, machine):
    images = load_cifar10(20, 10)
    assert images.source == "CIFAR-10 (downloaded by torchvision)" and not images.fallback
    assert network.calls[0] == ("torchvision", True, True)
    assert sorted(path.name for path in (machine / ".data").iterdir()) == [".lock", "cifar10.npz"]
    count = len(network.calls)
    again = load_cifar10(20, 10)
    assert again.source == "CIFAR-10 (file cifar10.npz)" and len(network.calls) == count
    assert again.checksum == images.checksum and torch.equal(again.train_images, images.train_images)


def test_a_download_that_another_process_finished_is_not_repeated(network, machine):
    write_npz(machine / ".data" / "cifar10.npz", pretend_cifar())
    assert data._download_cifar10() is not None and network.calls == []


@pytest.mark.parametrize("failure", [OSError("reset by peer"), RuntimeError("File not found or corrupted.")])
def test_a_failed_download_leads_to_the_fallback_and_is_named(network, machine, caplog, failure):
    network.failure = failure
    images = load_cifar10(20, 10)
    assert images.fallback and str(failure) in caplog.text and "not CIFAR-10" in caplog.text
    assert data.find_data("cifar10.npz") is None


def test_a_stalled_download_is_given_up(network, machine, monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(data, "STALL_S", 0.05)
    monkeypatch.setattr(data, "_cifar10_by_torchvision", lambda root, download: released.wait())
    assert load_cifar10(20, 10).fallback
    released.set()
    assert "no new byte" in caplog.text


def test_a_full_disk_after_the_download_keeps_the_images(network, machine, monkeypatch, caplog):
    def full_disk(stream, **arrays):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    images = load_cifar10(20, 10)
    assert not images.fallback and "could not be kept (No space left on device)" in caplog.text
    assert data.find_data("cifar10.npz") is None and not list((machine / ".data").glob("*.partial"))


def test_only_one_works_at_a_time_across_processes(machine):
    fcntl = pytest.importorskip("fcntl")
    entered = threading.Event()

    def enter():
        with data.one_at_a_time(machine / ".data"):
            entered.set()

    (machine / ".data").mkdir()
    with open(machine / ".data" / ".lock", "w") as held:  # as another process would hold it
        fcntl.flock(held, fcntl.LOCK_EX)
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
    thread.join()
    assert entered.is_set()


def test_a_folder_that_torchvision_unpacked_is_read_or_refused_by_name(machine, monkeypatch):
    import torchvision.datasets

    (machine / ".data" / "cifar-10-batches-py").mkdir(parents=True)
    with pytest.raises(DataError, match="cifar-10-batches-py.*incomplete or corrupted"):
        load_cifar10(10, 10)  # the real torchvision finds nothing in it
    fake = type("CIFAR10", (FakeCIFAR10,), {"calls": []})
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", fake)
    assert load_cifar10(10, 10).source == "CIFAR-10 (folder cifar-10-batches-py)"
    assert not any(download for _, _, download in fake.calls)


# The order of sources and the size asked for

def test_a_set_that_is_too_small_leads_to_the_next_and_then_to_an_error(network, machine):
    write_npz(machine / ".data" / "cifar10.npz", pretend_cifar(20, 20))
    (machine / ".data" / "cifar-10-batches-py").mkdir()
    assert load_cifar10(20, 20).source == "CIFAR-10 (file cifar10.npz)"
    assert load_cifar10(60, 20).source == "CIFAR-10 (folder cifar-10-batches-py)"
    with pytest.raises(ValueError, match=r"asked for 61 .* 20 \+ 20; .* 60 \+ 30") as caught:
        load_cifar10(61, 20)
    assert not isinstance(caught.value, DataError)


@pytest.mark.parametrize("count", [0, -1, 2.5, "7", True, math.inf])
def test_counts_must_be_whole_and_positive(machine, count):
    with pytest.raises(ValueError, match="whole number"):
        load_cifar10(num_train=count)
    with pytest.raises(ValueError, match="whole number"):
        load_cifar10(10, num_test=count)
    with pytest.raises(ValueError, match="whole number"):
        load_photographs(count)


def test_the_digits_are_balanced_and_disjoint_and_give_what_they_have(machine):
    images = load_cifar10(50_000, 10_000)
    assert torch.bincount(images.train_labels).tolist() == [140] * 10
    assert torch.bincount(images.test_labels).tolist() == [34] * 10
    assert images.summary()["num_train"] == 1400 and images.summary()["fallback"] is True
    arrays = data.digits_arrays()
    rows = {row.tobytes() for row in arrays["x_train"]}
    assert not any(row.tobytes() in rows for row in arrays["x_test"])
    assert load_cifar10(100, 100).checksum == load_cifar10(100, 100).checksum != images.checksum


@settings(max_examples=40)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.data())
def test_subsets_are_nested_and_as_balanced_as_the_labels_allow(labels, choice):
    labels = np.array(labels)
    small = choice.draw(st.integers(1, len(labels)))
    large = choice.draw(st.integers(small, len(labels)))
    index = balanced_subset(labels, small)
    assert len(index) == small and (np.diff(index) > 0).all() and set(index) <= set(balanced_subset(labels, large))
    taken, held = np.bincount(labels[index], minlength=6), np.bincount(labels, minlength=6)
    level = taken.max()
    assert all(t >= min(h, level - 1) for t, h in zip(taken, held))


# Trap 20

def test_trap_20_the_global_random_states_do_not_move(network, machine):
    random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    load_cifar10(20, 10)
    load_cifar10(20, 10)
    (machine / ".data" / "cifar10.npz").unlink()
    network.failure = OSError("gone")
    assert load_cifar10(20, 10).fallback
    load_photographs(16)
    labels = torch.arange(50) % 5
    partition_dirichlet(labels, 5, 0.5, torch.Generator().manual_seed(0))
    partition_iid(50, 5, torch.Generator().manual_seed(0))
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1]) and random.getstate() == states[2]


def test_trap_20_both_ends_are_reached_and_every_byte_survives():
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    unit = to_unit_images(pixels)
    assert unit.min().item() == 0.0 and unit.max().item() == 1.0
    assert torch.equal((unit * 255).round().byte().permute(0, 2, 3, 1), torch.from_numpy(pixels))
    for bad in (pixels[0], pixels.astype(np.float32), pixels[..., :1]):
        with pytest.raises(ValueError, match="uint8"):
            to_unit_images(bad)


def test_trap_20_split_sizes_and_disjointness(machine):
    good_file(machine)
    images = load_cifar10()
    assert len(images.train_labels) == 60 and len(images.test_labels) == 30
    train = {image.numpy().tobytes() for image in images.train_images}
    assert len(train) == 60 and not any(image.numpy().tobytes() in train for image in images.test_images)


# Photographs and faces

def test_photographs():
    for size in (1, 32, 64, 300):
        pictures = load_photographs(size)
        assert pictures.shape == (len(data.PHOTOGRAPHS), 3, size, size) and pictures.dtype == torch.float32
        assert pictures.min() >= 0 and pictures.max() <= 1
    assert torch.equal(load_photographs(32), load_photographs(32))
    with pytest.raises(ValueError, match="at most 300"):
        load_photographs(301)


def test_faces_have_no_stand_in_and_their_absence_says_what_to_do(machine):
    with pytest.raises(DataNotFound, match=r"faces_64_2k\.npz.*PRIVFL_DATA.*load_photographs"):
        load_faces()


def test_faces_split_by_person_and_are_not_for_show(machine, monkeypatch):
    numbers = np.random.default_rng(0)
    arrays = {"x": numbers.integers(0, 256, (40, 64, 64, 3), dtype=np.uint8), "identity": numbers.integers(0, 15, 40)}
    monkeypatch.setattr(data, "FACES_CHECKSUM", content_checksum(arrays))
    write_npz(machine / ".data" / "faces_64_2k.npz", arrays)
    faces = load_faces()
    assert not faces.showable and not faces.summary()["showable"] and faces.train_images.shape[1:] == (3, 64, 64)
    assert len(faces.train_labels) + len(faces.test_labels) == 40
    assert set(faces.train_labels.tolist()).isdisjoint(faces.test_labels.tolist())
    write_npz(machine / ".data" / "faces_64_2k.npz", arrays | {"identity": arrays["identity"] - 1})
    with pytest.raises(DataError, match="identity goes down to -1"):
        load_faces()


# Trap 7: partitions

@settings(max_examples=50)
@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(1, 12), st.integers(1, 10),
       st.sampled_from([1e-300, 1e-8, 1e-3, 0.1, 1.0, 100.0, 1e8]), st.data())
def test_trap_07_every_position_once_nobody_below_the_minimum_and_it_ends(seed, count, clients, classes, alpha, choice):
    labels = torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))
    clients = min(clients, count)
    smallest = choice.draw(st.integers(0, count // clients))
    parts = partition_dirichlet(labels, clients, alpha, torch.Generator().manual_seed(seed), min_size=smallest, max_tries=3)
    assert len(parts) == clients and all(part.dtype == torch.int64 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(count))
    assert min(len(part) for part in parts) >= smallest
    assert all((part.diff() > 0).all() for part in parts)


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 500), st.integers(1, 40))
def test_trap_07_iid_every_position_once_and_even(seed, count, clients):
    clients = min(clients, count)
    parts = partition_iid(count, clients, torch.Generator().manual_seed(seed))
    sizes = [len(part) for part in parts]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(count)) and max(sizes) - min(sizes) <= 1


def test_trap_07_the_number_of_draws_is_bounded(monkeypatch, caplog):
    draws = []

    def everything_to_the_first(labels, num_clients, alpha, generator):
        draws.append(1)
        return np.zeros(len(labels), dtype=np.int64)

    monkeypatch.setattr(data, "_dirichlet_draw", everything_to_the_first)
    with caplog.at_level(logging.INFO, logger="privfl"):
        parts = partition_dirichlet(torch.zeros(100, dtype=torch.int64), 4, 1.0, torch.Generator(), min_size=10, max_tries=7)
    assert len(draws) == 7 and [len(part) for part in parts] == [70, 10, 10, 10] and "topped up" in caplog.text


def test_trap_07_empty_clients_on_request_and_their_counts():
    labels = torch.arange(200) % 10
    parts = partition_dirichlet(labels, 20, 0.01, torch.Generator().manual_seed(0), min_size=0)
    counts = label_counts(labels, parts, 10)
    assert counts.sum(1).min() == 0 and counts.sum(0).tolist() == [20] * 10
    assert counts.sum(1).tolist() == [len(part) for part in parts]


def test_partitions_repeat_and_depend_on_the_generator():
    labels = torch.arange(300) % 10

    def deal(seed):
        generator = torch.Generator().manual_seed(seed)
        return partition_dirichlet(labels, 6, 0.5, generator) + partition_iid(300, 6, generator)

    first, same, other = deal(0), deal(0), deal(1)
    assert all(torch.equal(a, b) for a, b in zip(first, same))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize("arguments, words", [
    ({"num_clients": 0}, "num_clients"), ({"num_clients": -3}, "num_clients"), ({"num_clients": 2.5}, "num_clients"),
    ({"num_clients": 21}, "fewer clients"), ({"min_size": 11}, "smaller min_size"), ({"min_size": -1}, "min_size"),
    ({"alpha": 0.0}, "alpha"), ({"alpha": -1.0}, "alpha"), ({"alpha": math.nan}, "alpha"), ({"alpha": math.inf}, "alpha"),
    ({"max_tries": 0}, "max_tries"), ({"generator": None}, "global one"), ({"labels": torch.zeros(20)}, "integers"),
    ({"labels": torch.zeros(0, dtype=torch.int64)}, "integers"), ({"labels": torch.zeros(5, 4, dtype=torch.int64)}, "integers"),
])
def test_bad_partitions_are_refused_in_words(arguments, words):
    good = {"labels": torch.arange(20) % 3, "num_clients": 2, "alpha": 1.0, "generator": torch.Generator()}
    with pytest.raises(ValueError, match=words):
        partition_dirichlet(**(good | arguments))


@pytest.mark.parametrize("count, clients", [(10, 0), (10, 11), (0, 1), (-1, 1), (10, 2.5)])
def test_bad_even_partitions_are_refused(count, clients):
    with pytest.raises(ValueError):
        partition_iid(count, clients, torch.Generator())
    with pytest.raises(ValueError, match="global one"):
        partition_iid(10, 2, None)


@pytest.mark.parametrize("alpha", [0.3, 3.0])
def test_dirichlet_shares_have_the_theoretical_moments(alpha):
    """n = 600 partitions of 300 examples over 4 clients; five standard errors plus the rounding: one false alarm in about a million."""
    generator, labels, clients, count = torch.Generator().manual_seed(7), torch.zeros(300, dtype=torch.int64), 4, 600
    sizes = [[len(part) for part in partition_dirichlet(labels, clients, alpha, generator, min_size=0)] for _ in range(count)]
    shares = torch.tensor(sizes, dtype=torch.float64)[:, 1] / 300
    theory = (clients - 1) / (clients**2 * (clients * alpha + 1))
    squares = (shares - 1 / clients).square()
    assert abs(shares.mean() - 1 / clients) < 5 * math.sqrt(theory / count) + 1 / 300
    assert abs(squares.mean() - theory) < 5 * squares.std() / math.sqrt(count) + 2 * math.sqrt(theory) / 300 + 1 / 300**2


def test_dirichlet_shares_of_two_classes_are_independent():
    """n = 400; the correlation of independent shares is below 5 / sqrt(n) but for one run in about two million."""
    generator, labels = torch.Generator().manual_seed(9), torch.arange(200) % 2
    counts = [label_counts(labels, partition_dirichlet(labels, 3, 0.5, generator, min_size=0), 2)[0] for _ in range(400)]
    assert abs(torch.corrcoef(torch.stack(counts).double().T)[0, 1]) < 5 / math.sqrt(400)


def test_even_partitions_mix_the_classes_as_chance_does():
    """n = 400 deals; a client's count of one class is hypergeometric; five standard errors: one false alarm in two million."""
    generator, labels = torch.Generator().manual_seed(8), torch.arange(200) % 4
    counts = torch.tensor([int((labels[partition_iid(200, 5, generator)[2]] == 1).sum()) for _ in range(400)], dtype=torch.float64)
    variance = 40 * 0.25 * 0.75 * 160 / 199
    assert abs(counts.mean() - 10) < 5 * math.sqrt(variance / 400)
    assert abs(counts.var() / variance - 1) < 5 * math.sqrt(2 / 399)
