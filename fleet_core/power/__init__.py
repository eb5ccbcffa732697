"""Energy in joules. No torch.

``choose_meter`` chooses a ``meter``: ``sampled_meter`` for ``sensors`` of watts, ``rapl`` for processors'
counters, ``energy_model`` where there is no sensor; ``radio`` models sending. ``joules_by_phase`` books them.
``shared_counter`` divides a counter among processes, ``background_sampling`` reads every second, ``watts_now`` shows
every source.
"""
