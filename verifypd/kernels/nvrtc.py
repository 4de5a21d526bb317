"""CUDA C++ compiled at run time by NVRTC, which comes with torch, and launched by the driver. Knows no kernel.

Nothing is linked and no compiler is needed: both libraries are called by `ctypes`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from verifypd.metrics.pauses import COMPILED, WATCH

DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: nothing was on the device from this thread yet
EARLY_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAP_FLOAT16, MAP_BFLOAT16 = 6, 9  # CU_TENSOR_MAP_DATA_TYPE_
MAP_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
MAP_PROMOTE_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B: bytes that the L2 fetches at once


log = logging.getLogger(__name__)


class NvrtcError(RuntimeError):
    """NVRTC or the driver refused."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: a name, and 64 bytes for its value."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint), ("rest", ctypes.c_uint * 15))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def compiler() -> ctypes.CDLL | None:
    """NVRTC as torch brought it, or as the system has it; None: there is none."""
    major = (torch.version.cuda or "").split(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"]
    spec = find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        names[:0] = sorted(str(path) for path in Path(root).glob(f"*/lib/libnvrtc.so.{major}*"))
    for name in names:
        try:
            for part in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(part))  # it does not look beside itself for them
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def driver() -> ctypes.CDLL | None:
    """The driver; None: there is none, or one that knows no launch attributes."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if hasattr(library, "cuLaunchKernelEx") else None


def compiled(source: bytes, name: str, architecture: str, constants: Mapping[str, int]) -> bytes:
    """Machine code of a source for one architecture, "sm_90" say, with its macros set."""
    library = compiler()
    if library is None:
        raise NvrtcError("NVRTC is not here; install a CUDA build of torch")
    program = ctypes.c_void_p()
    _ask(library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None), "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture={architecture}", "-std=c++17"]
        options += [f"-D{key}={int(value)}" for key, value in constants.items()]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), given):
            log = _read(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise NvrtcError(f"{name} did not compile:\n{log.decode(errors='replace')}")
        return _read(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def loaded(
    source: bytes,
    file: str,
    name: str,
    device: torch.device,
    constants: Mapping[str, int],
    threads: int,
    shared_memory: int,
    features: str = "",
) -> Function:
    """A source's kernel `name`, compiled for a device and loaded on it. features: "a" for what only its chip has."""
    major, minor = torch.cuda.get_device_capability(device)
    with WATCH.timed(COMPILED, f"{name} {dict(constants)}"):
        code = compiled(source, file, f"sm_{major}{minor}{features}", constants)
        with torch.cuda.device(device):
            return Function(code, name, threads, shared_memory)


def works(load: Callable[[], Function], what: str, instead: str = "Triton") -> bool:
    """Whether a kernel can be loaded; if not, the log says whose takes its place."""
    try:
        load()
    except NvrtcError as problem:
        log.warning("%s are not compiled here, %s's take their place: %s", what, instead, problem)
        return False
    return True


def bound(call: Callable[[], int]) -> int:
    """The status of a call to the driver, made again where nothing had bound the device's context to this thread."""
    status = call()
    if status == NO_CONTEXT:
        torch.zeros(1, device="cuda")  # a kernel of torch's binds it
        status = call()
    return status


class Function:
    """A kernel in the current context, whose arguments are structures."""

    def __init__(self, code: bytes, name: str, threads: int, shared_memory: int) -> None:
        cuda = driver()
        if cuda is None:
            raise NvrtcError("the CUDA driver is not here or too old; install one for CUDA 12 or later")
        self._cuda, self._threads, self._shared_memory = cuda, threads, shared_memory
        torch.zeros(1, device="cuda")  # binds the device's context to this thread
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _ask(cuda.cuModuleLoadData(ctypes.byref(self._module), code), "cuModuleLoadData")
        _ask(cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), "cuModuleGetFunction")
        _ask(
            cuda.cuFuncSetAttribute(self._function, DYNAMIC_SHARED_MEMORY, ctypes.c_int(shared_memory)),
            "cuFuncSetAttribute",
        )
        self._early = _Attribute(EARLY_LAUNCH, 0, 1)

    def __call__(self, blocks: int, stream: int, *arguments: ctypes.Structure) -> None:
        """Launch it on a stream; it may begin before the kernel before it is done, and has to wait for it itself."""
        launch = _Launch(
            (blocks, 1, 1), (self._threads, 1, 1), self._shared_memory, stream, ctypes.pointer(self._early), 1
        )
        given = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
        status = bound(lambda: self._cuda.cuLaunchKernelEx(ctypes.byref(launch), self._function, given, None))
        _ask(status, "cuLaunchKernelEx")


class _TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = (("words", ctypes.c_ulonglong * 16),)


def tensor_map(x: Tensor, box: tuple[int, ...]) -> ctypes.Structure:
    """What the copy engine needs to fetch boxes of a tensor of 16-bit floats: of 128 bytes in its last dimension, laid
    out in shared memory as matrix instructions read them. Beyond the tensor there are zeros."""
    assert x.dim() == len(box) and x.stride(-1) == 1
    kind = MAP_FLOAT16 if x.dtype == torch.float16 else MAP_BFLOAT16
    return _encoded(x.data_ptr(), tuple(x.shape), tuple(2 * stride for stride in x.stride()[:-1]), kind, box)


@lru_cache(maxsize=4096)  # it depends on nothing else, and a launch that is not captured waits for it
def _encoded(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: int, box: tuple[int, ...]
) -> _TensorMap:
    """strides: bytes."""
    cuda = driver()
    assert cuda is not None
    room = ctypes.create_string_buffer(256)
    place = -(-ctypes.addressof(room) // 64) * 64
    count = len(shape)
    arguments = (
        ctypes.c_void_p(place),
        ctypes.c_int(kind),
        ctypes.c_uint(count),
        ctypes.c_void_p(address),
        (ctypes.c_ulonglong * count)(*reversed(shape)),
        (ctypes.c_ulonglong * (count - 1))(*reversed(strides)),
        (ctypes.c_uint * count)(*reversed(box)),
        (ctypes.c_uint * count)(*[1] * count),
        ctypes.c_int(0),  # not interleaved
        ctypes.c_int(MAP_SWIZZLE_128),
        ctypes.c_int(MAP_PROMOTE_256),
        ctypes.c_int(0),  # zeros
    )
    _ask(bound(lambda: cuda.cuTensorMapEncodeTiled(*arguments)), "cuTensorMapEncodeTiled")
    return _TensorMap.from_buffer_copy(ctypes.string_at(place, 128))


def _read(size: Callable[..., int], content: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    """What NVRTC holds of a program: its log, or its code."""
    count = ctypes.c_size_t()
    _ask(size(program, ctypes.byref(count)), "NVRTC")
    buffer = ctypes.create_string_buffer(count.value)
    _ask(content(program, buffer), "NVRTC")
    return buffer.raw


def _ask(status: int, what: str) -> None:
    if status:
        raise NvrtcError(f"{what} gave {status}")
