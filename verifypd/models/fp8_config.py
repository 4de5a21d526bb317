"""What a config says of matrices that are stored in fp8. Knows dicts; no tensors and no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifypd.errors import ConfigError

SUPPORTED = "supported: fp8 (e4m3) with scales by tensor, row or block, as quant_method fp8 or compressed-tensors"


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How matrices are stored in fp8."""

    block: tuple[int, int] | None = None  # rows and columns that have one scale; None: the rows of a tensor, or all


def read_format(quantization: Any, where: str) -> Fp8Format | None:
    """From the `quantization_config` of a checkpoint; None: it is not quantised. ConfigError for another format."""
    if not quantization:
        return None
    raw: Mapping[str, Any] = quantization if isinstance(quantization, dict) else {"quant_method": quantization}
    method = raw.get("quant_method")
    if method == "fp8" and raw.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
        return Fp8Format(_block(raw.get("weight_block_size"), where))
    if method == "compressed-tensors":
        groups = raw.get("config_groups")
        weights = [_float8(group) for group in groups.values()] if isinstance(groups, dict) else []
        if raw.get("format") == "float-quantized" and weights and None not in weights:
            blocks = [each.get("block_structure") for each in weights if each and each.get("strategy") == "block"]
            return Fp8Format(_block(blocks[0], where) if blocks else None)
        method = f"compressed-tensors {raw.get('format')}"
    raise ConfigError(
        f"{where}: {method} quantisation is not supported; {SUPPORTED}. Use the unquantised checkpoint (int8 or fp8"
        " weights can be made from it at load time) or a GGUF file"
    )


def _float8(group: Any) -> Mapping[str, Any] | None:
    """How the weights of a group of compressed-tensors are stored; None: not in a way that is known here."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("type") != "float" or weights.get("num_bits") != 8:
        return None
    known = weights.get("strategy") in (None, "tensor", "channel", "block") and weights.get("symmetric", True)
    return weights if known else None


def _block(value: Any, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
        raise ConfigError(f"{where}: blocks of {value!r} with one scale are not known; download the config again")
    return value[0], value[1]
