"""A tiny pair with a chat template that knows tools, one server over it that no test harms, and one that tests harm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.pairs import noisy_copy
from tests.models.checkpoints import tiny
from tests.server import faulty
from tests.server.frail import CONNECTIONS, LONG, PROMPTS
from tests.server.serving import TINY, Server
from verifypd import LLM
from verifypd.tokenizer import Tokenizer

FOREIGN = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")

TEMPLATE = """{%- if tools %}<tools>{{ tools | tojson }}</tools> call: <tool_call>{"name": …}</tool_call>{% endif -%}
{%- for message in messages -%}
<|{{ message['role'] }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message['content'] }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}</s>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}"""


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny verifier and a draft that agrees with it now and then."""
    base = tmp_path_factory.mktemp("pair")
    verifier = tiny("llama", base / "verifier", max_position_embeddings=512)
    (verifier / "chat_template.jinja").write_text(TEMPLATE)
    return verifier, noisy_copy(verifier, base / "draft", 0.15)


@pytest.fixture(scope="session")
def tokenizer(folders: tuple[Path, Path]) -> Tokenizer:
    """The verifier's."""
    return Tokenizer.from_folder(folders[0])


@pytest.fixture
def spelt(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens whose bytes the tokenizer was asked for."""
    asked: list[int] = []
    inner = tokenizer.token_bytes

    def counting(index: int) -> bytes:
        asked.append(index)
        return inner(index)

    monkeypatch.setattr(tokenizer, "token_bytes", counting)
    return asked


@pytest.fixture(scope="session")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server with its usual settings."""
    with Server(folders[0], str(folders[1]), tmp_path_factory.mktemp("log") / "server.log") as running:
        yield running
        running.idle()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=server.base, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def offline(folders: tuple[Path, Path]) -> Iterator[LLM]:
    """The engine in this process, with the settings of the server."""
    names = ("dtype", "kv-memory", "batch-size", "max-draft", "max-model-len", "block-size")
    with LLM(str(folders[0]), draft=str(folders[1]), **{n.replace("-", "_"): TINY[n] for n in names}) as llm:
        yield llm


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder whose files set off faults."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What other programs share their counters in: an empty folder for each name that the variable may have."""
    folder = tmp_path_factory.mktemp("foreign")
    for name in FOREIGN:
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def beside(foreign: Path) -> Iterator[pytest.MonkeyPatch]:
    """Servers of this module find these folders in their environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in FOREIGN:
            patch.setenv(name, str(foreign / name))
        yield patch


@pytest.fixture(scope="module")
def asking(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier that asks for one token out of one: without a word from the client its texts are the greedy ones."""
    folder = tmp_path_factory.mktemp("asking") / "model"
    shutil.copytree(folders[0], folder)
    file = folder / "generation_config.json"
    told = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**told, "top_k": 1}))
    return folder


@pytest.fixture(scope="module")
def frail(
    folders: tuple[Path, Path],
    asking: Path,
    faults: Path,
    beside: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """A server whose engine can be broken."""
    beside.setenv(faulty.VARIABLE, str(faults))
    flags: dict[str, Any] = {"engine-factory": "tests.server.faulty:build", "step-timeout": 3, "send-timeout": 2}
    log = tmp_path_factory.mktemp("log") / "frail.log"
    limits = {"header-timeout": 2, "max-body": "100KB", "max-connections": CONNECTIONS, "drain-timeout": 90}
    limits |= {"keep-alive-timeout": 8, "generation-config": "none"}
    with Server(asking, str(folders[1]), log, **limits, **flags) as running:
        yield running


@pytest.fixture(scope="module")
def texts(frail: Server) -> list[str]:
    """What each prompt gives when nothing breaks."""
    return [choice["text"] for choice in frail.complete(PROMPTS, **LONG)["choices"]]
