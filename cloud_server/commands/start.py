"""The entry point of ``metafleet``: says what is missing where only a device's packages are installed."""

from __future__ import annotations

import importlib.util

from fleet_core.base import processes
from fleet_core.base.errors import ConfigError

LIBRARIES = ("typer", "rich")


def main() -> None:
    processes.guarded(_start)


def _start() -> None:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{' and '.join(missing)} is not installed: this is the environment of a device",
                          hint='pip install "metafleet[server]"')
    from cloud_server.commands import cli

    cli.main()


if __name__ == "__main__":
    main()
