"""profiles: what an incident knows of where time went, folded into stacks, as pprof files that any viewer opens.

`write` puts `profiles/<kind>.pb.gz` and `profiles/folded.json` into an incident; the exporter makes OTLP profiles of the latter.
"""

from __future__ import annotations

from inferscope.diagnose.profiles.folded import Folded, fold
from inferscope.diagnose.profiles.pprof import encode
from inferscope.diagnose.profiles.writing import read, write

__all__ = ["Folded", "encode", "fold", "read", "write"]
