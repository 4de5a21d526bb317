"""Names that are not ours get the one that was meant."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cli.speller import run
from verifypd import LLM
from verifypd.config import EngineConfig
from verifypd.errors import ConfigError
from verifypd.hints import VLLM


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"gpu_memory_utilization": 0.9}, "'kv_memory'"),
        ({"pipeline_parallel_size": 2}, "'tensor_parallel_size' divides a model"),
        ({"speculative_config": {"model": "x", "num_speculative_tokens": 4}}, "'draft' for the draft model"),
        ({"max_num_seqs": 8}, "use 'batch_size'"),
        ({"enforce_eager": True}, "'graphs'"),
        ({"enable_prefix_caching": True}, "'prefix_cache'"),
        ({"batchsize": 8}, "did you mean 'batch_size'?"),
    ],
)
def test_a_program_is_told_our_names(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        LLM("smollm2", **settings)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["generate", "x", "--gpu-memory-utilization", "0.9"], "--kv-memory"),
        (["serve", "--pipeline-parallel-size=2"], "--tensor-parallel-size divides a model among devices; leave it out"),
        (["serve", "--max-num-seqs", "8"], "use --batch-size"),
        (["generate", "x", "--speculative-config", "{}"], "--draft"),
        (["generate", "x", "--max-tokns", "3"], "did you mean --max-tokens?"),
        (["generate", "x", "--bach-size=3"], "did you mean --batch-size?"),
        (["serve", "--prot", "8080"], "did you mean --port?"),
        (["serve", "--seed", "0"], "did you mean --engine-seed?"),
        (["serve", "-tp", "2"], "use --tensor-parallel-size"),
        (["serve", "--generation-config", "vllm"], "choose from 'auto', 'none'"),
        (["serve", "--override-generation-config", "{}"], "send these values in the requests"),
        (["serve", "--max-logprobs", "5"], "a request may ask for 20 at most; leave it out"),
        (["serve", "--disable-log-requests"], "every request is one line of the log"),
        (["serve", "--nonsense"], "--nonsense (see"),
        (["serve", "meta-llama/Llama-2-7b-hf"], "did you mean --model meta-llama/Llama-2-7b-hf?"),
        (["generat", "x"], "did you mean 'generate'?"),
        (["evaluate"], "did you mean 'evaluate-draft'?"),
        (["generate", "x", "--arch", "unifed"], "did you mean 'unified'?"),
    ],
)
def test_a_command_line_is_told_what_was_meant(args: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(*args)
    err = capsys.readouterr().err
    assert left.value.code == 2 and word in err and err.count("\n") == 1


def test_hints_name_settings_that_there_are() -> None:
    for name, text in VLLM.items():
        assert name not in EngineConfig.names()
        assert set(re.findall(r"\{(\w+)\}", text)) <= set(EngineConfig.names()), name
