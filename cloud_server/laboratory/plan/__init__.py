"""Decides what a simulated experiment runs, and predicts its costs.

``experiment`` reads the TOML file, ``workload`` divides the samples over devices, ``frozen_arrays`` says what each
round trains, ``model_downloads`` what devices fetch. ``planned_costs`` plans operations and joules, ``planned_bytes``
the bytes.
"""
