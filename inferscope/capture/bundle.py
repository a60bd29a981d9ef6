"""An incident on disk: artefacts and a chain of manifests that makes every later change of them visible.

    STATE_DIR/<service>/<slot>/incidents/<id>/    directories 0700, files 0600
        breach.json  evidence-*.json  captures/…  diagnosis-<n>.json
        manifest-1.json  manifest-2.json …

Each manifest names its predecessor's SHA-256 and that of every artefact, and carries a digest of itself. The SHA-256 of the last one is
the root hash: whoever has it from elsewhere (it travels in the incident's log event) can tell that nobody rewrote history. New content
takes a new file name; a published artefact never changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture.chain import SAFE_NAME, SCHEMA, digest, encode, hash_file, is_manifest, list_files, manifest_numbers, parse, verify
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferscope.types import Breach

__all__ = ["SCHEMA", "STATES", "Bundle", "list_incidents", "verify", "write_atomic"]

STATES: Final = ("open", "captured", "diagnosed", "closed")


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: owner-only temporary name, fsync, rename, fsync of the directory.

    Raises:
        EvidenceError: It cannot be written (full disk, say); what was there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise EvidenceError(f"{path.name} cannot be written: {error.strerror or type(error).__name__}") from error


class Bundle:
    """An incident's directory, as its one writer sees it.

    Use `create` or `open`. `add_json` and `add_file` collect artefacts, `publish` seals them with the next manifest.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self._head = dict(head)
        self._n = 0
        self._artefacts: dict[str, tuple[int, str]] = {}
        self._published: dict[str, str] = {}
        self.root_hash: str | None = None
        """SHA-256 of the last manifest; None before the first."""
        self.state = "open"

    @classmethod
    def create(
        cls,
        root: Path,
        breach: Breach,
        fingerprint: Mapping[str, Any],
        objective: Mapping[str, Any],
        versions: Mapping[str, str | None] | None = None,
    ) -> Bundle:
        """Make `root/incidents/<breach.id>` with its breach.json; nothing is published yet.

        Args:
            root: The worker's directory, `STATE_DIR/<service>/<slot>`.
            breach: What happened; its id names the directory.
            fingerprint: Machine, interpreter, libraries, settings.
            objective: The objective as JSON types.
            versions: Versions of service, model and libraries. Default none.

        Raises:
            EvidenceError: The id is no file name, the incident exists, or the directory cannot be written.
        """
        if not SAFE_NAME.match(breach.id):
            raise EvidenceError(f"{breach.id!r} cannot name an incident")
        path = root / "incidents" / breach.id
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
            (path / "captures").mkdir(mode=0o700)
        except OSError as error:
            raise EvidenceError(f"incident {breach.id} cannot be written: {error.strerror or type(error).__name__}") from error
        head = {"incident": breach.id, "fingerprint": fingerprint, "objective": objective, "versions": dict(versions or {})}
        bundle = cls(path, head)
        try:
            bundle.add_json("breach.json", asdict(breach))
        except EvidenceError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return bundle

    @classmethod
    def open(cls, path: Path) -> Bundle:
        """Continue an incident after its last manifest.

        Raises:
            EvidenceError: There is no manifest, it is damaged or from a newer version.
        """
        numbers = manifest_numbers(path)
        if not numbers:
            raise EvidenceError(f"{path.name}: no manifest")
        name = f"manifest-{numbers[-1]}.json"
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise EvidenceError(f"{name} cannot be read: {error.strerror}") from error
        manifest = parse(name, content)
        try:
            bundle = cls(path, {key: manifest[key] for key in ("incident", "fingerprint", "objective", "versions")})
            bundle._n = int(manifest["n"])
            bundle.state = str(manifest["state"])
            bundle._artefacts = {str(row["path"]): (int(row["bytes"]), str(row["sha256"])) for row in manifest["artefacts"]}
        except (KeyError, TypeError, ValueError) as error:
            raise EvidenceError(f"{name} is damaged: {error} is missing or wrong") from error
        bundle._published = {row: sha for row, (_, sha) in bundle._artefacts.items()}
        bundle.root_hash = hashlib.sha256(content).hexdigest()
        return bundle

    @property
    def artefacts(self) -> tuple[str, ...]:
        """Paths collected so far, relative to the incident."""
        return tuple(sorted(self._artefacts))

    def add_json(self, name: str, value: Any) -> str:
        """Write `value` as `name` and list it; returns its SHA-256.

        Raises:
            EvidenceError: The name leaves the incident, was published with other content, or the file cannot be written.
        """
        relative = self._relative(Path(name))
        try:
            content = encode(value)
        except (TypeError, ValueError) as error:
            raise EvidenceError(f"{name} cannot be written: {error}") from error
        if self._published.get(relative, hashlib.sha256(content).hexdigest()) != hashlib.sha256(content).hexdigest():
            raise EvidenceError(f"{name} is published already; new content takes a new name")
        write_atomic(self.path / relative, content)
        return self._list(relative)

    def add_file(self, path: Path) -> str:
        """List a file that lies in the incident already; returns its SHA-256.

        Raises:
            EvidenceError: It lies elsewhere, is no regular file, or was published with other content.
        """
        return self._list(self._relative(path))

    def add_rest(self) -> tuple[str, ...]:
        """List every file in the incident that is not yet listed (other workers and the diagnosis write there too); returns them."""
        rest = [name for name in list_files(self.path) if name not in self._artefacts]
        for name in rest:
            self._list(name)
        return tuple(rest)

    def publish(self, state: str) -> str:
        """Seal what was collected with the next manifest and return the root hash.

        Args:
            state: "open", "captured", "diagnosed" or "closed".

        Raises:
            EvidenceError: It cannot be written, or another writer published meanwhile.
        """
        if state not in STATES:
            raise EvidenceError(f"{state!r} is no state of an incident; known are {', '.join(STATES)}")
        name = f"manifest-{self._n + 1}.json"
        if (self.path / name).exists():
            raise EvidenceError(f"{name} exists: another process writes this incident")
        document: dict[str, Any] = {
            **self._head,
            "schema": SCHEMA,
            "n": self._n + 1,
            "previous_sha256": self.root_hash,
            "written_unix_ns": time.time_ns(),
            "state": state,
            "artefacts": [{"path": p, "bytes": size, "sha256": sha} for p, (size, sha) in sorted(self._artefacts.items())],
        }
        document["digest"] = digest(document)
        content = encode(document)
        write_atomic(self.path / name, content)
        self._n += 1
        self.state = state
        self._published = {path: sha for path, (_, sha) in self._artefacts.items()}
        self.root_hash = hashlib.sha256(content).hexdigest()
        return self.root_hash

    def _relative(self, path: Path) -> str:
        if path.is_absolute():
            try:
                path = path.relative_to(self.path)
            except ValueError as error:
                raise EvidenceError(f"{path.name} lies outside the incident") from error
        if not path.parts or not all(SAFE_NAME.match(part) for part in path.parts) or is_manifest(path.as_posix()):
            raise EvidenceError(f"{path.as_posix()!r} cannot name an artefact")
        return path.as_posix()

    def _list(self, relative: str) -> str:
        try:
            size, sha = hash_file(self.path / relative)
        except OSError as error:
            raise EvidenceError(f"{relative} cannot be read: {error.strerror}") from error
        if self._published.get(relative, sha) != sha:
            raise EvidenceError(f"{relative} changed after it was published")
        self._artefacts[relative] = (size, sha)
        return sha


def list_incidents(state_dir: Path) -> list[Path]:
    """Incident directories of every service and worker under `state_dir`, newest first; unreadable places are left out."""
    found = [path for path in state_dir.glob("*/*/incidents/*") if path.is_dir() and SAFE_NAME.match(path.name)]
    return sorted(found, key=lambda path: (path.name, path.as_posix()), reverse=True)
