"""Keys and certificates of a fleet, and how a device gets, renews and loses its own.

``create_fleet`` makes a fleet's folder with its keys, ``device_folder`` a device's. ``fleet_certificates`` makes and
revokes certificates with the ``certificate_authority``. ``token_enrolment`` signs for a device that holds a token,
``renewals`` for one whose certificate ends soon.
"""
