"""A folder that grows: each file is taken once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_agent.sources import folder as folders
from edge_agent.sources.folder import FolderFeed
from edge_agent.sources.interface import Item, Lost
from fleet_core.base.errors import SourceError
from fleet_core.board.source_settings import FolderSource
from fleet_core.data import unlabelled
from fleet_core.data.live import Taken
from fleet_core.data.shaping import sound
from fleet_core.model.layout import InputSpec
from tests.support import sounds

LATER = 4e9
IMAGES = InputSpec((1, 6, 4), "uint8", fit="letterbox")
HEARD = InputSpec((sound.BANDS, sound.frames_in(8000, 0.5)), sound_hz=8000)
SERIES = InputSpec((2, 3))


def feed_of(home: Path, spec: InputSpec, clock: float = LATER) -> FolderFeed:
    (home / "in").mkdir(exist_ok=True)
    source = FolderSource(kind="folder", path="in")
    return FolderFeed(source, home, spec, None, home / "taken", clock=lambda: clock)


def taken(feed: FolderFeed) -> list[Item]:
    found: list[Item] = []
    while items := feed.read(0.0):
        found += items
    return found


def put(home: Path, spec: InputSpec) -> list[Path]:
    """Files of all kinds that ``spec`` allows."""
    inside = home / "in"
    inside.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    if spec is IMAGES:
        files = [inside / "a.png", inside / "b.bmp"]
        for path in files:
            Image.fromarray(rng.integers(0, 256, (9, 7), dtype=np.uint8)).save(path)
        np.save(inside / "c.npy", rng.integers(0, 256, (1, 6, 4), dtype=np.uint8))
        return [*files, inside / "c.npy"]
    if spec is HEARD:
        return [sounds.write(inside / f"{k}.wav", sounds.tone(440, 1.3, k)) for k in range(2)]
    (inside / "a.csv").write_text("ax,ay\n" + "".join(f"{k},{k / 7}\n" for k in range(10)))
    (inside / "b.ndjson").write_text('{"x": [[1, 2, 3], [4, 5, 6]]}\n')
    return [inside / "a.csv", inside / "b.ndjson"]


@pytest.mark.parametrize("spec", [IMAGES, HEARD, SERIES], ids=["images", "sound", "series"])
def test_the_samples_are_those_of_the_readers_and_come_once(tmp_path: Path, spec: InputSpec) -> None:
    files = put(tmp_path, spec)
    wanted = np.concatenate([unlabelled.load(path, spec) for path in files])
    feed = feed_of(tmp_path, spec)
    found = [one for one in taken(feed) if isinstance(one, Taken)]
    assert np.stack([one.x for one in found]).tobytes() == wanted.tobytes()
    assert taken(feed) == []
    assert taken(feed_of(tmp_path, spec)) == [], "also after a new start"
    np.save(tmp_path / "in" / "new.npy", wanted[:1])
    assert len(taken(feed)) == 1


def test_a_subfolder_is_a_label(tmp_path: Path) -> None:
    (tmp_path / "in" / "frost").mkdir(parents=True)
    np.save(tmp_path / "in" / "frost" / "1.npy", np.zeros((2, 3), np.float32))
    (one,) = taken(feed_of(tmp_path, SERIES))
    assert isinstance(one, Taken)
    assert one.label == "frost"


def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    (path,) = put(tmp_path, SERIES)[:1]
    os.utime(path, (1000.0, 1000.0))
    (tmp_path / "in" / "b.ndjson").unlink()
    assert feed_of(tmp_path, SERIES, 1000.0 + folders.SETTLED_S / 2).read(0.0) == []
    assert len(feed_of(tmp_path, SERIES, 1000.0 + 2 * folders.SETTLED_S).read(0.0) or []) == 3


def test_a_file_that_cannot_be_used_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.npy").write_bytes(b"no array")
    np.save(tmp_path / "in" / "b.npy", np.zeros((4, 3), np.float32))
    feed = feed_of(tmp_path, SERIES)
    found = taken(feed)
    assert all(isinstance(one, Lost) for one in found)
    assert [Path(one.why.split(": ")[0]).name for one in found if isinstance(one, Lost)] == ["a.npy", "b.npy"]
    assert taken(feed) == []


def test_other_files_are_left_alone_and_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in (".hidden.npy", "notes.txt", "a.npy.part", "pickle.pkl"):
        (tmp_path / "in" / name).write_bytes(b"x")
    assert taken(feed_of(tmp_path, SERIES)) == []
    with pytest.raises(SourceError, match="other: cannot be read: No such file"):
        FolderFeed(FolderSource(kind="folder", path="other"), tmp_path, SERIES, None, tmp_path / "taken")


def test_names_of_files_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    files = put(tmp_path, SERIES)
    taken(feed_of(tmp_path, SERIES))
    files[0].unlink()
    feed_of(tmp_path, SERIES)
    assert (tmp_path / "taken").read_text() == "b.ndjson\n"
