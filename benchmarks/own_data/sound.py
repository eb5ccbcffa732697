"""Which form of sound the default network learns from: `python -m benchmarks.own_data.sound`; writes sound.json.

After a stop it resumes with the forms that are missing there. The takes 5 to 49 of four speakers (the test takes are
not touched), with the trial of `metafleet init`: its validation score, macro-F1 on the last 40 % of the speakers that
train, after 30 rounds of PFLDyn's class means. Forms of a window of 1.04 s: a spectrogram as an image (one channel),
and as a series (a channel for each of 32 bands).
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.laboratory.advise import model_trial
from cloud_server.laboratory.advise.recordings import Model
from fleet_core.base import processes, storage
from fleet_core.data import model_input
from fleet_core.data.samples import Samples
from fleet_core.data.sets import spoken

RESULT = Path(__file__).with_name("sound.json")
FILE = "spoken-digits-4speakers.npz"
SEEDS, SECONDS = (0,), 7200.0  # long enough for all 30 rounds


def takes() -> Samples:
    """The training takes as sound, x float32 [N, 1, 8320]."""
    with np.load(Path(os.environ["METAFLEET_SHARED"]) / "data" / FILE, allow_pickle=False) as archive:
        held = {name: archive[name] for name in archive}
    cuts = np.split(held["audio"], held["offset"][1:-1])
    found = [(int(take), str(who), int(digit), cut)
             for take, who, digit, cut in zip(held["take"], held["speaker"], held["digit"], cuts, strict=True)]
    return spoken.by_take(found)[0]


def forms(sound: Samples) -> dict[str, Samples]:
    image = spoken.spectrograms(sound)
    return {"image": image, "series": replace(image, x=image.x[:, 0])}


def main() -> None:
    found: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    for name, samples in forms(takes()).items():
        spec = model_input.standardized(samples.x)
        for seed in SEEDS[len(found.get(name, ())):]:
            tried = model_trial.try_models(samples, spec, "pfldyn-proto", seed=seed, seconds=SECONDS,
                                           models=[Model("ds-cnn", "ds-cnn")], say=processes.say).tried[0]
            found.setdefault(name, []).append(
                {"seed": seed, "validation": round(tried.validation, 4), "rounds": tried.rounds,
                 "parameters": tried.parameters})
            storage.write_json(RESULT, found)


if __name__ == "__main__":
    main()
