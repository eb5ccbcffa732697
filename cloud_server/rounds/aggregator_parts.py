"""Builds the parts of an aggregator. Each part is given the parts that it needs; none refers back to the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cloud_server.broadcast.manifest import Manifests
from cloud_server.broadcast.models_down import ModelsDown
from cloud_server.broadcast.open_round import Rounds
from cloud_server.broadcast.program_waves import ProgramWaves
from cloud_server.broadcast.round_arrays import RoundArrays
from cloud_server.broadcast.round_codecs import RoundCodecs
from cloud_server.broadcast.served_model import ServedModels
from cloud_server.broker.left_messages import LeftMessages
from cloud_server.broker.publisher import Publisher
from cloud_server.broker.server_messages import ServerMessages
from cloud_server.identity.announce_keys import AnnouncedKeys
from cloud_server.identity.audit_log import Recorder
from cloud_server.identity.renewals import Renewals
from cloud_server.identity.token_enrolment import Enrolments, open_tokens
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.reported_costs import ReportedCosts
from cloud_server.membership import quarantine
from cloud_server.membership.inability import inability
from cloud_server.membership.members import Members
from cloud_server.membership.quarantine import Quarantine
from cloud_server.membership.readiness import Readiness
from cloud_server.membership.training_states import TrainingStates
from cloud_server.membership.waiting import Places, Waiting
from cloud_server.records import training_graph
from cloud_server.records.checkpoint import Checkpoints
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.spool import Spool
from cloud_server.results.verdict import WarningLog
from cloud_server.rounds.budget import Budget
from cloud_server.rounds.decide_roll_back import RollBacks
from cloud_server.rounds.keep_rounds import KeepRounds
from cloud_server.rounds.privacy_budget import PrivacyBudget
from cloud_server.rounds.secure_round import SecureRounds
from cloud_server.rounds.server_rule import RuleState
from cloud_server.rounds.update_receiver import UpdateReceiver
from fleet_core.link.interface import Link
from fleet_core.model import graph_bundle
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.privacy.settings import LOCAL
from fleet_core.protocol.device_messages import Down


@dataclass(frozen=True)
class Parts:
    """layout: the layout of the fleet's model. tell(device, message): sends an unsigned message."""

    fleet: Fleet
    ledger: Ledger
    layout: Layout
    members: Members
    rule: RuleState
    rounds: Rounds
    checkpoints: Checkpoints
    spool: Spool
    costs: ReportedCosts
    quarantine: Quarantine
    roll_backs: RollBacks
    codecs: RoundCodecs
    arrays: RoundArrays
    publisher: Publisher
    programs: ProgramWaves
    models: ModelsDown
    served: ServedModels
    manifests: Manifests
    messages: ServerMessages
    tell: Callable[[str, Down], None]
    receiver: UpdateReceiver
    waiting: Waiting
    readiness: Readiness
    places: Places
    enrolments: Enrolments
    renewals: Renewals
    warnings: WarningLog
    budget: Budget
    keep: KeepRounds
    privacy: PrivacyBudget
    secure: SecureRounds
    left: LeftMessages
    keys: AnnouncedKeys


def assemble(
    fleet: Fleet, link: Link, ledger: Ledger, *, boot: str, clock: Callable[[], float], now: Callable[[], float],
    log: Callable[[str], None], access_changed: Callable[[], None],
    authority_changed: Callable[[], None] = lambda: None,
) -> Parts:
    """Builds all parts from the fleet's folder. Raises StateError or ConfigError if the folder cannot be used."""
    settings, method = fleet.config.fleet, fleet.method
    graph = fleet.graph_bytes()
    layout = graph_bundle.unpack(graph).layout
    steps, backbone = training_graph.read(fleet, layout), fleet.backbone_bytes()
    privacy = PrivacyBudget(fleet.config.privacy, ledger)
    wire = layout.extended(method.down, method.shared)
    checkpoints = Checkpoints(fleet.folder / "state", log)
    spool = Spool(fleet.folder / "spool", wire, method.shared)
    masked = fleet.config.privacy.secure_aggregation
    cannot = partial(
        inability, method=method, link=fleet.config.link, parameters=layout.parameters(MODEL_GROUPS),
        parts=fleet.config.train.parts, graph=steps is not None, private=fleet.config.privacy.on,
        secure=masked, numbers=masked and bool(method.up_scalars or method.server.weighted(fleet.hyper)),
        noise=fleet.config.privacy.noise_multiplier if fleet.config.privacy.mode == LOCAL else 0.0,
    )
    audit = Recorder(fleet.folder, now, log)
    members = Members(
        ledger, everyone=settings.enrolment == "open", quarantined=quarantine.quarantined(ledger), cannot=cannot,
        audit=audit, clock=clock, now=now, log=log,
    )
    states = TrainingStates(ledger, members, log)
    rule = RuleState(fleet, layout, ledger, checkpoints, members, log=log)
    rounds = Rounds(ledger, method, now)
    codecs, arrays = RoundCodecs(fleet, ledger), RoundArrays(fleet, layout, ledger)
    waiting = Waiting(members, rounds, settings.deadline_s, clock=clock, log=log)
    keys = AnnouncedKeys(fleet, ledger, link, audit=audit, clock=clock, now=now, log=log,
                         authority_changed=authority_changed)
    messages = ServerMessages(settings.name, link, keys.sign, boot, log)

    def tell(device: str, message: Down) -> None:
        if message.t == "need":
            waiting.granted(device)
        messages.tell(device, message)

    secure = SecureRounds(
        fleet, wire, ledger, spool, rounds, messages.attest, expected=members.expected, clock=clock, now=now,
    )
    receiver = UpdateReceiver(
        fleet, wire, layout.hash, ledger, spool, rounds, rule, members, states, codecs, secure, tell, audit=audit,
        clock=clock, now=now, log=log,
    )
    publisher = Publisher(settings.name, link, fleet.folder / "state" / "published.json", clock=clock, log=log)
    models = ModelsDown(fleet, wire, publisher)
    served = ServedModels(fleet, wire, ledger, checkpoints, models, codecs)
    manifests = Manifests(
        fleet, models, served, ledger, publisher, codecs, sign=keys.sign, graph=graph, steps=steps,
        backbone=backbone, layout=layout, max_upload_bytes=receiver.max_upload_bytes, now=now,
        resting=lambda: members.resting.keys() | members.quarantined.keys(), packed=members.all_read,
    )
    served.resume(rule.checkpoint)
    budget = Budget(
        fleet.config.budget, fleet.tariff, ledger, members, clock=clock, now=now, log=log, private=lambda: privacy.over,
    )
    return Parts(
        fleet=fleet, ledger=ledger, layout=layout, members=members, rule=rule, rounds=rounds,
        checkpoints=checkpoints, spool=spool, costs=ReportedCosts(ledger), codecs=codecs, arrays=arrays,
        publisher=publisher, models=models,
        programs=ProgramWaves(fleet, link, ledger, audit, sign=keys.sign, clock=clock, now=now, log=log),
        served=served, manifests=manifests, messages=messages, tell=tell, receiver=receiver, waiting=waiting,
        readiness=Readiness(
            members, settings.min_devices, settings.first_wait_s, invited=lambda: open_tokens(ledger), clock=clock,
            log=log,
        ),
        quarantine=Quarantine(
            ledger, members, automatic=fleet.config.robust.quarantine, withdraw=receiver.withdraw, audit=audit, log=log
        ),
        roll_backs=RollBacks(ledger, rule, checkpoints, served, limit=fleet.config.robust.roll_back, log=log),
        places=Places(members, rounds, settings.seed, settings.cohort, log=log),
        enrolments=Enrolments(
            fleet, ledger, link, admit=lambda name: members.enroll(name, rule.checkpoint.round),
            changed=access_changed, audit=audit, now=now, log=log,
        ),
        renewals=Renewals(fleet, ledger, audit=audit, now=now, log=log),
        warnings=WarningLog(ledger, settings.rounds, log),
        budget=budget, keep=KeepRounds(fleet.folder, fleet.config.keep, ledger, budget, log), privacy=privacy,
        secure=secure, keys=keys,
        left=LeftMessages(
            settings.name, link, revoked=members.revoked, off_for=members.off_for, refused=audit.refused, clock=clock,
            log=log,
        ),
    )
