"""``metafleet``, the operator's command line. ``start`` is its entry point, ``cli`` declares it; each group of
commands has a file: ``server``, ``keys``, ``lab`` (simulate, compare, advise), ``bundle``, ``backbones``, ``costs``,
``plan``, ``monitoring``, ``doctor``. ``help_texts`` has the sections of ``metafleet --help`` and the examples.

Commands import what they need when they are called, so that ``--help`` is fast. The commands about devices and flashing
are in ``cloud_server.devices``, those that list data sets and boards in ``cloud_server.choices``.
"""
