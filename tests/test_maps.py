"""The data set of radio maps: scale, splits, rasters, floors, generator with its cache, and the public folder layout."""
import json
import logging
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from privfl.data import DataError, DataNotFound, find_data
from privfl.radiomap import maps as module
from privfl.radiomap.maps import (RASTERS, RadioMaps, chance_rmse_m, draw_transmitters, floors_db, gain_to_target,
                                  generate_maps, load_radiomapseer, load_radiomapseer_sample, map_statistics,
                                  model_inputs, outdoor_pixels, pool, radiomapseer_split, rasters, split_by_map,
                                  target_to_gain_db)


def toy(num_cities: int = 6, per_city: int = 3, side: int = 8) -> RadioMaps:
    """Random numbers in the shape of radio maps; the gain of city i starts with i / 100."""
    draw = np.random.default_rng(0)
    owner = np.arange(num_cities).repeat(per_city)
    gain = draw.random((len(owner), side, side))
    gain[:, 0, 0] = owner / 100
    return RadioMaps(draw.random((num_cities, side, side)) * 0.9, gain, draw.uniform(0, 2 * side, (len(owner), 2)), owner, 2.0, "toy",
                     100 + np.arange(num_cities))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "radiomaps"


# ---- scale ------------------------------------------------------------------------------------------------------

def test_trap_20_both_ends_of_the_scale_are_reached():
    grey = np.arange(256) / 255
    gain_db = -147 + grey * 99.16
    target = gain_to_target(gain_db)
    assert np.allclose(target, np.maximum(grey - 0.2, 0) / 0.8, atol=1e-12) and target[0] == 0 and target[-1] == pytest.approx(1)
    assert (target[:52] < 1e-9).all() and target[52] > 0  # the floor is grey 51
    assert gain_to_target(torch.tensor(-47.0)).item() == 1 and gain_to_target(np.array([-np.inf, np.nan])).tolist() == [0, 0]
    assert np.allclose(target_to_gain_db(target)[51:], gain_db[51:], atol=1e-9) and target_to_gain_db(0.0) == pytest.approx(-127.168)


@given(st.lists(st.one_of(st.floats(-300, 0), st.just(math.nan), st.just(-math.inf)), min_size=1, max_size=20))
def test_numpy_and_torch_agree_on_the_scale(values):
    array = gain_to_target(np.array(values))
    assert np.allclose(array, gain_to_target(torch.tensor(values, dtype=torch.float64)).numpy(), atol=1e-12)
    assert ((array >= 0) & (array <= 1)).all()


# ---- the class and its splits -----------------------------------------------------------------------------------

def test_a_subset_keeps_walls_and_maps_together():
    maps = toy()
    part = maps.subset([104, 101])
    assert part.map_id.tolist() == [104, 101] and len(part) == 6
    assert part.map_id[part.map_index].tolist() == [101] * 3 + [104] * 3
    assert torch.equal(part.buildings, maps.buildings[[4, 1]]) and torch.allclose(part.gain[:, 0, 0], torch.tensor([0.01] * 3 + [0.04] * 3))
    assert torch.equal(model_inputs(part, [5])[0, 0], maps.buildings[4])
    for wrong in ([], [7], [101, 101]):
        with pytest.raises(ValueError, match="map_ids"):
            maps.subset(wrong)


@given(st.integers(0, 10_000), st.sampled_from([[4, 2], [1, 1, 1], [0.5, 0.5], [0.34, 0.33, 0.33], [3]]))
def test_a_split_deals_out_cities_never_transmitters(seed, sizes):
    maps = toy()
    parts = split_by_map(maps, sizes, seed)
    seen = [set(part.map_id.tolist()) for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen))  # no city on two sides
    assert all(len(part) == 3 * len(part.map_id) for part in parts)  # and all of its transmitters with it
    assert all(torch.equal(a.gain, b.gain) for a, b in zip(parts, split_by_map(maps, sizes, seed)))
    assert len(parts) == len(sizes) and (sum(sizes) < 1.5) == any(isinstance(size, float) for size in sizes)


@pytest.mark.parametrize("parts", [[7], [5, 2], [0.9, 0.2], [0, 1], [-1, 2], [], [True], ["1"], [0.01, 0.9], [math.nan]])
def test_impossible_splits_are_refused(parts):
    with pytest.raises(ValueError, match="parts|fractions"):
        split_by_map(toy(), parts)


def test_splits_differ_by_seed():
    assert len({tuple(split_by_map(toy(), [2], seed)[0].map_id.tolist()) for seed in range(12)}) > 3


@pytest.mark.parametrize("change, words", [
    ({"gain": torch.full((18, 8, 8), -80.0)}, "gain_to_target"), ({"gain": torch.full((18, 8, 8), math.nan)}, "without NaN"),
    ({"buildings": torch.ones(6, 8, 8)}, "inside a building"), ({"buildings": torch.zeros(6, 8, 9)}, "give .N, H, W."),
    ({"transmitter_m": torch.full((18, 2), 16.0)}, "outside the map"), ({"transmitter_m": torch.full((18, 2), -0.1)}, "outside the map"),
    ({"transmitter_m": torch.full((18, 2), math.nan)}, "outside the map"), ({"transmitter_m": torch.zeros(17, 2)}, "transmitters"),
    ({"map_index": torch.full((18,), 6)}, "map_index"), ({"map_index": torch.full((18,), -1)}, "map_index"),
    ({"map_id": torch.zeros(6)}, "twice"), ({"metres_per_pixel": 0.0}, "metres_per_pixel"), ({"metres_per_pixel": math.inf}, "metres_per_pixel"),
    ({"gain": torch.zeros(0, 8, 8)}, "N >= 1"),
])
def test_arrays_that_do_not_fit_are_refused(change, words):
    maps = toy()
    with pytest.raises(ValueError, match=words):
        module.replace(maps, **change)


# ---- what the network sees --------------------------------------------------------------------------------------

@given(st.floats(0, 15.99), st.floats(0, 23.99), st.sampled_from(RASTERS))
def test_rasters_lie_in_the_unit_interval_and_peak_at_the_transmitter(row, column, kind):
    picture = draw_transmitters((row, column), (8, 12), 2.0, kind)
    assert picture.shape == (8, 12) and picture.dtype == torch.float32 and picture.min() >= 0 and picture.max() <= 1
    place = torch.tensor((row, column), dtype=torch.float32) / 2
    assert picture[int(place[0]), int(place[1])] == picture.max()
    assert torch.equal(picture, draw_transmitters(torch.tensor([[3.0, 3.0], [row, column]]), (8, 12), 2.0, kind)[1])


def test_each_raster_is_what_it_is_called():
    one, spot, far = (draw_transmitters((10.5, 20.5), 32, 1.0, kind) for kind in RASTERS)
    assert one.sum() == 1 and one[10, 20] == 1
    assert spot[10, 28] == pytest.approx(math.exp(-0.5), abs=1e-6)  # 8 m: one standard deviation
    assert far[10, 20] == 1 and far[10, 27] == pytest.approx(1 - math.log(8) / math.log(1 + math.hypot(32, 32)), abs=1e-6) and (far > 0).all()
    half = draw_transmitters((10.5, 20.5), 16, 2.0, "gaussian")
    assert half[5, 14] == pytest.approx(math.exp(-(0.5**2 + 8.5**2) / 128), abs=1e-5)  # metres at every resolution


def test_bad_rasters_are_refused():
    with pytest.raises(ValueError, match="one_hot"):
        draw_transmitters((1.0, 1.0), 8, kind="onehot")
    for place in ((8.0, 1.0), (-0.1, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="outside the map"):
            draw_transmitters(place, 8)


@pytest.mark.parametrize("index", [[3, 0, 17], torch.tensor([3, 0, 17]), np.array([3, 0, 17])])
@pytest.mark.parametrize("kind", RASTERS)
def test_model_inputs_are_buildings_then_transmitter(index, kind):
    maps = toy()
    inputs = model_inputs(maps, index, raster=kind)
    assert inputs.shape == (3, 2, 8, 8) and inputs.dtype == torch.float32
    assert torch.equal(inputs[:, 0], maps.buildings[maps.map_index[[3, 0, 17]]]) and torch.equal(inputs[:, 1], rasters(maps, kind)[[3, 0, 17]])
    assert torch.equal(model_inputs(maps)[[3, 0, 17]], model_inputs(maps, index))
    assert torch.equal(model_inputs(maps, 4), model_inputs(maps, [4]))


# ---- floors and chance ------------------------------------------------------------------------------------------

def test_floors_are_the_errors_of_three_simple_guesses():
    maps = toy()
    floors = floors_db(maps)
    assert floors["zero"] == pytest.approx(10 * math.log10(maps.gain.square().mean()), abs=1e-4)
    assert floors["constant_mean"] == pytest.approx(10 * math.log10(maps.gain.var(unbiased=False)), abs=1e-4)
    assert floors["mean_image"] == pytest.approx(10 * math.log10(maps.gain.var(dim=0, unbiased=False).mean()), abs=1e-4)
    train, test = split_by_map(maps, [4, 2])
    assert floors_db(test, train)["mean_image"] > floors_db(test)["mean_image"] and floors_db(test, train)["zero"] == floors_db(test)["zero"]
    with pytest.raises(ValueError, match="one size"):
        floors_db(maps, toy(side=4))


def test_chance_is_the_spread_of_the_positions():
    """20,000 uniform points: standard error 0.2 m, a band of 1 m is missed with probability below 1e-5."""
    places = np.random.default_rng(0).uniform(53, 203, (20_000, 2))
    assert abs(chance_rmse_m(places) - 150 / math.sqrt(6)) < 1
    assert chance_rmse_m(torch.tensor(places)) == pytest.approx(chance_rmse_m(places + 100))
    assert chance_rmse_m([[5.0, 5.0]]) == 0
    for wrong in (np.zeros(3), np.zeros((0, 2)), np.array([[math.nan, 0]]), np.zeros((3, 3))):
        with pytest.raises(ValueError, match="positions"):
            chance_rmse_m(wrong)


# ---- the generator ----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def made() -> RadioMaps:
    """Four cities with three maps each."""
    return generate_maps(4, 3, seed=3, cache=False)


def test_generated_maps_are_what_they_say(made):
    assert len(made) == 12 and made.shape == (64, 64) and made.metres_per_pixel == 4.0 and made.map_index.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert made.gain.dtype == torch.float32 and 0 < made.gain.max() <= 1 and made.gain.min() == 0
    assert ((made.transmitter_m >= 53) & (made.transmitter_m < 203)).all()
    assert ((made.buildings > 0) & (made.buildings < 1)).any() and (made.buildings == 1).any()
    assert (made.gain[made.buildings[made.map_index] == 1] == 0).all()
    peaks = made.gain.flatten(1).argmax(dim=1)
    assert (torch.stack([peaks // 64, peaks % 64], dim=1) - made.pixels).abs().max() <= 1  # the brightest pixel is the transmitter's
    assert len({tuple(place.tolist()) for place in made.transmitter_m[:3]}) == 3


def test_trap_09_workers_number_of_cities_and_seeds(made):
    assert torch.equal(made.gain, generate_maps(4, 3, seed=3, workers=3, cache=False).gain)
    two = generate_maps(2, 3, seed=3, cache=False)
    assert torch.equal(made.gain[:6], two.gain) and torch.equal(made.transmitter_m[:6], two.transmitter_m)
    assert not torch.equal(two.gain, generate_maps(2, 3, seed=4, cache=False).gain)


def test_trap_20_generating_and_loading_leave_the_global_generators_alone():
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    generate_maps(1, 1, size=16, cache=False)
    parts = radiomapseer_split()
    assert np.array_equal(before[0], np.random.get_state()[1]) and torch.equal(before[1], torch.get_rng_state())
    assert [len(part) for part in parts] == [501, 100, 99] and sorted(np.concatenate(parts)) == list(range(700))
    generator = np.random.RandomState(42)
    assert np.array_equal(np.concatenate(parts), generator.permutation(700))


def test_pooling_is_the_average_of_the_full_map(made):
    full = generate_maps(1, 3, seed=3, size=256, cache=False)
    assert torch.allclose(pool(full.gain, 64), made.gain[:3], atol=2e-5) and torch.equal(pool(full.buildings, 64), made.buildings[:1])
    assert set(full.buildings.unique().tolist()) == {0.0, 1.0} and torch.equal(full.transmitter_m, made.transmitter_m[:3])


def test_style_and_density_for_each_city():
    maps = generate_maps(3, 1, style=["detached", "courts", "any"], built_fraction=[0.15, 0.35, 0.25], size=32, cache=False)
    assert np.allclose(maps.buildings.mean(dim=(1, 2)), [0.15, 0.35, 0.25], atol=0.03)
    for wrong in ({"style": ["bars"]}, {"built_fraction": [0.2] * 2}, {"style": "gothic"}, {"built_fraction": 0.9}):
        with pytest.raises(ValueError):
            generate_maps(3, 1, cache=False, **wrong)


@pytest.mark.parametrize("change", [{"num_cities": 0}, {"transmitters_per_city": 0}, {"workers": 0}, {"size": 60}, {"size": 0}, {"seed": 0.5},
                                    {"num_cities": 1.5}, {"transmitters_per_city": 10**6}])
def test_bad_requests_are_refused(change, cache):
    with pytest.raises(ValueError):
        generate_maps(**({"num_cities": 1, "transmitters_per_city": 1} | change))


def test_stored_maps_are_found_again_and_equal_fresh_ones(cache, monkeypatch, made):
    first = generate_maps(4, 3, seed=3, workers=2)
    assert len(list(cache.glob("*.npz"))) == 1 and torch.equal(first.gain, made.gain)
    monkeypatch.setattr(module, "_one_city", lambda *job: pytest.fail("made again"))
    again = generate_maps(4, 3, seed=3)
    assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in ("gain", "buildings", "transmitter_m", "map_index"))


@pytest.mark.parametrize("damage", ["truncated", "one bit", "empty", "other arrays"])
def test_a_broken_store_is_made_anew_with_a_warning(cache, caplog, damage):
    first = generate_maps(1, 2, size=16)
    path = next(cache.glob("*.npz"))
    content = bytearray(path.read_bytes())
    if damage == "one bit":
        content[content.index(b"gain.npy") + 400] ^= 1
    elif damage == "other arrays":
        np.savez(path, gain=np.zeros(3))
        content = path.read_bytes()
    path.write_bytes({"truncated": content[:len(content) // 2], "empty": b""}.get(damage, content))
    with caplog.at_level(logging.WARNING, "privfl"):
        again = generate_maps(1, 2, size=16)
    assert "made anew" in caplog.text and torch.equal(first.gain, again.gain)
    caplog.clear()
    generate_maps(1, 2, size=16)
    assert not caplog.text  # and it was stored again


def test_the_checksum_finds_what_the_archive_format_does_not(cache, caplog):
    generate_maps(1, 1, size=16)
    path = next(cache.glob("*.npz"))
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays["gain"][0, 0, 0] += 1
    np.savez(path, **arrays)
    with caplog.at_level(logging.WARNING, "privfl"):
        generate_maps(1, 1, size=16)
    assert "checksum" in caplog.text


def test_maps_of_another_generator_are_not_taken(cache, monkeypatch):
    generate_maps(1, 1, size=16)
    monkeypatch.setattr(module, "_fingerprint", lambda: "another generator")
    generate_maps(1, 1, size=16)
    assert len(list(cache.glob("*.npz"))) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "file")
    with caplog.at_level(logging.WARNING, "privfl"):
        assert len(generate_maps(1, 1, size=16)) == 1
    assert "nothing is kept" in caplog.text


def test_transmitters_stand_on_the_largest_open_ground():
    walls = np.zeros((256, 256), bool)
    walls[90:160, 90:160], walls[100:150, 100:150] = True, False
    places = outdoor_pixels(walls)
    assert places.min() == 53 and places.max() == 202 and not ((places > 99) & (places < 150)).all(axis=1).any()
    assert len(outdoor_pixels(np.ones((256, 256), bool))) == 0


# ---- RadioMapSeer -----------------------------------------------------------------------------------------------

PLACES = {4: [[70, 215], [80, 100]], 11: [[53, 202], [120.0, 60.0], [200, 53]]}


@pytest.fixture
def archive(tmp_path):
    """Two maps in the layout of the public archive: grey 51 + 10 * transmitter, white at the antenna, one house."""
    root = tmp_path / "RadioMapSeer"
    for name in ("png/buildings_complete", "gain/DPM", "gain/IRT4", "antenna"):
        (root / name).mkdir(parents=True)
    for one, places in PLACES.items():
        house = np.zeros((256, 256), np.uint8)
        house[10:30, 40:90] = 255
        Image.fromarray(house).save(root / f"png/buildings_complete/{one}.png")
        (root / f"antenna/{one}.json").write_text(json.dumps(places))
        for which, (x, y) in enumerate(places):
            grey = np.full((256, 256), 51 + 51 * which, np.uint8)
            grey[house > 0], grey[255 - int(y), int(x)] = 0, 255
            Image.fromarray(grey).save(root / f"gain/DPM/{one}_{which}.png")
            if which < 2:
                Image.fromarray(grey).save(root / f"gain/IRT4/{one}_{which}.png")
    return root


def test_the_public_folder_loads(archive):
    maps = load_radiomapseer(archive)
    assert len(maps) == 5 and maps.map_id.tolist() == [4, 11] and maps.map_index.tolist() == [0, 0, 1, 1, 1] and maps.metres_per_pixel == 1.0
    assert maps.pixels.tolist() == [[255 - y, x] for places in PLACES.values() for x, y in places]  # y is counted upwards
    assert all(maps.gain[n][tuple(maps.pixels[n])] == 1 for n in range(5))
    assert torch.allclose(maps.gain[:, 0, 0], torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5]), atol=1e-6)
    assert maps.buildings[0, 10:30, 40:90].min() == 1 and maps.buildings.sum() == 2 * 1000 and str(archive.parent) not in maps.source
    small = load_radiomapseer(str(archive), maps=[11], transmitters=[2, 0], size=64)
    assert small.shape == (64, 64) and small.map_id.tolist() == [11] and small.pixels.tolist() == [[50, 50], [13, 13]]
    assert torch.allclose(small.gain, pool(maps.gain[[4, 2]], 64)) and small.metres_per_pixel == 4.0
    assert len(load_radiomapseer(archive, "IRT4")) == 4


def damaged(root, name: str, content: bytes | None) -> None:
    """Replace a file, or remove it."""
    (root / name).unlink()
    if content is not None:
        (root / name).write_bytes(content)


@pytest.mark.parametrize("name, content", [
    ("gain/DPM/11_1.png", None), ("gain/DPM/11_1.png", b""), ("gain/DPM/11_1.png", b"half"), ("png/buildings_complete/4.png", b"\x89PNG"),
    ("antenna/4.json", None), ("antenna/4.json", b"[[70, 21"), ("antenna/4.json", b"[[70, 300]]"), ("antenna/4.json", b"[]"),
    ("antenna/4.json", b'{"x": 3}'), ("antenna/4.json", b"[[1, 2], [3]]"),
    ("antenna/4.json", b"[[1, 2, 3, 4]]"), ("antenna/4.json", b"\xff\xfe"),
])
def test_missing_and_truncated_files_are_named(archive, name, content):
    if content == b"half":
        content = (archive / name).read_bytes()[:-60]
    damaged(archive, name, content)
    with pytest.raises(DataError, match=name):
        load_radiomapseer(archive)


def test_wrong_folders_sizes_and_numbers_are_refused(archive):
    with pytest.raises(DataError, match="gain/DPM2"):
        load_radiomapseer(archive, "DPM2")
    with pytest.raises(DataError, match="buildings_complete"):
        load_radiomapseer(archive / "png")
    with pytest.raises(DataError, match="5.png is missing|5.json is missing"):
        load_radiomapseer(archive, maps=[5])
    with pytest.raises(ValueError, match="0 to 1"):
        load_radiomapseer(archive, transmitters=[2])
    with pytest.raises(ValueError, match="size"):
        load_radiomapseer(archive, size=100)
    with pytest.raises(DataError, match="empty list"):
        load_radiomapseer(archive, maps=[])
    Image.fromarray(np.zeros((128, 256), np.uint8)).save(archive / "gain/DPM/4_0.png")
    with pytest.raises(DataError, match="4_0.png has 128 x 256"):
        load_radiomapseer(archive)
    shutil.rmtree(archive / "antenna")
    with pytest.raises(DataError, match="antenna"):
        load_radiomapseer(archive)


def test_an_antenna_inside_a_building_is_refused(archive):
    (archive / "antenna/4.json").write_text("[[60, 240], [80, 100]]")
    with pytest.raises(ValueError, match="inside a building"):
        load_radiomapseer(archive)


def test_the_real_sample():
    if find_data("radiomapseer_sample.npz") is None:
        pytest.skip("radiomapseer_sample.npz is not there")
    maps = load_radiomapseer_sample()
    assert len(maps) == 31 and len(maps.map_id) == 26 and maps.map_index.bincount().max() == 5
    assert (maps.gain[torch.arange(31), *maps.pixels.T] == 1).all() and ((maps.pixels >= 53) & (maps.pixels <= 202)).all()
    floors = floors_db(maps)
    assert [round(floors[name], 1) for name in ("zero", "constant_mean", "mean_image")] == [-12.4, -15.2, -15.8]
    small = load_radiomapseer_sample(64)
    assert torch.allclose(small.gain, pool(maps.gain, 64)) and torch.equal(small.transmitter_m, maps.transmitter_m)


def test_without_the_sample_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(module, "find_data", lambda name: None)
    with pytest.raises(DataNotFound, match="generate_maps"):
        load_radiomapseer_sample()


# ---- statistics -------------------------------------------------------------------------------------------------

def test_statistics_of_an_open_field_with_one_wall():
    walls = np.zeros((1, 96, 96))
    walls[0, 20:24, :] = 1
    gain = gain_to_target(module.dominant_path_gain_db(walls[0] > 0, (48, 48)))
    table = map_statistics(RadioMaps(walls, gain[None], [[48.5, 48.5]], [0], 1.0, "one wall"))
    assert table["built share"] == pytest.approx(4 / 96) and table["decay in sight (dB/decade)"] == pytest.approx(25, abs=1e-2)
    assert table["floor share"] == pytest.approx(20 / 92) and table["share in sight"] == pytest.approx(72 / 92)
    assert table["share of jumps"][0] < 0.01 and all(len(column) == 1 for column in table.values())
