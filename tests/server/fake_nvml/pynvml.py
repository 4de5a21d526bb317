"""Stands in for NVIDIA's library where there is no GPU: one device with GPM, whose figures are fixed.

Only the names, constants and shapes that the library has; everything above it is the real thing.
"""

from __future__ import annotations

from types import SimpleNamespace

NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 3, 10
NVML_GPM_METRICS_GET_VERSION = 1
PERCENT = {NVML_GPM_METRIC_SM_UTIL: 62.0, NVML_GPM_METRIC_SM_OCCUPANCY: 31.0, NVML_GPM_METRIC_DRAM_BW_UTIL: 84.0}
SAMPLES: list[object] = []  # allocated and not freed


class NVMLError(Exception):
    pass


class c_nvmlGpmMetricsGet_t:
    def __init__(self) -> None:
        self.metrics = [SimpleNamespace(metricId=0, value=0.0) for _ in range(98)]
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = None


def nvmlInit() -> None:
    pass


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    if index:
        raise NVMLError("there is one device")
    return index


def nvmlGpmQueryDeviceSupport(handle: int) -> SimpleNamespace:
    return SimpleNamespace(isSupportedDevice=1)


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=97, memory=50)


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=3 << 30, total=8 << 30, free=5 << 30)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 412_000  # mW


def nvmlGpmSampleAlloc() -> object:
    if len(SAMPLES) > 8:
        raise NVMLError("samples are not freed")
    SAMPLES.append(object())
    return SAMPLES[-1]


def nvmlGpmSampleFree(sample: object) -> None:
    SAMPLES.remove(sample)


def nvmlGpmSampleGet(handle: int, sample: object) -> None:
    assert sample in SAMPLES


def nvmlGpmMetricsGet(query: c_nvmlGpmMetricsGet_t) -> None:
    if query.version != NVML_GPM_METRICS_GET_VERSION or None in (query.sample1, query.sample2):
        raise NVMLError("bad query")
    for metric in query.metrics[: query.numMetrics]:
        metric.value = PERCENT[metric.metricId]
