"""What a measurement depends on, and one hash of it.

Names of environment variables are kept, values never: they hold secrets.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from inferscope.host.process import cpu_quota

__all__ = ["digest", "file_sha256", "fingerprint", "settings_hashes", "source"]

_DISTRIBUTIONS: Final = ("inferscope-sdk", "torch", "numpy", "tritonclient", "onnxruntime", "starlette", "uvicorn", "opentelemetry-sdk")
_RELEVANT: Final = (
    "CUDA_",
    "GOMP_",
    "INFERSCOPE_",
    "KMP_",
    "MALLOC_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENBLAS_",
    "OTEL_",
    "PYTHON",
    "PYTORCH_",
    "TORCH",
)


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def _governor() -> str | None:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def fingerprint() -> dict[str, Any]:
    """Interpreter, libraries, processor, limits and names of relevant environment variables of this process."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        "libraries": {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None},
        "machine": platform.machine(),
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_quota": cpu_quota(),
        "governor": _governor(),
        "environment": sorted(name for name in os.environ if name.startswith(_RELEVANT)),
    }
    found["sha256"] = digest(found)
    return found


def settings_hashes() -> dict[str, str]:
    """The beginning of a hash of each relevant environment variable's value, so that a changed setting is seen and not shown.

    Left out: names that tell of a secret, and where evidence and telemetry go, which changes no measurement.
    """
    secret = ("KEY", "TOKEN", "SECRET", "PASSWORD", "HEADERS", "CREDENTIAL")
    beside = ("INFERSCOPE_STATE_DIR", "OTEL_")
    names = (name for name in sorted(os.environ) if name.startswith(_RELEVANT) and not name.startswith(beside))
    return {name: hashlib.sha256(os.environ[name].encode()).hexdigest()[:12] for name in names if not any(part in name for part in secret)}


def file_sha256(path: Path) -> str | None:
    """Hash of a file's content; None when it cannot be read."""
    try:
        with path.open("rb") as file:
            total = hashlib.sha256()
            while chunk := file.read(1 << 20):
                total.update(chunk)
    except OSError:
        return None
    return total.hexdigest()


def source(directory: Path) -> dict[str, Any]:
    """Git commit of a working tree and whether it has uncommitted changes; None for both outside of one."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=directory, capture_output=True, text=True, timeout=10, check=False)  # noqa: S607
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def digest(found: dict[str, Any]) -> str:
    """Hash of a fingerprint's content, without its own hash."""
    content = {key: value for key, value in found.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
