"""Sound in .wav files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloud_server.choices.first_settings import load_data
from fleet_core.base.errors import DataError
from fleet_core.data import readers, unlabelled
from fleet_core.data.prepare import prepared, takes
from fleet_core.data.readers import sounds as reading
from fleet_core.data.samples import load
from fleet_core.data.shaping import sound
from fleet_core.model.layout import InputSpec
from tests.support import sounds

SPEC = InputSpec((32, 62), sound_hz=8000)
LONGEST = sound.length_of(8000, 62)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2, 5])
def test_pcm_of_every_width_is_read_and_channels_are_averaged(tmp_path: Path, width: int, channels: int) -> None:
    tone = sounds.tone(440, 0.1, 0)
    wanted = sound.full_scale(tone)
    found, rate = reading.read_wave(sounds.write(tmp_path / "a.wav", tone, width=width, channels=channels), 1 << 20)
    assert (rate, str(found.dtype), len(found)) == (8000, "float32", len(tone))
    np.testing.assert_allclose(found, wanted, atol=1e-7 if width > 1 else 1 / 128)
    if width == 2:
        np.testing.assert_array_equal(found, wanted)


def test_opposite_channels_cancel(tmp_path: Path) -> None:
    both = np.stack([np.full(900, 1000, np.int16), np.full(900, -1000, np.int16)], axis=1).ravel()
    path = sounds.write(tmp_path / "a.wav", both)
    raw = bytearray(path.read_bytes())
    raw[22:24], raw[32:34] = (2).to_bytes(2, "little"), (4).to_bytes(2, "little")  # two channels of the same data
    path.write_bytes(bytes(raw))
    found, _ = reading.read_wave(path, 1 << 20)
    assert len(found) == 900
    assert not found.any()


def test_a_spectrogram_shows_the_pitch_and_silence_is_the_floor() -> None:
    window = np.zeros((3, LONGEST), np.float32)
    window[0], window[1] = (np.sin(2 * np.pi * hz * np.arange(LONGEST) / 8000) for hz in (300, 3000))
    low, high, silent = sound.spectrograms(window, 8000)
    assert low.shape == (sound.BANDS, 62)
    assert low.mean(1).argmax() < 10 < 24 < high.mean(1).argmax()
    np.testing.assert_allclose(silent, np.log(1e-6), rtol=1e-5)


@pytest.mark.parametrize(("length", "count"), [(1, 1), (99, 1), (100, 1), (149, 1), (150, 2), (250, 3), (260, 3)])
def test_a_recording_is_cut_into_windows_and_a_half_full_last_one_is_padded(length: int, count: int) -> None:
    found = sound.windows(np.ones(length, np.float32), 100, 100)
    assert found.shape == (count, 100)
    assert found.sum() == min(length, 100 * count)


def test_a_folder_makes_a_fleet_and_a_part_of_it_has_every_class(tmp_path: Path) -> None:
    folder, said = sounds.recordings(tmp_path / "sounds"), list[str]()
    samples, spec = load_data(str(folder), said.append)
    assert (samples.x.shape, samples.classes) == ((20, 32, 62), ("high", "low"))
    assert (spec.shape, spec.sound_hz, len(spec.mean)) == ((32, 62), 8000, 32)
    assert said == ["sound at 8000 Hz, in windows of 1.01 s: 20 windows of 20 recordings"]
    assert sorted(samples.y[:12]) == [0] * 6 + [1] * 6


def test_a_folder_for_each_device_and_a_list_name_the_client(tmp_path: Path) -> None:
    for name in ("hall", "kitchen"):
        sounds.recordings(tmp_path / "all" / name, each=2)
    by_folder = load(tmp_path / "all")
    assert (by_folder.clients, len(by_folder)) == (("hall", "kitchen"), 8)
    flat = tmp_path / "flat"
    for number in range(4):
        sounds.write(flat / f"{number}.wav", sounds.tone(300 + 400 * number, 2.1, number))
    (flat / "labels.csv").write_text("file,label,client,time\n" + "".join(
        f"{n}.wav,{'ab'[n % 2]},hall,{10 * n}\n" for n in range(4)))
    listed = load(flat)
    assert (listed.clients, listed.classes, len(listed)) == (("hall",), ("a", "b"), 8)
    assert listed.time is not None
    np.testing.assert_allclose(listed.time[:3], [0, LONGEST / 8000, 10])


@pytest.mark.parametrize("rows", ["no.wav,a\n", "../a.wav,a\n", "/etc/a.wav,a\n", "a.wav,\n", ",a\n"])
def test_a_list_that_names_no_file_of_the_folder_is_refused_with_its_line(tmp_path: Path, rows: str) -> None:
    sounds.write(tmp_path / "a.wav", sounds.tone(300, 0.2, 0))
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    with pytest.raises(DataError):
        load(tmp_path)


def test_recordings_at_another_rate_are_brought_to_the_fleets(tmp_path: Path) -> None:
    fine = sounds.write(tmp_path / "a.wav", sounds.tone(1000, 1.0, 0, rate=48_000), rate=48_000)
    found = unlabelled.load(fine, SPEC)
    np.testing.assert_allclose(found[0].mean(1).argmax(), prepared(sounds.tone(1000, 1.0, 0)[None], SPEC)[0].mean(
        1).argmax(), atol=1)
    assert readers.rate_of(tmp_path) == reading.DEFAULT_HZ


def test_files_and_arrays_of_the_same_sound_have_the_same_bits(tmp_path: Path) -> None:
    tones = [sounds.tone(400 + 200 * k, 1.0, k) for k in range(5)]
    for number, tone in enumerate(tones):
        sounds.write(tmp_path / "new" / f"{number}.wav", tone)
        sounds.write(tmp_path / "old" / "beep" / f"{number}.wav", tone)
    wanted = unlabelled.load(tmp_path / "new", SPEC)
    assert wanted.shape == (5, 32, 62)
    np.testing.assert_array_equal(load(tmp_path / "old", shape=(32, 62), sound_hz=8000).x, wanted)
    np.savez(tmp_path / "raw.npz", x=np.stack(tones), y=np.array(["beep"] * 5))
    np.testing.assert_array_equal(load(tmp_path / "raw.npz", shape=(32, 62), sound_hz=8000).x, wanted)
    np.testing.assert_array_equal(load_data(str(tmp_path / "raw.npz"), rate=8000)[0].x, wanted)
    np.save(tmp_path / "one.npy", sound.full_scale(tones[3]))
    for one in (unlabelled.load(tmp_path / "one.npy", SPEC), unlabelled.load(tmp_path / "new" / "3.wav", SPEC),
                prepared(sound.full_scale(tones[3])[None, None], SPEC)):
        np.testing.assert_array_equal(one[0], wanted[3])
    assert prepared(wanted, SPEC) is wanted


def test_sound_that_cannot_be_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected at most 8064, 1.01 s at 8000 Hz"):
        prepared(np.zeros((1, 9000), np.float32), SPEC)
    assert all(takes(shape, SPEC) for shape in ((8064,), (1, 50)))
    assert not any(takes(shape, SPEC) for shape in ((8065,), (2, 50), (0,), ()))
    (tmp_path / "a.wav").write_bytes(b"RIFF\x00\x00\x00\x00WAVEfmt ")
    for spec, why in ((SPEC, "cannot be read as sound"), (InputSpec((3,)), "is sound, from which this fleet does not")):
        with pytest.raises(DataError, match=why):
            unlabelled.load(tmp_path / "a.wav", spec)
    with pytest.raises(DataError, match=r"has \.wav files without a label"):
        load(tmp_path)
    with pytest.raises(DataError, match="is one recording"):
        load(tmp_path / "a.wav")
    sounds.write(tmp_path / "empty" / "a" / "a.wav", np.zeros(0, np.int16))
    with pytest.raises(DataError, match="has no sound"):
        load(tmp_path / "empty")
    with pytest.raises(DataError, match="over the limit"):
        load(sounds.recordings(tmp_path / "big"), limit_bytes=20_000)


def test_a_float_wav_says_how_to_convert_it(tmp_path: Path) -> None:
    path = sounds.write(tmp_path / "a.wav", sounds.tone(300, 0.1, 0))
    raw = bytearray(path.read_bytes())
    raw[20:22] = (3).to_bytes(2, "little")  # IEEE float
    path.write_bytes(bytes(raw))
    with pytest.raises(DataError, match="ffmpeg -i FILE -c:a pcm_s16le"):
        unlabelled.load(path, SPEC)
