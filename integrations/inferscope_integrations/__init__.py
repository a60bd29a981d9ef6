"""Integrations: each module here instruments one library and can take its instrumentation back.

The core never imports this package; it finds the integrations through the entry-point group `inferscope.integrations`.
They never import each other, so that switching one off cannot change another.
"""
