"""The head with gradients: unrolled drafts are the drafts it would make one token at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verifypd.distil.head import Head, HeadShape, Seen
from verifypd.distil.loss import loss_of
from verifypd.distil.recipe import LOSSES, Recipe
from verifypd.distil.text import Batch
from verifypd.distil.train import rate, supervised
from verifypd.models.config import Rope
from verifypd.models.layers import rope_tables

SHAPE = HeadShape(
    hidden=32,
    mlp=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    feature_layers=(1,),
    vocab=20,
    window=64,
    norm_eps=1e-5,
)


def one_by_one(head: Head, embedded: Tensor, features: Tensor, start: int, depth: int) -> Tensor:
    """Streams [depth, hidden] of a draft that starts at row `start`: each row in its own pass, over a growing context.

    Rows up to `start` read true features; each later row reads the stream of the row before.
    """
    shape = head.shape
    stream = features.clone()  # [T, hidden]: what row p + 1 reads
    out = []
    for d in range(depth):
        rows = start + d + 1
        cos, sin = (t[:rows] for t in rope_tables(Rope(shape.rope_theta), shape.head_dim, rows, embedded.device))
        token = head.embed_norm(embedded[:rows])
        x = head.fc(torch.cat([token, head.hidden_norm(F.pad(stream[: rows - 1], (0, 0, 1, 0)))], -1))[None]
        for layer in head.layers:
            x = layer(x, cos, sin, Seen([], []))  # one depth: plain causal attention over mixed rows
        out.append(x[0, -1])
        stream[rows - 1] = x[0, -1]
    return torch.stack(out)


@pytest.mark.parametrize("start", [0, 1, 5, 9])
def test_unrolling_is_drafting(start: int) -> None:
    torch.manual_seed(0)
    head = Head(SHAPE)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    embedded, features = torch.randn(2, 14, 32), torch.randn(2, 14, 32)
    with torch.no_grad():
        streams = list(head.unroll(embedded, features, 4))
        for row in range(2):
            expected = one_by_one(head, embedded[row], features[row], start, 4)
            found = torch.stack([streams[d][row, start + d] for d in range(4)])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_window_hides_what_lies_further_back() -> None:
    torch.manual_seed(0)
    head = Head(HeadShape(**{**{n: getattr(SHAPE, n) for n in SHAPE.__slots__}, "window": 4, "layers": 1}))
    embedded, features = torch.randn(1, 12, 32), torch.randn(1, 12, 32)
    changed = embedded.clone()
    changed[0, 3] += 1.0
    with torch.no_grad():
        before, after = (list(head.unroll(x, features, 3)) for x in (embedded, changed))
    for depth in range(3):
        moved = (before[depth] - after[depth]).abs().sum(-1)[0] > 1e-6
        assert moved.nonzero()[:, 0].tolist() == [3, 4, 5, 6] or depth
        assert not moved[:3].any() and not moved[3 + 4 + depth :].any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_least_at_the_target(name: str) -> None:
    torch.manual_seed(0)
    target = torch.randn(6, 10).softmax(-1)
    logits = target.log().clone()
    if name == "kl+top":  # it prefers the likeliest: the minimum lies at the sharpened target
        logits = target.log().scatter_add(1, target.argmax(1, keepdim=True), torch.full((6, 1), 1.5).log())
    least = loss_of(name, logits, target)
    for _ in range(20):
        assert (loss_of(name, logits + 0.3 * torch.randn(6, 10), target) > least - 1e-6).all()


def test_rows_that_learn_predict_the_answer() -> None:
    batch = Batch(torch.zeros(2, 8, dtype=torch.int64), torch.tensor([8, 5]), torch.tensor([3, 4]))
    rows, starts = supervised(batch)
    assert rows.tolist() == [2, 3, 4, 5, 6, 8 + 3]
    assert starts.tolist() == [0, 1, 2, 3, 4, 0]


def test_the_rate_rises_stays_and_falls() -> None:
    recipe = Recipe(steps=1000, warmup=10, decay=0.3)
    assert rate(0, recipe) == pytest.approx(0.1)
    assert rate(500, recipe) == 1.0
    assert rate(850, recipe) == pytest.approx(0.5)
    assert rate(999, recipe) == pytest.approx(0.02)
