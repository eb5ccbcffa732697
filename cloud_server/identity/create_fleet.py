"""Makes a fleet's folder: fleet.toml, keys, certificates, graph, first weights and an empty ledger; again where it is
incomplete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cloud_server.identity import fleet_certificates
from cloud_server.records.fleet_folder import Fleet, FleetConfig, check_folder, method_of
from cloud_server.records.ledger import Ledger
from fleet_core.base import config, storage
from fleet_core.base.errors import ConfigError
from fleet_core.model import graph_bundle
from fleet_core.protocol.signing import Signer

Make = Callable[[FleetConfig, bool], tuple[bytes, bytes]]


def found(folder: Path, text: str | None, make: Make) -> Fleet:
    """The fleet in ``folder``.

    text: of fleet.toml, or None to take the one that lies there. make(config, head): graph bundle and weights as bytes.
    Nothing of a fleet is replaced: a folder whose fleet.toml says something else is refused, and so is one with rounds
    of a fleet whose fleet.toml is gone. Raises ConfigError.
    """
    path = folder / "fleet.toml"
    if not path.exists():
        check_folder(folder)
    if not path.exists() and (folder / "state").exists():
        raise ConfigError("is absent, and rounds of its fleet are here", where=str(path),
                          hint="put it back, or take an empty folder")
    settings = _settings(path, text)
    made = Fleet(folder, settings, *method_of(settings, path))
    graph_path, weights_path = folder / "graph.safetensors", folder / "weights.safetensors"
    if not (path.exists() and graph_path.exists() and weights_path.exists()):
        graph, weights = make(settings, "predict" in made.method.graphs)
        storage.write_atomic(graph_path, graph)
        storage.write_atomic(weights_path, weights)
    made.weights(graph_bundle.unpack(made.graph_bytes()).layout)  # they are this model's
    if not (folder / "fleet.pub").exists():
        key = folder / "fleet.key"
        signer = Signer.load(key) if key.exists() else Signer.create(key)  # devices know no other
        storage.write_atomic(folder / "fleet.pub", signer.public.encode() + b"\n")
    with Ledger(folder / "ledger.sqlite") as ledger:
        facts = {"name": settings.fleet.name, "method": made.method.name, "seed": str(settings.fleet.seed)}
        if ledger.facts() != facts:
            ledger.set_facts(**facts)
        fleet_certificates.complete(made, ledger)
    if text is not None and not path.exists():
        storage.write_atomic(path, text.encode())  # last: with it the folder is a fleet
    return made


def _settings(path: Path, text: str | None) -> FleetConfig:
    if path.exists():
        settings = config.load(FleetConfig, path)
        if text is not None and config.parse(FleetConfig, text, "options") != settings:
            raise ConfigError(
                "another fleet is here already", where=str(path), hint="give no options, or another folder"
            )
        return settings
    if text is None:
        raise ConfigError("is absent", where=str(path), hint="give --data, or write the file")
    return config.parse(FleetConfig, text, str(path))
