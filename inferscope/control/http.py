"""The same requests over HTTP on loopback, for those who have a token: off unless a port is set.

    GET  /v1/status  /v1/snapshot  /v1/tickets/ID
    POST /v1/capture  /v1/enable  /v1/disable  /v1/set_slo     body: the arguments as JSON, the ticket's id in `Idempotency-Key`

One request a connection, parsed here: no more of HTTP is needed, and what is not needed cannot be abused.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.control.desk import FLOODED
from inferscope.control.protocol import CHANGES, LINE_BYTES, SCHEMA, Actor, RequestError, check, encode, load, reply
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from inferscope.control.desk import Allowance, Desk
    from inferscope.control.protocol import Request

__all__ = ["TOKEN_NAME", "HttpClient", "listen", "read_token"]

TOKEN_NAME: Final = "control.token"  # noqa: S105  (the name of the file)
_HEAD_BYTES: Final = 8192
_SHORTEST_TOKEN: Final = 16
_REASONS: Final = {
    200: "OK",
    202: "Accepted",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    411: "Length Required",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
}
_LINE: Final = re.compile(rb"(GET|POST|HEAD|PUT|DELETE|OPTIONS|PATCH) (/[!-~]{0,512}) HTTP/1\.[01]\Z")
_FIELD: Final = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\x20-\x7e\t]*?)[ \t]*\Z")
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def _ours(descriptor: int, name: str) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise InferscopeError(f"token file {name} is no regular file")
    if found.st_uid not in {0, os.geteuid()}:
        raise InferscopeError(f"token file {name} belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        raise InferscopeError(f"token file {name} can be read by other users; chmod 600 it")


def _token(text: str, source: str) -> bytes:
    token = text.strip()
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise InferscopeError(f"{source}: a token has at least {_SHORTEST_TOKEN} printable characters without spaces")
    return token.encode("ascii")


def read_token(environ: Mapping[str, str], directory: Path | None, file: Path | None = None) -> bytes:
    """The bearer token: INFERSCOPE_CONTROL_TOKEN, else the file that was named, else one made in the worker's directory.

    Args:
        environ: The environment.
        directory: The worker's own; None when there is none.
        file: What `control_token_file` names; None when nothing does.

    Raises:
        InferscopeError: There is none, or it is not secret.
    """
    if environ.get("INFERSCOPE_CONTROL_TOKEN", "") != "":
        return _token(environ["INFERSCOPE_CONTROL_TOKEN"], "INFERSCOPE_CONTROL_TOKEN")
    named = "" if file is None else str(file)
    if named == "" and directory is None:
        raise InferscopeError("HTTP control needs INFERSCOPE_CONTROL_TOKEN or INFERSCOPE_CONTROL_TOKEN_FILE where no state directory is")
    path = named or str(cast("Path", directory) / TOKEN_NAME)
    # A file that somebody named may be a link (mounted secrets are); ours is not.
    flags = os.O_RDONLY | os.O_CLOEXEC | (0 if named else os.O_NOFOLLOW)
    try:
        if not named:
            with contextlib.suppress(FileExistsError):
                made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(made, "w") as fresh:
                    fresh.write(secrets.token_urlsafe(32) + "\n")
        with os.fdopen(os.open(path, flags), "rb") as held:
            _ours(held.fileno(), path)
            text = held.read(4096).decode("ascii", errors="replace")
    except OSError as error:
        raise InferscopeError(f"token file {path} cannot be read ({error.strerror})") from error
    return _token(text, f"token file {path}")


def listen(host: str, port: int) -> socket.socket:
    """Listen on loopback only.

    Raises:
        InferscopeError: The host is not loopback, or the port is taken.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:
        raise InferscopeError(f"HTTP control: {host!r} is no loopback address; use 127.0.0.1") from error
    if not address.is_loopback:
        raise InferscopeError(f"HTTP control: {host} is not loopback; it listens on this machine only")
    listener = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(address), port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise InferscopeError(f"HTTP control: {address}:{port} cannot be used ({error.strerror})") from error
    return listener


class _Answer(Exception):  # noqa: N818  (it ends the parsing, it is no error)
    def __init__(self, status: int, why: str) -> None:
        self.status, self.why = status, why


class HttpClient:
    """One connection, one request.

    Args:
        desk: Who answers.
        token: What a caller must know.
        failures: How often a wrong token may be tried, over all connections.
        address: The caller's, for the audit trail.
    """

    def __init__(self, desk: Desk, token: bytes, failures: Allowance, address: str) -> None:
        self._desk, self._failures = desk, failures
        self._token = hashlib.sha256(token).digest()
        self._actor = Actor("http", peer=address)
        self._inbox = bytearray()
        self._head: tuple[str, str, dict[str, str], int] | None = None
        self.closing = False

    @property
    def pending(self) -> bool:
        """A connection without a request is a request that has not come yet."""
        return True

    def receive(self, data: bytes) -> None:
        """Take what arrived."""
        self._inbox += data

    def answer(self) -> bytes | None:
        """Answer when the request is complete, or wrong beyond repair."""
        try:
            found = self._request()
        except _Answer as refusal:
            return self._end(refusal.status, reply(None, None, "denied", why=refusal.why))
        except RequestError as error:
            return self._end(400, self._desk.malformed(error.why, error.id, error.op))
        if found is None:
            return None
        answer = self._desk.submit(found, self._actor)
        return self._end(_status(answer), answer)

    def _request(self) -> Request | None:
        if self._head is None:
            end = self._inbox.find(b"\r\n\r\n", 0, _HEAD_BYTES)
            if end < 0:
                if len(self._inbox) >= _HEAD_BYTES:
                    raise _Answer(431, f"headers are at most {_HEAD_BYTES} bytes")
                return None
            head, self._inbox = bytes(self._inbox[:end]), self._inbox[end + 4 :]
            self._head = self._parse_head(head)
        method, path, fields, length = self._head
        if len(self._inbox) < length:
            return None
        return check(_message(method, path, fields, bytes(self._inbox[:length])))

    def _parse_head(self, head: bytes) -> tuple[str, str, dict[str, str], int]:
        first, *rest = head.split(b"\r\n")
        line = _LINE.match(first)
        matches = [_FIELD.match(row) for row in rest]
        if line is None or not all(matches):
            raise _Answer(400, "not an HTTP/1.1 request")
        pairs = [(match[1].decode("ascii").lower(), match[2].decode("ascii")) for match in matches if match is not None]
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise _Answer(400, "a header occurs twice")
        self._admit(fields)
        return line[1].decode("ascii"), line[2].decode("ascii"), fields, _length(line[1], fields)

    def _admit(self, fields: Mapping[str, str]) -> None:
        # A page in the operator's browser can reach loopback: it is known by its origin, or by the name it was resolved from.
        if "origin" in fields or re.sub(r":[0-9]+\Z", "", fields.get("host", "localhost")).lower() not in _LOCAL_NAMES:
            raise _Answer(403, "only callers on this machine, not web pages")
        if not self._failures.left:
            raise _Answer(429, "too many wrong tokens; wait a second")
        scheme, _, given = fields.get("authorization", "").partition(" ")
        # Digests have one length: how long the comparison takes says nothing about the token.
        right = hmac.compare_digest(hashlib.sha256(given.strip().encode("ascii")).digest(), self._token)
        if scheme.lower() != "bearer" or not right:
            self._failures.take()
            self._desk.counts["unauthorised"] += 1
            raise _Answer(401, "a bearer token is needed: Authorization: Bearer TOKEN")

    def _end(self, status: int, answer: Mapping[str, Any]) -> bytes:
        self.closing = True
        self._inbox.clear()
        body = encode(answer)
        extra = {401: "WWW-Authenticate: Bearer\r\n", 405: "Allow: GET, POST\r\n", 429: "Retry-After: 1\r\n"}.get(status, "")
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Cache-Control: no-store\r\nConnection: close\r\n{extra}\r\n"
        )
        return head.encode("ascii") + body


def _length(method: bytes, fields: Mapping[str, str]) -> int:
    if "transfer-encoding" in fields:
        raise _Answer(411, "send a Content-Length instead of chunks")
    text = fields.get("content-length", "0" if method == b"GET" else "")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise _Answer(411, "a Content-Length is needed")
    if int(text) > LINE_BYTES:
        raise _Answer(413, f"a body is at most {LINE_BYTES} bytes")
    return int(text)


def _message(method: str, path: str, fields: Mapping[str, str], body: bytes) -> dict[str, Any]:
    """The request that the protocol knows for a method, a path and a body."""
    if method not in {"GET", "POST"}:
        raise _Answer(405, "GET or POST")
    word, _, rest = path.removeprefix("/v1/").partition("/")
    id_ = fields.get("idempotency-key") or f"http-{secrets.token_hex(8)}"
    base = {"schema": SCHEMA, "id": id_}
    if not path.startswith("/v1/"):
        raise _Answer(404, "paths begin with /v1/")
    if word == "tickets" and rest:
        return {**base, "op": "ticket", "args": {"id": rest}} if method == "GET" else _wrong_method("GET")
    if rest or word not in {"status", "snapshot", *CHANGES}:
        raise _Answer(404, "known are /v1/status, /v1/snapshot, /v1/tickets/ID and /v1/" + ", /v1/".join(CHANGES))
    if word not in CHANGES:
        return {**base, "op": word, "args": {}} if method == "GET" else _wrong_method("GET")
    if method != "POST":
        return _wrong_method("POST")
    try:
        args = load(body) if body.strip() else {}
    except RequestError as error:
        raise RequestError(f"the body is the arguments: {error.why}", None, word) from error
    return {**base, "op": word, "args": args}


def _wrong_method(method: str) -> dict[str, Any]:
    raise _Answer(405, f"use {method}")


def _status(answer: Mapping[str, Any]) -> int:
    if answer["state"] == "queued":
        return 202
    if answer["state"] == "done":
        return 200
    if answer["op"] == "ticket":
        return 404
    return 429 if answer["why"] == FLOODED else 409
