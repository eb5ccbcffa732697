"""Samples without labels, to be predicted: arrays, files, images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fleet_core.base.errors import DataError
from fleet_core.data import readers, unlabelled
from fleet_core.model.layout import InputSpec

ROW, PHOTO = InputSpec((3,)), InputSpec((3, 4, 5), "uint8", 1 / 255)
X = np.arange(6.0).reshape(2, 3)


def refused(path: Path, spec: InputSpec, why: str) -> None:
    with pytest.raises(DataError, match=why) as error:
        unlabelled.load(path, spec)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("given", [{}, {"y": [0, 1]}, {"y": ["on", "off"], "classes": ["off", "on"]}])
def test_an_npz_needs_no_labels_and_they_are_passed_over(tmp_path: Path, given: dict[str, Any]) -> None:
    np.savez(tmp_path / "new.npz", x=X, **given)
    found = unlabelled.load(tmp_path / "new.npz", ROW)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, X)


@pytest.mark.parametrize("text", ["a,b,c\n0,1,2\n3,4,5\n", "time,a,label,b,c\n9,0,on,1,2\n10,3,?,4,5\n"])
def test_a_csv_needs_no_label(tmp_path: Path, text: str) -> None:
    (tmp_path / "new.csv").write_text(text)
    np.testing.assert_array_equal(unlabelled.load(tmp_path / "new.csv", ROW), X)


def test_what_is_read_to_learn_from_still_needs_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "new.npz", x=X)
    with pytest.raises(DataError, match="has no array 'y'"):
        readers.read_npz(tmp_path / "new.npz", 1 << 20)
    (tmp_path / "new.csv").write_text("a,b\n0,1\n")
    with pytest.raises(DataError, match="has no column 'label'"):
        readers.read_csv(tmp_path / "new.csv", 1 << 20)


@pytest.mark.parametrize("x", [X[0], X[:1]])
def test_an_array_may_be_a_single_sample(tmp_path: Path, x: Any) -> None:
    np.save(tmp_path / "new.npy", x)
    np.testing.assert_array_equal(unlabelled.load(tmp_path / "new.npy", ROW), X[:1])


def photo(path: Path, mode: str = "RGB", size: tuple[int, int] = (5, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def test_an_image_is_a_sample_and_a_grey_one_is_of_equal_colours(tmp_path: Path) -> None:
    found = unlabelled.load(photo(tmp_path / "a.png"), PHOTO)
    assert (found.shape, str(found.dtype)) == ((1, 3, 4, 5), "uint8")
    np.testing.assert_array_equal(found[0].transpose(1, 2, 0), np.asarray(Image.open(tmp_path / "a.png")))
    grey = unlabelled.load(photo(tmp_path / "b.PNG", "L"), PHOTO)
    np.testing.assert_array_equal(grey, np.repeat(np.asarray(Image.open(tmp_path / "b.PNG"))[None, None], 3, 1))
    single = unlabelled.load(tmp_path / "b.PNG", InputSpec((1, 4, 5), "uint8"))
    np.testing.assert_array_equal(single, grey[:, :1])


def test_a_folder_of_images_is_read_by_name_and_one_of_classes_class_by_class(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg"):
        photo(tmp_path / "flat" / name)
    assert len(unlabelled.load(tmp_path / "flat", PHOTO)) == 2
    for label in ("cat", "dog"):
        photo(tmp_path / "sorted" / label / "1.png")
    assert len(unlabelled.load(tmp_path / "sorted", PHOTO)) == 2


def test_what_is_no_sample_of_the_model_is_refused_with_its_file(tmp_path: Path) -> None:
    refused(tmp_path / "none.png", PHOTO, "does not exist; expected a .npy array, a .npz with x")
    refused(photo(tmp_path / "large.png", size=(6, 4)), PHOTO, r"has shape \[1, 3, 4, 6\]; expected \[n, 3, 4, 5\]")
    refused(photo(tmp_path / "colour.png"), InputSpec((1, 4, 5), "uint8"), "has shape")
    refused(photo(tmp_path / "bytes.png"), InputSpec((3, 4, 5)), "has bytes, and the model takes float32")
    (tmp_path / "text.txt").write_text("1 2 3")
    refused(tmp_path / "text.txt", ROW, "has an unknown format '.txt'")
    (tmp_path / "no.png").write_bytes(b"no image")
    refused(tmp_path / "no.png", PHOTO, "cannot be read as an image")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", PHOTO, "has no subfolder")
    np.savez(tmp_path / "half.npz", x=X + 0.5)
    refused(tmp_path / "half.npz", InputSpec((3,), "int64"), "has float64 values that int64 cannot represent")
