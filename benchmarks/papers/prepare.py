"""Puts the data sets of METAFLEET_SHARED into metafleet's cache, so that experiments can name them.

    METAFLEET_SHARED=FOLDER python benchmarks/papers/prepare.py [NAME …] [--cache FOLDER]

FOLDER/data holds converted copies, not the originals that ``metafleet datasets fetch`` checks: each note says so, and
how they differ. Without names all sets are made; without --cache they go where ``metafleet datasets`` looks.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError, FleetError
from fleet_core.data.heartbeat import expand
from fleet_core.data.samples import Samples
from fleet_core.data.sets import har, idx, omniglot, set_cache, shakespeare, spoken
from fleet_core.data.sets.archives import gunzip
from fleet_core.data.sets.cifar import OBJECTS
from fleet_core.data.sets.fetch import keep, source
from fleet_core.data.sets.registry import entry
from fleet_core.data.sets.set_cache import Note, Parts

SHARED_VARIABLE = "METAFLEET_SHARED"
CIFAR_PARTS = ("train-1", "train-2", "train-3", "train-4", "train-5", "test")
CIFAR_FILES = (*(f"cifar10-{part}.xz" for part in CIFAR_PARTS), "cifar10-labels.npz")
IDX_KINDS = ("images-idx3", "labels-idx1")
IDX_FILES = tuple(f"mnist-{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in IDX_KINDS)
SPEAKERS = "four of the speakers: george, jackson, nicolas, yweweler"
TRAIN_SHARE = 0.8  # of a role's characters
SHA256 = {
    "cifar10-labels.npz": "886ee36af86d69641ef9ca870d23f9206cac3a97557831f0404dfd13dff325aa",
    "cifar10-test.xz": "9a49c91b9b01482ff81f0a477b0f95a304b5d6997ad7ab73fb666c5eea733ece",
    "cifar10-train-1.xz": "d7ac716baf5fa5fb3746b01a8fc805610d5498c1f89d27c2b60df79f1227867b",
    "cifar10-train-2.xz": "6af4eed9c92a0372abf93578c8290f21345aa076b703577db5564ccb9f07b4a3",
    "cifar10-train-3.xz": "092fe98f8ed96571aca67dd9e4bb7830733f0619661f3962a352aa843b7fb09d",
    "cifar10-train-4.xz": "f30d211de7cf73e4a82ce83824451cafb884895b2d94113b079719761ec408da",
    "cifar10-train-5.xz": "2ca6478d67f5f303f2367dcd611e9eb1e4f9a3ae6b7df11fe9b3ff44c8f8a8ed",
    "ecg-mitbih-ds1.npz": "4cae610a4cec0bd4854a4604f7cfc266eb196a143990db45b119d6851cfc264f",
    "har-train21.npz": "50baf4b2e4f121a8c40439ce372298280ec45214d95ebce02e1643eb3b3ebca0",
    "mnist-t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "mnist-t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "mnist-train-images-idx3-ubyte.gz": "71524e2cd1ad2968737f7f2f2ff69cbfc32df8ccddff51593f7cb2d4e0eb5b64",
    "mnist-train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "mnist-writers.npz": "74ffb4331b50769a3a5896d0232288be0697070797a80e721ef06ef2b4d23211",
    "omniglot-background.npz": "57471a430dfb5b6ce2bf639d243aafa8d7b2842dbda4c9deb0ea0e8a924380e7",
    "shakespeare-roles.jsonl.gz": "1beaa2cedd8324edab61fb73e14f41db6e30b437f0c1077dde05e76526068c54",
    "spoken-digits-4speakers.npz": "ce794bb1824c0a1e94471f8b1085ceacb94dd4941b9f2baa0e782ba85f2238ba",
}

Arrays = dict[str, NDArray[Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}; default: all")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="default: where 'metafleet datasets' looks")
    options = parser.parse_args()
    if options.cache:
        os.environ[set_cache.FOLDER_VARIABLE] = str(options.cache)
    try:
        folder = shared_folder()
        for name in options.names or MAKERS:
            note = prepare(name, folder)
            place = set_cache.home() / name
            print(f"{name}: {note.train} + {note.test} samples, {note.clients} clients, {place}", flush=True)
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def shared_folder() -> Path:
    """FOLDER/data. Raises ConfigError if METAFLEET_SHARED is not set."""
    folder = os.environ.get(SHARED_VARIABLE)
    if not folder:
        raise ConfigError(f"{SHARED_VARIABLE} is not set", expected="the folder that holds data/",
                          hint=f"export {SHARED_VARIABLE}=…")
    return Path(folder) / "data"


def prepare(name: str, folder: Path) -> Note:
    """Makes one set from the files in ``folder``, which must be the known ones, and stores it. Raises FleetError."""
    if name not in MAKERS:
        near = schema.suggest(name, MAKERS)
        raise ConfigError(f"no set '{name}' can be made" + (f" (did you mean '{near}'?)" if near else ""),
                          expected=f"one of {', '.join(MAKERS)}")
    files, make = MAKERS[name]
    sources = []
    for file in files:
        if not (folder / file).is_file():
            raise DataError("does not exist", where=str(folder / file), hint=f"check {SHARED_VARIABLE}")
        sources.append(source(file, folder / file))
        if sources[-1].sha256 != SHA256[file]:
            raise DataError("is another file than the one this set is made from", where=str(folder / file))
    parts, remark = make(folder)
    return keep(entry(name), parts, tuple(sources), remark=f"a converted copy, not the original; {remark}")


def arrays(path: Path) -> Arrays:
    """Every array of a .npz, read once."""
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def cifar_10(folder: Path) -> tuple[Parts, str]:
    spec = importlib.util.spec_from_file_location("shared_read", folder / "read.py")
    assert spec is not None
    assert spec.loader is not None
    read = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(read)
    images = [read.unpack_images((folder / f"cifar10-{part}.xz").read_bytes(), (10000, 3, 32, 32))
              for part in CIFAR_PARTS]
    labels = arrays(folder / "cifar10-labels.npz")
    train = Samples(np.concatenate(images[:-1]), labels["y_train"].astype(np.int64), classes=OBJECTS)
    test = Samples(images[-1], labels["y_test"].astype(np.int64), classes=OBJECTS)
    lossy = int(labels["lossy_train"].sum()), int(labels["lossy_test"].sum())
    return (train, test), (
        f"{sum(lossy)} images ({lossy[0]} for training, {lossy[1]} for testing) are decoded from JPEG; the test part is"
        " in another order"
    )


def mnist(folder: Path) -> tuple[Parts, str]:
    writers = arrays(folder / "mnist-writers.npz")
    parts = []
    for part, of in (("train", "writer_train"), ("t10k", "writer_test")):
        x, y = (idx.parse_idx(gunzip(folder / f"mnist-{part}-{kind}-ubyte.gz", idx.LIMIT_BYTES), part)
                for kind in IDX_KINDS)
        client = np.char.zfill(writers[of].astype(np.str_), 4)
        parts.append(Samples(x[:, None], y.astype(np.int64), client, classes=idx.DIGITS))
    return (parts[0], parts[1]), "byte for byte MNIST's images and labels, writers as QMNIST has them"


def human_activity(folder: Path) -> tuple[Parts, str]:
    held = arrays(folder / "har-train21.npz")
    y = held["y"].astype(np.int64)
    client = np.char.zfill(held["subject"].astype(np.str_), 2)
    time = har.segment_times(client, y, held["segment"].astype(np.int64))
    samples = Samples(held["x"].astype(np.float32), y, client, time, har.ACTIVITIES)
    return (samples, None), "the 21 people of the training part alone, in float16 (largest rounding error 0.002)"


def omniglot_background(folder: Path) -> tuple[Parts, str]:
    held = arrays(folder / "omniglot-background.npz")
    drawings = held["x28"].shape[1]
    y = np.repeat(held["character"].astype(np.int64) - 1, drawings)
    samples = Samples(held["x28"].reshape(-1, 1, omniglot.SIDE, omniglot.SIDE), y, classes=omniglot.CLASSES)
    return (samples, None), (
        "the background characters alone; most alphabets are not named there, so that no drawing names its drawer"
    )


def shakespeare_roles(folder: Path) -> tuple[Parts, str]:
    path = folder / "shakespeare-roles.jsonl.gz"
    early, late = [], []
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        role = json.loads(line)
        first, rest = parted(role["speeches"])
        if len(shakespeare.windows(first)[1]) and len(shakespeare.windows(rest)[1]):
            early.append((role["client"], first))
            late.append((role["client"], rest))
    parts = shakespeare.samples_of(early, str(path)), shakespeare.samples_of(late, str(path))
    return parts, (
        "the Moby text as shakespeare.mit.edu has it, 31 plays, not LEAF's edition; the first speeches of a role,"
        f" {TRAIN_SHARE:.0%} of its characters, are for training, the rest for testing; roles too short are left out"
    )


def parted(speeches: list[str]) -> tuple[str, str]:
    """The text of the first speeches, which make up the training share, and of the rest."""
    ends = np.cumsum([len(speech) for speech in speeches])
    count = int(np.searchsorted(ends, TRAIN_SHARE * ends[-1], side="right"))
    return "\n".join(speeches[:count]), "\n".join(speeches[count:])


def sounds(folder: Path) -> tuple[Samples, Samples]:
    held = arrays(folder / "spoken-digits-4speakers.npz")
    recordings = [
        (int(held["take"][k]), str(held["speaker"][k]), int(held["digit"][k]),
         held["audio"][held["offset"][k] : held["offset"][k + 1]])
        for k in range(len(held["digit"]))
    ]
    return spoken.by_take(recordings)


def spoken_digits_raw(folder: Path) -> tuple[Parts, str]:
    return sounds(folder), SPEAKERS


def spoken_digits(folder: Path) -> tuple[Parts, str]:
    train, test = sounds(folder)
    return (spoken.spectrograms(train), spoken.spectrograms(test)), SPEAKERS


def heartbeat_22(folder: Path) -> tuple[Parts, str]:
    held = arrays(folder / "ecg-mitbih-ds1.npz")
    samples = expand(held["x"], held["y"], held["patient"], held["rr"], held["pos"])
    return (samples, None), "all 22 patients, classes N, S and V as in the package's ten"


MAKERS: dict[str, tuple[tuple[str, ...], Callable[[Path], tuple[Parts, str]]]] = {
    "heartbeat-22": (("ecg-mitbih-ds1.npz",), heartbeat_22),
    "mnist": ((*IDX_FILES, "mnist-writers.npz"), mnist),
    "cifar-10": (CIFAR_FILES, cifar_10),
    "omniglot": (("omniglot-background.npz",), omniglot_background),
    "har": (("har-train21.npz",), human_activity),
    "spoken-digits": (("spoken-digits-4speakers.npz",), spoken_digits),
    "spoken-digits-raw": (("spoken-digits-4speakers.npz",), spoken_digits_raw),
    "shakespeare": (("shakespeare-roles.jsonl.gz",), shakespeare_roles),
}

if __name__ == "__main__":
    main()
