"""Sensors of volts, amperes or watts, one file per kind of chip, and CPU time.

``interface`` defines a sensor. A new sensor is a file here and a line in ``fleet_core.power.choose_meter``.
"""
