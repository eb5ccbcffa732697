"""Decides what a simulated experiment runs, and predicts its costs.

``experiment`` reads the TOML file, ``workload`` divides the samples over devices, ``frozen_arrays`` determines which
arrays a round trains, ``model_downloads`` counts the bytes that devices fetch. ``planned_costs`` predicts bytes,
operations and joules.
"""
