"""Runs a fleet: the aggregator as a process, the demo, a fleet in one process, a systemd service; and backs one up.

``aggregator`` runs the coordinator and survives a full disk, ``aggregator_process`` adds broker, alerts and live view,
``child_processes`` starts other programs. ``demo`` runs the fleet that ``demo_setup`` makes, ``fedavg_baseline`` its
baseline; ``in_one_process`` runs a fleet without a broker. ``systemd_service`` installs an aggregator as a service,
``backup`` copies a fleet.
"""
