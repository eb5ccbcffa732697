"""``edge-agent``: the device's command line. Commands import what they need when they are called."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from edge_agent.commands import board_commands
from edge_agent.commands.arguments import Parser, home, json, within
from fleet_core import __version__
from fleet_core.base import processes, terminal
from fleet_core.board.device_settings import WAYS, settings_of

INPUT = ".npy, .npz, .csv, .ndjson, image or .wav file, or a folder of images or sounds; labels are ignored"


def parser() -> Parser:
    """All commands with their options."""
    root = Parser("edge-agent", "The agent on a device: trains, personalizes and answers; the data stays here.")
    root.add_argument("--version", action="version", version=__version__, help="print the version and exit")
    root.add_argument("--verbose", action="store_true", help="print the traceback of an error")
    _connected(root)
    _local(root)
    samples = root.command("samples", "The device's own labelled samples.")
    _samples(samples)
    board_commands.declare(root)
    return root


def _connected(root: Parser) -> None:
    """The commands that need a broker, and the server."""
    one = root.command("run", "Take part in rounds and answer, until stopped. Enrols first if there is a token.", run)
    home(one)
    one.add_argument("--broker", metavar="URL", default=os.environ.get("METAFLEET_BROKER") or None,
                     help="mqtt(s)://host:port or ws(s)://host:port/path; also METAFLEET_BROKER")
    one.add_argument("--connect-s", metavar="S", type=float, default=60.0,
                     help="exit if no broker answers within this time at the start; default 60")
    one.add_argument("--token", metavar="FILE", type=Path, default=os.environ.get("METAFLEET_TOKEN") or None,
                     help="enrolment token, if the file exists; else HOME/enrol.token; also METAFLEET_TOKEN")
    one.add_argument("--plain", action="store_true", default=_is_on("METAFLEET_PLAIN"),
                     help="allow plain MQTT to leave this machine; also METAFLEET_PLAIN")
    one = root.command("enroll", "Become a device of a fleet: makes a key, a certificate and device.toml, and erases "
                       "the token.", enroll)
    one.add_argument("token", metavar="TOKENFILE", type=Path, help="what 'metafleet devices enroll' wrote")
    home(one)
    one.add_argument("--connect-s", metavar="S", type=float, default=60.0,
                     help="how long to wait for broker and aggregator; default 60")
    one = root.command("serve", "Answer over HTTP (Open Inference Protocol v2) with this device's model, until "
                       "stopped.", serve)
    home(one)
    one.add_argument("--host", help="address to listen on; default: device.toml's, or 127.0.0.1")
    one.add_argument("--port", type=within(int, 0, 65535),
                     help="default: device.toml's, or 8080; 0 for any free port")
    one.add_argument("--open", action="store_true",
                     help="also beyond this machine, answer everyone over plain HTTP, without a token")


def _local(root: Parser) -> None:
    """The commands that need no connection."""
    one = root.command("status", "Show this device's weights, personalization and training state.", status)
    home(one)
    json(one)
    one = root.command("install", "Check a bundle and answer with it from now on; needs no broker, aggregator or "
                       "torch.", install)
    one.add_argument("bundle", metavar="BUNDLE", type=Path, help="a folder or one file of 'metafleet export'")
    home(one)
    one.add_argument("--name", help="name of a new device; default: the folder's")
    one.add_argument("--unsigned", action="store_true", help="take a bundle that no fleet's key has signed")
    json(one)
    one = root.command("personalize", "Personalize the served model on this device's samples; needs no aggregator or "
                       "torch.", personalize)
    home(one)
    one.add_argument("--by", metavar="WAY", help=f"one of {', '.join(WAYS)}; it also applies to later rounds")
    one.add_argument("--steps", type=int, help="number of gradient steps; default: the method's")
    one.add_argument("--rate", type=float, help="rate of gradient steps; default: the method's")
    one.add_argument("--int8", action="store_true", default=None,
                     help="embed with the quantized encoder, if a bundle brought one")
    one.add_argument("--fp32", dest="int8", action="store_false", help="embed with the encoder as it was trained")
    json(one)
    one = root.command("predict", "Answer raw samples with this device's personalized model.", predict)
    one.add_argument("inputs", metavar="INPUT", type=Path, help=INPUT)
    home(one)
    json(one)
    one = root.command("review", "Show stored samples without a label, least certain first, and take their labels.",
                       review)
    home(one)
    one.add_argument("--limit", metavar="N", type=within(int, 1), default=20, help="number of samples at most; "
                     "default: 20")
    one.add_argument("--id", metavar="ID", help="label this sample, and ask for nothing")
    one.add_argument("--label", help="its class")
    one.add_argument("--target", metavar="NUMBER,…", help="of a fleet that predicts numbers: the sample's, in place of "
                     "--label")
    one.add_argument("--new-class", action="store_true",
                     help="the class may be this device's own; the fleet does not have it")
    json(one)
    one = root.command("sources", "Show the sensors whose readings become samples, and what they gave.", sources)
    home(one)
    one.add_argument("--try", dest="seconds", metavar="SECONDS", type=within(float, 0.1, 3600),
                     help="read each sensor for this time, store nothing, and show the readings; exit code 1 if they "
                          "cannot be used")
    json(one)
    one = root.command("verify", "Check that the fleet's key signed the program installed here, and that none of its "
                       "files has changed.", verify)
    one.add_argument("path", metavar="PATH", type=Path, nargs="?", default=Path("/opt/metafleet/current"),
                     help="a program's folder, or a signed file, whose text is printed; default: the one that runs")
    one.add_argument("--key", metavar="FILE", type=Path, default=Path("/etc/metafleet/fleet.pub"),
                     help="the fleet's public key; default: the one that the first flash put here")
    json(one)


def _samples(group: Parser) -> None:
    one = group.command("add", "Add labelled samples to the device's own; the next personalization uses them.", add)
    one.add_argument("file", metavar="FILE", type=Path, help=INPUT)
    one.add_argument("--label", help="the class of the samples")
    one.add_argument("--target", metavar="NUMBER,…", help="of a fleet that predicts numbers: those of all samples; "
                     "default: the file has them for each")
    one.add_argument("--labels", metavar="NAME,…", help="of a fleet with several labels: those of all samples, or '' "
                     "for none; default: the file has them for each")
    one.add_argument("--new-class", action="store_true",
                     help="the class is this device's own; the fleet does not have it")
    home(one)
    one = group.command("list", "Show how many samples of each class this device has.", list_samples)
    home(one)
    json(one)
    one = group.command("drop", "Remove the labelled samples that were added last; the next 'edge-agent personalize' "
                        "does not use them.", drop)
    one.add_argument("--last", metavar="N", type=within(int, 1), required=True,
                     help="how many of the samples that were added last")
    home(one)


def _is_on(variable: str) -> bool:
    """Whether an environment variable says yes."""
    return os.environ.get(variable, "").lower() in ("1", "true", "t", "yes", "y", "on")


# What the commands do -------------------------------------------------------------------------------------------------


def run(given: Namespace) -> None:
    from fleet_core.protocol import enrolment_token

    unused = enrolment_token.token_in(given.home, given.token)
    if unused is not None:
        from edge_agent.connection import enrolment  # slow to import, and seldom needed
        from edge_agent.device import fleet_keys

        fleet_keys.forget_issuer(given.home)
        enrolment.enroll(given.home, unused, limit_s=given.connect_s, log=processes.say)
    options = [*(["--plain"] if given.plain else []), *([] if given.broker is None else [given.broker])]
    processes.exec_module("edge_agent.commands.run", "--home", str(given.home), str(given.connect_s), *options)


def enroll(given: Namespace) -> None:
    from edge_agent.connection import enrolment
    from edge_agent.device import fleet_keys

    fleet_keys.forget_issuer(given.home)
    enrolment.enroll(given.home, given.token, limit_s=given.connect_s, log=processes.say)


def serve(given: Namespace) -> None:
    defaults = settings_of(given.home).serve
    host = defaults.host if given.host is None else given.host
    port = (defaults.port or 8080) if given.port is None else given.port
    more = ["--open"] if given.open else []
    processes.exec_module("edge_agent.http.serve", "--home", str(given.home), host, str(port), *more)


def status(given: Namespace) -> None:
    from edge_agent.commands import device_commands

    device_commands.status(given.home, given.as_json)


def install(given: Namespace) -> None:
    from edge_agent.commands import install as installing

    installing.command(given.bundle, given.home, given.name, given.as_json, unsigned=given.unsigned)


def personalize(given: Namespace) -> None:
    from edge_agent.commands import device_commands

    device_commands.personalize(given.home, given.as_json, given.by, given.steps, given.rate, given.int8)


def predict(given: Namespace) -> None:
    from edge_agent.commands import device_commands

    device_commands.predict(given.inputs, given.home, given.as_json)


def verify(given: Namespace) -> None:
    from edge_agent.commands import verify as verifying

    verifying.command(given.path, given.key, given.as_json)


def review(given: Namespace) -> None:
    from edge_agent.commands import review as reviewing

    reviewing.review(given.home, given.limit, given.id, given.label, target=given.target, new_class=given.new_class,
                     as_json=given.as_json)


def sources(given: Namespace) -> None:
    from edge_agent.sources import try_sources

    try_sources.command(given.home, given.seconds, given.as_json)


def add(given: Namespace) -> None:
    from edge_agent.commands import device_commands

    device_commands.add(given.file, given.label, given.home, new_class=given.new_class, target=given.target,
                        labels=given.labels)


def list_samples(given: Namespace) -> None:
    from edge_agent.commands import device_commands

    device_commands.list_samples(given.home, given.as_json)


def drop(given: Namespace) -> None:
    from edge_agent.commands import device_commands

    device_commands.drop(given.home, given.last)


def main() -> None:
    terminal.main(lambda args: parser().run(args))


if __name__ == "__main__":
    main()
