"""What a machine is made of, as far as it decides how fast a model runs: cards, memory policy, threads. Unknown is None."""

from __future__ import annotations

import hashlib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.host.process import facts

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["cards", "conditions", "machine_parts"]

_THP: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NODES: Final = Path("/sys/devices/system/node")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _open() -> Any:
    """The driver's library, ready; None where there is none."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001  (no package, no driver, no permission: there is nothing to tell)
        return None
    return nvml


def _known(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception:  # noqa: BLE001  (this card or driver does not tell)
        return None


def _card(nvml: Any, handle: Any) -> dict[str, Any]:
    uuid = _known(lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    mig = _known(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0]))
    return {
        "name": _known(lambda: _text(nvml.nvmlDeviceGetName(handle))),
        "uuid_sha256": None if uuid is None else hashlib.sha256(uuid.encode()).hexdigest()[:12],
        "memory_bytes": _known(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
        "application_clock_sm_mhz": _known(lambda: int(nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM))),
        "application_clock_memory_mhz": _known(lambda: int(nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_MEM))),
        "power_limit_mw": _known(lambda: int(nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
        "ecc": _known(lambda: bool(nvml.nvmlDeviceGetEccMode(handle)[0])),
        "mig": mig,
        "persistence": _known(lambda: bool(nvml.nvmlDeviceGetPersistenceMode(handle))),
        "pcie_generation": _known(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))),
        "pcie_width": _known(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
    }


def cards() -> dict[str, Any] | None:
    """Driver and cards; None where there is no driver."""
    nvml = _open()
    if nvml is None:
        return None
    try:
        count = _known(nvml.nvmlDeviceGetCount) or 0
        rows = [_card(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        return {"driver": _known(lambda: _text(nvml.nvmlSystemGetDriverVersion())), "cards": rows}
    finally:
        _known(nvml.nvmlShutdown)


def machine_parts() -> dict[str, Any]:
    """What belongs to the fingerprint and must be equal for a comparison."""
    try:
        thp = _THP.read_text(encoding="ascii")
        huge = thp.partition("[")[2].partition("]")[0] or None
    except OSError:
        huge = None
    nodes = len(list(_NODES.glob("node[0-9]*"))) if _NODES.is_dir() else None
    told = facts()
    return {
        "gpu": cards(),
        "transparent_hugepages": huge,
        "numa_nodes": nodes,
        "threads": {"omp": told["omp_threads"], "torch": told["torch_threads"]},
    }


def conditions() -> dict[str, Any]:
    """What changes by itself and is written down beside a measurement: load, clocks, other programs on the cards."""
    nvml = _open()
    rows: list[dict[str, Any]] = []
    if nvml is not None:
        try:
            for index in range(_known(nvml.nvmlDeviceGetCount) or 0):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                rows.append(_now(nvml, handle))
        finally:
            _known(nvml.nvmlShutdown)
    return {"load_average": [round(each, 2) for each in os.getloadavg()] if hasattr(os, "getloadavg") else None, "cards": rows or None}


def _now(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "clock_sm_mhz": _known(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))),
        "clock_memory_mhz": _known(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))),
        "temperature_c": _known(lambda: int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        "processes": _known(lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))),
    }
