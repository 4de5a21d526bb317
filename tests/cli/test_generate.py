"""`verifypd generate`: prompts in, text, JSON and token ids out; once over a real engine."""

from __future__ import annotations

import json

import pytest

from tests.cli.speller import Speller, feed, run
from verifypd.cli import running

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def test_one_prompt_streams(llm, capsys):
    assert run("generate", "hello") == 0
    out, err = capsys.readouterr()
    assert out == "abc déf\n"
    assert err.count("\n") == 1
    assert "7 tokens" in err
    assert "tok/s" in err
    assert "acceptance 0.75 (6 of 8 drafted)" in err
    assert "mean accepted length 3.00" in err
    assert llm.closed == 1


def test_text_appears_as_it_grows(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(running, "load", Speller("xyz", on_step=lambda step: seen.append(capsys.readouterr().out)))
    run("generate", "hello")
    assert seen == ["", "x", "y"]


def test_quiet_and_echo(llm, capsys):
    run("generate", "hello ", "--quiet", "--echo")
    assert capsys.readouterr() == ("hello abc déf\n", "")


def test_several_prompts_run_together(llm, capsys):
    assert run("generate", "one", "two") == 0
    assert llm.seen == ["one", "two"]
    assert capsys.readouterr().out == "=== one\nabc déf\n\n=== two\nabc déf\n\n"


def test_several_prompts_have_percentiles(monkeypatch, capsys):
    """Of the time to the first token and of that per token after it; one prompt has none."""

    class Timed(Speller):
        def output(self, prompt, length, params):
            made = super().output(prompt, length, params)
            wait = 0.010 * int(prompt)
            made.metrics.arrival_time, made.metrics.first_token_time = 5.0, 5.0 + wait
            made.metrics.finished_time = 5.0 + wait + 0.002 * int(prompt) * (length - 1)
            return made

    monkeypatch.setattr(running, "load", Timed())
    prompts = [str(n) for n in range(1, 21)]
    assert run("generate", *prompts) == 0
    assert "TTFT p50 100 ms p95 190 ms, TPOT p50 20 ms p95 38 ms" in capsys.readouterr().err
    assert run("generate", *prompts, "--json") == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert (summary["ttft_ms"], summary["tpot_ms"]) == ({"p50": 100.0, "p95": 190.0}, {"p50": 20.0, "p95": 38.0})
    assert run("generate", "7") == 0
    assert "TTFT" not in capsys.readouterr().err


def test_several_choices(llm, capsys):
    assert run("generate", "one", "--n", "2") == 0
    assert capsys.readouterr().out == "=== one [0]\nabc déf\n\n=== one [1]\nabc déf\n\n"


def test_json_is_one_document(llm, capsys):
    assert run("generate", "one", "two", "--json") == 0
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert [r["prompt"] for r in document["results"]] == ["one", "two"]
    assert document["results"][0]["outputs"][0]["text"] == "abc déf"
    assert document["results"][0]["metrics"]["acceptance_rate"] == 0.75
    assert document["summary"]["tokens"] == 14
    assert document["summary"]["mean_accepted_length"] == 3.0


def test_dash_reads_standard_input(llm, monkeypatch):
    feed(monkeypatch, "from a pipe\n")
    assert run("generate", "-") == 0
    assert llm.seen == ["from a pipe"]


def test_bytes_that_are_no_text_are_replaced(llm, monkeypatch):
    feed(monkeypatch, b"a\xffb")
    assert run("generate", "-") == 0
    assert llm.seen == ["a\ufffdb"]
    assert run("generate", "a\udcffb") == 0
    assert llm.seen == ["a\ufffdb"]


def test_prompts_and_output_as_token_ids(llm, capsys):
    assert run("generate", "5,6,7", "--token-ids") == 0
    assert llm.seen == [[5, 6, 7]]
    assert capsys.readouterr().out == "0,1,2,3,4,5,6\n"
    assert run("generate", "5,6,7", "--token-ids", "--echo") == 0
    assert capsys.readouterr().out == "5,6,7,0,1,2,3,4,5,6\n"


@pytest.mark.slow
def test_a_real_engine_behind_the_command(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    common = [
        "--model", str(tmp_path), "--load-format", "dummy", "--dtype", "float32", "--kv-memory", "16MB",
        "--device", "cpu", "--max-tokens", "24", "--temperature", "0", "--ignore-eos",
    ]  # fmt: skip
    assert run("generate", "w5 w6 w7 w5 w6", "--draft", "none", *common) == 0
    plain = capsys.readouterr().out
    assert len(plain.split()) == 24
    assert run("generate", "w5 w6 w7 w5 w6", "--draft", "ngram", *common) == 0
    assert capsys.readouterr().out == plain
    assert run("generate", "5,6", "5,6,7,5,6", "--token-ids", "--json", *common) == 0
    document = json.loads(capsys.readouterr().out)
    assert [f"w{i}" for i in document["results"][1]["outputs"][0]["token_ids"]] == plain.split()
    assert document["summary"]["ttft_ms"]["p50"] > 0 and document["summary"]["tpot_ms"]["p95"] > 0
    assert run("generate", "5,6", "--token-ids", "--json", "--deadline-ms", "0.001", *common) == 0
    [late] = json.loads(capsys.readouterr().out)["results"][0]["outputs"]
    assert (late["finish_reason"], late["token_ids"]) == ("deadline", [])
    (tmp_path / "settings.yaml").write_text("max_tokens: 3\ndraft: none\ngraphs: off\n")
    settings = [flag for flag in common if flag not in ("--max-tokens", "24")]
    assert run("generate", "w5 w6 w7 w5 w6", "--config", str(tmp_path / "settings.yaml"), *settings) == 0
    assert capsys.readouterr().out.split() == plain.split()[:3]
    assert run("generate", "5,6,999", "--token-ids", *common) == 2
    assert "999" in capsys.readouterr().err
