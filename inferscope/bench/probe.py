"""Single questions to a service: does it answer, and what does it answer to the golden inputs?"""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from inferscope.bench.targets import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["answers", "ask"]


def ask(url: str, body: bytes | None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body of one GET, or of one POST when there is a body.

    Raises:
        ServiceError: nobody answers there, it takes longer than `timeout_s`, or the answer is not HTTP.
    """
    parts = urlsplit(url)
    try:
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    except (ValueError, http.client.InvalidURL) as error:
        raise ServiceError(f"{url} is no address: {error}") from error
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request(
            "GET" if body is None else "POST", target, body, {"Content-Type": "application/json"} if body is not None else {}
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    except TimeoutError:
        raise ServiceError(f"{url} did not answer within {timeout_s:g} s") from None
    except http.client.HTTPException as error:
        raise ServiceError(f"{url} answered something that is not HTTP ({type(error).__name__})") from error
    except OSError as error:
        raise ServiceError(f"{url} cannot be reached: {error.strerror or error}") from error
    finally:
        connection.close()


def answers(url: str, bodies: Sequence[bytes], timeout_s: float = 10.0) -> list[Any]:
    """The answers to each body (to one GET when there are none) as JSON values; what is no JSON stays text.

    Raises:
        ServiceError: one is not answered, or with an error status.
    """
    found: list[Any] = []
    for index, body in enumerate(bodies or [None]):
        status, content = ask(url, body, timeout_s)
        if not 200 <= status < 300:
            raise ServiceError(f"{url} answers {status} to input {index}, so its outputs cannot be checked")
        try:
            found.append(json.loads(content))
        except ValueError:
            found.append(content.decode("utf-8", errors="replace"))
    return found
