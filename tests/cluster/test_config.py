"""Settings of a cluster, from flags and from the arguments of a config file."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from verifypd.cli import build_parser
from verifypd.cli.deploy import announced, config_file, settings
from verifypd.cluster.config import ClusterConfig, read
from verifypd.errors import ConfigError


def given(*arguments: str) -> Any:
    return settings(build_parser().parse_args(["deploy", *arguments]))


def test_a_config_file_deploys_what_the_flags_say() -> None:
    chosen = given("--model", "m", "--replicas", "2", "--max-replicas", "5", "--max-queue", "7", "--dtype", "float32")
    written = yaml.safe_load(config_file(chosen))
    [application] = written["applications"]
    assert application["import_path"] == "verifypd.serve_app:app"
    assert read(application["args"]) == chosen
    assert application["args"] == {"model": "m", "replicas": 2, "max_replicas": 5, "max_queue": 7, "dtype": "float32"}


def test_no_secret_is_written_into_a_config_file() -> None:
    assert "hidden" not in config_file(given("--api-key", "hidden"))


def test_a_key_of_the_environment_counts_for_a_config_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFYPD_API_KEY", "secret")
    assert read({"model": "m", "api_key": ["other"]}).server.api_key == ("other", "secret")


def test_one_value_alone_is_not_its_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = read({"api_key": "mykey", "cors_origin": "https://a.example"}).server
    assert chosen.api_key == ("mykey",) and chosen.cors_origin == ("https://a.example",)
    monkeypatch.setenv("VERIFYPD_API_KEY", "secret")
    assert read({"api_key": "mykey"}).server.api_key == ("mykey", "secret")


def test_a_second_deploy_names_the_address_that_is_served() -> None:
    """Ray Serve keeps to that of the first, whatever the second asks for."""
    chosen = given("--port", "9001")
    moved = announced(chosen, 9001, "127.0.0.1", 8000)
    assert "at http://127.0.0.1:8000\n" in moved and "not at 127.0.0.1:9001" in moved
    assert "not at" not in announced(chosen, 9001, "127.0.0.1", 9001)
    assert "not at" not in announced(given("--port", "0"), 40123, "127.0.0.1", 8000), "any would do"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"replicas": 0}, "--replicas 0 must lie in"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas 2 must not be less than"),
        ({"routing": "random"}, "choose from prefix, load, round-robin"),
        ({"goodput_goal": 2}, "--goodput-goal 2 must lie in 0..1"),
        ({"replica": 2}, "did you mean 'replicas'?"),
        ({"tls_cert": "a", "tls_key": "b"}, "is for one server, not for a cluster"),
        ({"admin_key": "a"}, "give --arch instead"),
        ({"api_workers": 2}, "give --ingress-replicas instead"),
        ({"max_queue": -1}, "--max-queue -1 must lie in"),
    ],
)
def test_what_makes_no_cluster_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        read(wrong)


def test_without_more_there_are_as_many_as_asked_for() -> None:
    assert ClusterConfig(replicas=3).most == 3
