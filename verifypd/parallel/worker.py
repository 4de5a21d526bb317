"""The process of a rank but the first: loads its shard, then takes part in every pass until rank 0 hangs up.

Started as `python -m verifypd.parallel.worker FD` with a line to rank 0. Knows models; nothing of requests.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from verifypd.attention.base import AttentionBackend
from verifypd.attention.choose import backend
from verifypd.errors import VerifyPDError
from verifypd.kernels.choose import select as select_kernels
from verifypd.kv.pool import KVCache
from verifypd.models.base import Model
from verifypd.models.loader import load_model
from verifypd.parallel.group import Group, Job, Pass, receive_layout
from verifypd.runtime.faults import out_of_memory
from verifypd.runtime.runner import cache_of

log = logging.getLogger(__name__)


def load(job: Job, group: Group) -> Model:
    """The shard of a rank."""
    return load_model(
        job.source,
        dtype=job.dtype,
        device=job.device,
        kernels=select_kernels(job.device, job.kernels, batch_invariant=job.batch_invariant),
        load_format=job.load_format,
        quantization=job.quantization,
        max_model_len=job.max_model_len,
        shard=job.shard,
        reduce=group.sum,
    )


def follow(
    model: Model, attention: AttentionBackend, cache: KVCache, group: Group, receive: Callable[[], Pass | None]
) -> None:
    """Take part in passes until there are no more; where the cache is in e4m3, the first is the one it is scaled by:
    see ModelRunner.calibrate."""
    if cache.scales is not None and (told := receive()) is not None:
        wide = cache_of(model, told.width + 1, cache.block_size)
        take_part(model, attention, wide, group, told)
        cache.take_scales(wide.fitting_scales())
    while (told := receive()) is not None:
        take_part(model, attention, cache, group, told)


@torch.inference_mode()
def take_part(model: Model, attention: AttentionBackend, cache: KVCache, group: Group, told: Pass) -> None:
    """One pass."""
    layout = receive_layout(group, told, cache.block_size)
    shape = (layout.rows, model.config.hidden_size)
    hidden = group.spread(torch.empty(shape, dtype=model.activation_dtype, device=model.device))
    model.through_layers(hidden, layout, attention, attention.prepare(layout), cache)


def end_with(line: Connection) -> None:
    """End this process at once when the other side of the line is gone, whatever it waits for meanwhile."""
    poller = select.poll()
    poller.register(line.fileno(), 0)  # nothing but that is reported
    poller.poll()
    os._exit(1)


def run(line: Connection) -> None:
    """The life of a rank. What it says is None, or why it cannot go on."""
    job: Job = line.recv()
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    group = Group(job.shard, job.device)
    try:
        model = load(job, group)
        attention = backend(job.attention, job.device, batch_invariant=job.batch_invariant, fp8=job.fp8_kv)
        line.send(None)
        cache = cache_of(model, line.recv(), job.block_size, job.fp8_kv)
        line.send(None)
    except (VerifyPDError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, VerifyPDError) or out_of_memory(error)):
            raise
        line.send(" ".join(str(error).split()))
        return
    group.join(job.folder)
    follow(model, attention, cache, group, line.recv)


if __name__ == "__main__":
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # rank 0 decides when this process ends
    to_rank_0 = Connection(int(sys.argv[1]))
    threading.Thread(target=end_with, args=(to_rank_0,), daemon=True).start()
    with suppress(EOFError):
        run(to_rank_0)
