"""Readers of the named sets' original files, on small files in their format and on real ones, and limits on
archives."""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import re
import sqlite3
import struct
import sys
import tarfile
import wave
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers import prepare
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.data.samples import Samples
from fleet_core.data.sets import archives, cifar, har, idx, omniglot, set_cache, shakespeare, spoken
from fleet_core.data.sets.registry import entry
from fleet_core.data.time_split import by_time

RNG = np.random.default_rng(0)


def tar_gz(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def wrote(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# idx: MNIST, its writers, Fashion-MNIST ------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    header = bytes([0, 0, kind, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8 if kind == 8 else ">i4").tobytes()


def mnist_files(folder: Path, labels: np.ndarray, writers: np.ndarray) -> dict[str, Path]:
    """MNIST with equally many digits in both parts; as in reality, QMNIST's test labels are longer."""
    extended = np.zeros((len(labels), 8), np.int64)
    extended[:, 0], extended[:, 2] = labels, writers
    images = np.arange(len(labels) * 784).reshape(-1, 28, 28) % 256
    contents = {
        **{f"{part}-images-idx3-ubyte.gz": idx_bytes(images) for part in ("train", "t10k")},
        **{f"{part}-labels-idx1-ubyte.gz": idx_bytes(labels) for part in ("train", "t10k")},
        "qmnist-train-labels-idx2-int.gz": idx_bytes(extended, 0x0C),
        "qmnist-test-labels-idx2-int.gz": idx_bytes(np.concatenate([extended, extended]), 0x0C),
    }
    return {name: wrote(folder / name, gzip.compress(data)) for name, data in contents.items()}


def test_mnist_comes_with_its_writers(tmp_path: Path) -> None:
    train, test = idx.mnist(mnist_files(tmp_path, np.array([3, 1, 4]), np.array([7, 2599, 7])))
    for part in (train, test):
        assert part.x.shape == (3, 1, 28, 28)
        assert part.x.dtype == np.uint8
        assert part.x[1, 0, 0, 5] == (784 + 5) % 256
        assert part.y.tolist() == [3, 1, 4]
        assert part.client is not None
        assert part.client.tolist() == ["0007", "2599", "0007"]


def test_writers_of_other_digits_are_refused(tmp_path: Path) -> None:
    files = mnist_files(tmp_path, np.array([3, 1]), np.array([7, 8]))
    wrote(files["train-labels-idx1-ubyte.gz"], gzip.compress(idx_bytes(np.array([3, 2]))))
    with pytest.raises(DataError, match="labels of other digits"):
        idx.mnist(files)


def test_images_and_labels_of_different_number_are_refused(tmp_path: Path) -> None:
    files = mnist_files(tmp_path, np.array([3, 1]), np.array([7, 8]))
    wrote(files["t10k-labels-idx1-ubyte.gz"], gzip.compress(idx_bytes(np.array([3]))))
    with pytest.raises(DataError, match="do not belong together"):
        idx.fashion_mnist(files)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "not an idx file"),
        (b"\0\0\x0d\x01\0\0\0\1\0\0\0\0", "not an idx file"),  # floats
        (b"\0\0\x08\0", "not an idx file"),
        (b"\0\0\x08\x02\0\0\0\1", "truncated header"),
        (idx_bytes(np.zeros(4))[:-1], "has 3 bytes; expected 4 bytes"),
        (idx_bytes(np.zeros(4)) + b"x", "has 5 bytes; expected 4 bytes"),
        (b"\0\0\x08\x04" + b"\xff" * 16, "claims shape"),  # far more than there is memory
    ],
)
def test_what_is_no_idx_file_is_refused(data: bytes, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        idx.parse_idx(data, "a")


@given(st.binary(max_size=40) | st.builds(lambda tail: b"\0\0\x08\x02" + tail, st.binary(max_size=40)))
def test_any_bytes_are_an_idx_array_or_a_data_error(data: bytes) -> None:
    try:
        array = idx.parse_idx(data, "a")
    except DataError:
        return
    assert array.nbytes <= 8 * len(data)


def test_the_real_mnist_has_its_images_and_labels(shared: Path) -> None:
    images = idx.parse_idx(archives.gunzip(shared / "data/mnist-t10k-images-idx3-ubyte.gz", idx.LIMIT_BYTES), "x")
    labels = idx.parse_idx(archives.gunzip(shared / "data/mnist-train-labels-idx1-ubyte.gz", idx.LIMIT_BYTES), "y")
    assert images.shape == (10000, 28, 28)
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert len(labels) == 60000


# CIFAR ---------------------------------------------------------------------------------------------------------------


def record(pixel: int, *labels: int) -> bytes:
    return bytes(labels) + bytes([pixel] * 1024 + [pixel + 1] * 1024 + [pixel + 2] * 1024)


def cifar_10_archive(path: Path, **changes: bytes) -> dict[str, Path]:
    members = {f"data_batch_{k}": record(10 * k, k) for k in range(1, 6)} | {"test_batch": record(90, 9)} | changes
    files = {f"cifar-10-batches-bin/{name}.bin": data for name, data in members.items() if data}
    files["cifar-10-batches-bin/readme.html"] = b"passed over"
    return {"cifar-10-binary.tar.gz": tar_gz(path / "a.tar.gz", dict(reversed(files.items())))}


def test_cifar_10_is_read_batch_after_batch_whatever_their_order_in_the_archive(tmp_path: Path) -> None:
    train, test = cifar.cifar_10(cifar_10_archive(tmp_path))
    assert train.x.shape == (5, 3, 32, 32)
    assert train.y.tolist() == [1, 2, 3, 4, 5]
    assert train.x[:, 0, 0, 0].tolist() == [10, 20, 30, 40, 50]
    assert train.x[0, :, 31, 31].tolist() == [10, 11, 12]
    assert (test.y.tolist(), test.x[0, 2, 0, 0]) == ([9], 92)
    assert train.classes is not None
    assert train.classes[train.y[0]] == "automobile"


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"data_batch_3": b""}, "lacks data_batch_3.bin"),
        ({"test_batch": record(1, 10)}, "holds label 10"),
        ({"data_batch_5": record(1, 1)[:-1]}, "a multiple of 3073"),
    ],
)
def test_a_cifar_archive_that_is_not_whole_is_refused(tmp_path: Path, changes: dict[str, bytes], wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        cifar.cifar_10(cifar_10_archive(tmp_path, **changes))


def test_cifar_100_has_the_fine_labels_under_the_archives_names(tmp_path: Path) -> None:
    names = "".join(f"thing_{k}\n" for k in range(100)).encode()
    files = {"train.bin": record(5, 19, 99) + record(6, 0, 1), "test.bin": record(7, 3, 42), cifar.FINE_NAMES: names}
    path = tar_gz(tmp_path / "a.tar.gz", {f"cifar-100-binary/{name}": data for name, data in files.items()})
    train, test = cifar.cifar_100({"cifar-100-binary.tar.gz": path})
    assert (train.y.tolist(), test.y.tolist()) == ([99, 1], [42])
    assert train.x[:, 0, 0, 0].tolist() == [5, 6]
    assert train.classes is not None
    assert train.classes[99] == "thing_99"


@given(st.binary(max_size=7000), st.sampled_from([1, 2]))
def test_any_bytes_are_cifar_records_or_a_data_error(data: bytes, label_bytes: int) -> None:
    try:
        samples = cifar.parse_records(data, label_bytes, cifar.OBJECTS, "a")
    except DataError:
        return
    assert samples.x.nbytes + label_bytes * len(samples) == len(data)


# Omniglot ------------------------------------------------------------------------------------------------------------


def png(ink: np.ndarray) -> bytes:
    """A drawing as in Omniglot: one bit per pixel, white paper."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(np.where(ink, 0, 255).astype(np.uint8)).convert("1").save(buffer, "PNG")
    return buffer.getvalue()


def drawing(row: int) -> np.ndarray:
    ink = np.zeros((105, 105), bool)
    ink[row : row + 15] = True
    return ink


def omniglot_files(folder: Path, **more: bytes) -> dict[str, Path]:
    background = {
        "images_background/Latin/character02/0684_01.png": png(drawing(30)),
        "images_background/Latin/character01/0683_02.png": png(drawing(15)),
        "images_background/Latin/character01/0683_01.png": png(drawing(0)),
        "__MACOSX/images_background/Latin/character01/._0683_01.png": b"passed over",
        **{name.replace("__", "/"): data for name, data in more.items()},
    }
    evaluation = {"images_evaluation/Angelic/character01/0965_20.png": png(drawing(45))}
    return {"images_background.zip": wrote(folder / "b.zip", zipped(background)),
            "images_evaluation.zip": wrote(folder / "e.zip", zipped(evaluation))}


def test_omniglot_is_ordered_by_character_and_drawer_with_ink_at_255(tmp_path: Path) -> None:
    train, test = omniglot.omniglot(omniglot_files(tmp_path))
    assert train.x.shape == (3, 1, 28, 28)
    assert train.y.tolist() == [682, 682, 683]
    assert train.client is not None
    assert train.client.tolist() == ["Latin/01", "Latin/02", "Latin/01"]
    assert [int(x[0, :, 3].argmax()) for x in train.x] == [0, 4, 8]  # 15 rows of 105 are four of 28
    assert (train.x[0, 0, :4] == 255).all()
    assert (train.x[0, 0, 4:] == 0).all()
    assert (test.y.tolist(), test.clients) == ([964], ("Angelic/20",))


@pytest.mark.parametrize(
    ("name", "data", "wrong"),
    [
        ("images_background__Latin__character03__0685_01.png", b"no image", "cannot be read as an image"),
        ("images_background__Latin__character03__0685_01.png", png(np.zeros((50, 50), bool)), "105 by 105"),
        ("images_background__Latin__character03__9999_01.png", png(drawing(0)), "out of range"),
    ],
)
def test_an_omniglot_member_that_is_no_drawing_is_refused(tmp_path: Path, name: str, data: bytes, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        omniglot.omniglot(omniglot_files(tmp_path, **{name: data}))


def test_without_pillow_the_hint_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = omniglot_files(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match="metafleet\\[images\\]"):
        omniglot.omniglot(files)


def test_real_drawings_are_reduced_as_the_shared_copy_has_them(shared: Path) -> None:
    with np.load(shared / "data/omniglot-background.npz", allow_pickle=False) as file:
        ink, reduced = file["ink105"][::400], file["x28"][::400]
    bits = np.unpackbits(ink, axis=-1)[..., :11025].reshape(-1, 105, 105)
    made = [omniglot.reduce(image * np.uint8(255), "x") for image in bits]
    np.testing.assert_array_equal(made, reduced.reshape(-1, 28, 28))


# human activity ------------------------------------------------------------------------------------------------------


def recording(person: int, activity: int, count: int) -> list[tuple[int, int, np.ndarray]]:
    """Windows of one segment, overlapping by half: (person, activity from 1, float32 [9, 128])."""
    stream = RNG.normal(size=(9, 64 * (count + 1))).astype(np.float32)
    return [(person, activity, stream[:, 64 * k : 64 * k + 128]) for k in range(count)]


def har_zip(train: list[tuple[int, int, np.ndarray]], test: list[tuple[int, int, np.ndarray]]) -> bytes:
    files = {}
    for part, windows in (("train", train), ("test", test)):
        for channel, name in enumerate(har.CHANNELS):
            rows = ("".join(f" {v: .9e}" for v in window[channel]) for _, _, window in windows)
            files[f"UCI HAR Dataset/{part}/Inertial Signals/{name}_{part}.txt"] = "\n".join(rows).encode()
        for column, name in enumerate(("subject", "y")):
            lines = "".join(f"{window[column]}\n" for window in windows)
            files[f"UCI HAR Dataset/{part}/{name}_{part}.txt"] = lines.encode()
    return zipped({"UCI HAR Dataset/README.txt": b"passed over", **files})


def har_of(path: Path, data: bytes) -> Any:
    return har.har({"human+activity+recognition+using+smartphones.zip": wrote(path, data)})


TRAIN = [*recording(1, 5, 3), *recording(1, 4, 2), *recording(1, 5, 4), *recording(3, 1, 2)]


@pytest.mark.parametrize("nested", [True, False])
def test_human_activity_is_read_from_the_archive_within_the_archive_and_alone(tmp_path: Path, nested: bool) -> None:
    data = har_zip(TRAIN, recording(2, 6, 2))
    train, test = har_of(tmp_path / "a.zip", zipped({"UCI HAR Dataset.zip": data, "x.names": b""}) if nested else data)
    np.testing.assert_allclose(train.x, np.stack([window for _, _, window in TRAIN]), rtol=1e-6)
    assert train.x.dtype == np.float32
    assert train.y.tolist() == [4, 4, 4, 3, 3, 4, 4, 4, 4, 0, 0]
    assert (train.clients, test.clients) == (("01", "03"), ("02",))
    assert test.classes[test.y[0]] == "LAYING"


def test_a_segment_has_one_time_and_segments_are_a_window_apart(tmp_path: Path) -> None:
    train, _ = har_of(tmp_path / "a.zip", har_zip(TRAIN, recording(2, 6, 2)))
    # first turn: STANDING for 3 windows (256 samples) and a gap of 128, SITTING; second turn: STANDING again
    assert train.time.tolist() == pytest.approx([0.0] * 3 + [7.68] * 2 + [7.68 + 6.4] * 4 + [0.0] * 2)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)), min_size=2, max_size=12),
       st.floats(0.05, 0.95))
def test_no_split_by_time_cuts_through_overlapping_windows(runs: list[tuple[int, int, int]], fraction: float) -> None:
    windows = [window for run in runs for window in recording(*run)]
    x = np.stack([window for _, _, window in windows])
    y = np.array([activity - 1 for _, activity, _ in windows])
    client = np.array([str(person) for person, _, _ in windows])
    segment = har.segments(x, client)
    assert segment.max() == len(runs) - 1
    samples = Samples(np.arange(len(x))[:, None], y, client, har.segment_times(client, y, segment))
    early, late = by_time(samples, fraction)
    for person in samples.clients:
        if len(set(segment[client == person])) > 1:
            parts = [set(segment[part.x[part.client == person, 0]]) for part in (early, late)]
            assert parts[0] & parts[1] == set()
            assert all(parts)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"train/y_train.txt": None}, "lacks UCI HAR Dataset/train/y_train.txt"),
        ({"train/y_train.txt": b"7\n" * 11}, "out of range; expected 1 to 6"),
        ({"train/y_train.txt": b"1\n" * 10}, r"expected \(11, 1\)"),
        ({"test/subject_test.txt": b"one\ntwo\n"}, "not a table of numbers"),
        ({"test/subject_test.txt": b"nan\nnan\n"}, "not finite"),
        ({"test/subject_test.txt": b"\n"}, "is empty"),
    ],
)
def test_a_human_activity_archive_that_is_not_whole_is_refused(
    tmp_path: Path, change: dict[str, bytes | None], wrong: str
) -> None:
    with zipfile.ZipFile(io.BytesIO(har_zip(TRAIN, recording(2, 6, 2)))) as archive:
        files: dict[str, bytes | None] = {name: archive.read(name) for name in archive.namelist()}
    files |= {f"UCI HAR Dataset/{name}": data for name, data in change.items()}
    with pytest.raises(DataError, match=wrong):
        har_of(tmp_path / "a.zip", zipped({name: data for name, data in files.items() if data is not None}))


def test_the_segments_of_real_windows_are_found_and_split_without_overlap(shared: Path) -> None:
    with np.load(shared / "data/har-train21.npz", allow_pickle=False) as file:
        rows = file["subject"] <= 6
        x, y, client, known = (file[name][rows] for name in ("x", "y", "subject", "segment"))
    client, y = client.astype(np.str_), y.astype(np.int64)
    segment = har.segments(x, client)
    np.testing.assert_array_equal(segment, np.unique(known, return_inverse=True)[1])
    early, late = by_time(Samples(x, y, client, har.segment_times(client, y, segment)), 0.5)
    for person in np.unique(client):
        parts = early.of_client(person), late.of_client(person)
        assert [sorted(set(part.y.tolist())) for part in parts] == [list(range(6))] * 2
        ends = {window[:, 64:].tobytes() for window in parts[0].x}
        assert not any(window[:, :64].tobytes() in ends for window in parts[1].x)


# spoken digits -------------------------------------------------------------------------------------------------------


def wav(sound: np.ndarray, rate: int = 8000, width: int = 2, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(sound.astype("<i2").tobytes())
    return buffer.getvalue()


def tone(hz: float, level: float = 8000, samples: int = 8320) -> np.ndarray:
    return (level * np.sin(2 * np.pi * hz * np.arange(samples) / 8000)).astype(np.int16)


def digits(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    members = {f"free-spoken-digit-dataset-1.0.9/recordings/{name}": data for name, data in files.items()}
    members["free-spoken-digit-dataset-1.0.9/README.md"] = b"passed over"
    return {"free-spoken-digit-dataset-1.0.9.tar.gz": tar_gz(folder / "a.tar.gz", members)}


def test_spoken_digits_are_ordered_by_take_and_the_first_five_are_the_test(tmp_path: Path) -> None:
    names = ["7_theo_10.wav", "7_theo_5.wav", "0_george_5.wav", "3_theo_4.wav", "3_theo_0.wav"]
    files = digits(tmp_path, {name: wav(np.array([int(name[0]), -5])) for name in names})
    train, test = spoken.spoken_digits_raw(files)
    assert train.time is not None
    assert (train.y.tolist(), train.time.tolist()) == ([0, 7, 7], [5, 5, 10])
    assert (test.y.tolist(), test.clients) == ([3, 3], ("theo",))
    assert train.x.shape == (3, 1, 8320)
    assert (train.x[1, 0, :3] * 32768).tolist() == [7, -5, 0]
    log_mel, _ = spoken.spoken_digits(files)
    assert log_mel.x.shape == (3, 1, 32, 64)
    assert log_mel.x.dtype == np.float32


@pytest.mark.parametrize("hz", [300, 1000, 2500])
def test_a_tone_is_loudest_in_the_band_around_it_and_fills_every_frame(hz: int) -> None:
    x = spoken.fitted(tone(hz))[None, None]
    log_mel = spoken.spectrograms(Samples(x, np.zeros(1, np.int64))).x[0, 0]
    edges = 700 * (10 ** (np.linspace(0, np.log10(1 + 4000 / 700), 34)) - 1)  # of the bands, in Hz
    loudest = log_mel.argmax(axis=0)
    assert (edges[loudest] < hz).all()
    assert (edges[loudest + 2] > hz).all()
    assert np.ptp(log_mel[loudest[0]]) < 0.5


def test_twice_the_sound_is_four_times_the_power_and_silence_is_the_floor() -> None:
    x = np.stack([spoken.fitted(tone(1000)), spoken.fitted(tone(1000, 16000)), np.zeros(8320, np.float32)])[:, None]
    one, two, silence = spoken.spectrograms(Samples(x, np.zeros(3, np.int64))).x[:, 0]
    assert (two - one).max() == pytest.approx(np.log(4), abs=1e-3)
    np.testing.assert_allclose(silence, np.log(1e-6), rtol=1e-6)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (wav(tone(500), rate=16000), "at 16000 Hz"),
        (wav(tone(500), channels=2), "2 channels"),
        (wav(tone(500), width=1), "of 1 bytes"),
        (wav(np.zeros(0)), "is empty"),
        (b"RIFF\0\0\0\0WAVE", "cannot be read as sound"),
        (wav(tone(500))[:30], "cannot be read as sound"),
    ],
)
def test_a_recording_of_another_form_is_refused(data: bytes, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        spoken.read_wave(data, "a")


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_are_a_sound_or_a_data_error(noise: bytes, at: int) -> None:
    data = wav(np.arange(20))
    try:
        sound = spoken.read_wave(data[:at] + noise, "a")
    except DataError:
        return
    assert 0 < len(sound) <= len(data) + len(noise)


# Shakespeare ---------------------------------------------------------------------------------------------------------


def message(number: int, data: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    size = bytearray()
    length = len(data)
    while length > 127:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + data


def example(text: str, feature: bytes = b"snippets") -> bytes:
    """A tf.train.Example as TensorFlow serializes it."""
    return message(1, message(1, message(1, feature) + message(2, message(1, message(1, text.encode())))))


def database(folder: Path, rows: list[tuple[str, str, bytes]]) -> dict[str, Path]:
    plain = folder / "plain.sqlite"
    connection = sqlite3.connect(plain)
    connection.execute("CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, "
                       "serialized_example_proto BLOB NOT NULL)")
    connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    connection.commit()
    connection.close()
    packed = lzma.compress(plain.read_bytes(), lzma.FORMAT_ALONE)
    return {"shakespeare.sqlite.lzma": wrote(folder / "shakespeare.sqlite.lzma", packed)}


SPEECH = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\nAnd all the clouds that"


def of_leaf(text: str) -> list[tuple[str, str]]:
    """LEAF's windows, one character apart, as its preprocessing defines them."""
    text = re.sub(r"   *", " ", text.replace("\n", " "))
    return [(text[k : k + 80], text[k + 80]) for k in range(len(text) - 80)]


def read_back(codes: Iterable[int]) -> str:
    return "".join(shakespeare.VOCABULARY[code] for code in codes)


def test_shakespeare_is_every_tenth_of_leafs_windows_by_role(tmp_path: Path) -> None:
    rows = [
        ("train", "RICHARD", example(SPEECH)), ("train", "ANNE", example("Set down.")),
        ("train", "RICHARD", example("   that   lour'd")), ("test", "RICHARD", example(SPEECH.upper())),
    ]
    train, test = shakespeare.shakespeare(database(tmp_path, rows))
    expected = of_leaf(SPEECH + "\n   that   lour'd")[::10]
    assert [(read_back(x), read_back([y])) for x, y in zip(train.x, train.y, strict=True)] == expected
    assert train.x.dtype == np.int64
    assert (train.clients, test.clients) == (("RICHARD",), ("RICHARD",))  # Anne's text is shorter than a window
    assert train.time is not None
    assert train.time.tolist() == [10.0 * k for k in range(len(expected))]
    assert read_back(test.x[0]) == of_leaf(SPEECH.upper())[0][0]


@pytest.mark.parametrize(("characters", "count"), [(0, 0), (80, 0), (81, 1), (90, 1), (91, 2)])
def test_a_text_has_a_window_for_every_ten_characters_behind_the_first_eighty(characters: int, count: int) -> None:
    x, y = shakespeare.windows("a" * characters)
    assert (x.shape, y.shape) == ((count, 80), (count,))


def test_a_character_outside_the_vocabulary_is_unknown() -> None:
    x, y = shakespeare.windows("é" + "a" * 79 + "$")
    assert (x[0, 0], y[0]) == (shakespeare.UNKNOWN, shakespeare.UNKNOWN)
    assert shakespeare.CLASSES[shakespeare.UNKNOWN] == "unknown"
    assert len(shakespeare.CLASSES) == entry("shakespeare").classes


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "without exactly one text"),
        (example("a", b"other"), "without exactly one text"),
        (example("a" * 300)[:-1], "cannot be read"),
        (b"\x0a", "truncated"),
        (b"\x08\x01\x00", "cannot be read"),
        (b"\x0a" + b"\xff" * 9, "cannot be read"),
    ],
)
def test_an_example_of_another_form_is_refused(data: bytes, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        shakespeare.parse_example(data, "a")


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_are_an_example_or_a_data_error(noise: bytes, at: int) -> None:
    with contextlib.suppress(DataError):
        assert len(shakespeare.parse_example(example("To be")[:at] + noise, "a")) <= 65


@pytest.mark.parametrize(
    "content", [b"", b"no database" * 100, lzma.compress(b"no database" * 100), lzma.compress(b"x" * 1000)[:-20]]
)
def test_what_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError):
        shakespeare.shakespeare({"shakespeare.sqlite.lzma": wrote(tmp_path / "a.lzma", content)})


# archives with hostile members ---------------------------------------------------------------------------------------


def everything(name: str) -> bool:
    return True


def hostile_tar(path: Path) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, kind, target in (("link", tarfile.SYMTYPE, "/etc/passwd"), ("hard", tarfile.LNKTYPE, "../good"),
                                   ("device", tarfile.CHRTYPE, ""), ("pipe", tarfile.FIFOTYPE, ""),
                                   ("folder", tarfile.DIRTYPE, "")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
        for name in ("../../evil", "/absolute", "good"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"data"))
    return path


def test_links_devices_and_folders_are_passed_over_and_names_are_never_paths(tmp_path: Path) -> None:
    path = hostile_tar(tmp_path / "a.tar.gz")
    found = dict(archives.tar_files(path, everything, 1 << 20))
    assert found == {"../../evil": b"data", "/absolute": b"data", "good": b"data"}
    assert list(tmp_path.iterdir()) == [path]


def test_an_archive_that_unpacks_to_too_much_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    path = tar_gz(tmp_path / "a.tar.gz", {"unwanted": bytes(4 << 20), "wanted": b"data"})
    assert path.stat().st_size < 1 << 14
    with pytest.raises(DataError, match="more than 1048576 bytes"):
        list(archives.tar_files(path, "wanted".__eq__, 1 << 20))
    bomb = zipped({"wanted": bytes(4 << 20)})
    with pytest.raises(DataError, match="more than 1048576 bytes"):
        list(archives.zip_files(bomb, everything, 1 << 20, "a.zip"))
    with pytest.raises(DataError, match="more than 1048576 bytes"):
        archives.gunzip(wrote(tmp_path / "a.gz", gzip.compress(bytes(4 << 20))), 1 << 20)
    with pytest.raises(DataError, match="more than 1048576 bytes"):
        archives.unlzma(wrote(tmp_path / "a.xz", lzma.compress(bytes(4 << 20))), io.BytesIO(), 1 << 20)


def test_an_archive_of_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    files = {f"{k}": b"" for k in range(4)}
    with pytest.raises(DataError, match="more than 3 members"):
        list(archives.tar_files(tar_gz(tmp_path / "a.tar.gz", files), everything, 1 << 20))
    with pytest.raises(DataError, match="more than 3 members"):
        list(archives.zip_files(zipped(files), everything, 1 << 20, "a.zip"))


def test_a_zip_member_that_is_encrypted_packed_unusually_or_lies_about_its_size_is_refused() -> None:
    unusual = io.BytesIO()
    with zipfile.ZipFile(unusual, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a", b"data")
    with pytest.raises(DataError, match="unsupported compression"):
        list(archives.zip_files(unusual.getvalue(), everything, 1 << 20, "a.zip"))
    data = bytearray(zipped({"a": b"data" * 100}))
    entry_at = data.index(b"PK\x01\x02")
    encrypted = bytearray(data)
    encrypted[entry_at + 8] |= 1
    with pytest.raises(DataError, match="encrypted"):
        list(archives.zip_files(bytes(encrypted), everything, 1 << 20, "a.zip"))
    lying = bytearray(data)
    lying[entry_at + 24 : entry_at + 28] = struct.pack("<I", 3)
    with pytest.raises(DataError):
        list(archives.zip_files(bytes(lying), everything, 1 << 20, "a.zip"))


@given(st.binary(max_size=200))
def test_any_bytes_are_an_archive_or_a_data_error(data: bytes) -> None:
    for content in (data, zipped({"a": b"data"})[: len(data)] + data):
        with contextlib.suppress(DataError):
            assert len(dict(archives.zip_files(content, everything, 1 << 16, "a.zip"))) < 2


@pytest.mark.parametrize("keep", [10, 60, 130])
def test_a_tar_that_was_cut_or_is_none_is_refused(tmp_path: Path, keep: int) -> None:
    path = tar_gz(tmp_path / "a.tar.gz", {"a": RNG.bytes(3000)})
    wrote(path, path.read_bytes()[:keep])
    with pytest.raises(DataError, match="cannot be unpacked"):
        list(archives.tar_files(path, everything, 1 << 20))
    wrote(path, gzip.compress(b"no tar" * 200))
    with pytest.raises(DataError, match="cannot be unpacked"):
        list(archives.tar_files(path, everything, 1 << 20))


# the shared copies, by benchmarks/papers/prepare.py ------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(set_cache.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_a_set_prepared_from_the_shared_copy_can_be_named_and_says_what_it_is(shared: Path, cache: Path) -> None:
    prepare.prepare("spoken-digits", shared / "data")
    loaded = set_cache.load_set("spoken-digits")
    assert loaded.test is not None
    assert (len(loaded.train), len(loaded.test)) == (1800, 200)
    assert loaded.train.clients == ("george", "jackson", "nicolas", "yweweler")
    assert loaded.note is not None
    assert not loaded.note.checked
    assert loaded.note.remark.startswith("a converted copy, not the original")
    assert (loaded.train.x.mean(), loaded.train.x.std()) == pytest.approx((loaded.entry.mean[0], loaded.entry.std[0]),
                                                                          abs=1e-3)


def test_preparing_without_the_shared_folder_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(prepare.SHARED_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="METAFLEET_SHARED is not set"):
        prepare.shared_folder()
    with pytest.raises(DataError, match="does not exist"):
        prepare.prepare("har", tmp_path)
    wrote(tmp_path / "har-train21.npz", b"another file")
    with pytest.raises(DataError, match="another file than"):
        prepare.prepare("har", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'har'"):
        prepare.prepare("hra", tmp_path)


def test_a_roles_speeches_are_parted_at_four_fifths_of_its_characters() -> None:
    assert prepare.parted(["a" * 4, "b" * 4, "c" * 2]) == ("aaaa\nbbbb", "cc")
    assert prepare.parted(["a" * 4, "b" * 5, "c"]) == ("aaaa", "bbbbb\nc")
    assert prepare.parted(["a"]) == ("", "a")
