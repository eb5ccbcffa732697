"""Makes the heartbeat data set from the beats of MIT-BIH, with the same bytes on every run.

    METAFLEET_SHARED=FOLDER python benchmarks/heartbeat/build.py                  the package's ten patients
    METAFLEET_SHARED=FOLDER python benchmarks/heartbeat/build.py --all OUT.npz    all 22, in the form of --data

FOLDER holds data/ecg-mitbih-ds1.npz: x int16 [N, 128], y uint8, patient int16, rr int16 [N, 2], pos int32.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import ConfigError, DataError, FleetError
from fleet_core.base.storage import write_atomic
from fleet_core.data.heartbeat import CLASSES, DEVICES, FILE, NEW_DEVICES, expand, load_heartbeat, pack_beats
from fleet_core.data.samples import Samples, save
from fleet_core.data.time_split import by_time, first_seconds

SOURCE = Path("data") / "ecg-mitbih-ds1.npz"
SHA256 = "4cae610a4cec0bd4854a4604f7cfc266eb196a143990db45b119d6851cfc264f"
COLUMNS = ("y", "patient", "rr", "pos")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", type=Path, metavar="OUT.npz", help="write all 22 patients there instead")
    options = parser.parse_args()
    try:
        source = read_source()
        if options.all:
            save(options.all, expand(source.pop("x"), **source))
            print(f"{options.all}: {options.all.stat().st_size} bytes")
        else:
            build(source, FILE)
            print(f"{FILE}: {FILE.stat().st_size} bytes")
            print("\n".join(counts(load_heartbeat())))
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def read_source() -> dict[str, NDArray[Any]]:
    """x, y, patient, rr and pos of the source. Raises ConfigError and DataError."""
    folder = os.environ.get("METAFLEET_SHARED")
    if not folder:
        raise ConfigError(
            "METAFLEET_SHARED is not set", expected=f"the folder that holds {SOURCE}", hint="export METAFLEET_SHARED=…"
        )
    path = Path(folder) / SOURCE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(path), hint="check METAFLEET_SHARED") from error
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise DataError("is another file than the one this data set is made from", where=str(path))
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return {name: file[name] for name in ("x", *COLUMNS)}


def build(source: dict[str, NDArray[Any]], path: Path) -> None:
    """Writes the rows of the package's patients, unchanged, to ``path``."""
    rows = np.isin(source["patient"], [int(name) for name in DEVICES + NEW_DEVICES])
    buffer = io.BytesIO()
    columns = {name: source[name][rows] for name in COLUMNS}
    np.savez_compressed(buffer, allow_pickle=False, beats=pack_beats(source["x"][rows]), **columns)
    write_atomic(path, buffer.getvalue())


def counts(samples: Samples) -> list[str]:
    """A table: beats of each class in the two parts of each patient."""
    lines = [f"{'patient':8} {'first part':>10} {'/'.join(CLASSES):>16} {'rest':>18}"]
    for name in DEVICES + NEW_DEVICES:
        one = samples.of_client(name)
        new = name in NEW_DEVICES
        parts = first_seconds(one, 300) if new else by_time(one)
        shown = ["/".join(map(str, np.bincount(part.y, minlength=len(CLASSES)))) for part in parts]
        lines.append(f"{name:8} {'5 min' if new else '60 %':>10} {shown[0]:>16} {shown[1]:>18}")
    return lines


if __name__ == "__main__":
    main()
