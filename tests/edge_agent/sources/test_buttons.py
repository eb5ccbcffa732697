"""Buttons that label the last sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.sources import buttons
from edge_agent.sources.buttons import Buttons
from fleet_core.base.errors import SourceError
from fleet_core.board.device_settings import settings_of
from fleet_core.board.source_settings import GpioButton
from fleet_core.link.mqtt import MqttLink
from tests.support import homes, installed, waiting
from tests.support.brokers import private_broker

GPIO = '[[button]]\nkind = "gpio"\nline = 17\nlabel = "a"\n'


@pytest.mark.parametrize(("version", "falling", "wanted"), [
    ("v1.6.3", True, "--num-events=1 --falling-edge --bias=pull-up gpiochip0 17"),
    ("v2.1.3", False, "--num-events=1 --edges=rising --bias=pull-down --chip=gpiochip0 17"),
])  # fmt: skip
def test_each_press_of_a_gpio_line_is_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, falling: bool, wanted: str
) -> None:
    """The stand-in ends like gpiomon when the file ``pressed`` appears."""
    asked = installed.program(monkeypatch, tmp_path / "bin", "gpiomon", (
        f'[ "$1" = --version ] && echo "gpiomon (libgpiod) {version}" && exit 0\n'
        f'until rm {tmp_path}/pressed 2>/dev/null; do sleep 0.02; done; echo event'
    ))
    clock = [100.0]
    button = GpioButton(kind="gpio", line=17, label="a", falling=falling)
    pressed, labels = buttons.GpioPressed(button, tmp_path, lambda: clock[0]), list[str]()

    def started(times: int) -> None:
        waiting.until(lambda: len(asked.read_text().splitlines()) == times, lambda: labels.extend(pressed.read(0.05)))

    for number, seconds in enumerate((0.0, 0.1, 5.0)):
        started(2 + number)
        clock[0] += seconds
        (tmp_path / "pressed").touch()
    started(5)
    pressed.close()
    assert labels == ["a", "a"], "the second bounced"
    assert asked.read_text().splitlines()[:2] == ["--version", wanted]


def test_without_gpiomon_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match=r"line 17: gpiomon cannot be started\nhint: apt install gpiod"):
        buttons.GpioPressed(GpioButton(kind="gpio", line=17, label="a"), tmp_path)


def test_a_button_that_fails_is_said_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buttons, "FIRST_S", 0.01)
    asked = installed.program(monkeypatch, tmp_path / "bin", "gpiomon", "echo 'no such line' >&2; exit 1")
    place, said = homes.home(tmp_path / "d", toml=GPIO), list[str]()
    with Buttons(place, settings_of(place), lambda label, source: None, said.append).on():
        waiting.until(lambda: asked.exists() and len(asked.read_text().splitlines()) > 5)
    assert len(said) == 1
    assert said[0].startswith("button 1: gpiomon: ended with exit code 1: no such line")


@pytest.mark.parametrize(("more", "wanted"), [("", ("frost", "s")), ('label = "a"\n', ("a", "s"))])
def test_a_message_is_a_press(tmp_path: Path, more: str, wanted: tuple[str, str]) -> None:
    toml = '[[source]]\nkind = "command"\ncommand = ["true"]\nname = "s"\n[[button]]\nkind = "mqtt"\nsource = "s"\n'
    with private_broker(tmp_path / "broker") as broker:
        place = homes.home(tmp_path / "d", toml=f'{toml}topic = "button"\nbroker = "{broker.url}"\n{more}')
        pressed, sender = list[tuple[str, str]](), MqttLink(broker.url, client_id="sender")
        sender.open()
        with Buttons(place, settings_of(place), lambda label, source: pressed.append((label, source)), print).on():
            waiting.until(lambda: sender.connected, lambda: sender.poll(0.05))

            def press() -> None:
                sender.publish("button", b" frost ")
                sender.poll(0.05)

            waiting.until(lambda: pressed, press)
        sender.close()
    assert pressed[0] == wanted
