"""Every setting has its flag, and what flags say reaches the engine and the request."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.cli.speller import run
from verifypd import cli, config
from verifypd.cli import flags
from verifypd.cluster.config import NOT_HERE
from verifypd.config import EngineConfig
from verifypd.request import SamplingParams


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


def test_the_help_of_deploy_leaves_out_what_it_refuses(capsys):
    with pytest.raises(SystemExit):
        run("deploy", "--help")
    shown = capsys.readouterr().out
    assert "--ingress-replicas" in shown
    assert not [name for name in NOT_HERE if config.flag(name) in shown]
