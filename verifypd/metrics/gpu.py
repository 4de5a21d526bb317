"""Reads a GPU through NVML: utilisation, SM occupancy and memory bandwidth (GPM, Hopper and later). Decides nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

LEAST_GAP = 0.1  # s between the two samples a GPM figure is made of


class GpuSampler:
    """One GPU. Each reading covers the time since the one before; what the driver does not offer is left out."""

    def __init__(self, index: int) -> None:
        self._nvml: Any = None
        self._last: Any = None
        self._taken = 0.0
        self._read: dict[str, float] = {}
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._nvml = pynvml
        except Exception as error:  # noqa: BLE001  # no driver, no module, no permission: the server runs without
            log.warning("no GPU figures (%s); pip install 'verifypd[gpu]'", " ".join(str(error).split()))
            return
        self._gpm = self._has_gpm()

    def _has_gpm(self) -> bool:
        try:
            return bool(self._nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice)
        except (self._nvml.NVMLError, AttributeError):
            return False

    def read(self, clock: Callable[[], float]) -> dict[str, float]:
        """The figures; shares lie in 0..1."""
        if self._nvml is None:
            return {}
        now = clock()
        if now - self._taken < LEAST_GAP:
            return self._read
        nvml, handle = self._nvml, self._handle
        found: dict[str, float] = {}
        try:
            found["gpu_utilization"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found["memory_used_bytes"], found["memory_total_bytes"] = float(memory.used), float(memory.total)
            found["power_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            if self._gpm:
                found |= self._gpm_figures()
        except nvml.NVMLError as error:
            log.debug("NVML: %s", error)
        self._taken, self._read = now, found
        return found

    def _gpm_figures(self) -> dict[str, float]:
        nvml = self._nvml
        sample = nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(self._handle, sample)
        last, self._last = self._last, sample
        if last is None:
            return {}
        wanted = {
            "sm_activity": nvml.NVML_GPM_METRIC_SM_UTIL,
            "sm_occupancy": nvml.NVML_GPM_METRIC_SM_OCCUPANCY,
            "dram_bandwidth": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        }
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(wanted)
        query.sample1, query.sample2 = last, sample
        for place, number in enumerate(wanted.values()):
            query.metrics[place].metricId = number
        nvml.nvmlGpmMetricsGet(query)
        nvml.nvmlGpmSampleFree(last)
        return {name: query.metrics[place].value / 100 for place, name in enumerate(wanted)}
