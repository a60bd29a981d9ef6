"""Every exception that inferscope can raise; all of them derive from `InferscopeError`.

Only lifecycle calls made by the user raise (`configure()`, `capture_now()`, command-line verbs); nothing raises on a request's path.
"""

from __future__ import annotations

__all__ = ["CaptureRefusedError", "ConfigurationError", "EvidenceError", "InferscopeError", "IntegrationUnavailableError"]


class InferscopeError(Exception):
    """Base class of everything that inferscope raises."""


class ConfigurationError(InferscopeError, ValueError):
    """A setting has a value that cannot be used.

    The message names the key, the value and the accepted form.

    Args:
        key: The setting, as the user wrote it.
        value: What was given.
        accepted: The accepted form, in words.
    """

    def __init__(self, key: str, value: object, accepted: str) -> None:
        self.key = key
        self.value = value
        self.accepted = accepted
        super().__init__(f"{key}={value!r} is not usable: {accepted}")

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[str, object, str]]:
        """Pickle by the three arguments, so that the error crosses a process pool."""
        return type(self), (self.key, self.value, self.accepted)


class IntegrationUnavailableError(InferscopeError):
    """An integration was asked for by name and cannot be switched on; the message says why and what to install."""


class CaptureRefusedError(InferscopeError):
    """A capture was asked for and denied; the message names the guard that denied it."""


class EvidenceError(InferscopeError):
    """An incident, trace or ring on disk is damaged, incomplete or from a newer version."""
