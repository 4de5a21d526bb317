"""A stand-in for vLLM with the part of its interface that the worker uses: strict about arguments, noisy on stdout.

`write(folder)` makes the package. Its engine starts a process by `spawn`, as vLLM does, and answers a token every
millisecond, four at a time where drafts are asked for. Prompts that it gets are kept in a file.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "vllm/__init__.py": """
print("noise on standard output")
__version__ = "0.0-fake"
from vllm.sampling_params import SamplingParams
""",
    "vllm/sampling_params.py": """
import enum
from dataclasses import dataclass

class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1

@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    output_kind: RequestOutputKind
""",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
from dataclasses import dataclass, field

@dataclass
class AsyncEngineArgs:
    model: str
    load_format: str
    skip_tokenizer_init: bool
    dtype: str
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory_bytes: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    tensor_parallel_size: int
    disable_log_stats: bool
    generation_config: str
    compilation_config: dict
    speculative_config: dict | None = None
""",
    "vllm/v1/__init__.py": "",
    "vllm/v1/engine/__init__.py": "",
    "vllm/v1/engine/child.py": """
def main():
    print("noise of another process")
""",
    "vllm/v1/engine/async_llm.py": """
import asyncio, json, multiprocessing, os
from types import SimpleNamespace
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import child

class AsyncLLM:
    @classmethod
    def from_engine_args(cls, args):
        return cls(args)

    def __init__(self, args):
        with open(os.path.join(args.model, "config.json")) as file:
            self.vocab = json.load(file)["vocab_size"]
        if args.kv_cache_memory_bytes > 10**9:
            raise ValueError("no memory for that")
        asyncio.get_running_loop()  # vLLM starts its output handler in it
        self.step = 1
        if args.speculative_config is not None:
            rates = args.speculative_config["synthetic_acceptance_rates"]
            assert len(rates) == args.speculative_config["num_speculative_tokens"]
            assert os.path.exists(os.path.join(args.speculative_config["model"], "config.json"))
            self.step = 4
        process = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"]).Process(target=child.main)
        process.start()
        process.join()
        assert process.exitcode == 0
        self.log = open(os.environ["VLLM_CACHE_ROOT"] + "/prompts", "a")
        self.vllm_config = SimpleNamespace(
            use_v2_model_runner=True,
            scheduler_config=SimpleNamespace(async_scheduling=True),
            cache_config=SimpleNamespace(kv_cache_size_tokens=args.kv_cache_memory_bytes // 1000),
        )

    async def generate(self, prompt, params, name):
        assert params.output_kind is RequestOutputKind.DELTA and params.ignore_eos and not params.detokenize
        ids = prompt["prompt_token_ids"]
        assert all(0 <= token < self.vocab for token in ids)
        self.log.write(json.dumps(ids) + "\\n")
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[])])  # an output without tokens is none
        left, got = params.max_tokens, 1
        while left:
            await asyncio.sleep(0.001)
            got = min(got, left)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * got)])
            left -= got
            got = self.step

    def shutdown(self):
        self.log.close()
""",
}


def write(folder: Path) -> Path:
    """A folder as `--peer` takes it."""
    for name, text in FILES.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip())
    (folder / "cache").mkdir()
    return folder
