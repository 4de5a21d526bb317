"""What a distillation run is made of: frozen settings, checked at birth. Knows no tensor and no file."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from verifypd.errors import ConfigError

LOSSES = ("kl", "kl+tv", "kl+top")
FORMATS = ("verifypd", "speculators")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All that decides the outcome. The same recipe, verifier and machine give the same draft."""

    seed: int = 0
    # text
    self_prompts: int = 60_000  # prompts the verifier writes itself, after its own chat template
    responses: int = 200_000  # answers in all, over given and self-written prompts
    raw_share: float = 0.08  # of the answers: text continued without a chat template
    given_share: float = 0.0  # least share of given prompts among those answered; few are answered again and again
    temperatures: tuple[float, ...] = (0.0, 0.8, 0.5, 0.0, 0.8, 1.0, 0.0, 0.8)  # used in turn
    max_prompt: int = 192  # tokens; longer prompts are left out
    max_new: int = 320  # tokens of an answer
    generate_batch: int = 4096  # sequences generated side by side
    validation: int = 256  # prompts kept back from training, for the choice of the loss and the curve
    # head
    format: str = "verifypd"  # or speculators: a head of the EAGLE-3 architecture, which other engines load too
    layers: int = 1
    mlp_size: int | None = None  # None: the verifier's
    feature_layers: tuple[int, ...] | None = None  # verifier layers it reads beside the last; None: two in between
    vocab: int = 8192  # tokens it can propose
    window: int = 512  # tokens its attention sees
    # training
    start: str | None = None  # folder of a draft whose weights training begins with
    depth: int = 4  # draft positions unrolled
    depth_decay: float = 0.8  # weight of a position against the one before
    losses: tuple[str, ...] = LOSSES  # tried for `pilot_steps`; the best goes on
    pilot_steps: int = 400
    steps: int = 8000
    batch_tokens: int = 32_768
    learning_rate: float = 1e-3
    warmup: int = 200  # steps
    decay: float = 0.35  # last share of the steps, over which the rate falls to a fiftieth
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        whole = ("responses", "max_prompt", "max_new", "generate_batch", "validation", "layers", "vocab", "window")
        for name in (*whole, "depth", "steps", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)} and must be positive")
        if self.mlp_size is not None and self.mlp_size < 1:
            raise ConfigError(f"--mlp-size is {self.mlp_size} and must be positive")
        layers = self.feature_layers or ()
        if any(layer < 0 for layer in layers) or len(set(layers)) < len(layers):
            raise ConfigError("--feature-layers must be numbers of layers, 0 or more, each of them once")
        if not 0.0 <= self.learning_rate < math.inf:
            raise ConfigError(f"--learning-rate is {self.learning_rate} and must be 0 or more")
        if not 0.0 <= self.decay <= 1.0:
            raise ConfigError(f"--decay is {self.decay} and must be a share of the steps, 0 to 1")
        for name in ("self_prompts", "pilot_steps", "warmup"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)} and must be 0 or more")
        if self.format not in FORMATS:
            raise ConfigError(f"--format {self.format!r} is not known; choose from {', '.join(FORMATS)}")
        if self.format != "verifypd" and self.start is not None:
            raise ConfigError("--start is for heads of the package's own format: leave it out, or --format")
        unknown = next((name for name in self.losses if name not in LOSSES), None)
        if unknown is not None or not self.losses:
            raise ConfigError(f"--losses: {unknown!r} is not known; choose from {', '.join(LOSSES)}")
        if not self.temperatures or any(not 0.0 <= each < math.inf for each in self.temperatures):
            raise ConfigError("--temperatures must be zero or more, and at least one")
        if self.window < self.max_prompt + self.max_new:
            raise ConfigError(
                f"a window of {self.window} tokens must hold a training text of"
                f" {self.max_prompt + self.max_new}: raise --window, or lower --max-prompt or --max-new"
            )
        for name in ("raw_share", "given_share"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)} and must be at least 0 and below 1"
                )

    @property
    def text_key(self) -> dict[str, object]:
        """The part that decides the text: where it differs, text made before cannot be used again."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name in _TEXT}


_TEXT = {
    "seed",
    "self_prompts",
    "responses",
    "raw_share",
    "given_share",
    "temperatures",
    "max_prompt",
    "max_new",
    "generate_batch",
    "validation",
}

# Every stage once, on as little text as that takes: seconds on two cores, with a verifier of 135 M weights.
TINY = Recipe(
    self_prompts=4,
    responses=4,
    max_prompt=64,
    max_new=8,
    generate_batch=4,
    validation=1,
    vocab=64,
    window=128,
    losses=("kl", "kl+top"),
    pilot_steps=1,
    steps=2,
    batch_tokens=128,
    warmup=1,
)
TINY_PROMPTS, TINY_HELD_OUT = 32, 4  # of the prompts, how many it uses for training and for the evaluation
