"""`--config FILE`: settings by their one name; flags go before it; what is not a setting is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.speller import run
from verifypd import cli
from verifypd.cli import config_file, flags, serve
from verifypd.request import SamplingParams
from verifypd.server.config import ServerConfig


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_file_gives_engine_and_sampling_settings(llm, file):
    path = file(
        """
        model: m               # a comment
        draft: none
        arch: plain
        graphs: off            # a word, not a boolean
        kv_memory: 2GB
        batch_size: 4
        slo_tpot: 20
        prefix_cache: false
        synthetic_acceptance: [0.5, 0.8]
        engine_seed: 3
        draft_temperature: 1.5
        seed: 7
        temperature: 0.5
        stop: ["END", "\\n"]
        logit_bias: {5: -2.5}
        stop_token_ids: [1, 2]
        """
    )
    assert run("generate", "x", "--config", path) == 0
    assert llm.settings == {
        "model": "m", "draft": "none", "arch": "plain", "graphs": "off", "kv_memory": "2GB", "batch_size": 4,
        "slo_tpot": 20, "prefix_cache": False, "synthetic_acceptance": [0.5, 0.8], "seed": 3, "draft_temperature": 1.5,
    }  # fmt: skip
    assert llm.params == SamplingParams(
        max_tokens=128, seed=7, temperature=0.5, stop=["END", "\n"], logit_bias={5: -2.5}, stop_token_ids=[1, 2]
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),  # PyYAML's own 1.1 has text here
        ("1.5e-3", 0.0015),
        ("-.5", -0.5),
        ("010", 10),  # eight in 1.1
        ("0o10", 8),
        ("0xff", 255),
        ("1_000", "1_000"),  # a thousand in 1.1
        ("1:30", "1:30"),  # ninety
        ("2024-01-31", "2024-01-31"),  # a date
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("!!int 7", 7),
    ],
)
def test_scalars_are_those_of_yaml_1_2(file, text, value):
    found = config_file.read(Path(file(f"name: {text}")))["name"]
    assert found == value and type(found) is type(value)


def test_a_flag_goes_before_the_file(llm, file):
    path = file("batch_size: 4\nmax_tokens: 9\nprefix_cache: false\nacceptance: coupled\n")
    assert run("generate", "x", "--batch-size", "2", "--prefix-cache", "--config", path, "--max-tokens", "5") == 0
    assert llm.settings == {"batch_size": 2, "prefix_cache": True, "acceptance": "coupled"}
    assert (llm.params.max_tokens, llm.params.acceptance) == (5, "coupled")


def test_every_flag_has_its_name_in_a_file():
    """A name in a file is the flag's, in every command that takes one."""
    commands = cli.build_parser()._subparsers._group_actions[0].choices
    for name in ("generate", "chat", "serve", "costs"):
        parser = commands[name]
        dests = {action.dest for action in parser._actions if action.dest.startswith((flags.ENGINE, serve.SERVER))}
        assert {setting.dest for setting in parser.settings.values()} >= dests
        options = parser._option_string_actions
        assert all(options["--" + name.replace("_", "-")].dest == s.dest for name, s in parser.settings.items())


def test_the_server_takes_its_own_settings_from_a_file(file, monkeypatch):
    """Up to the supervisor, which gets what the file says."""
    from verifypd.server import supervisor

    class Started:
        def __init__(self, engine, server, folder, told):
            self.found = engine, server

        def run(self) -> int:
            engine, server = self.found
            assert (engine.model, engine.load_format, engine.batch_size) == ("llama-2-7b", "dummy", 3)
            assert isinstance(server, ServerConfig)
            assert (server.port, server.api_key, server.max_queue) == (8081, ("a", "b"), 7)
            return 0

    monkeypatch.setattr(supervisor, "Supervisor", Started)
    path = file("model: llama-2-7b\nload_format: dummy\nbatch_size: 3\nport: 8080\napi_key: [a, b]\nmax_queue: 7\n")
    assert run("serve", "--config", path, "--port", "8081") == 0


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("max_drafts: 3", "unknown setting 'max_drafts'; did you mean 'max_draft'?"),
        ("max-draft: 3", "did you mean 'max_draft'?"),
        ("gpu_memory_utilization: 0.9", "it is vLLM's: 'kv_memory'"),
        ("port: 8000", "unknown setting 'port'"),
        ("3: 4", "unknown setting 3"),
        ("batch_size: many", "batch_size is 'many'; give a whole number"),
        ("batch_size: true", "give a whole number"),
        ("speculation: off", "speculation is 'off'; give true or false"),
        ("stop: [1]", "give text or a list or null"),
        ("batch_size: 0", "--batch-size 0 must lie in 1..4096"),
        ("- a\n- b", "is not a mapping"),
        ("a: [", "is not YAML"),
        ("batch_size: !!int x", "is not YAML"),
        ("batch_size: 3\nmax_draft: 2\nbatch_size: 4", "line 1: batch_size is there twice: remove one"),
        ("placement: &a {verify: fused}\nx: {<<: *a, decode: stream, decode: fused}", "decode is there twice"),
    ],
)
def test_a_bad_file_is_one_line(llm, capsys, file, text, word):
    assert run("generate", "x", "--config", file(text)) == 2
    out, err = capsys.readouterr()
    assert word in err and err.startswith("error: ") and err.count("\n") == 1 and out == ""


def test_a_file_that_is_not_there(llm, capsys, tmp_path):
    assert run("generate", "x", "--config", str(tmp_path / "none.yaml")) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_an_empty_file_says_nothing(llm, file):
    assert run("generate", "x", "--config", file("# nothing\n")) == 0
    assert llm.settings == {}


def test_a_secret_is_not_repeated(llm, capsys, file):
    assert run("serve", "--config", file("model: m\napi_key: hunter2")) == 2
    err = capsys.readouterr().err
    assert "api_key is something else; give a list" in err and "hunter2" not in err
