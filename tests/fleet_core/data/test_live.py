"""Samples that are cut from live readings equal those that the readers of files give."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_server.choices.first_settings import load_data
from edge_agent.device.local_samples import LocalData
from fleet_core.base.errors import DataError
from fleet_core.data import samples, unlabelled
from fleet_core.data.live import Cutter, Cutting, Readings, Taken
from fleet_core.data.shaping import sound
from fleet_core.data.shaping.resample import Resampler
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec, Layout
from tests.support import sounds

RNG = np.random.default_rng(0)
STEP_S = 0.02


def in_pieces(cutter: Cutter, values: np.ndarray, cuts: list[int], *, timed: bool = False) -> list[Taken]:
    """What the cutter makes of readings [n, C] that come in pieces of these sizes."""
    made, at, time = list[Taken](), 0, np.arange(len(values)).astype(np.float64) * STEP_S
    for size in (*cuts, len(values)):
        made += cutter.more(Readings(values[at : at + size], time[at : at + size], timed=timed))
        at += size
    return made + cutter.end()


@given(st.lists(st.integers(0, 50), max_size=20), st.sampled_from([(44_100, 16_000), (16_000, 8000), (8000, 11_025)]),
       st.integers(1, 400))
def test_a_series_in_pieces_is_resampled_to_the_bits_of_the_whole(
    cuts: list[int], rates: tuple[int, int], size: int
) -> None:
    whole = np.random.default_rng(size).normal(size=(size, 2)).astype(np.float32)
    wanted = Resampler(*rates).last(whole)
    one, made, at = Resampler(*rates), [], 0
    for cut in cuts:
        made.append(one.more(whole[at : at + cut]))
        at += cut
    made.append(one.last(whole[at:]))
    assert np.concatenate(made).tobytes() == wanted.tobytes()
    assert len(wanted) == max(1, int(size * rates[1] / rates[0] + 0.5))


def test_a_resampled_tone_is_the_tone_at_the_other_rate() -> None:
    time_in, time_out = (np.arange(44_100) + 0.5) / 44_100, (np.arange(16_000) + 0.5) / 16_000
    found = sound.at_rate(np.sin(2 * np.pi * 200 * time_in).astype(np.float32), 44_100, 16_000)
    np.testing.assert_allclose(found[10:-10], np.sin(2 * np.pi * 200 * time_out)[10:-10], atol=2e-3)


@pytest.mark.parametrize("stride", [None, 1, 5, 11])
@pytest.mark.parametrize("cuts", [[], [1] * 40, [3, 0, 17, 2]])
def test_windows_of_readings_are_those_of_the_file(tmp_path: Path, stride: int | None, cuts: list[int]) -> None:
    values = np.round(RNG.normal(size=(60, 2)), 4)
    rows = [f"{k * STEP_S!r},{a!r},{b!r}" for k, (a, b) in enumerate(values.tolist())]
    (tmp_path / "r.csv").write_text("\n".join(["time,ax,ay", *rows]))
    spec = InputSpec((2, 7))
    wanted = unlabelled.load(tmp_path / "r.csv", spec, stride=stride)
    made = in_pieces(Cutter(spec, Cutting(stride)), values, cuts, timed=True)
    assert np.stack([one.x for one in made]).tobytes() == wanted.tobytes()
    assert made[0].time == pytest.approx(6 * STEP_S)


def test_labels_and_gaps_end_a_window_as_in_the_file(tmp_path: Path) -> None:
    values = np.round(RNG.normal(size=(50, 1)), 4)
    labels = ["on"] * 18 + ["off"] * 14 + [""] * 9 + ["on"] * 9
    time = np.arange(50).astype(np.float64) * STEP_S + np.where(np.arange(50) >= 10, 1.0, 0.0)
    rows = [f"{t!r},{v[0]!r},{label}" for t, v, label in zip(time.tolist(), values.tolist(), labels, strict=True)]
    (tmp_path / "r.csv").write_text("\n".join(["time,v,label", *rows]))
    spec = InputSpec((1, 4))
    wanted = samples.load(tmp_path / "r.csv", shape=(1, 4), classes=("off", "on"))
    cutter, made = Cutter(spec, Cutting()), list[Taken]()
    for k in range(0, 50, 3):
        made += cutter.more(Readings(values[k : k + 3], time[k : k + 3], labels[k : k + 3], timed=True))
    made += cutter.end()
    labelled = [one for one in made if one.label]
    assert np.stack([one.x for one in labelled]).tobytes() == wanted.x.tobytes()
    assert [one.label for one in labelled] == [("off", "on")[k] for k in wanted.y]
    assert len(made) - len(labelled) == 9 // 4


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100])
@pytest.mark.parametrize("stride", [None, 1000])
def test_windows_of_sound_are_those_of_the_file(tmp_path: Path, rate: int, stride: int | None) -> None:
    heard = sounds.tone(440, 2.7, 3, rate)
    path = sounds.write(tmp_path / "s.wav", heard, rate=rate)
    spec = InputSpec((sound.BANDS, sound.frames_in(8000, 1.0)), sound_hz=8000)
    wanted = unlabelled.load(path, spec, stride=stride)
    values = (heard / 32768.0)[:, None]
    made = in_pieces(Cutter(spec, Cutting(stride, rate_hz=rate)), values, [1000, 1, 4000, 7])
    assert np.stack([one.x for one in made]).tobytes() == wanted.tobytes()


def test_a_row_of_features_is_a_sample() -> None:
    values = RNG.normal(size=(5, 3))
    made = in_pieces(Cutter(InputSpec((3,)), Cutting()), values, [2])
    np.testing.assert_array_equal(np.stack([one.x for one in made]), values.astype(np.float32))


def test_a_sensor_is_calibrated_before_anything_else() -> None:
    values = RNG.normal(size=(8, 2))
    made = in_pieces(Cutter(InputSpec((2, 4)), Cutting(gain=(2.0, 4.0), offset=(0.5,))), values, [3])
    wanted = in_pieces(Cutter(InputSpec((2, 4)), Cutting()), values * [2.0, 4.0] + 0.5, [])
    assert [one.x.tobytes() for one in made] == [one.x.tobytes() for one in wanted]


@pytest.mark.parametrize(("fleet_hz", "to_hz"), [(50.0, 0.0), (0.0, 50.0), (25.0, 50.0)])
def test_readings_at_another_rate_are_brought_to_the_fleets(fleet_hz: float, to_hz: float) -> None:
    values = np.repeat(np.arange(40.0)[:, None], 2, axis=1)
    made = in_pieces(Cutter(InputSpec((2, 5), rate_hz=fleet_hz), Cutting(rate_hz=100, to_hz=to_hz)), values, [7] * 5)
    whole = Resampler(100, 50).last(values.astype(np.float32))
    assert np.concatenate([one.x for one in made], 1).tobytes() == np.ascontiguousarray(whole.T).tobytes()
    assert [one.time for one in made] == pytest.approx([0.08, 0.18, 0.28, 0.38])


@pytest.mark.parametrize(("values", "cutting", "said"), [
    (np.zeros((2, 3)), Cutting(), r"a reading has 3 channels; expected 2, as the fleet's samples \[2, 4\]"),
    (np.full((2, 2), np.nan), Cutting(), "a reading is not finite"),
    (np.full((2, 2), 1e60), Cutting(), "a reading is not finite"),
    (np.zeros((2, 2)), Cutting(gain=(1.0, 1.0, 1.0)), "gain has 3 values; expected one, or one for each of 2"),
])  # fmt: skip
def test_readings_that_do_not_fit_are_refused(values: np.ndarray, cutting: Cutting, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Cutter(InputSpec((2, 4)), cutting).more(Readings(values, np.arange(2.0)))


def test_images_are_not_made_of_readings() -> None:
    with pytest.raises(DataError, match=r"samples of shape \[1, 8, 8\] are not made of readings"):
        Cutter(InputSpec((1, 8, 8)), Cutting())


def test_a_source_holds_no_more_than_a_window() -> None:
    cutter, piece = Cutter(InputSpec((3, 64)), Cutting(8, rate_hz=100, to_hz=50)), np.zeros((100, 3))
    tracemalloc.start()
    for k in range(300):
        cutter.more(Readings(piece, np.arange(100) / 100 + k))
        if k == 50:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < 200_000


def test_init_says_the_rate_of_readings_and_the_layouts_hash_does_not_depend_on_it(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("label,ax,ay\n" + "".join(f"{'ab'[k // 20]},{k},{k / 3}\n" for k in range(40)))
    _, spec = load_data(str(tmp_path / "r.csv"), window=5, rate=50)
    _, plain = load_data(str(tmp_path / "r.csv"), window=5)
    assert (spec.rate_hz, spec.sound_hz, plain.rate_hz) == (50.0, 0, 0.0)
    with_rate, without = (models.describe("mlp", one, ("a", "b"), {}) for one in (spec, plain))
    assert Layout.from_json(with_rate.to_json()).input.rate_hz == 50
    assert "rate_hz" not in without.to_json()
    assert with_rate.hash == without.hash
    assert with_rate.to_json().count("stride") == 0
    with pytest.raises(DataError, match="50 Hz is not a valid rate for sound"):
        load_data(str(tmp_path / "r.csv"), rate=50)


def test_a_device_cuts_its_readings_as_the_fleets_were_cut_unless_its_settings_say_otherwise(tmp_path: Path) -> None:
    values = np.arange(40, dtype=np.float64)[:, None]
    (tmp_path / "r.csv").write_text("label,a\n" + "".join(f"{'ab'[k // 20]},{k}\n" for k in range(40)))
    (tmp_path / "q.csv").write_text("a\n" + "".join(f"{k}\n" for k in range(40)))
    cut, spec = load_data(str(tmp_path / "r.csv"), window=5, stride=3)
    layout, plain = (models.describe("mlp", one, ("a", "b"), {}) for one in (spec, replace(spec, stride=0)))
    assert layout.hash == plain.hash, "an agent that does not know the key has the same model"
    layout = Layout.from_json(layout.to_json())
    settings: tuple[dict[str, int | None], ...] = {}, {"stride": None}, {"stride": 5}
    local = [LocalData.of(tmp_path, "r.csv", layout, table) for table in settings]
    assert [one.stride for one in local] == [3, 3, 5]
    assert LocalData.of(tmp_path, "r.csv", plain, {}).stride is None
    held_back = local[0].held_back()
    assert held_back is not None
    assert len(local[0].every()) + len(held_back) == len(cut) == 12
    x = unlabelled.load(tmp_path / "q.csv", layout.sample)
    assert x[:, 0, 0].tolist() == list(range(0, 36, 3))
    assert np.array_equal([one.x for one in in_pieces(Cutter(layout.sample, Cutting()), values, [7])], x)
    assert len(unlabelled.load(tmp_path / "q.csv", layout.sample, stride=5)) == 8
    assert len(in_pieces(Cutter(layout.sample, Cutting(5)), values, [7])) == 8
    assert len(unlabelled.load(tmp_path / "q.csv", plain.sample)) == 8
