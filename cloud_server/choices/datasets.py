"""``metafleet datasets``: lists the named data sets and fetches them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.figures.formatting import ABSENT, bytes_text
from fleet_core.base import processes, schema, terminal

if TYPE_CHECKING:
    from rich.progress import TaskID

    from fleet_core.data.sets.registry import Entry

datasets_app = typer.Typer(help="The named data sets.", invoke_without_command=True)

JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@datasets_app.callback()
def datasets(context: typer.Context, as_json: JSON = False) -> None:
    """List the named data sets: content, source, licence, and whether there is a local copy."""
    if context.invoked_subcommand is not None:
        return
    from fleet_core.data.sets.registry import entries

    listed = [facts(one) for one in entries().values()]
    if as_json:
        return terminal.show(listed)
    terminal.table([_row(one) for one in listed],
                   ("name", "what", "samples", "clients", "sample", "here", "size", "licence"))
    kept = [one["name"] for one in listed if not one["redistribute"]]
    processes.say(f"not to be passed on without leave: {', '.join(kept)} (--json says why)")
    processes.say("next: metafleet datasets fetch NAME")


@datasets_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See 'metafleet datasets'.")],
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="PATH",
                     help="A local copy: the original file, a folder of the originals, or metafleet's .npz."),
    ] = None,
) -> None:
    """Download a named data set, or import a local copy; the files are checked by sha256."""
    from fleet_core.data.sets import fetch as fetching
    from fleet_core.data.sets import set_cache
    from fleet_core.data.sets.registry import entry

    wanted = entry(name)
    if source is None and set_cache.is_here(wanted):
        return print(f"{name} is here already, {_place(wanted)}")
    if source is not None:
        note = fetching.take(wanted, source)
    else:
        with DownloadProgress() as progress:
            note = fetching.fetch(wanted, progress)
    parts = f"{note.train} samples" + (f" and {note.test} for testing" if note.test else "")
    print(f"{name}: {parts}" + (f", {note.clients} clients" if note.clients else "") + f", in {_place(wanted)}")
    for line in (note.remark, f"licence: {wanted.licence}", wanted.terms):
        if line:
            processes.say(line)


def facts(one: Entry) -> dict[str, Any]:
    """A set as plain JSON. The counts of a fetched set are those of the local copy."""
    from fleet_core.data.sets import set_cache

    note = set_cache.note_of(one)
    counts = {what: getattr(one if note is None else note, what) for what in ("train", "test", "clients")}
    whole = None if None in (counts["train"], counts["test"]) else counts["train"] + counts["test"]
    return {
        "name": one.name, "title": one.title, "task": one.task, "source": one.source, **counts, "samples": whole,
        "client": one.client, "shape": list(one.shape), "dtype": one.dtype, "classes": one.classes,
        "input": {**schema.plain(one.input_spec), "figures": one.figures}, "licence": one.licence,
        "redistribute": one.redistribute, "terms": one.terms, "here": set_cache.is_here(one),
        "place": _place(one), "disk_bytes": set_cache.disk_bytes(one), "download_bytes": one.download_bytes or None,
        "checked": None if note is None else note.checked, "remark": "" if note is None else note.remark,
        "files": [{"name": file.name, "urls": list(file.urls), "bytes": file.bytes, "sha256": file.sha256}
                  for file in one.files],
    }


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    size = one["disk_bytes"] or one["download_bytes"]
    return (
        one["name"], one["title"], ABSENT if one["samples"] is None else str(one["samples"]),
        f"{one['clients']} {one['client']}" if one["clients"] else ABSENT,
        f"{one['dtype']} {'x'.join(map(str, one['shape']))}", _here(one),
        ABSENT if size is None else bytes_text(size), one["licence"],
    )


def _here(one: dict[str, Any]) -> str:
    """yes, no, or ``copy`` for a local copy that was not checked by sha256."""
    return "no" if not one["here"] else "copy" if one["checked"] is False else "yes"


def _place(one: Entry) -> str:
    from fleet_core.data.sets import set_cache

    return "the package" if one.reader == set_cache.IN_PACKAGE else str(set_cache.home() / one.name)


class DownloadProgress:
    """Download progress on stderr: a bar for each file on a terminal, otherwise one line for each file."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
        self._bars = Progress(*columns, console=console) if console.is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._announced: set[str] = set()

    def __enter__(self) -> DownloadProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, file: str, done: int, total: int) -> None:
        if self._bars is None:
            if file not in self._announced:
                self._announced.add(file)
                processes.say(f"fetching {file}, {bytes_text(total)} …")
            return
        if file not in self._tasks:
            self._tasks[file] = self._bars.add_task(file, total=total)
        self._bars.update(self._tasks[file], completed=done)
