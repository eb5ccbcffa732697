"""Sensors that tell volts, amperes or watts, and CPU time: one file a kind of chip.

``interface`` says what a sensor is. A new sensor is a file here and a line in ``fleet_core.power.choose_meter``.
"""
