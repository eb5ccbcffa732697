"""Cards: which devices are refused, that every block is written, and that damage is found. A plain file stands for the
card, and a loop device where the machine has one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from firmware_profiles.image import block_device, write_card
from firmware_profiles.image.block_device import Card
from fleet_core.base.errors import ConfigError, FlashError
from tests.support import disks

MIB = 1 << 20


class System:
    """A /sys and a /proc with one unused card, sdx, with two partitions."""

    def __init__(self, folder: Path):
        self.sys, self.proc, self.path = folder / "sys", folder / "proc", Path("/dev/sdx")
        self.disk = self.sys / "block/sdx"
        self.put("block/sdx", dev="8:80", size="31116288", removable="1", ro="0", **{"device/model": "SD Reader "})
        for number in (1, 2):
            self.put(f"block/sdx/sdx{number}", dev=f"8:{80 + number}", size="1000", partition=str(number), ro="0")
        (self.sys / "dev/block").mkdir(parents=True)
        for name, node in (("sdx", "8:80"), ("sdx/sdx1", "8:81")):
            (self.sys / "dev/block" / node).symlink_to(self.sys / "block" / name)
        (self.proc / "self").mkdir(parents=True)
        self.mounts("22 27 0:21 / /proc rw - proc proc rw")
        (self.proc / "swaps").write_text("Filename Type Size Used Priority\n")

    def put(self, place: str, **files: str) -> None:
        for name, text in files.items():
            path = self.sys / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    def mounts(self, *lines: str) -> None:
        (self.proc / "self/mountinfo").write_text("\n".join(lines) + "\n")

    def card(self, number: str = "8:80", **how: bool) -> Card:
        return block_device.of_number(self.path, number, sys=self.sys, proc=self.proc, **how)


@pytest.fixture
def system(tmp_path):
    return System(tmp_path)


def test_a_card_that_nothing_uses_is_shown_with_model_and_size(system):
    assert system.card().shown == "/dev/sdx: SD Reader, 15.9 GB"


def test_a_partition_is_refused(system):
    with pytest.raises(ConfigError, match="is partition 1 of sdx, expected the whole device"):
        system.card("8:81")


def test_a_card_that_is_mounted_is_refused_with_the_place(system):
    system.mounts("36 35 8:82 / /media/me/root rw - ext4 /dev/sdx2 rw")
    with pytest.raises(ConfigError, match="sdx2 is mounted at /media/me/root"):
        system.card()


def test_swap_is_refused(system):
    with (system.proc / "swaps").open("a") as file:
        file.write("/dev/sdx2 partition 1000 0 -2\n")
    with pytest.raises(ConfigError, match="sdx2 is swap"):
        system.card()


@pytest.mark.parametrize("part", ["block/sdx", "block/sdx/sdx1"])
def test_a_card_that_another_device_holds_is_refused(system, part):
    system.put(f"{part}/holders/dm-0", dev="253:0")
    with pytest.raises(ConfigError, match="is held by dm-0"):
        system.card()


def test_a_read_only_card_is_refused(system):
    system.put("block/sdx", ro="1")
    with pytest.raises(ConfigError, match="read-only"):
        system.card()


def test_a_disk_of_the_computer_is_refused_and_an_sd_card_in_a_slot_is_not(system):
    system.put("block/sdx", removable="0")
    with pytest.raises(ConfigError, match=r"not removable(.|\n)*nothing removable is in this computer"):
        system.card()
    system.put("block/sdx/device", type="MMC")  # soldered on
    with pytest.raises(ConfigError, match="not removable"):
        system.card()
    system.put("block/sdx/device", type="SD")
    assert system.card().size_bytes == 31116288 * 512


def test_a_reader_without_a_card_is_refused(system):
    system.put("block/sdx", size="0")
    with pytest.raises(ConfigError, match="no medium"):
        system.card()


def test_all_reasons_against_a_card_are_reported_at_once(system):
    system.put("block/sdx", removable="0", ro="1")
    system.mounts("36 35 8:81 / /boot rw - vfat /dev/sdx1 rw")
    with pytest.raises(ConfigError) as told:
        system.card()
    assert all(word in str(told.value) for word in ("mounted at /boot", "read-only", "not removable"))


def test_a_path_that_is_no_block_device_is_refused_and_a_file_is_accepted_only_in_rehearsal(tmp_path):
    path = tmp_path / "card"
    path.write_bytes(bytes(MIB))
    for wrong in (path, Path("/dev/null"), tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"not a block device|cannot be found"):
            block_device.inspect(wrong)
    assert block_device.inspect(path, rehearse=True) == Card(path, "a plain file in place of a card", MIB, is_file=True)


# Writing and reading back ---------------------------------------------------------------------------------------------


def picture(folder: Path, size: int = 6 * MIB + 512) -> Path:
    """An image with a hole."""
    path = folder / "image.img"
    with path.open("wb") as file:
        file.write(os.urandom(2 * MIB))
        file.truncate(size - 512)
        file.seek(0, os.SEEK_END)
        file.write(os.urandom(512))
    return path


NO_LOOP = "no loop device can be had"
"""The CI machine's kernel may have no loop devices although losetup is installed."""


@pytest.fixture(params=[
    "file", pytest.param("loop", marks=[pytest.mark.needs("losetup"), pytest.mark.allowed_skip(NO_LOOP)]),
])
def used(request, tmp_path):
    """A card full of other data."""
    path = tmp_path / "card"
    path.write_bytes(b"\xaa" * (8 * MIB))
    if request.param == "file":
        yield block_device.inspect(path, rehearse=True)
        return
    losetup = shutil.which("losetup", path=disks.PATH)
    assert losetup is not None
    made = subprocess.run([losetup, "--find", "--show", str(path)], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"{NO_LOOP}: {made.stderr.strip()}")
    loop = Path(made.stdout.strip())
    try:
        yield block_device.inspect(loop, rehearse=True)
    finally:
        subprocess.run([losetup, "--detach", str(loop)], check=True)


def test_every_block_is_on_the_card_holes_too_and_no_more(used, tmp_path):
    image, seen = picture(tmp_path), []
    done = write_card.write(image, used, lambda what, done, total: seen.append((what, done, total)))
    held = used.path.read_bytes()
    size = image.stat().st_size
    assert held[:size] == image.read_bytes()
    assert set(held[size:]) == {0xAA}
    assert done.bytes == size
    assert used.is_file or done.compared_by == "O_DIRECT"  # not every file system supports it for a plain file
    assert ("writing", size, size) in seen
    assert seen[-1] == ("verifying", size, size)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 511, MIB, 3 * MIB, 6 * MIB + 511])
def test_one_bit_that_changes_after_it_was_written_is_found(used, tmp_path, monkeypatch, at):
    verify = write_card._verify

    def corrupted(*arguments):
        with used.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        return verify(*arguments)

    monkeypatch.setattr(write_card, "_verify", corrupted)
    with pytest.raises(FlashError, match=rf"first at byte {at}$|first at byte {at}\n"):
        write_card.write(picture(tmp_path), used)


def test_a_run_that_is_cut_off_leaves_a_card_without_a_partition_table(used, tmp_path):
    def cut(what: str, done: int, total: int) -> None:
        if done > 5 * MIB or what == "verifying":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_card.write(picture(tmp_path), used, cut)
    assert set(used.path.read_bytes()[:MIB]) == {0}
    write_card.write(picture(tmp_path), used)
    assert used.path.read_bytes()[:MIB] == (tmp_path / "image.img").read_bytes()[:MIB]


def test_a_card_that_is_too_small_is_refused_before_it_is_touched(used, tmp_path):
    with pytest.raises(ConfigError, match="too small"):
        write_card.write(picture(tmp_path, 9 * MIB), used)
    assert set(used.path.read_bytes()) == {0xAA}


def test_a_card_that_lies_about_its_size_is_found(tmp_path):
    """The card accepts every block, but stores the last ones over the first."""
    path = tmp_path / "card"
    path.write_bytes(bytes(8 * MIB))
    liar = Card(path, "32 GB!", 8 * MIB, is_file=True)
    write = os.pwrite

    def wrapped(device, data, at):
        return write(device, data, at % (4 * MIB))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", wrapped)
        with pytest.raises(FlashError, match="smaller than it reports"):
            write_card.write(picture(tmp_path), liar)


def test_a_device_that_something_else_has_opened_for_itself_is_not_written(used, tmp_path):
    if used.is_file:
        return
    with open(os.open(used.path, os.O_RDWR | os.O_EXCL), "rb"), pytest.raises(ConfigError, match="something uses it"):
        write_card.write(picture(tmp_path), used)
