"""Writes the checkpoints and reference logits of this folder. Not run by tests: its outputs are kept.

    pip install --no-deps speculators==0.9.0 openai aiohttp hs-connectors   # beside torch 2.13 and transformers 5.22
    pip install datasets loguru
    python tests/models/data/eagle/make_reference.py

The two speculators heads are run by that library. EAGLE-1 and EAGLE-3 are run by the plain forward passes below, which
follow the published code (SafeAILab/EAGLE, cnets1.py and cnets.py) over whole texts, without caches.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3DraftModel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

HERE = Path(__file__).parent
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 32, 7, 2, 1, 8, 16
DRAFT_VOCAB, LENGTH, STEPS, EPS, THETA = 24, 14, 3, 1e-5, 10_000.0
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
}


def randomise(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Matrices that give logits of order one, norms near one; all of them numbers that bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        bias = name.endswith("bias")
        values = noise * tensor.shape[1] ** -0.5 if tensor.dim() == 2 else 0.1 * noise + (0.0 if bias else 1.0)
        made[name] = values.to(torch.bfloat16)
    return made


def save(model: Any, folder: Path) -> None:
    """In bfloat16, which its rotary tables must not become here."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def verifier() -> LlamaForCausalLM:
    config = LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1)
    model = LlamaForCausalLM(config)
    weights = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    model.load_state_dict(randomise(weights, 1), strict=False)
    save(model, HERE / "verifier")
    (HERE / "verifier" / "generation_config.json").unlink(missing_ok=True)
    return model.eval()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def attend(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    """Causal attention of [T, width]; positions count from 0, as in the published code."""
    rows = len(x)
    q, k, v = (
        (x @ weights[f"{prefix}self_attn.{p}_proj.weight"].T).view(rows, -1, HEAD_DIM).transpose(0, 1) for p in "qkv"
    )
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(rows).float(), frequencies).repeat(1, 2)

    def turned(z: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        return z * angles.cos() + torch.cat([-z[..., half:], z[..., :half]], -1) * angles.sin()

    mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
    return mixed.transpose(0, 1).reshape(rows, -1) @ weights[f"{prefix}self_attn.o_proj.weight"].T


def mlp(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def eagle1(embedded: Tensor, hidden: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Layer outputs [T, H]: what the verifier's output matrix reads, and what the next step reads."""
    x = torch.cat([embedded, hidden], -1) @ weights["fc.weight"].T + weights["fc.bias"]
    x = x + attend(x, weights, "layers.0.")
    return x + mlp(rms(x, weights["layers.0.post_attention_layernorm.weight"]), weights, "layers.0.")


def eagle3(embedded: Tensor, hidden: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The same of the one layer of EAGLE-3."""
    token, normed = (
        rms(embedded, weights["midlayer.input_layernorm.weight"]),
        rms(hidden, weights["midlayer.hidden_norm.weight"]),
    )
    x = hidden + attend(torch.cat([token, normed], -1), weights, "midlayer.")
    return x + mlp(rms(x, weights["midlayer.post_attention_layernorm.weight"]), weights, "midlayer.")


def chains(layer: Any, logits: Any, embedded: Tensor, features: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """[STEPS, T, V]: step s at t drafts from the text up to token t + 1 and goes on with the text's own tokens."""
    ends = LENGTH - 1 - STEPS
    found = []
    for t in range(ends + 1):
        rows, tokens = features[: t + 1], embedded[1 : t + 2]
        steps = []
        for step in range(STEPS):
            out = layer(tokens, rows, weights)
            steps.append(logits(out[-1]))
            rows, tokens = torch.cat([rows, out[-1:]]), embedded[1 : t + 3 + step]
        found.append(torch.stack(steps))
    return torch.stack(found, 1)


def layer_shapes(prefix: str, width: int) -> dict[str, Tensor]:
    """Empty tensors of one layer whose attention reads `width` numbers."""
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (q, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
        "post_attention_layernorm": (HIDDEN,),
    }
    return {f"{prefix}{name}.weight": torch.empty(shape) for name, shape in shapes.items()}


def draft_vocabulary() -> tuple[Tensor, Tensor]:
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:DRAFT_VOCAB].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return ids - torch.arange(DRAFT_VOCAB), known


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, "model_type": "llama", **fields}, indent=2) + "\n")


def speculators(name: str, layer: Any, **flags: Any) -> Tensor:
    """A head made and run by the library: logits [STEPS, T, V] of all its unrolled steps."""
    d2t, t2d = draft_vocabulary()
    model = Eagle3DraftModel.from_training_args(
        layer,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=DRAFT_VOCAB,
        ttt_steps=STEPS,
        verifier_name_or_path=str(HERE / "verifier"),
        draft_attn_impl="eager",
        **{"norm_before_residual": False, **flags},
    )
    own = ("verifier_lm_head.weight", "verifier_norm.weight", "embed_tokens.weight", "d2t", "t2d")
    weights = randomise({name: t for name, t in model.state_dict().items() if name not in own}, 3)
    model.load_state_dict(weights, strict=False)
    save(model, HERE / name)
    (HERE / name / "config.py").unlink(missing_ok=True)  # the library's own source
    path = HERE / name / "config.json"
    config = json.loads(path.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "example/verifier"
    path.write_text(json.dumps(config, indent=2) + "\n")
    model.eval()
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach()[0]))
    states = torch.cat([HIDDEN_STATES[k] for k in model.target_layer_ids], -1)
    model(
        hidden_states=states[None, :-1],
        input_ids=IDS[None, 1:],
        document_ids=torch.zeros(1, LENGTH - 1, dtype=torch.long),
        ttt_steps=STEPS,
    )
    return torch.stack(seen)[:, : LENGTH - STEPS]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    target = verifier()
    IDS = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(4))
    HIDDEN_STATES = [h[0] for h in target(IDS[None], output_hidden_states=True).hidden_states]
    embedding = target.get_input_embeddings().weight
    found = {"ids": IDS}

    shapes = {"fc.weight": torch.empty(HIDDEN, 2 * HIDDEN), "fc.bias": torch.empty(HIDDEN)}
    weights = randomise({**shapes, **layer_shapes("layers.0.", HIDDEN)}, 5)
    write_config(HERE / "eagle", {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": True})
    save_file({"embed_tokens.weight": embedding.to(torch.bfloat16), **weights}, HERE / "eagle" / "model.safetensors")
    full = {name: tensor.float() for name, tensor in weights.items()}
    found["eagle"] = chains(eagle1, lambda x: x @ embedding.T, embedding[IDS], HIDDEN_STATES[-1], full)

    shapes = {
        "fc.weight": torch.empty(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.empty(HIDDEN),
        "lm_head.weight": torch.empty(DRAFT_VOCAB, HIDDEN),
        "midlayer.input_layernorm.weight": torch.empty(HIDDEN),
        "midlayer.hidden_norm.weight": torch.empty(HIDDEN),
    }
    weights = randomise({**shapes, **layer_shapes("midlayer.", 2 * HIDDEN)}, 6)
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB}
    write_config(HERE / "eagle3", fields)
    d2t, t2d = draft_vocabulary()
    torch.save({**weights, "d2t": d2t, "t2d": t2d}, HERE / "eagle3" / "pytorch_model.bin")
    full = {name: tensor.float() for name, tensor in weights.items()}
    features = torch.cat([HIDDEN_STATES[k] for k in (2, LAYERS // 2, LAYERS - 3)], -1) @ full["fc.weight"].T

    def own_logits(x: Tensor) -> Tensor:
        return rms(x, full["norm.weight"]) @ full["lm_head.weight"].T

    found["eagle3"] = chains(eagle3, own_logits, embedding[IDS], features, full)

    llama = LlamaConfig(**SHAPE, num_hidden_layers=1)
    found["speculators"] = speculators("speculators", llama, target_layer_ids=[0, 3, 6])
    qwen3 = Qwen3Config(**SHAPE, num_hidden_layers=2)
    qwen3.sliding_window, qwen3.layer_types = 6, ["sliding_attention", "full_attention"]
    flags = {"norm_before_residual": True, "fc_norm": True, "norm_output": True}
    found["speculators31"] = speculators("speculators31", qwen3, **flags)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, HERE / "reference.safetensors")
