"""``edge-agent``: the device's command line. What a command needs is imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_agent.commands.board_commands import doctor, energy_app
from fleet_core.base import processes, terminal
from fleet_core.board.device_settings import WAYS, settings_of

app = terminal.application("The agent on a device: trains, personalizes and answers; the data stays here.")
samples_app = typer.Typer(help="The device's own labelled samples.", no_args_is_help=True)
app.add_typer(samples_app, name="samples")
app.add_typer(energy_app, name="energy")
app.command()(doctor)

HOME = Annotated[
    Path, typer.Option("--home", envvar="METAFLEET_HOME", help="Folder with device.toml, samples and state.")
]
JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
HERE = Path(".")
ASKED = ".npy array, .npz, .csv, .ndjson, image or folder of images; labels are passed over."


@app.command()
def run(
    home: HOME = HERE,
    broker: Annotated[str | None, typer.Option(envvar="METAFLEET_BROKER", help="mqtt(s)://host:port")] = None,
    connect_s: Annotated[float, typer.Option(help="Leave when no broker answered for so long at the start.")] = 60.0,
    token: Annotated[Path | None, typer.Option(envvar="METAFLEET_TOKEN", metavar="FILE",
                                               help="A token that may wait there; HOME/enrol.token in any case.")]
    = None,
    plain: Annotated[bool, typer.Option("--plain", envvar="METAFLEET_PLAIN",
                                        help="Plain MQTT may leave this machine.")] = False,
) -> None:
    """Take part in rounds and answer, until stopped; a token that waits is used first."""
    from edge_agent.connection import broker_login, enrolment

    waiting = enrolment.token_in(home, token)
    if waiting is not None:
        enrolment.enroll(home, waiting, limit_s=connect_s, log=processes.say)
    broker_login.tls_files(home, settings_of(home, broker), plain=plain)  # what is wrong with them is said here
    options = [*(["--plain"] if plain else []), *([] if broker is None else [broker])]
    processes.exec_module("edge_agent.commands.run", "--home", str(home), str(connect_s), *options)


@app.command()
def enroll(
    token: Annotated[Path, typer.Argument(metavar="TOKENFILE", help="What 'metafleet devices enroll' wrote.")],
    home: HOME = HERE,
    connect_s: Annotated[float, typer.Option(help="How long to wait for broker and aggregator.")] = 60.0,
) -> None:
    """Become a device of a fleet: a key of its own, a certificate, device.toml; the token is erased."""
    from edge_agent.connection import enrolment

    enrolment.enroll(home, token, limit_s=connect_s, log=processes.say)


@app.command()
def serve(
    home: HOME = HERE,
    host: Annotated[str | None, typer.Option(help="Address to listen on; device.toml's, or 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="device.toml's, or 8080; 0 for any that is free.")
    ] = None,
) -> None:
    """Answer over HTTP (Open Inference Protocol v2) from what is on this device, until stopped."""
    place = settings_of(home).serve
    where = place.host if host is None else host
    processes.exec_module(
        "edge_agent.http.serve", "--home", str(home), where, str((place.port or 8080) if port is None else port)
    )


@app.command()
def status(home: HOME = HERE, as_json: JSON = False) -> None:
    """What this device holds: weights, personalization, training state."""
    from edge_agent.commands import device_commands

    device_commands.status(home, as_json)


@app.command()
def install(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder or one file of 'metafleet export'.")],
    home: HOME = HERE,
    name: Annotated[str | None, typer.Option(help="Of a new device; default: the folder's.")] = None,
    as_json: JSON = False,
) -> None:
    """Check a bundle and answer with it from now on; no broker, no aggregator and no torch needed."""
    from edge_agent.commands import install as installing

    installing.command(bundle, home, name, as_json)


@app.command()
def personalize(
    home: HOME = HERE,
    by: Annotated[
        str | None, typer.Option("--by", help=f"One of {', '.join(WAYS)}; it holds for the rounds to come.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Gradient steps, in place of the method's.")] = None,
    rate: Annotated[float | None, typer.Option(help="Of gradient steps, in place of the method's.")] = None,
    int8: Annotated[
        bool | None, typer.Option("--int8/--fp32", help="Embed by the quantized encoder, where a bundle brought one.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Personalize the served model on this device's samples; no aggregator and no torch needed."""
    from edge_agent.commands import device_commands

    device_commands.personalize(home, as_json, by, steps, rate, int8)


@app.command()
def predict(
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help=ASKED)],
    home: HOME = HERE,
    as_json: JSON = False,
) -> None:
    """Answers for raw samples, from the served model as this device personalized it."""
    from edge_agent.commands import device_commands

    device_commands.predict(inputs, home, as_json)


@samples_app.command("add")
def add(
    file: Annotated[Path, typer.Argument(help=ASKED)],
    label: Annotated[str, typer.Option("--label", help="Their class.")],
    new_class: Annotated[
        bool, typer.Option("--new-class", help="The class is this device's own: the fleet does not have it.")
    ] = False,
    home: HOME = HERE,
) -> None:
    """Add labelled samples to the device's own; the next personalization counts them."""
    from edge_agent.commands import device_commands

    device_commands.add(file, label, home, new_class=new_class)


@samples_app.command("list")
def list_samples(home: HOME = HERE, as_json: JSON = False) -> None:
    """How many samples of each class this device has."""
    from edge_agent.commands import device_commands

    device_commands.list_samples(home, as_json)


@samples_app.command("drop")
def drop(
    last: Annotated[int, typer.Option("--last", min=1, help="How many of those that were added last.")],
    home: HOME = HERE,
) -> None:
    """Forget the labelled samples that were added last; 'edge-agent personalize' then does without them."""
    from edge_agent.commands import device_commands

    device_commands.drop(home, last)


def main() -> None:
    terminal.main(app)


if __name__ == "__main__":
    main()
