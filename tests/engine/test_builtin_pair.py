"""The pair that comes out of the box: found by name, taken by default, and as good as it says."""

from __future__ import annotations

import json

import pytest

from verifypd import LLM, SamplingParams
from verifypd.config import EngineConfig
from verifypd.distil.prompts import evaluation_prompts
from verifypd.engine.build import drafts_for
from verifypd.errors import ConfigError
from verifypd.models import builtin, smollm2

HERE = pytest.mark.skipif(not smollm2.is_whole(), reason="needs the built-in model: verifypd pull smollm2")


def test_auto_takes_what_comes_with_the_verifier() -> None:
    assert drafts_for(EngineConfig()) == ("smollm2-draft", "ngram")
    assert drafts_for(EngineConfig(model="some/folder")) == ("ngram",)
    assert drafts_for(EngineConfig(model="tinyllama-1.1b")) == ("ngram",)
    assert drafts_for(EngineConfig(load_format="dummy")) == ("ngram",)
    assert drafts_for(EngineConfig(draft="none")) == ()
    assert drafts_for(EngineConfig(draft="a/b, ngram")) == ("a/b", "ngram")


@pytest.mark.parametrize("draft", ["a,b", "ngram,ngram", "auto,ngram", "a,"])
def test_drafters_that_cannot_run_side_by_side_are_refused(draft: str) -> None:
    with pytest.raises(ConfigError, match="--draft"):
        EngineConfig(draft=draft)


def test_the_shipped_draft_says_how_it_was_made() -> None:
    folder = builtin.packaged("smollm2-draft")
    assert folder is not None
    made = json.loads((folder / "distil.json").read_text())
    assert made["verifier"] == "smollm2" and len(made["commit"]) == 40 and made["command"].startswith("verifypd distil")
    chat = made["evaluation"]["0.0"]["chat"]
    assert chat["alpha"][0] >= 0.60 and chat["mean_accepted_length"] >= 2.4
    assert made["evaluation"]["0.8"]["chat"]["alpha"][0] >= 0.50


@HERE
def test_text_is_plain_text_and_drafts_stand() -> None:
    prompts = [prompt.text for prompt in evaluation_prompts() if prompt.kind == "chat"][:3]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    texts = []
    for settings in ({"draft": None, "arch": "plain"}, {"max_draft": 4, "measure_costs": False}):
        with LLM("smollm2", dtype="float32", max_model_len=512, kv_memory="100MB", **settings) as llm:
            rendered = [llm.render([{"role": "user", "content": text}]) for text in prompts]
            texts.append([output.outputs[0].token_ids for output in llm.generate(rendered, params)])
            stats = llm.engine.stats
    assert texts[0] == texts[1]
    assert stats.drafted and stats.acceptance_rate > 0.2
