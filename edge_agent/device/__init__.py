"""This device: its state on the disk, its samples, its board and its program's version. No torch.

``state`` stores everything that the agent keeps between rounds. ``slots`` has the two slots (A/B) of the models that
answer. ``local_samples`` reads the device's data, ``sample_buffer`` keeps samples without a label. ``manifest_method``
reads the method that a manifest names. ``this_board`` has the board's profile and limits, ``full_disk`` whether the
disk can be written. ``agent_costs`` counts what the agent spends, ``process_usage`` its CPU seconds and memory.
``fleet_keys`` are the fleet's keys that count here, ``signed_program`` checks a program against the fleet's signature.
"""
