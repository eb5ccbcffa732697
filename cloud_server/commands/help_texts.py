"""What help shows besides options: the commands by task, and an example below each command."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.models import CommandInfo, TyperInfo

SECTIONS = {
    "Begin": ("demo", "init", "doctor"),
    "Run a fleet": ("server", "devices", "watch", "console", "report", "costs", "plan", "audit"),
    "Answers": ("predict", "export", "bundle"),
    "Boards": ("flash", "profiles", "programs", "updates"),
    "Choose a method and a model": ("advise", "simulate", "compare", "methods", "codecs", "datasets", "backbone"),
    "Other systems": ("metrics", "home-assistant"),
}

EXAMPLES = {
    "demo": "metafleet demo --devices 4 --rounds 10 --codec int8",
    "init": "metafleet init greenhouse --data samples.npz",
    "methods": "metafleet methods pfldyn-proto",
    "codecs": "metafleet codecs",
    "predict": "metafleet predict greenhouse pi-07 sample.npy",
    "report": "metafleet report greenhouse",
    "watch": "metafleet watch greenhouse",
    "audit": "metafleet audit greenhouse --last 20",
    "console": "metafleet console greenhouse --open",
    "metrics": "metafleet metrics greenhouse --port 9464",
    "home-assistant": "metafleet home-assistant greenhouse --broker mqtt://homeassistant.local:1883 --plain",
    "doctor": "metafleet doctor greenhouse",
    "export": "metafleet export greenhouse --to greenhouse.bundle",
    "costs": "metafleet costs greenhouse --per-month 24",
    "plan": "metafleet plan greenhouse --board raspberry-pi-4b",
    "flash": "metafleet flash pi-07.toml --to ssh://pi@pi-07.local",
    "simulate": "metafleet simulate experiment.toml --out runs --set budget.rounds=50",
    "compare": "metafleet compare runs --out comparison",
    "advise": "metafleet advise samples.npz --budget-minutes 10",
    "server start": "metafleet server start greenhouse",
    "server install": "metafleet server install greenhouse --user",
    "server config": "metafleet server config greenhouse --host broker.example.org",
    "server status": "metafleet server status greenhouse --json",
    "server alerts": "metafleet server alerts greenhouse",
    "server rounds": "metafleet server rounds greenhouse --explain",
    "server backup": "metafleet server backup greenhouse --to backups/monday",
    "server encrypt-keys": "metafleet server encrypt-keys greenhouse",
    "server roll-key": "metafleet server roll-key greenhouse --overlap 30d",
    "server roll-authority": "metafleet server roll-authority greenhouse",
    "server pause": "metafleet server pause greenhouse",
    "server roll-back": "metafleet server roll-back greenhouse --to 30",
    "server resume": "metafleet server resume greenhouse",
    "devices list": "metafleet devices list greenhouse",
    "devices show": "metafleet devices show greenhouse pi-07",
    "devices enroll": "metafleet devices enroll greenhouse pi-07 --to pi-07",
    "devices quarantine": "metafleet devices quarantine greenhouse pi-07",
    "devices release": "metafleet devices release greenhouse pi-07",
    "devices revoke": "metafleet devices revoke greenhouse pi-07",
    "datasets fetch": "metafleet datasets fetch har",
    "profiles show": "metafleet profiles show raspberry-pi-4b",
    "programs sbom": "metafleet programs sbom 0.1.0-3fa9c1d2e0",
    "programs clear": "metafleet programs clear",
    "updates start": "metafleet updates start greenhouse pi-07.toml --waves 1,5,20",
    "updates status": "metafleet updates status greenhouse",
    "updates resume": "metafleet updates resume greenhouse",
    "updates abort": "metafleet updates abort greenhouse",
    "updates save": "metafleet updates save greenhouse pi-07.toml artifact",
    "backbone make": "metafleet backbone make model.onnx --to backbone.safetensors --output pooled",
    "backbone show": "metafleet backbone show model.onnx",
    "bundle verify": "metafleet bundle verify greenhouse.bundle",
}


def add_to(app: typer.Typer, within: str = "") -> None:
    """Adds an example below the help of every command of ``app`` and of its groups, and lists commands with whole
    help."""
    for command in app.registered_commands:
        example = EXAMPLES.get(f"{within}{_name(command)}")
        command.epilog = f"Example: {example}" if example else None
    for group in app.registered_groups:
        if group.typer_instance is not None:
            group.cls = WholeHelp
            add_to(group.typer_instance, f"{within}{group.name} ")


def part_for(app: typer.Typer, arguments: Sequence[str]) -> typer.Typer:
    """``app`` with the command of ``arguments`` in full, and only name and help of the others. Otherwise Typer converts
    the parameters of all commands at each start, which takes longer than most commands."""
    if any(name.endswith("_COMPLETE") for name in os.environ):
        return app
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    part = copy.copy(app)
    part.registered_commands = [
        command if _name(command) == wanted else _without_parameters(command) for command in app.registered_commands
    ]
    part.registered_groups = [
        group if group.name == wanted else _without_commands(group) for group in app.registered_groups
    ]
    return part


def _name(command: CommandInfo) -> str:
    return command.name or (command.callback.__name__.replace("_", "-") if command.callback else "")


def _without_parameters(command: CommandInfo) -> CommandInfo:
    bare = copy.copy(command)
    bare.name, bare.help, bare.callback = _name(command), command.help or inspect.getdoc(command.callback), lambda: None
    return bare


def _without_commands(group: TyperInfo) -> TyperInfo:
    bare = copy.copy(group)
    bare.typer_instance = copy.copy(group.typer_instance)
    if bare.typer_instance is not None:
        bare.typer_instance.registered_commands, bare.typer_instance.registered_groups = [], []
    return bare


class WholeHelp(TyperGroup):
    """Lists each command with the whole first paragraph of its help, under the titles of ``sections``."""

    def sections(self) -> Mapping[str, Iterable[str]]:
        return {"Commands": self.commands}

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in self.sections().items():
            with formatter.section(title):
                formatter.write_dl([(name, (self.commands[name].help or "").partition("\n\n")[0]) for name in names])


class BySection(WholeHelp):
    """The program itself: its commands by task."""

    def sections(self) -> Mapping[str, Iterable[str]]:
        return SECTIONS
