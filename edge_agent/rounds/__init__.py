"""The agent's loop and the parts that it composes: one round of training on this device.

``agent`` is the loop. ``received_models`` and ``graphs`` hold what arrived, ``train_job`` has it trained,
``pending_update`` keeps the update until the aggregator counted it and then commits the device's state (duals,
residuals). ``reports`` tells the aggregator. Only ``edge_agent.commands`` and the simulation import the agent.
"""
