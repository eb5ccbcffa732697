"""One experiment: its file, its devices, its rounds and its folder; the fleet's own algorithms, no broker.

``experiment`` reads the TOML file, ``workload`` divides the samples over devices, ``engine`` runs the rounds,
``executors`` say where the devices' work is done, ``device_work`` does it, ``run_folder`` keeps what came out.
"""
