"""``metafleet server``: starts, pauses and backs up the aggregator, and shows its state.

Heavy modules are imported inside the commands.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from cloud_server.commands.lab import MLFLOW, TENSORBOARD
from cloud_server.devices.devices import FLEET, JSON, PLAIN, checked_url
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import ConfigError, StateError

server_app = typer.Typer(help="The aggregator.", no_args_is_help=True)

BROKER = Annotated[
    str | None,
    typer.Option(envvar="METAFLEET_BROKER", callback=checked_url,
                 help="mqtt(s)://host:port, ws(s)://host:port/path, or 'embedded' for a private amqtt; default: a "
                      "private mosquitto."),
]


@server_app.command("start")
def start(
    fleet: FLEET,
    broker: BROKER = None,
    host: Annotated[str, typer.Option(help="Address of the private broker; beyond loopback it requires certificates.")]
    = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the private broker; default 1883, or 8883 "
                                                                     "beyond loopback.")] = None,
    plain: PLAIN = False,
    connect_s: Annotated[float, typer.Option(help="Seconds to wait for the broker at the start.")] = 30.0,
    until_done: Annotated[bool, typer.Option("--until-done", help="Exit after the last round.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No live view.")] = False,
    console: Annotated[bool, typer.Option("--console", help="Also show the fleet on a page, on this machine: "
                                                            "'metafleet console'.")] = False,
    console_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of that page.")] = 8765,
    tensorboard: TENSORBOARD = None,
    mlflow: MLFLOW = None,
) -> None:
    """Run the aggregator, or continue a stopped run."""
    from cloud_server.integrations import tracking
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.model import graph_bundle

    made = Fleet.load(fleet)
    made.selected(graph_bundle.unpack(made.graph_bytes()).layout)  # both raise before the process is replaced
    tracking.check(tracking.Options(tensorboard, mlflow))
    options = {"broker": broker, "host": host, "port": port, "plain": plain, "connect_s": connect_s,
               "until_done": until_done, "quiet": quiet, "console": console_port if console else None,
               "tensorboard": tensorboard, "mlflow": mlflow}
    processes.exec_module("cloud_server.running.aggregator_process", str(fleet), json.dumps(options))


@server_app.command("install")
def server_install(
    fleet: FLEET,
    broker: BROKER = None,
    host: Annotated[str | None, typer.Option(help="As for 'server start'.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="As for 'server start'.")] = None,
    user: Annotated[bool, typer.Option("--user", help="Install a service of your user, without root.")] = False,
    passphrase: Annotated[Path | None, typer.Option("--passphrase", metavar="FILE", help="File with the passphrase of "
                                                    "the fleet's keys, which systemd gives the service as a "
                                                    "credential; NAME.cred: encrypted by systemd-creds.")]
    = None,
    printed: Annotated[bool, typer.Option("--print", help="Print the unit; install nothing.")] = False,
) -> None:
    """Install the aggregator as a systemd service, enable it and start it."""
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.running import systemd_service

    given = (("--broker", broker), ("--host", host), ("--port", port))
    options = [text for name, value in given if value is not None for text in (name, str(value))]
    service = systemd_service.service_of(Fleet.load(fleet), options, user=user, passphrase=passphrase)
    if printed:
        return print(service.text, end="")
    systemd_service.install(service)
    audit_log.done(fleet, "install service", text=service.name)
    print(service.path)
    scope = " --user" if user else ""
    processes.say(f"it runs; its log: journalctl{scope} -u {service.name} -f; to end it: "
                  f"systemctl{scope} disable --now {service.name}")


@server_app.command("config")
def server_config(
    fleet: FLEET,
    host: Annotated[list[str] | None, typer.Option(help="A name or address by which devices reach the broker; may be "
                                                        "repeated, devices use the first one.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default 8883.")] = None,
    enrolment_port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port for devices with a token; default "
                                                       "8884.")] = None,
    at: Annotated[str, typer.Option(help="Folder of these files on the broker's machine; default: where they are "
                                         "written.")] = "",
) -> None:
    """Write the files that mosquitto needs as this fleet's broker: configuration, access lists, certificates."""
    from cloud_server.broker.mosquitto_config import ENROLMENT_PORT, PORT, BrokerSetup
    from cloud_server.identity import audit_log, fleet_certificates
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records.fleet_folder import Fleet

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path) as ledger:
        fleet_certificates.create_missing(made, ledger)
        hosts = tuple(host) if host else fleet_certificates.default_hosts(made.config.link.broker)
        setup = BrokerSetup(hosts, port or PORT, enrolment_port or ENROLMENT_PORT, at=at)
        path = fleet_certificates.configure(made, ledger, setup)
    audit_log.done(fleet, "configure broker", text=", ".join(hosts))
    print(path)
    processes.say(
        f"devices find the broker at {setup.url}; its files are in {path.parent}; keep server.key secret"
    )


@server_app.command("status")
def status(fleet: FLEET, as_json: JSON = False) -> None:
    """Show closed rounds, which devices are on, and what the fleet has cost."""
    from cloud_server.devices import fleet_status
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.results import result, verdict

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path, create=False) as ledger:
        facts, found = fleet_status.facts(made, ledger), verdict.of_ledger(ledger)
        task = result.task_scores(ledger)
    if as_json:
        facts |= {} if found is None else {"verdict": result.plain(found)}
        facts |= {"task": {stage: result.plain(one) for stage, one in task.items()}} if task else {}
        return terminal.show(facts)
    for line in (*fleet_status.lines(facts, fleet), *verdict.lines(found)):
        print(line)
    for stage, score in task.items():
        print(f"{stage} personalization, {score.samples} held-back samples: {score.whole_text}")


@server_app.command("alerts")
def show_alerts(
    fleet: FLEET,
    test: Annotated[bool, typer.Option("--test", help="Send a test message to the command and the webhook.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Send alerts while no aggregator runs.")] = False,
    as_json: JSON = False,
) -> None:
    """Show what needs the operator now; [alerts] in fleet.toml says where alerts are sent."""
    from cloud_server.integrations import alert_senders, alerts
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.records.fleet_settings import AlertsSection

    made = Fleet.load(fleet)
    section = made.config.alerts or AlertsSection()
    if (test or watch) and not (section.command or section.webhook):
        raise ConfigError("is not set", where=f"{fleet / 'fleet.toml'}: alerts", expected="a command or a webhook")
    if watch:
        with processes.until_signal() as stopped:
            return alert_senders.watch(made, section, stopped, processes.say)
    if test:
        message = alerts.Alerts(made, section).test(time.time())
        failed = [why for channel in alert_senders.channels(section) if (why := channel(message))]
        if failed:
            raise StateError("; ".join(failed), where=f"{fleet / 'fleet.toml'}: alerts")
        return processes.say("sent")
    with Ledger(made.ledger_path, create=False) as ledger:
        found = alerts.present(made, ledger, section, time.time())
    if as_json:
        return terminal.show([schema.plain(one) for one in found])
    for one in found:
        print(f"{one.kind}: {one.text}")
    if not found:
        processes.say("nothing needs the operator")


@server_app.command("rounds")
def rounds(
    fleet: FLEET,
    explain: Annotated[
        bool, typer.Option("--explain", help="Also show each round's codecs, frozen arrays, epsilon and refused "
                                             "updates, with the reasons.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """List every round: cohort, skipped and refused updates, loss, duration."""
    from cloud_server.ledger.ledger import Ledger
    from cloud_server.ledger.ledger_tables import RoundArrays, RoundCodec, RoundPrivacy, Update
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.reports import array_tables, codec_tables, privacy_tables
    from cloud_server.results import folded_rounds

    made = Fleet.load(fleet)
    with Ledger(made.ledger_path, create=False) as ledger:
        listed, codecs = ledger.rounds(), ledger.rows(RoundCodec) if explain else []
        arrays = ledger.rows(RoundArrays) if explain else []
        private = ledger.rows(RoundPrivacy) if explain else []
        skipped = Counter(one.round for one in ledger.each(Update, status="counted", skipped=True))
        refused = Counter(one.round for one in ledger.each(Update, status="refused"))
        unused = [one for one in ledger.each(Update) if one.reason and one.status != "late"] if explain else []
        folded = folded_rounds.of_ledger(ledger)
    shown = {name: counts for name, counts in (("skipped", skipped), ("refused", refused)) if counts}
    if as_json:
        used: dict[int, dict[str, Any]] = {}
        for one in codecs:
            used.setdefault(one.round, {})[one.way] = {
                "codec": one.codec, "reason": one.reason, "left_out": one.left_out
            }
        hidden = {one.round: schema.plain(one) for one in private}
        trained = {one.round: {"frozen": one.frozen, "reason": one.reason, "moves": one.moves} for one in arrays}
        return terminal.show([
            {**schema.plain(r), "skipped": skipped[r.round], "refused": refused[r.round],
             **({"codecs": used.get(r.round, {}), "arrays": trained.get(r.round), "privacy": hidden.get(r.round),
                 "reasons": {one.device: one.reason for one in unused if one.round == r.round}} if explain else {})}
            for r in listed
        ])
    rows = [
        (str(r.round), terminal.date(r.opened_at), r.status, str(len(r.cohort)),
         *(str(counts[r.round]) for counts in shown.values()),
         "" if r.loss is None else f"{r.loss:.4f}", "" if r.seconds is None else f"{r.seconds:.1f}", r.note)
        for r in listed
    ]
    terminal.table(rows, ("round", "opened", "status", "cohort", *shown, "loss", "seconds", "note"))
    if folded is not None:
        processes.say(f"{folded.text} ({folded.closed} closed, {folded.participants} updates counted, {folded.refused} "
                      "refused); [keep] in fleet.toml says how many rounds are kept")
    elif not rows:
        return processes.say("no round has been opened yet")
    if explain:
        tables = [codec_tables.explained(codecs), *([array_tables.explained(arrays)] if arrays else []),
                  *([privacy_tables.explained(private)] if private else [])]
        if unused:
            tables.append((("round", "device", "update", "why"),
                           [(str(one.round), one.device, one.status, one.reason) for one in unused]))
        for heads, lines in tables:
            print()
            terminal.table(lines, heads)


@server_app.command("backup")
def server_backup(
    fleet: FLEET,
    to: Annotated[Path, typer.Option("--to", help="The new folder.")],
    as_json: JSON = False,
) -> None:
    """Copy the fleet's folder, also while the aggregator runs. The copy is a complete fleet."""
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet
    from cloud_server.running.backup import backup

    made = Fleet.load(fleet)
    closed = backup(made, to)
    audit_log.done(fleet, "backup", text=str(to))
    if as_json:
        return terminal.show({"folder": str(to), "rounds_closed": closed})
    print(to)
    processes.say(f"{closed} of {made.config.fleet.rounds} rounds closed; the copy has the fleet's keys: keep it "
                  "secret")


@server_app.command("roll-back")
def roll_back(
    fleet: FLEET,
    to: Annotated[int | None, typer.Option("--to", help="The round of the model; default: the second newest in "
                                                        "--list.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the rounds whose models are kept.")] = False,
    as_json: JSON = False,
) -> None:
    """Continue training from an earlier served model, once the open round is closed."""
    from cloud_server.devices import roll_back as back
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet

    made = Fleet.load(fleet)
    if listed:
        kept = back.kept_rounds(made)
        if as_json:
            return terminal.show([schema.plain(one) for one in kept])
        return print("\n".join(map(back.line, kept)) or "no round is kept yet")
    target = back.ask(made, to)
    audit_log.done(fleet, "roll back", text=f"to round {target}")
    if as_json:
        return terminal.show({"to": target, "running": made.running()})
    when = "after the open round" if made.running() else "when the aggregator runs"
    print(f"training continues from the model of round {target} {when}")


@server_app.command("pause")
def pause(fleet: FLEET, as_json: JSON = False) -> None:
    """Open no further round. The open round is still completed."""
    _pause(fleet, True, as_json)


@server_app.command("resume")
def resume(fleet: FLEET, as_json: JSON = False) -> None:
    """Open rounds again."""
    _pause(fleet, False, as_json)


def _pause(fleet: Path, paused: bool, as_json: bool) -> None:
    from cloud_server.devices import pause as pausing
    from cloud_server.identity import audit_log
    from cloud_server.records.fleet_folder import Fleet

    made = Fleet.load(fleet)
    answer = pausing.ask(made, paused)
    audit_log.done(fleet, "pause" if paused else "resume", text=pausing.sentence(answer, made))
    terminal.show(schema.plain(answer)) if as_json else print(pausing.sentence(answer, made))
