"""``metafleet export`` and ``metafleet bundle``: write and verify bundles, as a folder or one file.

Heavy modules are imported inside the commands.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.devices.devices import JSON
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import BundleError, ConfigError, installed
from fleet_core.base.processes import typed

if TYPE_CHECKING:
    from cloud_server.records.fleet_folder import Fleet
    from fleet_core.personalization.bundle_format import Bundle
    from fleet_core.protocol.signing import Signer

bundle_app = typer.Typer(help="Bundles: a served model with everything a device needs.", no_args_is_help=True)
EXTRA = 'pip install "metafleet[export]"'


def export(
    source: Annotated[Path, typer.Argument(metavar="FLEET|CHECKPOINT", help="A fleet, or FLEET/state/round-….")],
    to: Annotated[Path, typer.Option("--to", metavar="BUNDLE", help="A new folder, or one file: NAME.bundle.")],
    stored: Annotated[str, typer.Option(help="Weights on disk: fp32 or fp16.")] = "fp32",
    int8: Annotated[
        str | None, typer.Option("--int8", metavar="DATA", help="Add an int8 encoder, calibrated with these samples.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Write a served model as a bundle: a device installs it and answers with it, without torch or a broker."""
    from cloud_server.identity import audit_log
    from cloud_server.records.read_served_model import place_of
    from fleet_core.personalization import device_bundle
    from fleet_core.personalization.bundle_format import STORED

    if stored not in STORED:
        raise ConfigError(f"unknown --stored '{stored}'", expected=" or ".join(STORED))
    device_bundle.refuse_existing(to)
    started = time.monotonic()
    bundle, (fleet, _) = _export_bundle(source, stored, int8), place_of(source)
    checks: list[dict[str, Any]] = []
    device_bundle.write(to, bundle, check=lambda written: checks.append(_check_without_torch(written)),
                        signer=_signer(fleet))
    audit_log.done(fleet.folder, "export", text=str(to))
    facts = {**_facts(device_bundle.read(to)), **checks[0], "seconds": round(time.monotonic() - started, 1)}
    if as_json:
        return terminal.show(facts)
    print(f"{to}: {_summary(facts)}")
    processes.say(f"next, on a device: edge-agent install {typed(to)} --home HOME")


@bundle_app.command("verify")
def verify(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A folder or one file.")], as_json: JSON = False
) -> None:
    """Check a bundle: every file, the graphs' outputs on this machine, and torch's outputs if it is installed."""
    from edge_agent.inference import bundle_check
    from fleet_core.personalization import device_bundle

    bundle = device_bundle.read(path)
    facts = {**_facts(bundle), **schema.plain(bundle_check.check(bundle)), "torch": _compare_with_torch(bundle)}
    if as_json:
        return terminal.show(facts)
    print(f"{path}: sound; {_summary(facts)}")
    torch = "compared with torch" if facts["torch"] else f"not compared with torch, which is not installed ({EXTRA})"
    print(f"golden outputs under onnxruntime {facts['onnxruntime']}; {torch}")
    key = bundle.manifest.key
    print(f"signed by the fleet's key {key[:16]}…" if bundle.signed else "not signed: devices take it with --unsigned")


def _export_bundle(source: Path, stored: str, data: str | None) -> Bundle:
    """data: samples to calibrate an int8 encoder with, or None. Raises FleetError."""
    from cloud_server.records.read_served_model import place_of, served_model
    from fleet_core.model import graph_bundle

    fleet, file = place_of(source)
    graph = graph_bundle.unpack(fleet.graph_bytes())
    number, params = served_model(fleet, file, graph.layout)
    with installed("export"):
        from export.full_bundle import Served, whole  # needs torch and onnx
    served = Served(fleet.config.fleet.name, fleet.public_key(), fleet.method, fleet.hyper, number, params,
                    fleet.weights(graph.layout), fleet.backbone_bytes() or b"")
    calibration = None if data is None else fleet.samples(graph.layout, Path(data))
    return whole(served, graph, stored=stored, data=calibration, say=processes.say)


def _signer(fleet: Fleet) -> Signer | None:
    """Signs with the fleet's key. None, with a message, if the key is not here. Raises StateError for a damaged key."""
    if (fleet.folder / "fleet.key").exists():
        return fleet.signer()
    processes.say("not signed, because fleet.key is not here: devices take it with --unsigned")
    return None


def _check_without_torch(bundle: Path) -> dict[str, Any]:
    """Runs the check that devices run, in a process without torch. Raises BundleError."""
    command = processes.command("edge_agent.inference.bundle_check", str(bundle))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"the bundle fails its check: {done.stderr.strip().removeprefix('error: ')[-2000:]}",
                          hint="nothing was written")
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def _compare_with_torch(bundle: Bundle) -> bool:
    """Compares the graphs with the model in torch; False if torch is not installed. Raises BundleError if the outputs
    differ."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "onnx", "onnxscript")):
        return False
    from export import gate
    from fleet_core.learning.models import build

    gate.check(bundle.graph, build(bundle.graph.layout).eval())
    return True


def _facts(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "fleet": manifest.fleet, "method": manifest.method.name, "round": manifest.model.round,
        "model": manifest.model.id, "signed": bundle.signed, "family": manifest.layout.model,
        "stored": manifest.model.stored,
        "classes": list(manifest.layout.classes),
        **({"outputs": list(manifest.layout.outputs)} if manifest.layout.outputs else {}),
        "adaptation": schema.plain(manifest.adaptation),
        "int8_cost": schema.plain(manifest.int8), "min_onnxruntime": manifest.graph.min_onnxruntime,
        "bytes": {name: info.size for name, info in sorted(manifest.files.items())},
    }  # fmt: skip


def _summary(facts: dict[str, Any]) -> str:
    steps = facts["adaptation"]
    how = f"{steps['number']} steps of {' and '.join(steps['groups'])}" if steps else "no gradient steps"
    size = sum(facts["bytes"].values())
    return f"{facts['method']}, {facts['family']} of round {facts['round']}, {how}, {size} bytes as {facts['stored']}"
