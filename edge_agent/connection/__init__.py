"""What an agent does over its link: enrol, fetch blobs, send updates, renew its certificate.

The link itself is ``fleet_core.link``; ``edge_agent.rounds`` handles the messages that arrive.
"""
