"""What an operator changes while the server runs: not there without a key, and then with that key only."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.clients import Stream
from tests.server.inprocess import connected
from tests.server.samples import IDS
from tests.server.serving import Server
from verifypd.server.calls import CallError
from verifypd.server.messages import Down, Switch

pytestmark = pytest.mark.xdist_group("server")

PATH = "/v1/admin/architecture"
OPERATOR = {"Authorization": "Bearer operator"}
CLIENT = {"Authorization": "Bearer client"}
LONG = {"prompt": IDS, "max_tokens": 150, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def keyed(folders, tmp_path_factory):
    """Its operator's key is in the environment, where no list of processes shows it."""
    log = tmp_path_factory.mktemp("log") / "admin.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERIFYPD_ADMIN_KEY", "operator")
        with Server(folders[0], str(folders[1]), log, **{"api-key": "client", "metrics-interval": 2}) as running:
            yield running


def test_without_an_operators_key_it_is_not_there(server):
    for status, body, _ in (server.post(PATH, {"architecture": "pd"}), server.get(PATH)):
        assert status == 404 and body["error"]["code"] == "not_found"


def test_only_the_operators_key_opens_it_and_it_opens_nothing_else(keyed):
    for headers in ({}, CLIENT, {"Authorization": "Bearer wrong"}):
        status, body, _ = keyed.post(PATH, {"architecture": "pd"}, **headers)
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
        assert keyed.get(PATH, **headers)[0] == 401
    assert keyed.post("/v1/completions", {"prompt": IDS, "max_tokens": 1}, **OPERATOR)[0] == 401
    assert keyed.post("/v1/completions", {"prompt": IDS, "max_tokens": 1}, **CLIENT)[0] == 200
    assert "operator" not in keyed.log.read_text()


def test_a_switch_under_a_stream_changes_no_text_and_is_told(keyed):
    alone = keyed.post("/v1/completions", LONG, **CLIENT)[1]["choices"][0]["text"]
    stream = Stream(keyed, LONG, key="client").start().begun()
    status, body, _ = keyed.post(PATH, {"architecture": "pdv"}, **OPERATOR)
    assert status == 200 and body["policy"] == "pdv"
    assert keyed.get(PATH, **OPERATOR)[1]["policy"] == "pdv"
    assert stream.join().text == alone
    figures = keyed.idle()
    assert figures['verifypd:architecture{architecture="pdv (atomic)",policy="pdv"}'] == 1
    assert figures['verifypd:architecture_steps_total{architecture="pdv (atomic)"}'] > 0
    assert figures['verifypd:architecture_steps_total{architecture="unified"}'] > 0
    told = keyed.get(PATH, **OPERATOR)[1]
    assert (told["policy"], told["architecture"], told["switches"]) == ("pdv", "pdv (atomic)", 1)
    assert set(told["architecture_steps"]) == {"unified", "pdv (atomic)"}


@pytest.mark.parametrize("body", [{"architecture": "pvd"}, {"architecture": 3}, {}, {"architecture": "pd", "x": 1}])
def test_what_is_no_architecture_is_refused(keyed, body):
    status, answer, _ = keyed.post(PATH, body, **OPERATOR)
    assert status == 400 and answer["error"]["param"] in ("architecture", "x")
    assert "--arch" not in answer["error"]["message"]
    if body == {"architecture": "pvd"}:
        assert "architecture: 'pvd' is not known; choose from" in answer["error"]["message"]


def test_a_switch_does_not_wait_for_an_engine_that_is_gone(tokenizer):
    async def run() -> None:
        bridge, heard = connected(tokenizer)
        switch = asyncio.ensure_future(bridge.switch("pdv"))
        await asyncio.sleep(0)
        assert isinstance(heard[0], Switch) and heard[0].architecture == "pdv"
        bridge.take(Down(1, "it broke"))
        with pytest.raises(CallError, match="it broke") as caught:
            await switch
        assert caught.value.code == "engine_lost"
        with pytest.raises(CallError, match="not up"):
            await bridge.switch("pdv")

    asyncio.run(run())
