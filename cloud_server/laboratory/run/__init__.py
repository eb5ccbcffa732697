"""Runs an experiment, with the fleet's algorithms and without a broker.

``simulate`` starts all runs, ``engine`` runs the rounds of one, ``executors`` decide where a device's work is done,
``device_work`` does it. ``round_figures`` counts costs and evaluates models, ``other_models`` keeps further models that
a run evaluates, ``run_folder`` stores the results, ``run_progress`` shows the progress. ``rehearsal`` runs a few rounds
for a plan.
"""
