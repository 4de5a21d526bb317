"""An arm that is transformers' own assisted generation, in this process: one request at a time, as it does.

transformers is no part of an installation; without it the arm says how to get it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from verifypd.bench.arms import pairs_of
from verifypd.bench.dummy import parsed
from verifypd.bench.play import Answer, Drafts
from verifypd.bench.provenance import relative
from verifypd.bench.workload import Arrival
from verifypd.config import EngineConfig
from verifypd.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from verifypd.tokenizer import Tokenizer

NAME = "transformers"
SETTINGS = ("model", "draft", "max_draft", "dtype", "device")


class Assisted:
    """`generate(assistant_model=…)`, greedy. draft: a folder, "ngram" (its prompt look-up), or None."""

    def __init__(self, name: str, settings: dict[str, Any], vocab: int | None = None) -> None:
        for each in settings:
            if each not in SETTINGS:
                raise ConfigError(f"--arm {name}: {each!r} is none of its settings, {', '.join(SETTINGS)}")
        self._name = name
        self.settings = {"model": EngineConfig.model, "draft": None, "max_draft": 4, "dtype": "float32", **settings}
        if self.settings["draft"] in ("auto", "none", ""):
            self.settings["draft"] = None
        self.vocab = vocab
        self._one = asyncio.Lock()
        self._model: Any = None
        self._draft: Any = None
        self._tokenizer: Tokenizer | None = None

    @property
    def name(self) -> str:
        """As given on the command line."""
        return self._name

    @property
    def spec(self) -> dict[str, Any]:
        """Its settings."""
        shown = {name: relative(each) if isinstance(each, str) else each for name, each in self.settings.items()}
        return {"transformers": shown, "vocab": self.vocab}

    async def start(self) -> dict[str, Any]:
        """Load the models."""
        try:
            import transformers
        except ImportError:
            raise ConfigError("the arm transformers needs it: pip install 'verifypd[bench]'") from None
        await asyncio.to_thread(self._load)
        return {"transformers": transformers.__version__, "draft": self.spec["transformers"]["draft"]}

    def _load(self) -> None:
        from verifypd.models.hub import resolve
        from verifypd.tokenizer import Tokenizer

        self._model = reference(self.settings["model"], self.settings["dtype"], self.settings.get("device"))
        if self.settings["draft"] not in (None, "ngram"):
            self._draft = reference(self.settings["draft"], self.settings["dtype"], self.settings.get("device"))
        source = resolve(self.settings["model"])
        if source.folder is not None and (source.folder / "tokenizer.json").exists():
            self._tokenizer = Tokenizer.from_folder(source.folder)

    async def ask(self, arrival: Arrival, seed: int, answer: Answer) -> None:
        """Answer one request to its full length; others wait."""
        ids = self._ids(arrival, seed)
        loop = asyncio.get_running_loop()
        stop = threading.Event()
        async with self._one:
            work = asyncio.to_thread(
                self._generate, ids, arrival.output_tokens, stop,
                lambda count: loop.call_soon_threadsafe(answer.came, count),
            )  # fmt: skip
            task = asyncio.ensure_future(work)
            try:
                count = await asyncio.shield(task)
            except asyncio.CancelledError:
                stop.set()  # the thread ends with its step; only then may the next request have the model
                await asyncio.wait([task])
                raise
        await asyncio.sleep(0)  # what came last is noted
        answer.ended(count, len(ids))

    def _ids(self, arrival: Arrival, seed: int) -> list[int]:
        prompt = arrival.as_text().text_or_ids(seed, self.vocab)
        if isinstance(prompt, list):
            return prompt
        if self._tokenizer is None:
            raise ConfigError(f"{self.settings['model']} has no tokenizer here; give --vocab")
        return self._tokenizer.encode(prompt)

    def _generate(self, ids: list[int], tokens: int, stop: threading.Event, came: Any) -> int:
        """In a thread of its own."""
        import torch

        given = torch.tensor([ids], device=self._model.device)
        drafts: dict[str, Any] = {}
        if self._draft is not None:
            config = self._draft.generation_config
            config.num_assistant_tokens = self.settings["max_draft"]
            config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0
            drafts = {"assistant_model": self._draft}
        elif self.settings["draft"] == "ngram":
            drafts = {"prompt_lookup_num_tokens": self.settings["max_draft"]}
        counted = _Counted(came, len(ids))
        with torch.inference_mode():
            found = self._model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, min_new_tokens=tokens,
                do_sample=False, pad_token_id=0, streamer=counted, stopping_criteria=_until(stop), **drafts,
            )  # fmt: skip
        return int(found.shape[1]) - len(ids)

    async def drafts(self) -> Drafts | None:
        """It does not say."""
        return None

    async def close(self) -> None:
        """Free the models."""
        self._model = self._draft = None


def _until(stop: threading.Event) -> Any:
    """Ends a generation once somebody says so."""
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Until(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), stop.is_set(), device=input_ids.device, dtype=torch.bool)

    return StoppingCriteriaList([Until()])


class _Counted:
    """A streamer: told of tokens as they are accepted, the prompt first where it is passed on."""

    def __init__(self, came: Any, prompt: int) -> None:
        self.came, self.prompt, self.first = came, prompt, True

    def put(self, value: Any) -> None:
        count = value.numel()
        if self.first and count == self.prompt and count > 1:
            self.first = False
            return
        self.first = False
        self.came(count)

    def end(self) -> None:
        """Nothing is left to tell."""


def reference(model: str, dtype: str, device: str | None = None) -> Any:
    """transformers' model of a folder; of the built-in one, its Llama over the weights that the engine reads."""
    import torch
    import transformers

    from verifypd.models.hub import resolve

    kind: torch.dtype = getattr(torch, dtype if dtype != "auto" else "float32")
    where = device if device not in (None, "auto") else "cuda" if torch.cuda.is_available() else "cpu"
    source = resolve(model)
    if source.folder is not None and any(source.folder.glob("*.safetensors")):
        made: Any = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=kind)
        return made.to(where).eval()
    return built_in(model).to(kind).to(where).eval()


def built_in(model: str = "smollm2") -> Any:
    """transformers' Llama over the same weights the engine dequantises."""
    import torch
    import transformers

    from verifypd import kernels
    from verifypd.models.hub import resolve
    from verifypd.models.loader import load_model

    source = resolve(model)
    if source.folder is None:
        raise ConfigError(f"{model} has no folder that transformers could read")
    ours: Any = load_model(source, dtype=torch.float32, device="cpu", kernels=kernels.select("cpu", "torch"))
    made = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(source.folder))
    heads, kv_heads = ours.config.heads * ours.config.head_dim, ours.config.kv_heads * ours.config.head_dim
    with torch.no_grad():
        made.model.embed_tokens.weight.copy_(ours.embedding)
        for mine, theirs in zip(ours.layers, made.model.layers, strict=True):
            for name, part in zip("qkv", mine.qkv.split([heads, kv_heads, kv_heads], 0), strict=True):
                getattr(theirs.self_attn, f"{name}_proj").weight.copy_(part)
            theirs.self_attn.o_proj.weight.copy_(mine.output)
            for name, part in zip(("gate", "up"), mine.gate_up.chunk(2, 0), strict=True):
                getattr(theirs.mlp, f"{name}_proj").weight.copy_(part)
            theirs.mlp.down_proj.weight.copy_(mine.down)
            theirs.input_layernorm.weight.copy_(mine.input_norm)
            theirs.post_attention_layernorm.weight.copy_(mine.mlp_norm)
        made.model.norm.weight.copy_(ours.layers[-1].next_norm)
    return made


def parse(text: str, shared: dict[str, Any], vocab: int | None = None) -> Assisted:
    """An arm from `transformers` or `transformers:SETTING=VALUE,…` over settings that all arms share."""
    given = parsed(pairs_of(text.partition(":")[2], text))
    return Assisted(text, {**{name: value for name, value in shared.items() if name in SETTINGS}, **given}, vocab)
