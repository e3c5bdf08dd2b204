"""Channels: data sets, loaders, features and dissimilarities."""
import contextlib
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from privfl.charting import csi as module
from privfl.charting.csi import (CSIDataset, autocorrelation_features, charting_dissimilarity, fuse_time, geodesic_distances,
                                 load_csi_file, load_munich, load_powder, neighbor_graph, reduce_csi, restore_csi, rss_dissimilarity,
                                 rss_features, street_grid_csi, tap_dissimilarity, trace_csi)
from privfl.charting.metrics import trustworthiness
from privfl.data import DataError, DataNotFound

STREETS = street_grid_csi(120, seed=3)


def test_streets_are_deterministic_and_walkable():
    assert np.array_equal(STREETS.csi, street_grid_csi(120, seed=3).csi)
    assert not np.array_equal(STREETS.csi, street_grid_csi(120, seed=4).csi)
    assert np.linalg.norm(np.diff(STREETS.positions, axis=0), axis=1).max() < 8
    with pytest.raises(ValueError):
        street_grid_csi(2)


def test_trap_20_nothing_touches_the_global_generator():
    before = np.random.get_state()[1].copy()
    street_grid_csi(30, seed=0)
    load_munich(50, shipped=True)
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("spoil", [lambda c: c.real, lambda c: c[0], lambda c: np.where(np.arange(32) == 5, np.nan, c), lambda c: c * (np.arange(120) > 3)[:, None, None], lambda c: c[:-1]])
def test_bad_channels_are_refused(spoil):
    with pytest.raises(ValueError):
        CSIDataset(spoil(STREETS.csi), STREETS.positions, STREETS.times, "spoilt")


def test_shipped_walk():
    dataset = load_munich(shipped=True)
    assert dataset.csi.shape == (1200, 32, 32) and dataset.csi.dtype == np.complex64
    assert (np.diff(dataset.times) > 0).all() and "Munich" in dataset.source and "/" not in dataset.source
    part = load_munich(300, shipped=True)
    assert len(part) == 300 and np.array_equal(part.positions, dataset.positions[::4])
    for count in (2, 1201):
        with pytest.raises(ValueError):
            load_munich(count, shipped=True)


def test_full_walk_where_it_is_there(monkeypatch, tmp_path):
    """The loader takes the full file from PRIVFL_DATA; here a small one of the same format."""
    users = 40
    generator = np.random.default_rng(0)
    stored = {"csi": (generator.standard_normal((users, 4, 8)) + 1j).astype(np.complex64), "ue_pos": generator.random((users, 3)).astype(np.float32),
              "time": np.arange(users, dtype=np.float32), "valid": np.arange(users) != 7, "bs_pos": np.zeros(3, np.float32), "freq_hz": np.array(3.5e9)}
    np.savez(tmp_path / "csi_munich.npz", **stored)
    monkeypatch.setenv("PRIVFL_DATA", str(tmp_path))
    assert len(load_munich()) == 39 and "full" in load_munich().source
    assert len(load_munich(shipped=True)) == 1200
    (tmp_path / "csi_munich.npz").write_bytes((tmp_path / "csi_munich.npz").read_bytes()[:3000])
    with pytest.raises(DataError, match="csi_munich.npz"):
        load_munich()


def test_reduction_keeps_the_strongest_taps():
    arrays = reduce_csi(STREETS, 12)
    assert arrays["taps"].dtype == np.float16 and arrays["taps"].shape == (120, 16, 12, 2)
    back = restore_csi(arrays)
    kept = np.abs(STREETS.taps[:, :, arrays["tap_index"]])
    assert np.abs(np.abs(back.taps[:, :, arrays["tap_index"]]) - kept).max() < 1e-3 * kept.max()
    share = (np.abs(STREETS.taps) ** 2).sum((0, 1))
    assert share[arrays["tap_index"]].min() > 0


@pytest.mark.parametrize("real", [True, False])
def test_own_files(tmp_path, real):
    stored = np.stack([STREETS.csi.real, STREETS.csi.imag], -1).reshape(120, 4, 4, 32, 2) if real else STREETS.csi.reshape(120, 4, 4, 32)
    np.savez(tmp_path / "own.npz", csi=stored, pos=STREETS.positions, time=STREETS.times)
    loaded = load_csi_file(tmp_path / "own.npz")
    assert np.array_equal(loaded.csi, STREETS.csi) and len(load_csi_file(tmp_path / "own.npz", 10)) == 10


def test_own_files_in_hdf5(monkeypatch, tmp_path):
    """h5py where it is installed, else a stand-in with its interface: names to arrays, opened for reading."""
    try:
        import h5py
    except ImportError:
        h5py = types.SimpleNamespace(File=lambda path, mode="r": contextlib.closing(StoredArrays(path)))
        monkeypatch.setitem(sys.modules, "h5py", h5py)
        with open(tmp_path / "own.h5", "wb") as file:
            np.savez(file, csi=STREETS.csi, pos=np.c_[STREETS.positions, np.ones(120)], time=STREETS.times[:, None])
    else:
        with h5py.File(tmp_path / "own.h5", "w") as file:
            file.update({"csi": STREETS.csi, "pos": np.c_[STREETS.positions, np.ones(120)], "time": STREETS.times[:, None]})
    loaded = load_csi_file(tmp_path / "own.h5")
    assert np.array_equal(loaded.csi, STREETS.csi) and np.array_equal(loaded.positions, STREETS.positions)
    assert np.array_equal(loaded.times, STREETS.times) and loaded.source.startswith("own.h5")


class StoredArrays(dict):
    """The arrays of a file by name."""

    def __init__(self, path):
        super().__init__(np.load(path))

    def close(self):
        self.clear()


def test_broken_own_files(tmp_path):
    with pytest.raises(DataNotFound, match="none.npz"):
        load_csi_file(tmp_path / "none.npz")
    np.savez(tmp_path / "poor.npz", csi=STREETS.csi, pos=STREETS.positions)
    with pytest.raises(DataError, match="times"):
        load_csi_file(tmp_path / "poor.npz")
    np.savez(tmp_path / "real.npz", csi=STREETS.csi.real, pos=STREETS.positions, time=STREETS.times)
    with pytest.raises(DataError, match="real"):
        load_csi_file(tmp_path / "real.npz")
    (tmp_path / "noise.npz").write_bytes(b"not a file of arrays")
    with pytest.raises(DataError, match="noise.npz"):
        load_csi_file(tmp_path / "noise.npz")


def test_missing_extras_say_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sionna", None)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match="pip install sionna-rt"):
        trace_csi(STREETS.positions[:2], STREETS.times[:2])
    (tmp_path / "file.h5").write_bytes(b"x")
    with pytest.raises(DataError, match="h5py"):
        load_csi_file(tmp_path / "file.h5")


def test_tracing_calls_the_solver(monkeypatch):
    """Without Sionna RT: the calls are recorded by a stand-in, and what comes back is stacked by user."""

    class Scene:
        def __init__(self):
            self.items = {}

        def add(self, item):
            self.items[item.name] = item

        def remove(self, name):
            del self.items[name]

    class Device:
        def __init__(self, name, position, look_at=None):
            self.name, self.position = name, position

    class Solver:
        def __call__(self, scene, **options):
            assert options["refraction"] is False and options["diffraction"] is True
            place = scene.items["user"].position
            return types.SimpleNamespace(cfr=lambda frequencies, **_: np.full((1, 1, 1, 32, 1, len(frequencies)), place[0] + 1j))

    rt = types.SimpleNamespace(load_scene=lambda name: Scene(), scene=types.SimpleNamespace(munich="munich"), PlanarArray=lambda **_: None,
                               Transmitter=Device, Receiver=Device, PathSolver=Solver)
    monkeypatch.setitem(sys.modules, "sionna", types.SimpleNamespace(rt=rt))
    traced = trace_csi(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([0.0, 1.0]))
    assert traced.csi.shape == (2, 32, 32) and np.allclose(traced.csi[:, 0, 0], [1 + 1j, 2 + 1j]) and "munich" in traced.source


@given(st.integers(0, 10**6))
def test_features_ignore_phase_and_power(seed):
    generator = np.random.default_rng(seed)
    csi = STREETS.csi[:10] * (generator.uniform(0.1, 9, 10) * np.exp(1j * generator.uniform(0, 6, 10)))[:, None, None]
    assert np.abs(autocorrelation_features(csi, 2) - autocorrelation_features(STREETS.csi[:10], 2)).max() < 1e-5
    assert np.abs(tap_dissimilarity(csi) - tap_dissimilarity(STREETS.csi[:10])).max() < 1e-4


def test_features_have_the_distances_of_the_matrices():
    features = autocorrelation_features(STREETS.csi[:20])
    taps = STREETS.taps[:20].astype(complex)
    moments = taps @ taps.conj().transpose(0, 2, 1)
    moments /= np.trace(moments, axis1=1, axis2=2).real[:, None, None]
    wanted = np.sqrt((np.abs(moments[:, None] - moments[None]) ** 2).sum((2, 3)))
    assert np.abs(np.linalg.norm(features[:, None] - features[None], axis=2) - wanted).max() < 1e-5
    assert features.shape == (20, 256)
    for wrong in (0, 33):
        with pytest.raises(ValueError):
            autocorrelation_features(STREETS.csi, wrong)
    with pytest.raises(ValueError):
        autocorrelation_features(np.full((3, 2, 4), np.nan + 0j))


def test_dissimilarity_is_one_and_shuffles():
    base = tap_dissimilarity(STREETS.csi)
    assert np.array_equal(base, base.T) and not np.diag(base).any() and base.min() >= 0 and base.max() <= 1
    order = np.random.default_rng(1).permutation(120)
    assert np.abs(tap_dissimilarity(STREETS.csi[order]) - base[order][:, order]).max() < 1e-5


def test_time_window_counts_steps():
    base = tap_dissimilarity(STREETS.csi)
    assert np.allclose(fuse_time(base, STREETS.times), fuse_time(base, 7.0 * STREETS.times))
    order = np.random.default_rng(2).permutation(120)
    assert np.allclose(fuse_time(base[order][:, order], STREETS.times[order]), fuse_time(base, STREETS.times)[order][:, order])
    with pytest.raises(ValueError, match="time stamps"):
        fuse_time(base, np.zeros(120))


def test_graph_and_geodesics():
    line = np.arange(12.0)
    distance = np.abs(line[:, None] - line[None])
    assert np.allclose(geodesic_distances(np.minimum(distance, 3.0), 2), distance)  # saturated values are walked around
    with pytest.raises(ValueError, match="parts"):
        neighbor_graph(np.abs(np.r_[line, line + 99][:, None] - np.r_[line, line + 99][None]), 2)
    bridged = geodesic_distances(np.abs(np.r_[line, line + 99][:, None] - np.r_[line, line + 99][None]), 2, connect=True)
    assert np.isfinite(bridged).all() and bridged[0, -1] == pytest.approx(110)
    same = geodesic_distances(np.zeros((4, 4)), 2)
    assert (same < 1e-9).all()  # coincident points stay connected
    for wrong in (0, 12):
        with pytest.raises(ValueError, match="n_neighbors"):
            neighbor_graph(distance, wrong)


def test_streets_chart_themselves():
    lengths = charting_dissimilarity(STREETS, connect=True)
    squared = lengths**2
    centred = squared - squared.mean(0) - squared.mean(1)[:, None] + squared.mean()
    values, vectors = np.linalg.eigh(-centred / 2)
    assert lengths.mean() == pytest.approx(1) and trustworthiness(STREETS.positions, vectors[:, -2:] * np.sqrt(values[-2:])) > 0.85


def test_received_powers_with_holes():
    rss = np.array([[-60.0, -70, np.nan, -80, -90], [-62.0, -70, -50, -80, -90], [np.nan, np.nan, np.nan, np.nan, -90.0]])
    distance = rss_dissimilarity(rss)
    assert distance[0, 1] == pytest.approx(1.0) and distance[0, 2] == distance[1, 2] == pytest.approx(2.0)  # too few in common: far
    features = rss_features(rss)
    assert features.shape == (3, 10) and np.isfinite(features).all() and features[0, 7] == 0 and features[1, 7] == 1
    assert features[0, 2] == 0.0  # a hole sits at the receiver's mean, not at the noise floor


def test_powder_loader(monkeypatch, tmp_path):
    monkeypatch.setenv("PRIVFL_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataNotFound, match="powder_rss_outdoor.npz"):
        load_powder()
    stamps = np.array(["2022-07-06 10:00:08", "2022-07-06 10:00:00", "2022-07-07 10:00:00"])
    np.savez(tmp_path / "powder_rss_outdoor.npz", timestamp=stamps, rss_fixed=np.array([[-80, -101.0], [-70, -90], [-60, -95]], np.float32),
             tx_pos=np.array([[40.76, -111.83], [40.77, -111.84], [40.75, -111.82]]))
    day = load_powder("2022-07-06")
    assert len(day) == 2 and np.array_equal(day.rss_db, [[-70, -90], [-80, np.nan]], equal_nan=True)  # in temporal order
    assert np.linalg.norm(day.positions[0] - day.positions[1]) == pytest.approx(np.hypot(1113.2, 843.3), rel=1e-3)
    assert len(load_powder(None)) == 3
    with pytest.raises(ValueError, match="sessions"):
        load_powder("2021-01-01")
    assert module.load_powder is load_powder
