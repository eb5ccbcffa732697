"""The entry point of ``metafleet``, and the application that its commands are added to. Where only a device's packages
are installed, it says what is missing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from fleet_core import __version__
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError

if TYPE_CHECKING:
    import typer

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


def application() -> typer.Typer:
    """The program without commands, with ``--version`` and ``--verbose``."""
    import typer

    from cloud_server.commands.help_texts import BySection

    made = typer.Typer(
        help="Personalized federated learning on real edge devices.", no_args_is_help=True, rich_markup_mode=None,
        cls=BySection,
        pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]},
    )

    def told(wanted: bool) -> None:
        if wanted:
            print(__version__)
            raise typer.Exit()

    @made.callback()
    def _options(
        version: bool = typer.Option(False, "--version", help="Print the version and exit.", callback=told,
                                     is_eager=True),
        verbose: bool = typer.Option(False, "--verbose", help="Print the traceback of an error."),
    ) -> None:
        del version, verbose

    return made


if __name__ == "__main__":
    main()
