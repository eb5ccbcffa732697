"""Images of a camera: stand-ins for libcamera's program and for OpenCV."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from edge_agent.sources import camera
from edge_agent.sources.interface import Feed, Item, Lost
from fleet_core.base.errors import SourceError
from fleet_core.board.source_settings import CameraSource
from fleet_core.data import unlabelled
from fleet_core.data.live import Taken
from fleet_core.data.prepare import prepared
from fleet_core.data.readers import images
from fleet_core.model.layout import InputSpec
from tests.support import installed, waiting

COLOUR, GREY = InputSpec((3, 24, 32), "uint8", fit="letterbox"), InputSpec((1, 24, 32), "uint8", fit="stretch")
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 60, 90, 3), dtype=np.uint8)


def source(by: str = "auto", **more: float) -> CameraSource:
    return CameraSource(kind="camera", by=by, every_s=more.pop("every_s", 0.5))


def jpegs(folder: Path) -> list[Path]:
    folder.mkdir()
    for n, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(folder / f"{n}.jpg", quality=95)
    return sorted(folder.iterdir())


def samples(items: list[Item], spec: InputSpec) -> bytes:
    return b"".join(prepared(one.x[None], spec).tobytes() for one in items if isinstance(one, Taken))


def taken(feed: Feed, count: int) -> list[Item]:
    items: list[Item] = []
    waiting.until(lambda: len(items) >= count, lambda: items.extend(feed.read(0.1) or []))
    feed.close()
    return items


def test_the_samples_of_what_is_taken_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = jpegs(tmp_path / "in")
    asked = installed.program(monkeypatch, tmp_path / "bin", "rpicam-vid", f"cat {tmp_path}/in/*.jpg; sleep 60")
    items = taken(camera.camera_feed(source(), tmp_path, COLOUR), 3)
    assert samples(items, COLOUR) == b"".join(unlabelled.load(path, COLOUR).tobytes() for path in files)
    assert "--width 640 --height 480 --framerate 2 " in asked.read_text()


def test_a_grey_fleet_gets_grey_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = jpegs(tmp_path / "in")
    installed.program(monkeypatch, tmp_path / "bin", "rpicam-vid", f"cat {tmp_path}/in/*.jpg; sleep 60")
    items = taken(camera.camera_feed(source(), tmp_path, GREY), 3)
    for path, one in zip(files, items, strict=True):
        assert isinstance(one, Taken)
        with Image.open(path) as image:
            assert one.x[0].tobytes() == np.asarray(image.convert("L")).tobytes()


def test_images_that_come_in_pieces_or_are_broken_do_not_stop_the_others() -> None:
    made = camera.ProgramCamera.__new__(camera.ProgramCamera)
    made._channels, made._held = 3, b""
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(buffer, "jpeg")
    found: list[Item] = []
    stream = b"noise" + camera.BEGIN + b"broken" + camera.END + buffer.getvalue() * 2
    for begin in range(0, len(stream), 100):
        made._held += stream[begin : begin + 100]
        found += made._images()
    assert [type(one).__name__ for one in found] == ["Lost", "Taken", "Taken"]
    assert isinstance(found[0], Lost)
    assert "cannot be read as an image" in found[0].why


def test_a_stream_that_is_no_image_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(camera, "MAX_IMAGE_BYTES", 1000)
    made = camera.ProgramCamera.__new__(camera.ProgramCamera)
    made._channels, made._held = 3, b"x" * 5000
    assert made._images() == []
    assert len(made._held) < 5
    made._held = camera.BEGIN + b"x" * 5000
    (lost,) = made._images()
    assert isinstance(lost, Lost)
    assert made._held == b""


class Capture:
    """What cv2.VideoCapture does: images with the channels blue, green, red."""

    def __init__(self, number: int, opens: bool = True):
        self.number, self.opens, self.given, self.released = number, opens, 0, False

    def isOpened(self) -> bool:
        return self.opens

    def set(self, key: int, value: int) -> None:
        assert (key, value) in {(3, 640), (4, 480)}

    def grab(self) -> bool:
        return True

    def read(self) -> tuple[bool, np.ndarray | None]:
        if self.given == len(PIXELS):
            return False, None
        self.given += 1
        return True, PIXELS[self.given - 1][..., ::-1]

    def release(self) -> None:
        self.released = True


@pytest.mark.parametrize("spec", [COLOUR, GREY], ids=["colour", "grey"])
def test_opencv_gives_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: InputSpec) -> None:
    captures: list[Capture] = []

    def capture(number: int) -> Capture:
        captures.append(Capture(number))
        return captures[-1]

    module = SimpleNamespace(VideoCapture=capture, CAP_PROP_FRAME_WIDTH=3, CAP_PROP_FRAME_HEIGHT=4)
    monkeypatch.setitem(sys.modules, "cv2", module)
    feed = camera.camera_feed(source("opencv", every_s=0.05), tmp_path, spec)
    wanted = np.moveaxis(PIXELS, -1, 1)
    if spec is GREY:
        wanted = np.stack([images.grey(one) for one in wanted])
    items: list[Item] = []
    waiting.until(lambda: len(items) == 3, lambda: items.extend(feed.read(0.1) or []))
    assert samples(items, spec) == prepared(wanted, spec).tobytes()
    with pytest.raises(SourceError, match="camera 0: gives no image"):
        waiting.until(lambda: False, lambda: feed.read(0.1))
    feed.close()
    assert captures[0].released


@pytest.mark.parametrize(("by", "said"), [
    ("auto", "neither rpicam-vid nor OpenCV is installed\nhint: apt install rpicam-apps"),
    ("opencv", "OpenCV is not installed"), ("rpicam", "rpicam-vid: cannot be started"),
])  # fmt: skip
def test_a_board_without_a_camera_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, said: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(SourceError, match=said):
        camera.camera_feed(source(by), tmp_path, COLOUR)


def test_a_fleet_that_learns_no_images_has_no_camera(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"samples float32 \[2, 8\] are not images"):
        camera.camera_feed(source(), tmp_path, InputSpec((2, 8)))
