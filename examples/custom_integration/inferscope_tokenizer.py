"""An integration of one's own: measures a library that inferscope does not know, `slow_tokenizer`, as stage `tokenize`.

It is what a third party would publish. The package announces it under the entry-point group `inferscope.integrations`:

    [project.entry-points."inferscope.integrations"]
    slow_tokenizer = "inferscope_tokenizer:TokenizerIntegration"

and its users write `scope.instrument("slow_tokenizer")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["TokenizerIntegration"]


class TokenizerIntegration(Integration):
    """`Tokenizer.encode` as stage `tokenize`, and the number of tokens as the request's size."""

    name: ClassVar[str] = "slow_tokenizer"
    target: ClassVar[str] = "examples.custom_integration.slow_tokenizer"  # patched when the application imports it, never imported by us

    def patch(self, ledger: Ledger) -> None:
        """Replace `Tokenizer.encode` on the class, so that objects which exist already are measured too."""
        from examples.custom_integration.slow_tokenizer import Tokenizer

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
                if not patch.active:  # another library patched over us and we could not be removed
                    return original(self, *args, **kwargs)
                with recorder().stage("tokenize"):
                    tokens = original(self, *args, **kwargs)
                request = recorder().current()
                if request is not None and request.size is None:
                    request.size = len(tokens)
                return tokens

            return encode

        ledger.replace(Tokenizer, "encode", make)
