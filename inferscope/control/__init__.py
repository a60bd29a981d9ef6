"""On-demand control of a running service: capture, switch, change an objective, look. Nothing here runs on a request's thread.

`Control` is what the runtime builds: `open` a worker's channels, `serve_once` in a loop on one thread, `close`. What may be done is lent
to it as `Operations`; what is asked is data, checked in `protocol`, queued and audited in `desk`. Nothing is ever unpickled or evaluated.
"""

from __future__ import annotations

from inferscope.control.channels import Control, Options
from inferscope.control.protocol import PARTS, Actor, Operations

__all__ = ["PARTS", "Actor", "Control", "Operations", "Options"]
