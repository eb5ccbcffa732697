"""``metafleet``: the operator's command line. Heavy modules are imported inside the commands."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.choices.datasets import datasets_app
from cloud_server.choices.profiles import profiles_app
from cloud_server.commands import backbones, bundle, costs, help_texts, keys, lab, monitoring, plan
from cloud_server.commands.costs import BATTERY, PER_MONTH, RUN, TARIFF
from cloud_server.commands.lab import (
    FIT,
    LABELS,
    LOSS,
    NORMAL,
    OUTPUTS,
    PER_DAY,
    RATE,
    SECONDS,
    SIZE,
    STRIDE,
    TASK,
    WINDOW,
)
from cloud_server.commands.server import BROKER, server_app
from cloud_server.commands.start import application
from cloud_server.devices import flash
from cloud_server.devices.devices import BROKER_OPTION, FLEET, JSON, PLAIN, broker_url, devices_app, enrolled_device
from cloud_server.devices.programs import programs_app
from cloud_server.devices.updates import updates_app
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, installed
from fleet_core.base.processes import typed
from fleet_core.protocol import topics

if TYPE_CHECKING:
    from cloud_server.choices.first_settings import SampleOptions
    from cloud_server.laboratory.advise.recordings import Model
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.records.fleet_settings import FleetConfig, ModelSection
    from fleet_core.base.trees import Params
    from fleet_core.model.layout import Layout

app = application()
keys.add_to(server_app)
app.add_typer(server_app, name="server")
app.add_typer(devices_app, name="devices")
app.add_typer(datasets_app, name="datasets")
app.add_typer(profiles_app, name="profiles")
app.add_typer(programs_app, name="programs")
app.add_typer(updates_app, name="updates")
app.add_typer(bundle.bundle_app, name="bundle")
app.add_typer(backbones.backbone_app, name="backbone")

METHOD = Annotated[str | None, typer.Option(help="See 'metafleet methods'; default pfldyn-proto; for numbers, labels "
                                            "and anomalies fedavg-meta.")]
CODEC = Annotated[str | None, typer.Option("--codec", metavar="CODEC", help="See 'metafleet codecs'; up:NAME,down:NAME "
                                           "for different ones; auto: chosen for each round; default int8.")]

DEFAULT_ROUNDS = 30


@app.command()
def demo(
    devices: Annotated[int, typer.Option(min=1, help="Devices that train.")] = 8,
    new_devices: Annotated[int, typer.Option(min=0, help="Devices that join at the end, with little data.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of training.")] = DEFAULT_ROUNDS,
    method: METHOD = None,
    codec: CODEC = None,
    data: Annotated[str, typer.Option(help="heartbeat, or a file of samples with a 'client' column.")] = "heartbeat",
    task: TASK = "classes",
    outputs: OUTPUTS = None,
    loss: LOSS = None,
    labels: LABELS = None,
    normal: NORMAL = None,
    per_day: PER_DAY = None,
    window: WINDOW = None,
    stride: STRIDE = None,
    size: SIZE = None,
    fit: FIT = None,
    rate: RATE = None,
    seconds: SECONDS = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    broker: BROKER = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; an unfinished run there is continued.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline/--no-baseline", help="Also run FedAvg, to compare.")] = True,
    support_s: Annotated[float | None, typer.Option(
        "--support-seconds", min=1e-3, help="Seconds of samples that a new device learns from; default: 300 for heart "
        "beats, 60 % of the device's time for a file.")] = None,
    meter_watts: Annotated[tuple[float, float] | None, typer.Option(metavar="IDLE BUSY")] = None,
    engine: Annotated[str, typer.Option(metavar="torch|onnx", help="What trains on the devices; onnx: without torch.")]
    = "torch",
    open_console: Annotated[bool, typer.Option("--open", help="Watch it in a browser: 'metafleet console'.")] = False,
    as_json: JSON = False,
) -> None:
    """Run a broker, an aggregator and real agents on this machine, from training to personalized answers."""
    from cloud_server.choices.first_settings import SampleOptions
    from cloud_server.running import demo as demonstration
    from cloud_server.running.demo_setup import Options

    reading = SampleOptions(task, outputs, loss, labels, normal, per_day, window, stride, size, fit, rate, seconds)
    options = Options(
        **vars(reading), devices=devices, new_devices=new_devices, rounds=rounds,
        method=method or reading.default_method, data=data, seed=seed, baseline=baseline, support_s=support_s,
        meter_watts=meter_watts, codec=codec, engine=engine,
    )
    shown = demonstration.run(options, out, broker, show=processes.say if as_json else print, console=open_console)
    if as_json:
        terminal.show(shown)


@app.command()
def init(
    fleet: FLEET,
    data: Annotated[str | None, typer.Option(help="heartbeat, or samples that define shape and classes.")] = None,
    task: TASK = "classes",
    outputs: OUTPUTS = None,
    loss: LOSS = None,
    labels: LABELS = None,
    normal: NORMAL = None,
    per_day: PER_DAY = None,
    window: WINDOW = None,
    stride: STRIDE = None,
    size: SIZE = None,
    fit: FIT = None,
    rate: RATE = None,
    seconds: SECONDS = None,
    name: Annotated[str | None, typer.Option(help="The fleet's name in topics; default: the folder's name.")] = None,
    method: METHOD = None,
    codec: CODEC = None,
    only: Annotated[list[str] | None, typer.Option("--train", metavar="PATTERN", help="Arrays that devices train and "
                                                   "send, such as 'head.*'; may be repeated; default: all.")] = None,
    freeze: Annotated[str | None, typer.Option(metavar="never|auto", help="auto: most rounds leave out arrays that "
                                               "hardly move; default: never.")] = None,
    model: Annotated[str | None, typer.Option(help="A named model or package.module:build; default: depends on the "
                                                   "data.")]
    = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Default 30.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Default 0.")] = None,
    trial: Annotated[
        bool | None,
        typer.Option(help="Try models on the samples for about a minute and use the best; default: for a file, if no "
   "--model is given."),
    ] = None,
    graph: Annotated[bool, typer.Option("--train-graph/--no-train-graph", help="Make the graph with which devices "
                                        "train without torch.")] = True,
    backbone: backbones.BACKBONE = None,
    backbone_output: backbones.OUTPUT = None,
    backbone_build: backbones.BUILD = None,
    backbone_int8: backbones.INT8 = False,
    encrypt_keys: Annotated[bool, typer.Option("--encrypt-keys", help="Encrypt the fleet's keys with a "
                                               "passphrase.")] = False,
) -> None:
    """Make a fleet: fleet.toml, keys, graph, first weights, ledger. Completes a folder that has a fleet.toml."""
    from cloud_server.choices import first_settings
    from cloud_server.identity import audit_log
    from cloud_server.identity.create_fleet import create_fleet

    given = {"--name": name, "--method": method, "--model": model, "--rounds": rounds, "--seed": seed,
             "--window": window, "--stride": stride, "--size": size, "--fit": fit, "--rate": rate,
             "--seconds": seconds, "--outputs": outputs, "--loss": loss, "--labels": labels, "--codec": codec,
             "--normal": normal, "--false-alarms": per_day,
             "--train": only or None, "--freeze": freeze, "--backbone": backbone, "--backbone-output": backbone_output,
             "--backbone-build": backbone_build}
    unused = [option for option, value in given.items() if value is not None]
    if data is None and unused:
        raise ConfigError(f"{', '.join(unused)} without --data", hint="give --data, or write it in fleet.toml")
    text = None
    if data is not None:
        reading = first_settings.SampleOptions(task, outputs, loss, labels, normal, per_day, window, stride, size, fit,
                                               rate, seconds)
        text = _first_fleet_toml(fleet, data, reading, name, method or reading.default_method,
                                 model, rounds or DEFAULT_ROUNDS, seed or 0, trial, codec,
                                 first_settings.train_table(only, freeze),
                                 backbones.Wanted(backbone, backbone_output, backbone_build, backbone_int8))
    made = create_fleet(fleet, text, _export, _export_train if graph else None)
    if encrypt_keys:
        from cloud_server.records import key_files

        key_files.encrypt(fleet)
    audit_log.done(fleet, "init")
    section = made.config.model
    answers = f"classes {', '.join(section.classes)}" if section.task is None else section.task.told
    print(f"fleet {made.config.fleet.name} in {fleet}: {made.method.name}, model {section.name}, {answers}")
    for remark in made.remarks():
        processes.say(remark)
    where = typed(fleet)
    processes.say(f"next: metafleet server start {where}, and for each device: metafleet devices enroll {where} NAME "
                  "--to HOME, then edge-agent run --home HOME; for devices elsewhere see docs/security.md")


def _first_fleet_toml(
    fleet: Path, data: str, reading: SampleOptions, name: str | None, method: str, model: str | None, rounds: int,
    seed: int, trial: bool | None, codec: str | None, train: dict[str, Any], wanted: backbones.Wanted,
) -> str:
    """fleet.toml for these samples. The model is the named one, that of the fleet in the folder, the winner of a trial,
    or the default; the first of these that exists. Raises FleetError."""
    from cloud_server.choices import first_settings, method_catalogue
    from cloud_server.choices.first_settings import fleet_toml, model_for, topic_name, wants_trial
    from fleet_core.data.model_input import default_model

    samples, spec = reading.load(data, processes.say)
    samples, spec, backbone = backbones.applied(wanted, fleet, samples, spec)
    chosen = _existing_model(fleet) if model is None else None
    learned = reading.of_fleet_toml(samples, spec)
    quiet = learned["quiet"]
    if quiet and trial:
        raise ConfigError("no models are tried on quiet samples alone, which do not show what finds anomalies",
                          where="--trial", hint="name a --model, or leave --trial out; metafleet advise compares "
                          "methods on samples with labelled anomalies")
    if chosen is None and quiet is None and wants_trial(data, model, trial):
        task = first_settings.tried_task(reading.names, learned["labels"], reading.loss)
        chosen = lab.choose_model(samples, spec, method_catalogue.named(method).name, seed, task)
    return fleet_toml(
        samples, name or topic_name(fleet.resolve().name), method,
        chosen.name if chosen else model or (None if quiet else default_model(spec.shape, spec.dtype) if backbone else
                                             model_for(data, samples)),
        rounds=rounds, seed=seed, spec=spec, model_options=chosen.options if chosen else None, codec=codec, train=train,
        backbone=backbone, **learned,
    )


def _existing_model(fleet: Path) -> ModelSection | Model | None:
    """The model of the fleet in the folder, which keeps it; None if there is no fleet yet."""
    from cloud_server.records.fleet_settings import FleetConfig
    from fleet_core.base import config

    if not (fleet / "fleet.toml").exists():
        return None
    return config.load(FleetConfig, fleet / "fleet.toml").model


def _export(settings: FleetConfig, head: bool) -> tuple[bytes, bytes]:
    """Graph bundle and first weights. Raises ConfigError if torch or onnx is not installed."""
    from fleet_core.algorithms.methods.registry import METHODS

    with installed("export"):
        from export.first_model import first  # needs torch and onnx
    model, method = settings.model, METHODS[settings.fleet.method]
    hyper, _ = schema.read(method.hyper, settings.hyper)
    return first(model.name, model.input, model.classes, model.options, head=head, seed=settings.fleet.seed,
                 method=method, hyper=hyper, say=processes.say, backbone=model.backbone, task=model.task)


def _export_train(fleet: Fleet, layout: Layout, first: Params) -> bytes:
    """The graph ``train``. Raises ConfigError if torch or onnx is not installed."""
    with installed("export"):
        from export.first_model import train_graph_of  # needs torch and onnx
    return train_graph_of(layout, fleet.method, fleet.hyper, first, seed=fleet.config.fleet.seed, say=processes.say)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method in full.")] = None,
    as_json: JSON = False,
) -> None:
    """List the methods, or show one: what devices send and keep, source, hyper-parameters."""
    from cloud_server.choices import method_catalogue
    from fleet_core.algorithms.methods.registry import METHODS

    if name is not None:
        method = method_catalogue.named(name)
        if as_json:
            notes = {"notes": method_catalogue.notes(method), "pages": method_catalogue.pages(method)}
            return terminal.show({**method_catalogue.facts(method), **notes})
        return print(method_catalogue.description(method))
    if as_json:
        return terminal.show([method_catalogue.facts(method) for method in METHODS.values()])
    terminal.table(method_catalogue.rows(), ("method", "down", "up", "stays", "what", "source"))


@app.command()
def codecs(as_json: JSON = False) -> None:
    """List the codecs: bits per value of a small model's noise, error feedback, bias."""
    from cloud_server.choices import codec_catalogue
    from fleet_core.codecs.kinds.registry import CODECS

    if as_json:
        return terminal.show([*map(codec_catalogue.facts, CODECS.values()), codec_catalogue.auto_facts()])
    terminal.table(codec_catalogue.rows(), ("codec", "bits", "feedback", "unbiased", "what"))


@app.command("predict")
def predict_command(
    fleet: FLEET,
    device: str,
    inputs: Annotated[Path, typer.Argument(metavar="INPUT", help=".npy, .npz, .csv, .ndjson, image or .wav file, or a "
                                            "folder of images or sounds; labels are ignored.")],
    broker: BROKER_OPTION = None,
    plain: PLAIN = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 20.0,
    as_json: JSON = False,
) -> None:
    """Ask a device for an answer, over MQTT."""
    from cloud_server.devices import predict
    from cloud_server.identity import fleet_certificates
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.data import unlabelled

    made = Fleet.load(fleet)
    topics.check_name(device, "device")
    row = enrolled_device(made, device)
    x = unlabelled.load(inputs, made.config.model.sample, say=processes.say, outputs=made.config.model.outputs)
    url = broker_url(broker, made, plain)
    with fleet_certificates.as_operator(made, url) as tls:
        answer = predict.ask(made.config.fleet.name, device, x, url, timeout_s=timeout_s, tls=tls,
                             off=predict.why_off(made, row))
    if as_json:
        return terminal.show(schema.plain(answer))
    said = f"{device}: meta-model of round {answer.round}, personalization: {answer.personalization}"
    if answer.of_task is not None:
        terminal.table(*answer.of_task)
        return processes.say(said)
    unknown = answer.unknown or (False,) * len(answer.labels)
    rows = [(str(n), label + " (unknown)" * unknown[n], " ".join(f"{p:.3f}" for p in row))
            for n, (label, row) in enumerate(zip(answer.labels, answer.probabilities, strict=True))]
    terminal.table(rows, ("sample", "answer", " ".join(answer.classes or made.config.model.classes)))
    processes.say(said)


@app.command()
def report(
    folder: RUN,
    out: Annotated[Path, typer.Option("--out", help="The page to write.")] = Path("report.html"),
    tariff: TARIFF = None,
    per_month: PER_MONTH = None,
    battery_wh: BATTERY = None,
    against: Annotated[Path | None, typer.Option("--against", metavar="FLEET|DIR", help="Also compare with this run.")]
    = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --against: print the differences.")] = False,
) -> None:
    """Write one self-contained page: table, curves, bytes, joules, costs by device."""
    from cloud_server.reports.html_report import render
    from cloud_server.results import outcome, result
    from fleet_core.base import storage

    if as_json and against is None:
        raise ConfigError("--json prints what differs from another run", where="report", expected="--against FLEET|DIR",
                          hint="the whole result: result.json of a demo, or metafleet server status --json")
    pricing = costs.pricing(folder, tariff, per_month, battery_wh)
    found = outcome.of_run(folder)
    other = None if against is None else (against.resolve().name, outcome.of_run(against))
    text = render(found, title=f"Metafleet: {found['method']}", pricing=pricing, against=other)
    storage.write_atomic(out, text.encode())
    if as_json and other is not None:
        return terminal.show({"this": folder.resolve().name, "other": other[0], "report": str(out),
                              **outcome.plain_differences(result.parse(found), result.parse(other[1]))})
    print(out)
    if not found["rounds"]:
        processes.say("no round has been closed yet")


@app.command()
def watch(fleet: FLEET) -> None:
    """Watch a fleet: its rounds, devices, bytes and joules, live on a terminal, else a line for each round."""
    from cloud_server.devices import fleet_status
    from cloud_server.records.fleet_folder import Fleet

    with contextlib.suppress(KeyboardInterrupt):
        fleet_status.watch(Fleet.load(fleet), sys.stdout)


@app.command()
def doctor(
    fleet: Annotated[Path | None, typer.Argument(help="A fleet's folder: also check its broker and disk.")] = None,
    as_json: JSON = False,
) -> None:
    """Check this machine: packages, broker, ports, clock, firewall, disk. Exit code 1 if something is wrong."""
    from cloud_server.commands import doctor as machine

    found = machine.examine(fleet)
    if as_json:
        terminal.show([schema.plain(one) for one in found])
    else:
        for line in machine.lines(found):
            print(line)
    if any(one.state == "wrong" for one in found):
        raise typer.Exit(1)


for command in (bundle.export, monitoring.audit, monitoring.console, monitoring.metrics, monitoring.home_assistant,
                costs.costs, plan.plan, flash.flash, lab.simulate, lab.compare, lab.advise):
    app.command()(command)

help_texts.add_to(app)


def main() -> None:
    terminal.main(lambda args: help_texts.part_for(app, args)(args=args))


if __name__ == "__main__":
    main()
