"""`inferscope ship`: carry finished incidents away, verified, oldest first: what a sidecar runs.

To a directory they go in the layout of a state directory, so that every other verb reads them there. To a URL each is posted as one tar,
with its id and root hash in headers. An incident that arrived once under a root hash is not sent again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.capture.bundle import Bundle, list_incidents, verify, write_atomic
from inferscope.capture.chain import SAFE_NAME, hash_file, manifest_numbers
from inferscope.cli.asking import whole
from inferscope.cli.completing import add_profiles
from inferscope.cli.output import emit, state_argument, state_dir
from inferscope.errors import EvidenceError, InferscopeError
from inferscope.pod import safe_name

if TYPE_CHECKING:
    from collections.abc import Iterable

HELP = "Carry finished incidents to a directory or an HTTP address, verified, oldest first. Exit status 1 when one could not be carried."

SETTLED_S: Final = 900
"""An incident that was never closed (its process died) counts as finished when its last manifest is older than this."""
_TIMEOUT_S: Final = 30.0


def _target(text: str) -> str:
    scheme, separator, _ = text.partition("://")
    if separator and scheme.lower() not in {"http", "https"}:
        raise argparse.ArgumentTypeError(f"{text}: a directory, or an http:// or https:// address")
    if not text.strip():
        raise argparse.ArgumentTypeError("a directory, or an http:// or https:// address")
    return text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument(
        "--to", required=True, type=_target, metavar="DIR|URL", help="where to; a bearer token for a URL is read from INFERSCOPE_SHIP_TOKEN"
    )
    parser.add_argument("--service", help="only this service's")
    parser.add_argument("--every", type=whole(1, 86_400), metavar="SECONDS", help="go on, and look again this often (default: once)")


def is_finished(path: Path, now_s: float) -> bool:
    """Whether nothing will be added to an incident any more, or not for a long time."""
    try:
        bundle = Bundle.open(path)
        newest = (path / f"manifest-{manifest_numbers(path)[-1]}.json").stat().st_mtime
    except (EvidenceError, OSError, IndexError):
        return False
    return bundle.state == "closed" or now_s - newest > SETTLED_S


def stage(source: Path, into: Path) -> tuple[str, int]:
    """Copy an incident, file by file as its last manifest lists them.

    Args:
        source: The incident.
        into: A new directory; removed again when the copy is not intact.

    Returns:
        The root hash of the copy, and how many files in no manifest were left behind (a process that died left some).

    Raises:
        EvidenceError: The source or the copy is not intact.
    """
    problems = verify(source)
    strays = [problem for problem in problems if problem.endswith(" is in no manifest")]
    broken = [problem for problem in problems if problem not in strays]
    if broken:
        raise EvidenceError(f"{source.name} is not intact: {broken[0]}")
    bundle = Bundle.open(source)
    names = [*bundle.artefacts, *(f"manifest-{n}.json" for n in manifest_numbers(source))]
    try:
        into.mkdir(mode=0o700, parents=True)
        for name in names:
            _copy(source / name, into / name)
        problems = verify(into, bundle.root_hash)
    except OSError as error:
        problems = [error.strerror or type(error).__name__]
    if problems:
        shutil.rmtree(into, ignore_errors=True)
        raise EvidenceError(f"the copy of {source.name} is not intact: {problems[0]}")
    return str(bundle.root_hash), len(strays)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(reading, "rb") as file:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(writing, "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())


def _root(path: Path) -> str | None:
    try:
        return hash_file(path / f"manifest-{manifest_numbers(path)[-1]}.json")[1]
    except (EvidenceError, OSError, IndexError):
        return None


class ToDirectory:
    """Carries into a directory laid out like a state directory."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def _place(self, source: Path) -> Path:
        slot = source.parent.parent
        return self._target / slot.parent.name / slot.name / "incidents" / source.name

    def has(self, source: Path, root: str) -> bool:
        """Whether that incident lies there already, whole."""
        place = self._place(source)
        return _root(place) == root and not verify(place, root)

    def carry(self, source: Path) -> tuple[str, int]:
        """Copy it beside its place, then put it there in one step; returns what `stage` does.

        Raises:
            EvidenceError: It is not intact, or what lies there is no earlier state of it.
        """
        place = self._place(source)
        if _root(place) is not None:
            _check_earlier(place, source)
        beside = place.parent / f".{place.name}.{os.getpid()}.tmp"
        shutil.rmtree(beside, ignore_errors=True)
        root, left = stage(source, beside)
        try:
            old = beside.with_suffix(".old")
            shutil.rmtree(old, ignore_errors=True)
            if place.exists():
                place.rename(old)
            beside.rename(place)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            raise EvidenceError(f"{source.name} cannot be put in place: {error.strerror}") from error
        return root, left


def _check_earlier(there: Path, here: Path) -> None:
    """What was carried before may only be continued, never replaced by another history."""
    for n in manifest_numbers(there):
        name = f"manifest-{n}.json"
        try:
            same = hash_file(there / name) == hash_file(here / name)
        except OSError:
            same = False
        if not same:
            raise EvidenceError(f"{here.name}: another history of it lies at the target ({name} differs); it is left as it is")


class ToUrl:
    """Posts tars; what arrived is remembered under the state directory.

    Args:
        url: Where to.
        state: The state directory.
        token: Bearer token; None sends none.
    """

    def __init__(self, url: str, state: Path, token: str | None) -> None:
        self._url, self._token = url, token
        self._ledger = state / ".shipped" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
        self._sent = self._read()

    def _read(self) -> dict[str, str]:
        try:
            held: Any = json.loads(self._ledger.read_bytes())
        except (OSError, ValueError):
            return {}
        return {key: str(value) for key, value in cast("dict[str, object]", held).items()} if isinstance(held, dict) else {}

    def has(self, source: Path, root: str) -> bool:
        """Whether it was accepted before."""
        return self._sent.get(_key(source)) == root

    def carry(self, source: Path) -> tuple[str, int]:
        """Post one; returns what `stage` does.

        Raises:
            EvidenceError: It is not intact.
            InferscopeError: It was not accepted.
        """
        with tempfile.TemporaryDirectory(prefix="inferscope-ship-") as scratch:
            copy = Path(scratch) / source.name
            root, left = stage(source, copy)
            tar = Path(scratch) / "incident.tar"
            with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
                archive.add(copy, arcname=source.name, filter=_anonymous)
            self._post(source, root, tar)
        self._sent[_key(source)] = root
        self._remember()
        return root, left

    def _post(self, source: Path, root: str, tar: Path) -> None:
        import urllib3

        headers = {
            "Content-Type": "application/x-tar",
            "Content-Length": str(tar.stat().st_size),
            "Idempotency-Key": f"{source.name}-{root}",
            "X-Inferscope-Incident": source.name,
            "X-Inferscope-Root-Sha256": root,
            "X-Inferscope-Service": source.parent.parent.parent.name,
            "X-Inferscope-Slot": source.parent.parent.name,
            **({"Authorization": f"Bearer {self._token}"} if self._token else {}),
        }
        try:
            with tar.open("rb") as body, urllib3.PoolManager() as pool:
                answer = pool.request("POST", self._url, body=body, headers=headers, timeout=_TIMEOUT_S, retries=False, redirect=False)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise InferscopeError(f"{source.name} was not sent: {type(error).__name__}") from error
        if not (200 <= answer.status < 300 or answer.status == 409):  # 409: it has that key already
            raise InferscopeError(f"{source.name} was not accepted: HTTP {answer.status}")

    def _remember(self) -> None:
        try:
            self._ledger.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomic(self._ledger, json.dumps(self._sent, indent=1, sort_keys=True).encode())
        except (OSError, EvidenceError):
            # A read-only mount: the receiver has the idempotency key.
            pass


def _key(source: Path) -> str:
    slot = source.parent.parent
    return f"{slot.parent.name}/{slot.name}/{source.name}"


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def ship(sources: Iterable[Path], target: ToDirectory | ToUrl) -> list[dict[str, Any]]:
    """Carry each that is not there yet, in that order; one that fails does not hold up the others."""
    rows: list[dict[str, Any]] = []
    for source in sources:
        add_profiles(source)  # before its root hash is read: the service may have left that to us
        row: dict[str, Any] = {
            "incident": source.name,
            "path": str(source),
            "root_sha256": _root(source),
            "result": "there already",
            "why": None,
        }
        try:
            if row["root_sha256"] is None or not target.has(source, row["root_sha256"]):
                row["root_sha256"], left = target.carry(source)
                row |= {"result": "carried", "why": f"{left} files in no manifest were left behind" if left else None}
        except InferscopeError as error:
            row |= {"result": "failed", "why": str(error)}
        rows.append(row)
    return rows


def _finished(root: Path, service: str | None) -> list[Path]:
    now = time.time()
    wanted = None if service is None else safe_name(service)
    found = [path for path in list_incidents(root) if wanted in {None, path.parent.parent.parent.name} and SAFE_NAME.match(path.name)]
    return [path for path in reversed(found) if is_finished(path, now)]


def run(options: argparse.Namespace) -> int:
    """Carry what is finished; with `--every`, until interrupted."""
    root = state_dir(options)
    is_url = "://" in options.to
    if not is_url and Path(options.to).resolve() == root.resolve():
        raise InferscopeError(f"--to {options.to}: that is the state directory itself")
    target = ToUrl(options.to, root, os.environ.get("INFERSCOPE_SHIP_TOKEN") or None) if is_url else ToDirectory(Path(options.to))
    while True:
        rows = ship(_finished(root, options.service), target)
        failed = [row for row in rows if row["result"] == "failed"]
        lines = [f"{row['incident']}: {row['result']}{': ' + row['why'] if row['why'] else ''}" for row in rows]
        if options.every is None:
            emit(options, {"to": options.to, "incidents": rows}, "\n".join(lines) or "no finished incident")
            return 1 if failed else 0
        if any(row["result"] != "there already" for row in rows):
            emit(options, {"to": options.to, "incidents": rows}, "\n".join(line for line in lines if not line.endswith("there already")))
            with contextlib.suppress(OSError):
                sys.stdout.flush()
        time.sleep(options.every)
