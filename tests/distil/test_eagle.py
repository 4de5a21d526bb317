"""Heads of the EAGLE-3 architecture: what is trained is what the engine runs, and what other engines load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.heads import eagle3_for, make_head
from tests.models.checkpoints import VOCAB, tiny
from tests.models.test_eagle import DATA, STEPS, Pages, chain, streams_of, verifier_of
from verifypd.cli import main
from verifypd.distil.dense import read_features
from verifypd.distil.eagle import Eagle3Head, eagle3_shape
from verifypd.distil.recipe import TINY
from verifypd.errors import ConfigError
from verifypd.models.head_loader import load_head
from verifypd.models.hub import resolve


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@torch.inference_mode()
def test_drafting_is_unrolling(family: str, layers: int, tmp_path: Path) -> None:
    """Written, loaded and drafted with: the logits that training unrolled. Gemma's embedding is scaled."""
    folder = tiny(family, tmp_path / "verifier")
    model = verifier_of(folder)
    draft = load_head(resolve(str(eagle3_for(folder, tmp_path / "head", layers=layers, taught=False))), model)
    trained = (
        make_head(eagle3_shape(model.config, layers, 48, None, 300, 24), kind=Eagle3Head).to(torch.bfloat16).float()
    )
    ids = torch.randint(3, VOCAB, (16,), generator=torch.Generator().manual_seed(1))
    layers_read = draft.feature_layers
    assert layers_read == trained.shape.feature_layers and draft.vocab_map is not None
    hidden, captured = read_features(model, ids[None], layers_read)
    embedded = model.embed(ids).to(torch.bfloat16).float()[None]
    unrolled = list(trained.unroll(embedded, trained.project(captured, hidden), STEPS))
    rows = model.head[draft.vocab_map].to(torch.bfloat16).float()  # type: ignore[index]
    features = draft.project(streams_of(model, draft, ids))
    for t in (0, 4, 11):
        for step, logits in enumerate(chain(Pages(draft, "torch"), ids, features, t)):
            expected = trained.logits(unrolled[step][0, t + 1 + step], rows)
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


def test_what_is_written_is_what_the_library_writes(tmp_path: Path) -> None:
    """The same fields, and the same tensors, as a head saved by speculators 0.9.0."""
    folder = eagle3_for(tiny("llama", tmp_path / "verifier"), tmp_path / "head", taught=False)
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (folder, DATA / "speculators"))
    assert theirs.keys() - ours.keys() <= {"auto_map", "transformers_version"} and not ours.keys() - theirs.keys()
    for part in ("speculators_config", "transformer_layer_config"):
        assert ours[part].keys() >= {"verifier"} & theirs[part].keys()
    assert ours["speculators_config"].keys() == theirs["speculators_config"].keys()
    assert ours["speculators_config"]["proposal_methods"][0].keys() == (
        theirs["speculators_config"]["proposal_methods"][0].keys()
    )
    held, known = (load_file(each / "model.safetensors") for each in (folder, DATA / "speculators"))
    assert held.keys() == known.keys()
    assert all(held[name].dtype == known[name].dtype and held[name].dim() == known[name].dim() for name in held)
    assert ours["eagle_aux_hidden_state_layer_ids"] == [1, 2]  # 2, 3 // 2 and 3 − 3 of a verifier of three layers


@torch.inference_mode()
def test_the_library_loads_it(tmp_path: Path) -> None:
    """Where speculators is installed (see tests/models/data/eagle/make_reference.py): its logits are ours."""
    speculators: Any = pytest.importorskip("speculators.models.eagle3")
    verifier = tiny("llama", tmp_path / "verifier")
    folder = eagle3_for(verifier, tmp_path / "head", taught=False)
    theirs = speculators.Eagle3DraftModel.from_pretrained(folder).float()
    config = theirs.config
    config.transformer_layer_config._attn_implementation = "eager"
    weights = theirs.state_dict()
    theirs = speculators.Eagle3DraftModel(config)
    theirs.load_state_dict(weights)
    seen: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0]))
    model = verifier_of(verifier)
    head = load_head(resolve(str(folder)), model)
    ids = torch.randint(3, VOCAB, (14,), generator=torch.Generator().manual_seed(1))
    streams = streams_of(model, head, ids)
    theirs.eval()(
        hidden_states=torch.cat(streams, -1)[None, :-1],
        input_ids=ids[None, 1:],
        document_ids=torch.zeros(1, 13, dtype=torch.long),
        ttt_steps=STEPS,
    )
    for t in (0, 5, 10):
        for step, logits in enumerate(chain(Pages(head, "torch"), ids, head.project(streams), t)):
            torch.testing.assert_close(logits, seen[step][t], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_distil_writes_one(tmp_path: Path) -> None:
    verifier = tiny("llama", tmp_path / "verifier")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"Tell me about the number {n}." for n in range(12)))
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("What is rain?\nWrite about the sea.")
    small = {"self-prompts": 8, "responses": 24, "max-new": 12, "generate-batch": 8, "validation": 4, "steps": 2}
    flags = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    command = [
        "distil",
        "--model",
        str(verifier),
        "--out",
        str(tmp_path),
        "--tiny",
        "--device",
        "cpu",
        "--losses",
        "kl",
    ]
    command += ["--prompts", str(prompts), "--held-out", str(held_out), *flags]
    assert main([*command, "--format", "speculators"]) == 0
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["draft_vocab_size"] == 64
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(verifier)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    head = load_head(resolve(str(tmp_path / "draft")), verifier_of(verifier))
    assert head.config.family == "eagle3"


def test_formats_that_do_not_go(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--format 'x' is not known; choose from verifypd, speculators"):
        replace(TINY, format="x")
    with pytest.raises(ConfigError, match="--start is for heads of the package's own format"):
        replace(TINY, format="speculators", start=str(tmp_path))
