"""Makes a fleet's folder, or completes it: fleet.toml, keys, certificates, graph, first weights and an empty ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cloud_server.identity import fleet_certificates
from cloud_server.ledger.ledger import Ledger
from cloud_server.records import key_files, training_graph
from cloud_server.records.fleet_folder import Fleet, check_folder, method_of
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config, storage
from fleet_core.base.errors import ConfigError
from fleet_core.base.trees import Params
from fleet_core.model import graph_bundle
from fleet_core.model.layout import Layout
from fleet_core.protocol.signing import Signer

Export = Callable[[FleetConfig, bool], tuple[bytes, bytes]]
"""(settings, whether the graph ``predict`` is needed) to (graph bundle, first weights), both as bytes."""
ExportTrain = Callable[[Fleet, Layout, Params], bytes]
"""(fleet, layout, first weights) to the graph ``train``; empty if its method or model has none."""


def create_fleet(folder: Path, text: str | None, export: Export, export_train: ExportTrain | None = None) -> Fleet:
    """Creates the fleet in ``folder``, or adds what is missing. It replaces no file, except a graph ``train`` that is
    not of fleet.toml's method.

    text: the content of fleet.toml; None to use the file in the folder. export_train: None makes no such graph. Raises
    ConfigError if the folder has a different fleet.toml, or has rounds but no fleet.toml.
    """
    path = folder / "fleet.toml"
    if not path.exists():
        check_folder(folder)
    if not path.exists() and (folder / "state").exists():
        raise ConfigError("is missing, but the folder has rounds of its fleet", where=str(path),
                          hint="put it back, or use an empty folder")
    settings = _settings(path, text)
    fleet = Fleet(folder, settings, *method_of(settings, path))
    _write_model(fleet, export, export_train, complete=path.exists())
    _write_signing_key(folder)
    with Ledger(fleet.ledger_path) as ledger:
        facts = {"name": settings.fleet.name, "method": fleet.method.name, "seed": str(settings.fleet.seed)}
        if ledger.facts() != facts:
            ledger.set_facts(**facts)
        fleet_certificates.create_missing(fleet, ledger)
    if text is not None and not path.exists():
        storage.write_atomic(path, text.encode())  # last, because fleet.toml makes the folder a fleet
    return fleet


def _write_model(fleet: Fleet, export: Export, export_train: ExportTrain | None, *, complete: bool) -> None:
    """Graphs and first weights. complete: files that are there are of this fleet's model, so they stay."""
    fleet.backbone_bytes()  # raises if it is missing
    graph_path, weights_path = fleet.folder / "graph.safetensors", fleet.folder / "weights.safetensors"
    if not (complete and graph_path.exists() and weights_path.exists()):
        graph, weights = export(fleet.config, "predict" in fleet.method.graphs)
        fleet.selected(graph_bundle.unpack(graph).layout)  # before anything is written
        training_graph.path_of(fleet).unlink(missing_ok=True)
        storage.write_atomic(graph_path, graph)
        storage.write_atomic(weights_path, weights)
    layout = graph_bundle.unpack(fleet.graph_bytes()).layout
    first = fleet.weights(layout)  # raises if they are of another model
    fleet.selected(layout)
    if export_train is not None and training_graph.read(fleet, layout) is None:
        made = export_train(fleet, layout, first)
        if made:
            storage.write_atomic(training_graph.path_of(fleet), made)


def _write_signing_key(folder: Path) -> None:
    if (folder / "fleet.pub").exists():
        return
    key = folder / "fleet.key"
    kept = key.exists()  # devices trust this key only
    signer = Signer.load(key, key_files.read) if kept else Signer.create(key, key_files.write)
    storage.write_atomic(folder / "fleet.pub", signer.public.encode() + b"\n")


def _settings(path: Path, text: str | None) -> FleetConfig:
    if path.exists():
        settings = config.load(FleetConfig, path)
        if text is not None and config.parse(FleetConfig, text, "options") != settings:
            raise ConfigError(
                "another fleet is here already", where=str(path), hint="give no options, or another folder"
            )
        return settings
    if text is None:
        raise ConfigError("is missing", where=str(path), hint="give --data, or write the file")
    return config.parse(FleetConfig, text, str(path))
