"""Evaluation of a draft: counts, overlaps and times of a tiny pair, through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.heads import head_for, make_head, teach
from tests.models.checkpoints import VOCAB, tiny
from verifypd import LLM, SamplingParams, progress
from verifypd.bench.provenance import files_hash
from verifypd.cli import main
from verifypd.distil.evaluate import Listener, _count
from verifypd.distil.export import write_draft
from verifypd.distil.head import shape_for
from verifypd.distil.measure import Acceptance, measure, starts
from verifypd.distil.teacher import Teacher
from verifypd.distil.text import Text
from verifypd.kernels.torch import TorchKernels
from verifypd.models.config import ModelConfig
from verifypd.models.hub import resolve
from verifypd.models.loader import load_model


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("pair") / "verifier", max_position_embeddings=1024)


def evaluate(verifier: Path, draft: str, out: Path, weights: str = "auto") -> dict:
    prompts = out / "prompts.jsonl"
    lines = [{"kind": "code" if i % 2 else "story", "text": f"w{i} w{i + 1} w5 w6"} for i in range(6)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = {"prompts": prompts, "tokens": 16, "timed": 2, "max-draft": 3, "dtype": "float32", "device": "cpu"}
    flags |= {"draft-quantization": weights, "json": out / "report.json", "plot": out / "report.png"}
    command = ["evaluate-draft", "--model", str(verifier), "--draft", draft]
    assert main([*command, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]) == 0
    return json.loads((out / "report.json").read_text())


def test_a_model_that_drafts_for_itself_is_always_right(
    verifier: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    report = evaluate(verifier, str(verifier), tmp_path, weights="none")
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("evaluating: ")]
    assert len(told) > 100, "at every step"
    for stage in ("acceptance", "speed", "calibration"):
        assert any(stage in line for line in told)
    # 6 prompts at 5 temperatures and for the calibration, 2 timed and one that warms up on both arms
    assert told[0].startswith("evaluating: 0 of 42 prompts") and "42 of 42 prompts" in told[-1]
    assert report["settings"]["draft_quantization"] == "none"
    for temperature in ("0", "0.8", "0.3"):
        assert set(report["acceptance"][temperature]) == {"all", "code", "story"}
        assert min(report["acceptance"][temperature]["all"]["alpha"]) > 0.98
    for overlaps in report["overlap_by_tau"].values():
        assert overlaps["1"] == pytest.approx(1.0, abs=1e-3)
        assert max(overlaps.values()) == overlaps["1"]
    assert report["speed"]["same_text"] == 2
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert "calibration error" in capsys.readouterr().out


def test_a_head_is_evaluated(verifier: Path, tmp_path: Path) -> None:
    report = evaluate(verifier, str(head_for(verifier, tmp_path / "head")), tmp_path)
    alpha = report["acceptance"]["0.8"]["all"]["alpha"][0]
    assert 0.0 < alpha < 1.0
    assert report["speed"]["same_text"] == 2 and report["speed"]["cost_ratio"] > 0
    assert report["dtype"] == "float32"
    assert report["command"].startswith("verifypd") and report["files"] == files_hash()


def test_a_verifier_of_short_texts_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Within its own context; a prompt that is past it is named, for there is no flag that would make room."""
    folder, prompts = tiny("llama", tmp_path / "short", max_position_embeddings=64), tmp_path / "prompts.txt"
    prompts.write_text("w1 w2\n")
    command = ["evaluate-draft", "--model", str(folder), "--draft", "ngram", "--tokens", "4", "--timed", "1"]
    assert main([*command, "--prompts", str(prompts)]) == 0
    prompts.write_text("w1 w2\n" + "w " * 80 + "\n")
    assert main([*command, "--prompts", str(prompts)]) == 2
    said = capsys.readouterr().err
    assert "give --prompts without it" in said and "--max-model-len" not in said


@pytest.mark.parametrize("temperature", ["0", "nan"])
def test_a_greedy_request_draws_nothing_that_could_be_heated(
    temperature: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate-draft", "--tau-temperatures", f"{temperature},0.7"]) == 2
    assert "--tau-temperatures must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [(["--draft", "none"], "--draft none drafts nothing"), (["--search-layers"], "--search-layers needs --draft")],
)
def test_there_must_be_a_draft_to_evaluate(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate-draft", *flags]) == 2
    assert told in capsys.readouterr().err


# -- acceptance without an engine, against what the engine counts ------------------------------------------------------


def test_a_span_starts_where_the_one_before_it_ended() -> None:
    """Certain outcomes: the walk of a greedy text. Uncertain ones: the mean over many walks."""
    certain = np.array([[1, 1, 1, 1, 1, 0, 1, 1], [1, 0, 1, 1, 1, 1, 1, 1]], float)  # [depth, rows]
    assert starts(certain, 7).tolist() == [1, 0, 1, 0, 0, 1, 1]  # one stood, then two, then none
    noise = np.random.default_rng(0)
    chances = noise.uniform(size=(3, 20))
    counts = np.zeros(16)
    for _ in range(4000):
        row = 0
        while row < 16:
            counts[row] += 1
            stood = 0
            while stood < 3 and noise.random() < chances[stood, row + stood]:
                stood += 1
            row += stood + 1
    assert np.abs(counts / 4000 - starts(chances, 16)).max() < 0.03


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_measured_acceptance_is_what_the_engine_counts(verifier: Path, tmp_path: Path, temperature: float) -> None:
    """The same prompts and the same texts: exactly for greedy ones; sampled ones have the same law."""
    config = ModelConfig.from_folder(verifier)
    ids = torch.arange(VOCAB)
    head = make_head(shape_for(config, 1, 48, None, VOCAB, 64))
    teach(head, verifier, ids)
    head = head.to(torch.bfloat16).float()  # as it is written
    write_draft(tmp_path / "head", head, ids, config, str(verifier), {})
    prompts = [[3 + (i * 31 + j * j * 7) % 300 for j in range(6 + i % 5)] for i in range(40)]
    params = SamplingParams(temperature=temperature, max_tokens=32, ignore_eos=True, acceptance="rejection")
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_memory": "16MB", "seed": 0}
    settings |= {"arch": "unified", "controller": "fixed", "max_draft": 3, "kernels": "torch", "attention": "torch"}
    with LLM(str(verifier), draft=str(tmp_path / "head"), **settings) as llm:
        listener = Listener(llm)
        outputs = llm.generate(prompts, params)
        whole = {int(o.request_id): len(o.outputs[0].token_ids) for o in outputs}
    emitted = dict.fromkeys(whole, 1)
    counted = Acceptance(3)
    for seen in listener.seen:
        emitted[seen.request_id] += seen.emitted
        if (
            seen.drafted == 3 and emitted[seen.request_id] - seen.emitted + 3 < whole[seen.request_id]
        ):  # a whole draft fitted
            _count(counted, seen)
    model = load_model(resolve(str(verifier)), dtype=torch.float32, device="cpu", kernels=TorchKernels())
    teacher = Teacher(model, head.shape.feature_layers, ids)
    texts = [  # the last token is left out: the engine keeps room for one after a draft
        Text(np.array(p + o.outputs[0].token_ids[:-1], np.int32), len(p), temperature)
        for p, o in zip(prompts, outputs, strict=True)
    ]
    found = measure(head, teacher, texts, 3)[f"{temperature:.1f}"]["all"]
    assert counted.accepted[0] > 10
    if temperature == 0:
        assert found.drafted == counted.drafted and found.accepted == counted.accepted
    else:
        assert found.drafted[0] == pytest.approx(counted.drafted[0], rel=0.08)
        assert found.alpha[0] == pytest.approx(counted.alpha[0], abs=0.06)
        assert found.mean_accepted_length == pytest.approx(counted.mean_accepted_length, rel=0.08)
