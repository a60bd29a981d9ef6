"""report: pure functions from a value to text. Nothing is computed here that the diagnosis does not already say.

`text` for a terminal, `markdown` for a ticket or a pull request, `html` for a file to attach, `document` for machines, `perfetto` for the slowest
requests on a time line, `hgrm` for HdrHistogram's plotter. Each module has one function `render`; `document` has `to_json`.
"""

from __future__ import annotations
