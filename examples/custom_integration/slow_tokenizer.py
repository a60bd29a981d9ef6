"""Stands for somebody else's library: splits text into tokens, slowly, and knows nothing of inferscope."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["Tokenizer"]

_WORD: Final = re.compile(r"\w+|\S")


class Tokenizer:
    """Numbers words in the order of their first appearance."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Numbers of the tokens of `text`."""
        return [self._known.setdefault(word.lower(), len(self._known)) for word in _WORD.findall(text)]
