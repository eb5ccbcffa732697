"""Keys and certificates of a fleet, how a device gets, renews and loses its own, and the record of who did what.

``create_fleet`` makes a fleet's folder with its keys, ``device_folder`` a device's. ``fleet_certificates`` makes and
revokes certificates with the ``certificate_authority``. ``token_enrolment`` signs for a device that holds a token,
``renewals`` for one whose certificate ends soon. ``audit_log`` keeps what operators asked for and whom the aggregator
let in or refused, in ``audit_files``. ``announce_keys`` tells devices of another signing key,
``authorities`` has the authority and its successor, ``token_authority`` those of the enrolment port.
"""
