"""Runs an experiment, with the fleet's algorithms and without a broker.

``simulate`` starts all runs, ``engine`` runs the rounds of one, ``executors`` decide where a device's work is done,
``device_work`` does it. ``round_figures`` counts costs and evaluates models, ``other_models`` keeps those under which a
run is evaluated besides, ``run_folder`` stores the results, ``run_progress`` shows how far it is. ``rehearsal`` runs a
few rounds for a plan.
"""
