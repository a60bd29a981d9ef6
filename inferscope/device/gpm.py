"""GPU performance monitoring of NVIDIA's driver (Hopper and newer): how much of a card works, not only whether any of it does.

Metrics are of the time between two samples (nvml.h, nvmlGpmMetricsGet): the one of this look and the one of the look before. An older card, an
older driver and a MIG instance have none; a metric that the driver refuses is unknown.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Gpm", "Work"]

_MIB: Final = 1 << 20
_METRICS: Final = (
    ("NVML_GPM_METRIC_SM_UTIL", 0.01),
    ("NVML_GPM_METRIC_SM_OCCUPANCY", 0.01),
    ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 0.01),
    ("NVML_GPM_METRIC_DRAM_BW_UTIL", 0.01),
    ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", _MIB),
    ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", _MIB),
)
"""Names in nvml.h in the order of `Work`, and what makes fractions of their percent and bytes of their MiB."""


class Work(NamedTuple):
    """What a card's parts did since the last look; None is unknown."""

    sm_busy: float | None = None
    """Fraction of its multiprocessors that were busy."""
    sm_occupancy: float | None = None
    """Warps that were active, as a fraction of the most that there can be."""
    tensor_busy: float | None = None
    """Fraction of the time in which tensor cores worked."""
    dram_busy: float | None = None
    """Of its memory's bandwidth, as a fraction."""
    pcie_in_bytes_s: float | None = None
    pcie_out_bytes_s: float | None = None


_UNKNOWN: Final = Work()


class Gpm:
    """Samples of the cards; used by the monitor's thread alone.

    Args:
        library: The module `pynvml`.
        ask: Asks one call about one card, and remembers what it never answers: `DriverMonitor._ask`.
    """

    def __init__(self, library: Any, ask: Callable[..., Any]) -> None:
        self._library, self._ask = library, ask
        self._samples: dict[str, list[Any]] = {}
        """By card, the last sample and the one to fill next; empty where the card has none."""

    def look(self, uuid: str) -> Work:
        """What a card did since the last look; unknown at the first one."""
        pair = self._samples.get(uuid)
        if pair is None:
            pair = self._samples[uuid] = self._open(uuid)
            if pair and self._ask(uuid, "nvmlGpmSampleGet", pair[0]) is None:
                self._drop(uuid)
            return _UNKNOWN
        if not pair:
            return _UNKNOWN
        if self._ask(uuid, "nvmlGpmSampleGet", pair[1]) is None:
            return _UNKNOWN
        found = self._metrics(*pair)
        pair.reverse()
        return found

    def _open(self, uuid: str) -> list[Any]:
        """Two samples for a card that has this; none otherwise."""
        support = self._ask(uuid, "nvmlGpmQueryDeviceSupport")
        if support is None or not support.isSupportedDevice:
            return []
        made: list[Any] = []
        with contextlib.suppress(Exception):  # the driver has no memory for it
            made += [self._library.nvmlGpmSampleAlloc(), self._library.nvmlGpmSampleAlloc()]
        return made if len(made) == 2 else []

    def _metrics(self, before: Any, now: Any) -> Work:
        nvml = self._library
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_METRICS)
        asked.sample1, asked.sample2 = before, now
        for index, (name, _) in enumerate(_METRICS):
            asked.metrics[index].metricId = getattr(nvml, name)
        try:
            nvml.nvmlGpmMetricsGet(asked)
        except Exception:  # noqa: BLE001  (unknown this time)
            return _UNKNOWN
        rows = [asked.metrics[index] for index in range(len(_METRICS))]
        return Work(
            *(row.value * scale if row.nvmlReturn == 0 and row.value >= 0 else None for row, (_, scale) in zip(rows, _METRICS, strict=True))
        )

    def _drop(self, uuid: str) -> None:
        for sample in self._samples.get(uuid, ()):
            with contextlib.suppress(Exception):  # a lost card
                self._library.nvmlGpmSampleFree(sample)
        self._samples[uuid] = []

    def close(self) -> None:
        """Give the driver its memory back."""
        for uuid in list(self._samples):
            self._drop(uuid)
        self._samples.clear()
