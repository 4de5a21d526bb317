"""Tokens embedded and normed in one launch. Knows launches; nothing of models."""

from __future__ import annotations

import torch
from torch import Tensor

from verifypd.kernels.launch import launch_early
from verifypd.kernels.tiles import power_of_two, row_warps
from verifypd.kernels.triton_embeddings import embed_beside_rows, embed_norm_rows


def embed_norm(
    ids: Tensor, table: Tensor, scale: float | None, weight: Tensor, eps: float, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """See Kernels.embed_norm."""
    rows, width = len(ids), table.shape[1]
    out, stream = (torch.empty(rows, width, dtype=table.dtype, device=table.device) for _ in range(2))
    if rows:
        embed_norm_rows[(rows,)](
            ids.contiguous(),
            table,
            weight,
            stream,
            out,
            _factor(scale),
            eps,
            UNIT=unit_offset,
            **_constants(table, scale),
        )
    return out, stream


def embed_beside(
    ids: Tensor,
    table: Tensor,
    scale: float | None,
    features: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See Kernels.embed_beside."""
    rows, width = features.shape
    features = features if features.stride(1) == 1 else features.contiguous()
    out = torch.empty(rows, 2 * width, dtype=table.dtype, device=table.device)
    kept = features if norms is None else torch.empty(rows, width, dtype=table.dtype, device=table.device)
    weight, features_weight = norms or (table, table)  # not read
    if rows:
        embed_beside_rows[(rows, 2)](
            ids.contiguous(),
            table,
            weight,
            features,
            features_weight,
            out,
            kept,
            features.stride(0),
            _factor(scale),
            eps,
            NORMED=norms is not None,
            **_constants(table, scale),
        )
    return out, kept


def _factor(scale: float | None) -> float:
    return 1.0 if scale is None else scale  # not read


def _constants(table: Tensor, scale: float | None) -> dict[str, int]:
    """Compile-time constants and options that both have."""
    width = table.shape[1]
    return {
        "WIDTH": width,
        "BLOCK": power_of_two(width),
        "SCALED": scale is not None,
        "num_warps": row_warps(width),
        **launch_early(table.device),
    }
