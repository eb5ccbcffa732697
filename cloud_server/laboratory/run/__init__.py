"""Runs one experiment, with the fleet's algorithms and without a broker.

``experiment`` reads the TOML file, ``workload`` divides the samples over devices, ``simulate`` starts all runs,
``engine`` runs the rounds of one, ``executors`` decide where a device's work is done, ``device_work`` does it,
``frozen_arrays`` says what each round trains, ``model_downloads`` what devices fetch, ``run_folder`` stores the
results, ``other_models`` keeps those under which a run is evaluated besides. ``planned_costs`` plans bytes, operations
and joules of a run before it starts.
"""
