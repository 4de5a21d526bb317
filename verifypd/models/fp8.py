"""Reads checkpoints with matrices in fp8. Knows their names and scales; nothing of what becomes of them.

A matrix `NAME.weight` has its scale beside it, as `NAME.weight_scale` or, of other makers, `NAME.weight_scale_inv`:
both are multiplied with. The scale's shape says what it is of: the whole matrix, its rows or blocks. What was not
quantised is stored as ever. Scales of activations are not needed, for rows are scaled by what they hold when they come.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from verifypd.errors import ModelError
from verifypd.kernels.weights import FP8
from verifypd.models.checkpoint import SafetensorsFolder, TensorSource, copy_chunks
from verifypd.models.fp8_config import Fp8Format

log = logging.getLogger(__name__)

SCALES = (".weight_scale", ".weight_scale_inv")
UNUSED = (".input_scale", ".activation_scale", ".act_scale", ".q_scale", ".prob_scale", "_zero_point")
# scales of keys and values, under all the names they were given
KV_SCALE = re.compile(
    r"layers\.(\d+)\.self_attn\.(?:(?:attn\.|[kv]_proj\.|qkv_proj\.)?(k|v|kv)_scale|(k|v)_proj\.output_scale)$"
)


class Fp8Folder:
    """The tensors of a folder with some in fp8: read as any other they come widened, by `stored_chunks` as they are."""

    def __init__(self, folder: SafetensorsFolder, block: tuple[int, int] | None) -> None:
        self.where = folder.where
        self._folder = folder
        self._block = block or (1, 1)
        self._scales = {f"{n.removesuffix(end)}.weight": n for n in folder.shapes for end in SCALES if n.endswith(end)}
        aside = {name for name in folder.shapes if KV_SCALE.search(name) or name.endswith(UNUSED)}
        aside |= set(self._scales.values())
        self.shapes: Mapping[str, tuple[int, ...]] = {n: shape for n, shape in folder.shapes.items() if n not in aside}
        self._fp8 = frozenset(name for name in self.shapes if folder.entries[name].dtype == FP8)
        scaled = [name for name in self._fp8 if name in self._scales]  # others may be of a part that is not loaded
        for name in scaled:
            self._check(name)
        self.stored = frozenset(name for name in scaled if self._by_row(name))
        if len(self.stored) < len(scaled):
            log.warning(
                "%s: %d matrices in fp8 have scales by block and are widened as they are read; --quantization fp8"
                " rounds them to fp8 again, with a scale for each row",
                self.where,
                len(scaled) - len(self.stored),
            )

    def _check(self, name: str) -> None:
        where, scale = f"weights of {self.where}", self._scales.get(name)
        if scale is None or len(self.shapes[name]) != 2:
            wrong = "without a scale beside it" if scale is None else f"with shape {self.shapes[name]}"
            raise ModelError(f"{where}: tensor {name} is stored as F8_E4M3 {wrong}: use the unquantised checkpoint")
        (outputs, columns), (height, width) = self.shapes[name], self._block
        if not self._by_row(name) and self._folder.shapes[scale] != (-(-outputs // height), -(-columns // width)):
            raise ModelError(
                f"{where}: {scale} has shape {self._folder.shapes[scale]}: neither one scale, nor one for each row, nor"
                " for the blocks that the config names: download it again"
            )

    def _by_row(self, name: str) -> bool:
        """Whether each row has one scale, be it the same for all."""
        shape, rows = self._folder.shapes[self._scales[name]], self.shapes[name][0]
        return prod(shape) == 1 or shape in ((rows,), (rows, 1))

    def scale(self, name: str) -> Tensor:
        """What the rows of a stored matrix are multiplied by, float32 [rows]."""
        return self._read(self._scales[name]).flatten().expand(self.shapes[name][0])

    def stored_chunks(self, name: str) -> Iterator[Tensor]:
        """As `chunks`, of a stored matrix, in fp8."""
        return self._folder.chunks(name)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """See TensorSource.chunks."""
        factor, start = self._factor(name) if name in self._fp8 else None, 0
        for chunk in self._folder.chunks(name):
            yield chunk if factor is None else chunk.float() * factor(torch.arange(start, start + len(chunk)))
            start += len(chunk)

    def _factor(self, name: str) -> Callable[[Tensor], Tensor]:
        """Rows -> what they are multiplied by, [rows, columns or 1]."""
        self._check(name)
        if name in self.stored:
            scale = self.scale(name)[:, None]
            return lambda rows: scale[rows]
        height, width = self._block
        wide = self._read(self._scales[name]).repeat_interleave(width, 1)[:, : self.shapes[name][1]]
        return lambda rows: wide[rows // height]

    def read_into(self, name: str, out: Tensor) -> None:
        """See TensorSource.read_into."""
        if name in self._fp8:
            copy_chunks(self.chunks(name), out)
        else:
            self._folder.read_into(name, out)

    def _read(self, name: str) -> Tensor:
        """A small tensor in float32."""
        entry = self._folder.entries[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self._folder.read_into(name, out)
        return out.float()


def scaled(tensors: TensorSource, form: Fp8Format | None) -> TensorSource:
    """The same tensors, those in fp8 with their scales on them. form: what the config says of them."""
    if not isinstance(tensors, SafetensorsFolder):
        return tensors
    stored = any(entry.dtype == FP8 for entry in tensors.entries.values())
    return Fp8Folder(tensors, form.block if form else None) if stored or form else tensors
