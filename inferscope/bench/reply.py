"""HTTP/1.1 answers, read from the bytes of a connection as they come."""

from __future__ import annotations

__all__ = ["ReplyParser"]


class ReplyParser:
    """Reads one HTTP/1.1 answer after another from the bytes of a connection; keeps no body."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._reset()
        self.close_after = False
        """Whether the server closes the connection after this answer."""

    def _reset(self) -> None:
        self._status = 0
        self._left = -1  # body bytes still to come; -1: head not read; -2: until the connection closes
        self._chunked = False

    def feed(self, data: bytes) -> int | None:
        """Takes bytes; returns the status when they complete the answer, else None.

        Raises:
            ValueError: not HTTP.
        """
        self._buffer += data
        if self._left == -1 and not self._head():
            return None
        complete = self._chunks() if self._chunked else self._body()
        return self._finish() if complete else None

    def at_close(self) -> int | None:
        """The status of an answer whose end is the end of the connection, else None."""
        return self._finish() if self._left == -2 else None

    def _finish(self) -> int:
        status = self._status
        self._reset()
        return status

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        version, _, rest = lines[0].partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"not an HTTP/1 answer: {lines[0][:40]!r}")
        self._status = int(rest[:3])
        if 100 <= self._status < 200:
            return self._head()
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(b":") for line in lines[1:])}
        self.close_after = headers.get(b"connection", b"") == b"close" or (version == b"HTTP/1.0" and b"connection" not in headers)
        self._chunked = headers.get(b"transfer-encoding", b"") == b"chunked"
        if self._chunked or self._status in {204, 304}:
            self._left = 0
        else:
            self._left = int(headers.get(b"content-length", b"-2"))
        return True

    def _body(self) -> bool:
        if self._left == -2:
            self._buffer.clear()
            return False
        taken = min(self._left, len(self._buffer))
        del self._buffer[:taken]
        self._left -= taken
        return self._left == 0

    def _chunks(self) -> bool:
        while True:
            line_end = self._buffer.find(b"\r\n")
            if line_end < 0:
                return False
            size = int(bytes(self._buffer[:line_end]).split(b";")[0], 16)
            whole = line_end + 2 + size + 2
            if len(self._buffer) < whole:
                return False
            del self._buffer[:whole]
            if size == 0:
                return True
