"""Who may speak for the fleet: its certificates, and how a device gets, renews and loses its own.

``create_fleet`` makes a fleet's folder with its keys. ``token_enrolment`` signs for a device that holds a token,
``renewals`` for one whose certificate ends soon. ``fleet_certificates`` makes, completes and revokes.
"""
