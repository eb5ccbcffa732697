"""``metafleet programs``: lists, shows and clears the agent programs that flashing keeps in the user's cache folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cloud_server.devices.devices import JSON
from cloud_server.figures.formatting import bytes_text
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, FlashError

if TYPE_CHECKING:
    from firmware_profiles.package.program_cache import Cache

programs_app = typer.Typer(help="The agent programs that earlier flashes built.", invoke_without_command=True)


@programs_app.callback()
def programs(context: typer.Context, as_json: JSON = False) -> None:
    """List the agent programs that earlier flashes built: the newest few of each Python and architecture."""
    if context.invoked_subcommand is not None:
        return
    from firmware_profiles.package import program

    kept = _cache().entries()
    if as_json:
        return terminal.show([schema.plain(one) for one in kept])
    terminal.table(
        [(one.version, one.arch, one.python, bytes_text(one.size_bytes), bytes_text(one.installed_bytes),
          terminal.date(one.used_at), "yes" if one.in_use else "no") for one in kept],
        ("version", "architecture", "Python", "packed", "installed", "used", "in use"),
    )
    processes.say(f"{len(kept)} in {program.cache_folder()}; metafleet programs clear")


@programs_app.command()
def clear(as_json: JSON = False) -> None:
    """Delete the programs that no flash is using; the next flash builds its program again."""
    deleted = _cache().clear()
    if as_json:
        return terminal.show([schema.plain(one) for one in deleted])
    print(f"{len(deleted)} deleted, {bytes_text(sum(one.size_bytes for one in deleted))}")


@programs_app.command("sbom")
def show_bill(version: Annotated[str, typer.Argument(help="A version that 'metafleet programs' lists.")]) -> None:
    """Print a program's bill of materials: CycloneDX, JSON. Flashed devices have it as sbom.cdx.json."""
    from firmware_profiles.package import program

    kept = [one.version for one in _cache().entries()]
    if version not in kept:
        near = schema.suggest(version, kept)
        raise ConfigError(f"no program '{version[:80]}' is kept" + (f" (did you mean '{near}'?)" if near else ""),
                          hint="metafleet programs")
    path = next(path for path in sorted(program.cache_folder().glob("*.tar.gz")) if path.name.startswith(f"{version}-"))
    print(program.bill_of(path), end="")


def _cache() -> Cache:
    from firmware_profiles.package import program
    from firmware_profiles.package.program_cache import Cache

    folder = program.cache_folder()
    try:
        return Cache(folder)
    except OSError as error:
        raise FlashError(f"cannot be read: {error.strerror or error}", where=str(folder)) from error
