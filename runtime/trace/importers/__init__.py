"""Importers: one module per foreign format, recognised by content. ``detect.detect_and_open`` is the way in."""
