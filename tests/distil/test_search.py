"""`evaluate-draft --search-layers`: the states a head was trained on are found, whatever its config says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.engine.heads import eagle3_for, head_for
from tests.models.checkpoints import tiny
from verifypd import LLM, SamplingParams
from verifypd.cli import main
from verifypd.distil.search import TOKENS

pytestmark = pytest.mark.xdist_group("distil-search")  # one head is taught

RIGHT = [2, 3]  # of a verifier of six layers: 2, 6 // 2 and 6 − 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A verifier, a head that was taught on its states, and prompts."""
    base = tmp_path_factory.mktemp("search")
    verifier = tiny("llama", base / "verifier", num_hidden_layers=6)
    prompts = base / "prompts.txt"
    asked = [f"Tell me about {thing}." for thing in ("rain", "seas", "ants", "tins")]
    prompts.write_text("\n".join(asked))
    with LLM(str(verifier), draft=None, arch="plain", dtype="float32", device="cpu", kv_memory="32MB") as llm:
        rendered = [llm.render([{"role": "user", "content": text}]) for text in asked]
        outputs = llm.generate(rendered, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    texts = [ids + output.outputs[0].token_ids for ids, output in zip(rendered, outputs, strict=True)]
    length = min(len(ids) for ids in texts)
    taught = torch.tensor([ids[:length] for ids in texts])
    return verifier, eagle3_for(verifier, base / "head", vocab=384, window=128, texts=taught, steps=60), prompts


def search(folders: tuple[Path, Path, Path], report: Path) -> dict[str, object]:
    verifier, head, prompts = folders
    flags = ["--prompts", str(prompts), "--device", "cpu", "--dtype", "float32", "--json", str(report)]
    assert main(["evaluate-draft", "--model", str(verifier), "--draft", str(head), "--search-layers", *flags]) == 0
    found: dict[str, object] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("configured", [[2, 3], [1, 2], [6, 0]])
def test_the_right_states_are_found(
    folders: tuple[Path, Path, Path], configured: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folders[1] / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eagle_aux_hidden_state_layer_ids": configured}))
    report = search(folders, tmp_path / "report.json")
    best = report["best"][0]  # type: ignore[index]
    assert best["states"] == RIGHT and best["agreement"] > report["agreement_configured"] - 1e-9
    assert report["tokens"] > 100 and report["tried"] > 12  # type: ignore[operator]
    said = capsys.readouterr()
    advice = "are the best of" if configured == RIGHT else "use --draft-layers 2,3 (best of"
    assert advice in said.err and "2,3" in said.out


def test_only_eagle3_heads_have_states_to_look_for(
    folders: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = head_for(folders[0], tmp_path / "own", taught=False)
    assert main(["evaluate-draft", "--model", str(folders[0]), "--draft", str(own), "--search-layers"]) != 0
    assert "--search-layers is for EAGLE-3 heads" in capsys.readouterr().err
