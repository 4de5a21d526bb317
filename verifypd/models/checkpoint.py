"""Reads the safetensors of a Hugging Face folder, each tensor straight into its place. Knows the file; no model.

Files are read, not mapped, and converted in chunks: loading never holds much more than the weights in memory. Draft
heads may also come as the pickles of torch, of which nothing but tensors is unpickled.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from verifypd.errors import ModelError

AGAIN = "the download is incomplete; download it again"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
DTYPES["F8_E4M3"] = torch.float8_e4m3fn  # with a scale in another tensor: see models/fp8.py
INTEGERS = {"I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}  # maps of vocabularies; never weights
VOCAB_MAP = "vocab_map"  # token ids, of a head made here
D2T, T2D = "d2t", "t2d"  # of EAGLE-3: id − row of each token it proposes; which tokens those are
MAPS = (VOCAB_MAP, D2T, T2D)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
CHUNK = 1 << 20  # weights converted at a time
MAX_HEADER = 100_000_000  # bytes, the format's own limit


class TensorSource(Protocol):
    """Checkpoint tensors by name (without a leading `model.`), in the order they lie in the file."""

    where: str  # for messages
    shapes: Mapping[str, tuple[int, ...]]

    def chunks(self, name: str) -> Iterator[Tensor]:
        """The rows of the tensor in order, some at a time, on the CPU in a floating dtype of the file's choice."""
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """The tensor converted into `out`, any dtype and device."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsFolder:
    """All tensors of a folder with one safetensors file, or several and an index."""

    def __init__(self, folder: Path, rename: Callable[[str], str] | None = None) -> None:
        """rename: what a tensor is called here, by its name in the file; `canonical` unless given."""
        self.where = str(folder)
        self.entries: dict[str, Entry] = {}
        for path in weight_files(folder):
            for name, entry in read_header(path).items():
                self.entries[(rename or canonical)(name)] = entry
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in self.entries.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        """See TensorSource.chunks."""
        entry = self.entries[name]
        rows = max(1, CHUNK // max(1, prod(entry.shape[1:])))
        with entry.path.open("rb") as file:
            file.seek(entry.offset)
            for start in range(0, entry.shape[0], rows):
                part = torch.empty((min(rows, entry.shape[0] - start), *entry.shape[1:]), dtype=entry.dtype)
                _fill(file, part, entry.path)
                yield part

    def read_into(self, name: str, out: Tensor) -> None:
        """See TensorSource.read_into; no copy is made when dtype and device fit."""
        entry = self.entries[name]
        if out.device.type == "cpu" and out.dtype == entry.dtype and out.is_contiguous():
            with entry.path.open("rb") as file:
                file.seek(entry.offset)
                _fill(file, out, entry.path)
        else:
            copy_chunks(self.chunks(name), out)


class PickledFolder:
    """All tensors of a folder with `pytorch_model.bin`, or several files and an index."""

    def __init__(self, folder: Path, rename: Callable[[str], str]) -> None:
        self.where = str(folder)
        self.tensors: dict[str, Tensor] = {}
        index = folder / PICKLE_INDEX
        for path in _indexed(folder, index, PICKLE) if index.is_file() else [folder / PICKLE]:
            self.tensors |= {rename(name): tensor for name, tensor in _unpickle(path).items()}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(t.shape) for name, t in self.tensors.items()}

    def chunks(self, name: str) -> Iterator[Tensor]:
        """See TensorSource.chunks."""
        tensor = self.tensors[name]
        yield from torch.split(tensor, max(1, CHUNK // max(1, prod(tensor.shape[1:]))))

    def read_into(self, name: str, out: Tensor) -> None:
        """See TensorSource.read_into."""
        out.copy_(self.tensors[name])


def _unpickle(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ModelError(
            f"{path} holds more than tensors, which could run code when loaded, or is damaged: download it again, or"
            " the safetensors version"
        ) from None
    except (FileNotFoundError, PermissionError) as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError):
        raise ModelError(f"{path} is not a whole file of torch: {AGAIN}") from None
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ModelError(f"{path} is not a plain dict of tensors: save the head's state_dict alone")
    return {str(name): tensor for name, tensor in found.items()}


def open_folder(folder: Path, rename: Callable[[str], str]) -> TensorSource:
    """The tensors of a draft head's folder: safetensors where there are any, else pickles."""
    pickled = (folder / PICKLE).is_file() or (folder / PICKLE_INDEX).is_file()
    if pickled and not any(folder.glob("*.safetensors")):
        return PickledFolder(folder, rename)
    return SafetensorsFolder(folder, rename)


def copy_chunks(chunks: Iterator[Tensor], out: Tensor) -> None:
    """Lay chunks of rows one after another into `out`."""
    start = 0
    for part in chunks:
        out[start : start + len(part)].copy_(part)
        start += len(part)


def _fill(file: BufferedReader, out: Tensor, path: Path) -> None:
    if file.readinto(out.reshape(-1).view(torch.uint8).numpy().data) != out.nbytes:
        raise ModelError(f"{path} ends early: {AGAIN}")


def canonical(name: str) -> str:
    """A tensor's name without the prefixes that say which part of a larger model it belongs to."""
    for prefix in ("language_model.model.", "model.language_model.", "language_model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, all of them present."""
    index = folder / INDEX
    if index.is_file():
        return _indexed(folder, index, SINGLE)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if len(files) == 1:
        return files
    if files:
        raise ModelError(f"weights of {folder}: {len(files)} safetensors files and no {INDEX}: {AGAIN}")
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder: give a Hugging Face checkpoint folder, a GGUF file or a model name"
        )
    if list(folder.glob("*.bin")):
        raise ModelError(
            f"weights of {folder} are PyTorch pickles, which can run code when loaded: convert them with transformers'"
            " save_pretrained, or download the safetensors version"
        )
    other = next(iter(sorted(folder.glob("*.gguf"))), None)
    advice = f"give {other} itself" if other is not None else "download the weights, or use --load-format dummy"
    raise ModelError(f"{folder} holds no safetensors file: {advice}")


def _indexed(folder: Path, index: Path, single: str) -> list[Path]:
    """The files an index names, all of them present; or the one that a later save left beside it, without them."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} cannot be read: {AGAIN}") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing == names and (folder / single).is_file():
        return [folder / single]
    if missing:
        raise ModelError(
            f"weights of {folder}: {missing[0]} is missing ({len(missing)} of {len(names)} files): {AGAIN}"
        )
    return [folder / name for name in names]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file in file order; every tensor is known to lie within the file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(8)
            if start.startswith(b"version "):
                raise ModelError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
                raise ModelError(f"{path} is not a whole safetensors file ({size} bytes): {AGAIN}")
            header = json.loads(file.read(length))
        entries = {n: _entry(path, n, e, 8 + length) for n, e in header.items() if n != "__metadata__"}
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}): check the path and its permissions") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{path} has a broken safetensors header: {AGAIN}") from None
    for entry in entries.values():
        if entry.offset + entry.nbytes > size:
            raise ModelError(f"{path} is cut short ({size} of {entry.offset + entry.nbytes} bytes or more): {AGAIN}")
    return dict(sorted(entries.items(), key=lambda item: item[1].offset))


def _entry(path: Path, name: str, raw: Mapping[str, Any], base: int) -> Entry:
    if raw["dtype"] not in DTYPES and not (raw["dtype"] in INTEGERS and canonical(name) in MAPS):
        raise ModelError(
            f"{path}: tensor {name} is stored as {raw['dtype']}; supported: {', '.join(DTYPES)};"
            " use the unquantised checkpoint"
        )
    dtype = (DTYPES | INTEGERS)[raw["dtype"]]
    shape = tuple(int(n) for n in raw["shape"])
    begin, end = (int(n) for n in raw["data_offsets"])
    if begin < 0 or min(shape, default=0) < 0 or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(name)
    return Entry(path, dtype, shape, base + begin, end - begin)
