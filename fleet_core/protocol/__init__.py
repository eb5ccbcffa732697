"""What crosses the wire between a device and the aggregator, apart from the numbers themselves.

``messages`` are the JSON messages, ``topics`` their addresses, ``chunks`` splits blobs and puts them together again.
``signing`` signs manifests, ``certificates`` and ``enrolment_token`` say who a device is, ``cohort`` draws who takes
part in a round. docs/protocol.md describes it. It imports ``base`` only.
"""
