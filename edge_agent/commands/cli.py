"""``edge-agent``: the device's command line. Commands import what they need when they are called."""

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
INPUT = ".npy array, .npz, .csv, .ndjson, image or folder of images; labels in it are ignored."


@app.command()
def run(
    home: HOME = HERE,
    broker: Annotated[str | None, typer.Option(envvar="METAFLEET_BROKER", help="mqtt(s)://host:port")] = None,
    connect_s: Annotated[float, typer.Option(help="Exit if no broker answers within this time at the start.")] = 60.0,
    token: Annotated[Path | None, typer.Option(envvar="METAFLEET_TOKEN", metavar="FILE",
                                               help="Enrolment token, if the file exists; else HOME/enrol.token.")]
    = None,
    plain: Annotated[bool, typer.Option("--plain", envvar="METAFLEET_PLAIN",
                                        help="Allow plain MQTT to leave this machine.")] = False,
) -> None:
    """Take part in rounds and answer, until stopped. Enrols first if there is a token."""
    from edge_agent.connection import broker_login, enrolment

    unused = enrolment.token_in(home, token)
    if unused is not None:
        enrolment.enroll(home, unused, limit_s=connect_s, log=processes.say)
    broker_login.tls_files(home, settings_of(home, broker), plain=plain)  # raises before the process is replaced
    options = [*(["--plain"] if plain else []), *([] if broker is None else [broker])]
    processes.exec_module("edge_agent.commands.run", "--home", str(home), str(connect_s), *options)


@app.command()
def enroll(
    token: Annotated[Path, typer.Argument(metavar="TOKENFILE", help="What 'metafleet devices enroll' wrote.")],
    home: HOME = HERE,
    connect_s: Annotated[float, typer.Option(help="How long to wait for broker and aggregator.")] = 60.0,
) -> None:
    """Become a device of a fleet: makes a key, a certificate and device.toml, and erases the token."""
    from edge_agent.connection import enrolment

    enrolment.enroll(home, token, limit_s=connect_s, log=processes.say)


@app.command()
def serve(
    home: HOME = HERE,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: device.toml's, or 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Default: device.toml's, or 8080; 0 for any free port.")
    ] = None,
) -> None:
    """Answer over HTTP (Open Inference Protocol v2) with this device's model, until stopped."""
    defaults = settings_of(home).serve
    address = defaults.host if host is None else host
    number = (defaults.port or 8080) if port is None else port
    processes.exec_module("edge_agent.http.serve", "--home", str(home), address, str(number))


@app.command()
def status(home: HOME = HERE, as_json: JSON = False) -> None:
    """Show this device's weights, personalization and training state."""
    from edge_agent.commands import device_commands

    device_commands.status(home, as_json)


@app.command()
def install(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder or one file of 'metafleet export'.")],
    home: HOME = HERE,
    name: Annotated[str | None, typer.Option(help="Name of a new device; default: the folder's.")] = None,
    as_json: JSON = False,
) -> None:
    """Check a bundle and answer with it from now on; needs no broker, aggregator or torch."""
    from edge_agent.commands import install as installing

    installing.command(bundle, home, name, as_json)


@app.command()
def personalize(
    home: HOME = HERE,
    by: Annotated[
        str | None, typer.Option("--by", help=f"One of {', '.join(WAYS)}; it also applies to later rounds.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of gradient steps; default: the method's.")] = None,
    rate: Annotated[float | None, typer.Option(help="Rate of gradient steps; default: the method's.")] = None,
    int8: Annotated[
        bool | None, typer.Option("--int8/--fp32", help="Embed with the quantized encoder, if a bundle brought one.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Personalize the served model on this device's samples; needs no aggregator or torch."""
    from edge_agent.commands import device_commands

    device_commands.personalize(home, as_json, by, steps, rate, int8)


@app.command()
def predict(
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help=INPUT)],
    home: HOME = HERE,
    as_json: JSON = False,
) -> None:
    """Answer raw samples with this device's personalized model."""
    from edge_agent.commands import device_commands

    device_commands.predict(inputs, home, as_json)


@samples_app.command("add")
def add(
    file: Annotated[Path, typer.Argument(help=INPUT)],
    label: Annotated[str, typer.Option("--label", help="The class of the samples.")],
    new_class: Annotated[
        bool, typer.Option("--new-class", help="The class is this device's own; the fleet does not have it.")
    ] = False,
    home: HOME = HERE,
) -> None:
    """Add labelled samples to the device's own; the next personalization uses them."""
    from edge_agent.commands import device_commands

    device_commands.add(file, label, home, new_class=new_class)


@samples_app.command("list")
def list_samples(home: HOME = HERE, as_json: JSON = False) -> None:
    """Show how many samples of each class this device has."""
    from edge_agent.commands import device_commands

    device_commands.list_samples(home, as_json)


@samples_app.command("drop")
def drop(
    last: Annotated[int, typer.Option("--last", min=1, help="How many of the samples that were added last.")],
    home: HOME = HERE,
) -> None:
    """Remove the labelled samples that were added last; the next 'edge-agent personalize' does not use them."""
    from edge_agent.commands import device_commands

    device_commands.drop(home, last)


def main() -> None:
    terminal.main(app)


if __name__ == "__main__":
    main()
