"""``metafleet console``: a web page that shows a fleet and sends it requests (docs/console.md).

``serve`` starts the server, ``app`` has its addresses, ``guard`` says who may use them. ``fleet_view`` reads the ledger
into small values, ``live`` keeps them and sends what changed. ``round_words`` explains a round, ``device_view`` shows
one device, ``events`` makes the log. ``actions`` ask the aggregator, through the functions of the command line, and the
audit log keeps who asked what. ``page`` is what the browser gets.
"""
