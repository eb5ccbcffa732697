"""The agent's loop and the parts that it composes: one round of training on this device.

``agent`` is the loop, ``round_tasks`` does what a round's manifest asks for, once ``manifest_check`` accepted it.
``received_models``, ``device_payload`` and ``graphs`` hold what arrived, ``train_job`` has it trained,
``pending_update`` keeps the update until the aggregator counted it and then commits the device's state (duals,
residuals). ``served_model_update`` personalizes a new served model, ``reports`` tells the aggregator. ``attempts``
keeps what failed, so that it is not tried again at once. ``secure_update`` takes part in a secure sum. Only
``edge_agent.commands`` and the simulation import the agent.
"""
