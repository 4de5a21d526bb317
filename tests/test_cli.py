"""The command line, over a model that only spells: flags, streams, exit codes, errors, Ctrl-C, closed pipes."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from verifypd import cli
from verifypd.cli import flags, running
from verifypd.config import EngineConfig
from verifypd.errors import ModelError, RequestError
from verifypd.request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

ROOT = Path(__file__).resolve().parent.parent


class Speller:
    """Stands in for LLM: continues a prompt with the letters of `text`, one a step."""

    def __init__(self, text: str = "abc déf", on_step=None) -> None:
        self.text = text
        self.on_step = on_step or (lambda step: None)
        self.settings: dict = {}
        self.params: SamplingParams | None = None
        self.seen: list = []
        self.closed = 0
        self.aborted = 0

    def __call__(self, settings: dict) -> Speller:
        EngineConfig.from_kwargs(**settings)
        self.settings = settings
        return self

    def __enter__(self) -> Speller:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def output(self, prompt: str, length: int, params: SamplingParams) -> RequestOutput:
        done = length == len(self.text)
        choices = [
            CompletionOutput(i, self.text[:length], list(range(length)), "length" if done else None)
            for i in range(params.n)
        ]
        metrics = RequestMetrics(drafted=8, accepted=6, emitted=9, passes=3, span_emitted=9, spans=3)
        return RequestOutput("r", prompt, [1], choices, done, metrics=metrics)

    def generate(self, prompts, params):
        self.seen, self.params = list(prompts), params
        return [self.output(prompt, len(self.text), params) for prompt in prompts]

    def stream(self, prompt, params):
        self.seen = [prompt]
        return self.steps(prompt, params)

    def steps(self, prompt, params):
        self.params = params
        try:
            for length in range(1, len(self.text) + 1):
                self.on_step(length)
                yield self.output(prompt, length, params)
        except GeneratorExit:
            self.aborted += 1
            raise

    def stream_chat(self, messages, params):
        self.seen = [dict(m) for m in messages]
        if "too long" in messages[-1]["content"]:
            raise RequestError("the prompt has 9000 tokens, the model takes 8192")
        return self.steps(messages[-1]["content"], params)


@pytest.fixture
def llm(monkeypatch):
    speller = Speller()
    monkeypatch.setattr(running, "load", speller)
    return speller


def feed(monkeypatch, text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def run(*args: str) -> int:
    return cli.main(list(args))


# --- flags ------------------------------------------------------------------------------------------------------------


def test_every_engine_setting_has_a_flag(llm):
    options = cli.build_parser().parse_args(["generate", "x"])
    assert flags.engine_settings(options) == {}  # defaults live in EngineConfig alone
    subparser = cli.build_parser()._subparsers._group_actions[0].choices["generate"]
    known = set(subparser._option_string_actions)
    for f in fields(EngineConfig):
        assert flags.ENGINE_FLAGS.get(f.name, "--" + f.name.replace("_", "-")) in known


def test_every_sampling_parameter_has_a_flag_or_a_reason():
    assert {f.name for f in fields(SamplingParams)} == {*flags.SAMPLING_HELP, *flags.ENGINE_OWNED, *flags.NOT_FLAGS}
    for name in flags.ENGINE_OWNED:
        assert name in EngineConfig.names()


def test_engine_flags_reach_the_engine(llm):
    assert run(
        "generate", "x", "--model", "m", "--draft", "none", "--arch", "plain", "--max-draft", "3", "--dtype", "float32",
        "--slo-tpot", "20", "--kv-memory", "1GB", "--no-prefix-cache", "--synthetic-acceptance", "0.5,0.8",
        "--engine-seed", "4", "--late-tickets",
    ) == 0  # fmt: skip
    assert llm.settings == {
        "model": "m", "draft": "none", "arch": "plain", "max_draft": 3, "dtype": "float32", "slo_tpot": 20.0,
        "kv_memory": "1GB", "prefix_cache": False, "synthetic_acceptance": "0.5,0.8", "seed": 4, "late_tickets": True,
    }  # fmt: skip


def test_sampling_flags_reach_the_request(llm):
    assert run(
        "generate", "x", "--temperature", "0.5", "--top-k", "-1", "--seed", "7", "--stop", "\n", "--stop", "END",
        "--logit-bias", "5=-2.5", "--logit-bias", "9=1", "--stop-token-ids", "1,2", "--no-speculation",
        "--bad-words", "so so", "--presence-penalty", "-1.5", "--ignore-eos",
    ) == 0  # fmt: skip
    assert llm.params == SamplingParams(
        max_tokens=128, temperature=0.5, top_k=-1, seed=7, stop=["\n", "END"], logit_bias={5: -2.5, 9: 1.0},
        stop_token_ids=[1, 2], speculation=False, bad_words=["so so"], presence_penalty=-1.5, ignore_eos=True,
    )  # fmt: skip
    assert llm.settings == {}


def test_acceptance_asked_for_by_name_holds_for_a_seeded_request(llm):
    run("generate", "x", "--seed", "7", "--acceptance", "rejection")
    assert llm.params.acceptance == "rejection"
    run("generate", "x", "--seed", "7")
    assert llm.params.acceptance is None  # the library decides: coupled


# --- generate ---------------------------------------------------------------------------------------------------------


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


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation(llm, monkeypatch, capsys):
    feed(monkeypatch, "hi\n\nand then?\n")
    assert run("chat", "--system", "be brief", "--quiet") == 0
    assert llm.seen == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "abc déf"},
        {"role": "user", "content": "and then?"},
    ]
    assert llm.params.max_tokens == 512
    assert capsys.readouterr() == ("abc déf\n" * 2, "")


def test_chat_commands(llm, monkeypatch, capsys):
    feed(monkeypatch, "/help\n/system\nhi\n/system sing\n/system\n/nonsense\nla\n/reset\nlo\n/exit\nnever\n")
    assert run("chat", "--quiet") == 0
    assert llm.seen == [{"role": "system", "content": "sing"}, {"role": "user", "content": "lo"}]
    err = capsys.readouterr().err
    assert "/reset" in err
    assert "no system prompt" in err
    assert "no command /nonsense" in err


def test_chat_survives_a_refused_message(llm, monkeypatch, capsys):
    feed(monkeypatch, "this is too long\nok\n")
    assert run("chat", "--quiet") == 0
    assert llm.seen == [{"role": "user", "content": "ok"}]
    assert "error: the prompt has 9000 tokens, the model takes 8192; /reset starts over" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_not_the_chat(monkeypatch, capsys):
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    speller = Speller("abcdef", on_step=interrupt)
    monkeypatch.setattr(running, "load", speller)
    before = signal.getsignal(signal.SIGINT)
    feed(monkeypatch, "hi\nmore\n")
    assert run("chat", "--quiet") == 0
    assert speller.aborted == 2
    assert speller.seen[1] == {"role": "assistant", "content": "ab"}
    assert capsys.readouterr().out == "ab\nab\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_second_ctrl_c_leaves(monkeypatch, capsys):
    def interrupt(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(running, "load", Speller(on_step=interrupt))
    feed(monkeypatch, "hi\n")
    assert run("chat") == 130
    assert "Traceback" not in capsys.readouterr().err


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "x", "--no-such-flag"],
        ["generate", "x", "--max", "3"],  # no guessing of flags
        ["generate", "x", "--top-p", "much"],
        ["generate", "x", "--top-p", "3"],
        ["generate", "x", "--arch", "gothic"],
        ["generate", "x", "--logit-bias", "five"],
        ["generate", "x", "--stop-token-ids", "1,two"],
        ["generate", "x", "--max-draft", "-1"],
        ["generate", "x", "--kv-memory", "lots"],
        ["generate", "x", "--synthetic-acceptance", "2"],
        ["generate", "x", "--min-tokens", "9", "--max-tokens", "3"],
        ["generate", "-", "-"],
        ["generate", "five", "--token-ids"],
        ["chat", "--n", "2"],
    ],
)
def test_bad_input_is_one_line_and_code_2(llm, capsys, args):
    try:
        code = run(*args)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_errors_of_the_engine_are_one_line(monkeypatch, capsys):
    def fail(settings):
        raise ModelError("weights are\n truncated; pull them again")

    monkeypatch.setattr(running, "load", fail)
    assert run("generate", "x") == 2
    assert capsys.readouterr().err == "error: weights are truncated; pull them again\n"


def test_ctrl_c_is_130(monkeypatch, capsys):
    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    speller = Speller(on_step=interrupt)
    monkeypatch.setattr(running, "load", speller)
    assert run("generate", "x") == 130
    assert "Traceback" not in capsys.readouterr().err
    assert speller.closed == 1


SPELL_FOR_EVER = """
import sys
sys.path.insert(0, "tests")
from test_cli import Speller
from verifypd import cli
from verifypd.cli import flags, running
running.load = Speller("x\\n" * 100_000)
sys.exit(cli.main(["generate", "x"]))
"""


def test_closed_pipe_is_quiet():
    command = f"{sys.executable} -c '{SPELL_FOR_EVER}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr, result.returncode) == ("x\n", "", 141)


# --- the program itself -----------------------------------------------------------------------------------------------


def program(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "verifypd", *args], cwd=ROOT, capture_output=True, text=True)


def test_help_needs_no_torch_and_little_time():
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = program("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.returncode == 0
        assert "generate" in result.stdout
    assert min(spent) < 0.3  # seconds of processor time: the machine may be busy with something else
    code = "import sys, verifypd.cli as c; c.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("command", ["generate", "chat", "pull", "models", "trace", "explain", "version"])
def test_every_command_has_help(command):
    result = program(command, "--help")
    assert result.returncode == 0
    assert result.stderr == ""


def test_models_lists_the_built_in_names():
    result = program("models")
    assert result.returncode == 0
    assert "smollm2" in result.stdout
    assert "qwen2-7b" in result.stdout


def test_pull_refuses_an_unknown_name():
    result = program("pull", "nonsense")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_version():
    import verifypd

    assert program("version").stdout.startswith(f"verifypd {verifypd.__version__}\n")
    assert program("--version").stdout == f"verifypd {verifypd.__version__}\n"


def test_bad_setting_is_refused_before_torch_is_loaded():
    code = "import sys; from verifypd import cli; assert cli.main(sys.argv[1:]) == 2; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "generate", "x", "--max-draft", "99"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "error: --max-draft 99 must lie in 0..64\n")


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
    assert run("generate", "5,6,999", "--token-ids", *common) == 2
    assert "999" in capsys.readouterr().err
