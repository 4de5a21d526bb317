"""What cannot fit is refused from configs alone: in seconds, and before any weight is allocated."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.program import program
from verifypd import LLM
from verifypd.config import EngineConfig
from verifypd.engine import sizes
from verifypd.engine.sizes import check_memory
from verifypd.errors import HubError, MemoryBudgetError, ModelError
from verifypd.models import loader
from verifypd.models.builtin import BUILTINS
from verifypd.models.config import ModelSource

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any) -> None:
        raise AssertionError("weights are allocated")

    monkeypatch.setattr(loader, "allocate", allocate)


@pytest.mark.parametrize(
    ("free", "settings", "word"),
    [
        (23, {"model": "codellama-34b"}, "codellama-34b needs 62.85GiB for its weights and cpu has 23GiB free"),
        (40, {"model": "codellama-34b"}, "or --quantization int8, which takes 31.68GiB"),
        (23, {"model": "codellama-34b", "quantization": "int8"}, "choose a smaller model"),
        (23, {"model": "codellama/CodeLlama-34b-hf"}, "CodeLlama-34b-hf needs"),
        (23, {"model": "llama-2-7b", "kv_memory": "200TB"}, "--kv-memory 200TB is more than the 23GiB"),
        (23, {"model": "llama-2-7b", "kv_memory": "20GB", "batch_size": 64}, "leaves 10.45GiB; give --kv-memory"),
        (13, {"model": "llama-2-7b"}, "lower --max-model-len"),
        (23, {"model": "tinyllama-1.1b", "draft": "codellama-34b"}, "choose a smaller draft, or --draft ngram"),
    ],
)  # fmt: skip
def test_too_much_is_refused_before_anything_is_allocated(
    free: int, settings: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda: free * GIB)
    with pytest.raises(MemoryBudgetError) as error:
        LLM(**settings, load_format="dummy", device="cpu", measure_costs=False)
    assert word in str(error.value) and "\n" not in str(error.value)


def test_a_head_for_another_verifier_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ModelError, match="smollm2-draft is a draft head for a verifier of hidden size 576"):
        LLM("tinyllama-1.1b", draft="smollm2-draft", load_format="dummy", device="cpu")


def test_a_draft_that_is_not_there_is_called_the_draft() -> None:
    with pytest.raises(HubError, match=r"--draft: no model 'nope': give a built-in name"):
        LLM("tinyllama-1.1b", draft="nope", load_format="dummy", device="cpu")


def test_gpu_memory_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    device, source = torch.device("cuda"), ModelSource("big", BUILTINS["codellama-34b"].config)
    with pytest.raises(MemoryBudgetError, match=r"big needs 62\.85GiB for its weights and cuda has 52GiB free"):
        check_memory(EngineConfig(), source, None, device)
    check_memory(EngineConfig(quantization="int8"), source, None, device)
    small = ModelSource("small", BUILTINS["llama-2-7b"].config)
    check_memory(EngineConfig(kv_memory="45GiB"), small, None, device)  # asked for by name: no share is kept back
    with pytest.raises(MemoryBudgetError, match="which leaves"):
        check_memory(EngineConfig(kv_memory="48GiB", batch_size=64), small, None, device)
    with pytest.raises(MemoryBudgetError, match=r"200TB is more than the 60GiB"):
        check_memory(EngineConfig(kv_memory="200TB"), small, None, device)


def test_a_container_has_no_more_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CGROUP", tmp_path)
    without = sizes.available_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("500\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert abs(sizes.available_bytes() - without) < GIB
    (tmp_path / "memory.max").write_text("1000\n")
    assert sizes.available_bytes() == 700
    shutil.copytree(tmp_path, tmp_path / "memory")  # the first version's names, and less of it
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("900\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("500\n")
    assert sizes.available_bytes() == 600


@pytest.mark.parametrize("flags", [[], ["--kv-memory", "200TB"]])
def test_the_program_says_so_in_seconds(tmp_path: Path, flags: list[str]) -> None:
    """In processor time: the machine may be busy with something else. Too large for any machine, unless KV is asked."""
    folder = Path(tmp_path / "model")
    folder.mkdir()
    shape = dict(BUILTINS["codellama-34b" if not flags else "llama-2-7b"].raw)
    (folder / "config.json").write_text(json.dumps(shape if flags else shape | {"num_hidden_layers": 4800}))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = program("generate", "1,2", "--token-ids", "--model", str(folder), "--load-format", "dummy", *flags)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2
    assert " free" in result.stderr and result.stderr.count("\n") == 1
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5.0
