"""Template of an integration: copy it, put your library where `json` stands, announce it in your distribution's entry points.

[project.entry-points."inferscope.integrations"]
json = "your_package.template:JsonIntegration"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["JsonIntegration"]


class JsonIntegration(Integration):
    """Encoding of JSON as stage `json`."""

    name: ClassVar[str] = "json"  # what instrument("json") takes
    target: ClassVar[str] = "json"  # patch() runs when the application imports it, never before
    distribution: ClassVar[str] = ""  # the distribution whose version is checked; empty: none is
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((0,), None)  # oldest supported, first unsupported
    serves: ClassVar[bool] = False  # True when importing the library means that this program serves: `inferscope run` starts then

    def patch(self, ledger: Ledger) -> None:
        """Replace `JSONEncoder.encode`."""
        import json

        ledger.replace(json.JSONEncoder, "encode", _encoding)


def _encoding(original: Any, patch: Patch) -> Callable[..., Any]:
    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:  # undone under somebody else's patch
            return original(self, *args, **kwargs)
        with recorder().stage("json"):
            return original(self, *args, **kwargs)

    return encode
