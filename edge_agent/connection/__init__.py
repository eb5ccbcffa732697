"""What an agent does over its link, which is ``fleet_core.link``; ``edge_agent.rounds`` handles what arrives.

``enrolment`` gets a certificate for a token, ``certificate_renewal`` renews it, ``broker_login`` has the files for TLS.
``blob_download`` fetches models and graphs, ``update_upload`` sends an update. ``alarm_senders`` tells the
user's program or an MQTT topic of an alarm.
"""
