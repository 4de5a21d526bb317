"""Tables of what the original published, beside what is measured and simulated here."""

from __future__ import annotations

from cells import read, rows, source
from tables_lanes import BATCHES, EVERY_H200, MIXED, MIXED_H200, RULED, SWEEP, SWEEP_H200, THREE_H200

from verifypd.bench import claims

SWEEP_7B_H200, QUEUE, HAND_OVER = "bench-sweep-7b-h200", "simulated-queue-h200", "hand-over"
CPU = ("bench-three-way-cpu", "bench-comprehensive-cpu")
PUBLISHED = (THREE_H200, "bench-models-h200", "bench-models-qwen2-gemma-h200", EVERY_H200)
ARMS = ("pd", "pdv whole", "pdv pipelined")


def _by_letter(*names: str) -> claims.Results:
    return [(found["protocol"]["letter"], found) for found in map(read, names)]


def figures() -> str:
    """What it says of utilisation, memory, acceptance, tails, waiting, queues and batches; each with a word."""
    measured = _by_letter(THREE_H200, EVERY_H200, SWEEP_H200, SWEEP_7B_H200, MIXED_H200)
    told = [
        claims.utilisation(measured),
        claims.memory(measured),
        *(claims.decode_tails(read(name)) for name in (MIXED_H200, MIXED)),
        claims.acceptance(_by_letter(THREE_H200, EVERY_H200), _by_letter(*CPU)),
        claims.won([read(name) for name in RULED]),
        *claims.sweep(read(SWEEP)),
        claims.queue_depth(read(QUEUE)),
        claims.batch_sizes(read(BATCHES)),
        claims.waiting(read(HAND_OVER)),
    ]
    lines = [[f"{each.name}: {each.claim}", each.figures, each.seen] for each in told]
    live = (THREE_H200, EVERY_H200, SWEEP_H200, SWEEP_7B_H200, MIXED_H200, *CPU)
    return rows(["its claim", "here", "verdict"], lines) + source(*live, MIXED, *RULED, QUEUE, BATCHES, HAND_OVER)


def changes() -> str:
    """B, C and D: P95 and tokens/s over Baseline's; of one load the later result."""
    made = {each.scenario: each for name in PUBLISHED for each in claims.published_changes(read(name))}
    lines = []
    for each in made.values():
        p95, rate = ("e2e_ms_p95", "tok_s")
        line = [each.scenario.removesuffix(" (random)")]
        for figure in (p95, rate):
            said = each.published.get(figure, {})
            line += [claims.change_texts(said, ("PD", "PDV")) if said else "–"]
            line += [claims.change_texts(each.measured[figure], ARMS)]
        lines.append([*line, each.over_baseline, each.over_pd])
    header = ["over Baseline", "P95: its PD / PDV", f"here: `{'` / `'.join(ARMS)}`", "tokens/s: its PD / PDV",
              "here, in the same order", "PDV's P95 moves so over Baseline's", "over PD's"]  # fmt: skip
    return rows(header, lines) + source(*PUBLISHED)
