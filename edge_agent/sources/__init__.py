"""Sources: sensors whose readings become the device's samples, without a program by the user. docs/sources.md

``interface`` is what a source is. ``text_lines`` reads lines of text, for ``command``, ``serial_port`` and ``topic``;
``folder`` takes files, ``microphone`` sound, ``camera`` images, ``iio`` sensors of the kernel. ``buttons`` label the
last sample. ``run_sources`` runs them all beside the agent and stores what they give, ``try_sources`` shows it.
"""
