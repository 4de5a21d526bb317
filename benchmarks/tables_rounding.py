"""Tables of what eight bits do to text: fp8 weights, and fp8 keys and values."""

from __future__ import annotations

from cells import read, rows, source

WEIGHTS, KEYS, INT8 = "fp8-cpu", "fp8_kv-neoverse-n1", "weights_kl-neoverse-n1"


def weights() -> str:
    """How far from float32 a verifier with fp8 weights is."""
    arms = read(WEIGHTS)["text"]["kl"].values()
    lines = [
        ["mean KL from float32, nats", *(f"{each['mean_kl']:.3f}" for each in arms)],
        ["the likeliest token is the same", *(f"{100 * each['argmax_agreement']:.1f} %" for each in arms)],
    ]
    return rows(["", "W8A16", "W8A8"], lines) + source(WEIGHTS)


def drafts() -> str:
    """Tokens a pass with the built-in draft, where it, the verifier or both are in fp8."""
    found = read(WEIGHTS)["text"]["acceptance"]
    arms = [found[f"verifier {v}, draft {d}"] for v in ("float32", "fp8") for d in ("float32", "fp8")]
    lines = [["tokens a pass", *(f"{each['tokens_a_pass']:.2f}" for each in arms)]]
    return rows(["in fp8", "neither", "the draft", "the verifier", "both"], lines) + source(WEIGHTS)


def keys_and_values() -> str:
    """How far from a float32 cache one in fp8 is."""
    found = read(KEYS)["kl"]
    arms = {
        "fp8 keys and values": found["fp8"],
        "the same with all scales 1, vLLM's default": found["fp8, scales of 1"],
        "int8 weights, to compare": read(INT8)["moved"]["int8"],
    }
    lines = [[name, f"{own['mean_kl']:.4f}", f"{100 * own['argmax_agreement']:.1f} %"] for name, own in arms.items()]
    header = ["", "mean KL from a float32 cache, nats", "the likeliest token is the same"]
    return rows(header, lines) + source(KEYS, INT8)
