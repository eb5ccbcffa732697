"""Runs an experiment, with the fleet's algorithms and without a broker.

``simulate`` starts all runs, ``engine`` runs the rounds of one, ``executors`` distribute the devices' work over
processes, ``device_work`` does it. ``round_figures`` computes costs and scores, ``other_models`` keeps further models
for evaluation, ``run_folder`` stores the results, ``run_progress`` shows progress.
"""
