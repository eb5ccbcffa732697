"""Runs a fleet: the aggregator as a process, the demo, a fleet in one process, a systemd service; and backs one up.

``aggregator`` turns the coordinator's loop, ``aggregator_process`` starts it with broker, alerts and live view,
``child_processes`` the programs beside it. ``demo`` runs the fleet that ``demo_setup`` makes, ``fedavg_baseline`` and
``in_one_process`` run one without a broker. ``systemd_service`` installs it as a service, ``backup`` copies a fleet.
"""
