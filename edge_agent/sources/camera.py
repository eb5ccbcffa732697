"""A camera: images by libcamera's program (``rpicam-vid``), or by OpenCV where it is installed.

Images are resized to the fleet's size when they are stored, like images in files (``fleet_core.data.prepare``).
"""

from __future__ import annotations

import importlib
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.sources.command import Program
from edge_agent.sources.interface import Feed, Item, Lost
from fleet_core.base.errors import DataError, SourceError
from fleet_core.board.source_settings import CameraSource
from fleet_core.data.live import Taken
from fleet_core.data.readers import images
from fleet_core.model.layout import InputSpec

PROGRAMS = ("rpicam-vid", "libcamera-vid")
BEGIN, END = b"\xff\xd8\xff", b"\xff\xd9"
MAX_IMAGE_BYTES = 16 << 20
HINT = "apt install rpicam-apps, with Pillow (metafleet[images]); or pip install opencv-python-headless"


def camera_feed(source: CameraSource, home: Path, spec: InputSpec) -> Feed:
    """An open camera. spec: of a raw sample. Raises SourceError."""
    if len(spec.shape) != 3 or spec.dtype != "uint8" or spec.shape[0] not in (1, 3):
        raise SourceError(f"the fleet's samples {spec.dtype} {list(spec.shape)} are not images",
                          where=f"camera {source.camera}", expected="uint8, 1 or 3 channels")
    channels, size = spec.shape[0], (480, 640) if spec.fit != "refuse" else spec.shape[1:]
    source = replace(source, height=source.height or size[0], width=source.width or size[1])
    program = next((name for name in PROGRAMS if shutil.which(name)), None)
    if source.by == "rpicam" or (source.by == "auto" and program):
        return ProgramCamera(source, home, channels, program or PROGRAMS[0])
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError as error:
        raise SourceError(f"neither {PROGRAMS[0]} nor OpenCV is installed" if source.by == "auto"
                          else "OpenCV is not installed", where=f"camera {source.camera}", hint=HINT) from error
    return OpenCvCamera(source, channels, cv2)


class ProgramCamera:
    """A program that prints one JPEG after the other."""

    def __init__(self, source: CameraSource, home: Path, channels: int, program: str):
        self._channels, self._held = channels, b""
        self._program = Program((
            program, "--codec", "mjpeg", "--timeout", "0", "--nopreview", "--camera", str(source.camera), "--width",
            str(source.width), "--height", str(source.height), "--framerate", f"{1 / source.every_s:g}", "--flush",
            "--output", "-",
        ), home, HINT)

    def read(self, timeout_s: float) -> list[Item] | None:
        data = self._program.read(timeout_s)
        if data is None:
            raise SourceError("the camera's program has ended", hint=HINT)
        self._held += data
        return self._images()

    def close(self) -> None:
        self._program.close()

    def _images(self) -> list[Item]:
        found: list[Item] = []
        while True:
            begin = self._held.find(BEGIN)
            end = -1 if begin < 0 else self._held.find(END, begin)
            if end < 0:
                self._held = self._held[begin if begin >= 0 else -2 :]
                break
            found.append(self._image(self._held[begin : end + len(END)]))
            self._held = self._held[end + len(END) :]
        if len(self._held) > MAX_IMAGE_BYTES:
            self._held = b""
            found.append(Lost(f"an image of over {MAX_IMAGE_BYTES} bytes"))
        return found

    def _image(self, data: bytes) -> Item:
        try:
            return Taken(images.decoded(data, self._channels), time.time())
        except DataError as error:
            return Lost(error.what)


class OpenCvCamera:
    """cv2: the module."""

    def __init__(self, source: CameraSource, channels: int, cv2: Any):
        self._every_s, self._channels, self._where = source.every_s, channels, f"camera {source.camera}"
        self._capture = cv2.VideoCapture(source.camera)
        if not self._capture.isOpened():
            raise SourceError("cannot be opened by OpenCV", where=self._where, hint="ls /dev/video*")
        self._capture.set(cv2.CAP_PROP_FRAME_WIDTH, source.width)
        self._capture.set(cv2.CAP_PROP_FRAME_HEIGHT, source.height)
        self._due = time.monotonic()

    def read(self, timeout_s: float) -> list[Item] | None:
        left_s = self._due - time.monotonic()
        if left_s > 0:
            time.sleep(min(left_s, timeout_s))
        if left_s > timeout_s:
            return []
        self._due = max(self._due + self._every_s, time.monotonic())
        self._capture.grab()  # the driver may hold an old image
        taken, image_HWC = self._capture.read()
        if not taken:
            raise SourceError("gives no image", where=self._where)
        colour_CHW = np.ascontiguousarray(np.moveaxis(np.asarray(image_HWC, np.uint8)[..., ::-1], -1, 0))
        return [Taken(colour_CHW if self._channels == 3 else images.grey(colour_CHW), time.time())]

    def close(self) -> None:
        self._capture.release()
