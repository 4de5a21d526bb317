"""Many clients at once: every text is the offline engine's, none is lost, none is crossed, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.serving import TINY, Server
from verifypd import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("server")

CLIENTS, LEAVERS = 64, 16


def plan(count: int) -> list[tuple[Any, dict[str, Any]]]:
    """Prompts and parameters: text and ids, greedy and seeded, short and long, with and without stop strings."""
    dice = random.Random(7)
    made: list[tuple[Any, dict[str, Any]]] = []
    for i in range(count):
        ids = [3 + dice.randrange(300) for _ in range(dice.randrange(1, 60))]
        prompt: Any = f"client {i} says: the same the same" if i % 3 == 0 else ids + ids[: len(ids) // 2]
        params: dict[str, Any] = {"max_tokens": dice.randrange(4, 48)}
        params |= [
            {"temperature": 0.0},
            {"seed": i, "temperature": 0.8},
            {"seed": i, "top_p": 0.9, "presence_penalty": 0.5},
            {"temperature": 0.0, "stop": ["e", "zz"]},
        ][i % 4]
        made.append((prompt, params))
    return made


async def ask(client: openai.AsyncOpenAI, prompt: Any, params: dict[str, Any], stream: bool) -> str:
    if not stream:
        got = await client.completions.create(model="tiny", prompt=prompt, **params)
        return got.choices[0].text
    text = ""
    async for part in await client.completions.create(model="tiny", prompt=prompt, stream=True, **params):
        text += part.choices[0].text
    return text


async def leave(client: openai.AsyncOpenAI, dice: random.Random) -> None:
    """Ask for a long text and go away at some point: before it begins, or in the middle."""
    body: Any = {"model": "tiny", "prompt": [9, 8, 7], "max_tokens": 380, "extra_body": {"ignore_eos": True}}
    try:
        async with asyncio.timeout(dice.uniform(0.01, 1.5)):
            async for _ in await client.completions.create(stream=True, **body):
                pass
    except TimeoutError:
        pass


async def everyone(server: Server, work: list[tuple[Any, dict[str, Any]]]) -> list[str]:
    dice = random.Random(3)
    async with openai.AsyncOpenAI(base_url=server.base, api_key="none", max_retries=0, timeout=120) as client:
        asks = [ask(client, prompt, params, i % 5 != 4) for i, (prompt, params) in enumerate(work)]
        leavers = [leave(client, dice) for _ in range(LEAVERS)]
        found = await asyncio.gather(*asks, *leavers)
    return found[: len(work)]


@pytest.mark.slow
def test_64_clients_get_the_offline_texts(server: Server, folders: tuple[Path, Path]) -> None:
    work = plan(CLIENTS)
    names = ("dtype", "kv-memory", "max-draft", "max-model-len", "block-size")
    settings = {name.replace("-", "_"): TINY[name] for name in names}
    with LLM(str(folders[0]), draft=None, arch="plain", batch_size=4, **settings) as llm:
        outputs = llm.generate([prompt for prompt, _ in work], [SamplingParams(**params) for _, params in work])
        expected = [output.outputs[0].text for output in outputs]
    before = server.idle()
    got = asyncio.run(everyone(server, work))
    assert got == expected
    after = server.idle()
    name = 'verifypd:calls_total{outcome="ok"}'
    assert after[name] - before.get(name, 0.0) >= CLIENTS
    assert after["vllm:spec_decode_num_accepted_tokens_total"] > before["vllm:spec_decode_num_accepted_tokens_total"]
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    assert after[aborted] > before.get(aborted, 0.0)


@pytest.mark.slow
def test_a_short_prompt_does_not_wait_for_long_ones(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Twenty long prompts came first, and eight tokens are read a step: it is answered before most of them, though all
    have waited for more than their targets allow."""
    flags = {"arch": "plain", "prefill-chunk": 8, "no-prefix-cache": True, "max-draft": 0, "max-queue": 64}
    flags |= {"slo-ttft": 1, "slo-gap": 1}

    async def all_at_once(server: Server) -> int:
        """Long prompts that are not answered when the short one is."""
        async with openai.AsyncOpenAI(base_url=server.base, api_key="none", max_retries=0, timeout=120) as client:
            params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
            long = [asyncio.create_task(ask(client, [3 + i] * 390, params, False)) for i in range(20)]
            await asyncio.wait(long, return_when=asyncio.FIRST_COMPLETED)
            await ask(client, [5, 6, 7, 8], params, False)
            left = sum(not each.done() for each in long)
            await asyncio.gather(*long)
        return left

    with Server(folders[0], "none", tmp_path / "log", **flags) as server:
        assert asyncio.run(all_at_once(server)) >= 10
