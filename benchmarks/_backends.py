"""Real receivers for tests and benchmarks: found where they are, or unpacked into build/backends; started on 127.0.0.1, ended by whoever started.

VictoriaMetrics comes from BACKEND_VICTORIA_METRICS, the PATH, or Debian's package, which is downloaded and unpacked with an apt state of
its own (the machine's is not touched) from the mirror that the machine itself is configured with. rotel comes from BACKEND_ROTEL, an
installed package, or its wheel. Nothing is downloaded unless `fetch` says so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "backends"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE = "trixie"
_ALONE = {"http_proxy": "", "https_proxy": "", "all_proxy": "", "no_proxy": "*"}


class BackendAbsentError(Exception):
    """A backend cannot be had here; the message says why."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _found(variable, *candidates):
    named = os.environ.get(variable)
    if named:
        if not os.access(named, os.X_OK):
            raise BackendAbsentError(f"{variable}={named} cannot be run")
        return Path(named)
    return next((Path(path) for path in candidates if path and os.access(path, os.X_OK)), None)


def _run(command, deadline, **more):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(deadline - time.monotonic(), 0.1), check=False, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendAbsentError(f"{command[0]}: {type(error).__name__}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise BackendAbsentError(f"{command[0]}: {last}")


def _mirror():
    """The Debian mirror in the machine's own configuration."""
    base = Path("/etc/apt")
    files = [base / "sources.list", *sorted((base / "sources.list.d").glob("*"))] if base.is_dir() else []
    for file in files:
        with contextlib.suppress(OSError):
            match = re.search(r"^(?:URIs:\s*|deb\s+(?:\[[^\]]*\]\s+)?)(\S+/debian/?)(?:\s|$)", file.read_text(), re.MULTILINE)
            if match:
                return match[1].rstrip("/")
    raise BackendAbsentError("apt knows no Debian mirror here")


def victoria_metrics(*, fetch, timeout_s=60.0):
    """Path of the program.

    Raises:
        BackendAbsentError: It is not here, and cannot be unpacked in time.
    """
    unpacked = PLACE / "victoria-metrics" / "usr" / "bin" / "victoria-metrics"
    found = _found("BACKEND_VICTORIA_METRICS", shutil.which("victoria-metrics"), unpacked)
    if found:
        return found
    if not fetch:
        raise BackendAbsentError("victoria-metrics is not here; 'make test-backends' unpacks it")
    if not (shutil.which("apt-get") and shutil.which("dpkg") and KEYRING.exists()):
        raise BackendAbsentError("victoria-metrics is not on the PATH, and this machine has no apt with Debian's keys to unpack it with")
    deadline = time.monotonic() + timeout_s
    PLACE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
        base = Path(scratch)
        for part in ("etc/preferences.d", "state/lists/partial", "cache/archives/partial"):
            (base / part).mkdir(parents=True)
        (base / "etc" / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} {SUITE} main\n")
        (base / "status").touch()
        own = {"Etc": "etc", "Etc::sourceparts": "none", "State": "state", "State::status": "status", "Cache": "cache"}
        options = [word for key, part in own.items() for word in ("-o", f"Dir::{key}={base / part}")]
        options += ["-o", "APT::Sandbox::User=root", "-o", "Acquire::Languages=none"]
        _run(["apt-get", *options, "update"], deadline)
        _run(["apt-get", *options, "download", f"victoria-metrics/{SUITE}"], deadline, cwd=base)
        package = next(base.glob("victoria-metrics*.deb"))
        _run(["dpkg", "-x", str(package), str(base / "files")], deadline)
        with contextlib.suppress(OSError):  # somebody else was quicker
            (base / "files").rename(PLACE / "victoria-metrics")
    return unpacked


def rotel(*, fetch, timeout_s=60.0):
    """Path of the agent.

    Raises:
        BackendAbsentError: It is not here, and its wheel cannot be had in time.
    """
    spec = importlib.util.find_spec("rotel")
    installed = Path(spec.origin).parent / "rotel-agent" if spec is not None and spec.origin else None
    unpacked = PLACE / "rotel" / "rotel" / "rotel-agent"
    found = _found("BACKEND_ROTEL", installed, unpacked)
    if found:
        return found
    if not fetch:
        raise BackendAbsentError("rotel is not here; 'make test-backends' unpacks it")
    deadline = time.monotonic() + timeout_s
    PLACE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
        base = Path(scratch)
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", scratch, "rotel"], deadline)
        with zipfile.ZipFile(next(base.glob("rotel*.whl"))) as wheel:
            wheel.extractall(base / "files")
        (base / "files" / "rotel" / "rotel-agent").chmod(0o755)
        with contextlib.suppress(OSError):
            (base / "files").rename(PLACE / "rotel")
    return unpacked


@contextlib.contextmanager
def running(command, ready, *, timeout_s=15.0):
    """A process until the block ends; `ready()` is asked until it is true."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **_ALONE}
        )
        try:
            until = time.monotonic() + timeout_s
            while not ready():
                if child.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    tail = log.read()[-500:].decode(errors="replace")
                    raise BackendAbsentError(f"{Path(command[0]).name} does not start: {tail}")
                time.sleep(0.05)
            yield child
        finally:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def listens(port):
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class VictoriaMetrics:
    """A database to send to and to ask."""

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        self.otlp = f"{self.url}/opentelemetry"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path, **query):
        with self._opener.open(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return answer.read()

    def healthy(self):
        try:
            return self.get("/health") == b"OK"
        except (OSError, urllib.error.URLError):
            return False

    def query(self, text, *, within_s=10.0):
        """`[(labels, value)]` of an instant query; asked again for a while when empty, because what was written is found a little later."""
        until = time.monotonic() + within_s
        while True:
            self.get("/internal/force_flush")
            found = json.loads(self.get("/api/v1/query", query=text))["data"]["result"]
            if found or time.monotonic() > until:
                return [(each["metric"], float(each["value"][1])) for each in found]
            time.sleep(0.1)

    def series(self, name):
        """How many series a metric has."""
        return len(self.query(f'{{__name__="{name}"}}'))


@contextlib.contextmanager
def serve_victoria_metrics(program, *, relabel=None):
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [program, f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={data}", "-retentionPeriod=2d", "-loggerLevel=ERROR"]
        command += ["-opentelemetry.usePrometheusNaming", "-search.latencyOffset=0s", "-memory.allowedBytes=256MB"]
        command += ["-search.disableCache"] + ([f"-relabelConfig={relabel}"] if relabel else [])
        backend = VictoriaMetrics(port)
        with running(command, backend.healthy):
            yield backend


@contextlib.contextmanager
def serve_rotel(program, to):
    """rotel in front of an OTLP/HTTP receiver at `to`; gives its gRPC and HTTP endpoints."""
    grpc, http = free_port(), free_port()
    command = [program, "start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"]
    command += ["--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", to]
    with running(command, lambda: listens(grpc) and listens(http)):
        yield f"http://127.0.0.1:{grpc}", f"http://127.0.0.1:{http}"
