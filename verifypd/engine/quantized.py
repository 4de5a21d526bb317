"""Which weights are kept in eight bits: what settings ask for, what checkpoints hold. Knows no tensors."""

from __future__ import annotations

import logging
from typing import cast

import torch

from verifypd.config import EngineConfig
from verifypd.errors import ConfigError
from verifypd.kernels.base import Kernels
from verifypd.kernels.weights import Quantization
from verifypd.models.config import ModelConfig, ModelSource

log = logging.getLogger(__name__)


def verifier_quantization(config: EngineConfig) -> Quantization | None:
    """What the verifier's linear layers are rounded to at load."""
    return cast(Quantization | None, config.quantization)


def draft_quantization(config: EngineConfig, kernels: Kernels) -> Quantization | None:
    """The same of the draft; no output's distribution depends on it. auto: where steps are quicker."""
    if config.draft_quantization == "auto":
        return "int8" if kernels.name == "native" else verifier_quantization(config)
    return None if config.draft_quantization == "none" else cast(Quantization, config.draft_quantization)


def kept_in(shape: ModelConfig, quantization: Quantization | None, device: torch.device) -> Quantization | None:
    """What linear layers are held in: what is asked for, or what they are stored in; on a CPU fp8 is widened."""
    stored = shape.fp8 is not None and shape.fp8.block is None
    form = quantization or ("fp8" if stored else None)
    return None if form == "fp8" and device.type == "cpu" else form


def check_verifier(config: EngineConfig, source: ModelSource, device: torch.device) -> None:
    """Refuse to round twice; say what fp8 does not bring on a CPU."""
    if config.quantization == "int8" and source.config.fp8 is not None:
        raise ConfigError(f"{source.name} is stored in fp8: leave out --quantization int8, which would round it again")
    if device.type == "cpu" and (config.quantization == "fp8" or source.config.fp8 is not None):
        log.warning("%s: a CPU does not multiply fp8; weights are rounded to it and widened again", source.name)
