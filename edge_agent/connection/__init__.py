"""What an agent does over its link: enrol, fetch blobs, send updates, renew its certificate.

The link itself is ``fleet_core.link``; what is done with what arrives is ``edge_agent.rounds``.
"""
