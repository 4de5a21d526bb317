from __future__ import annotations

import numpy as np
import pytest
import torch

from verifypd.sampling.philox import Role, gumbel, philox, uniform, uniforms

# Random123, kat_vectors, philox4x32 10: counter, key, result
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_known_answers(library, counter, key, result):
    make = (lambda word: torch.tensor([word])) if library == "torch" else (lambda word: np.array([word]))
    words = philox(tuple(map(make, counter)), tuple(map(make, key)))
    assert tuple(int(word[0]) for word in words) == result


def test_the_seed_is_the_key_and_the_role_the_last_counter_word():
    seed = 0x299F31D0A4093822
    words = uniforms(torch.tensor([seed]), torch.tensor([7]), torch.tensor([5]), Role.RESIDUAL)
    expected = philox(
        tuple(torch.tensor([word]) for word in (5, 7, 0, int(Role.RESIDUAL))),
        (torch.tensor([0xA4093822]), torch.tensor([0x299F31D0])),
    )
    assert torch.equal(words[0], torch.stack([(word[0] >> 8) * 2.0**-24 for word in expected]))


def test_uniforms_fill_the_unit_interval():
    seeds = torch.arange(100_000) * 0x9E3779B97F4A7C15
    u = uniform(seeds, torch.zeros_like(seeds), torch.zeros_like(seeds), Role.ACCEPT)
    assert u.dtype == torch.float32
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts = torch.histc(u, 50, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 10 * np.sqrt(98)


def test_keys_give_independent_noise():
    """Roles, indices, choices, seeds and lanes are uncorrelated with each other."""
    n = 20_000
    base, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    series = [uniform(base, zero, zero, role) for role in Role]
    series += [uniform(base, zero + 1, zero, Role.DRAFT), uniform(base, zero, zero + 1, Role.DRAFT)]
    series += [uniform(zero, zero, base, Role.DRAFT), *uniforms(base + n, zero, zero, Role.DRAFT).unbind(-1)]
    correlation = torch.corrcoef(torch.stack(series)) - torch.eye(len(series))
    assert correlation.abs().max() < 5 / np.sqrt(n)


def test_shapes_broadcast():
    seeds, indices = torch.arange(3)[:, None], torch.arange(5)
    u = uniform(seeds, torch.zeros(1, dtype=torch.int64), indices, Role.DRAFT)
    assert u.shape == (3, 5)
    assert u[2, 4] == uniform(torch.tensor([2]), torch.tensor([0]), torch.tensor([4]), Role.DRAFT)
    roles = torch.tensor([int(Role.ACCEPT), int(Role.RESIDUAL)])[:, None, None]
    both = uniform(seeds, torch.zeros(1, dtype=torch.int64), indices, roles)
    assert torch.equal(both[1], uniform(seeds, torch.zeros(1, dtype=torch.int64), indices, Role.RESIDUAL))


def test_negative_and_large_seeds_differ():
    seeds = torch.tensor([-1, 2**63 - 1, 2**32, 0, 1])
    u = uniform(seeds, torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), Role.DRAFT)
    assert len(u.unique()) == 5


def test_gumbel_noise_is_gumbel_and_keyed_by_token():
    seeds, zero = torch.arange(500), torch.zeros(500, dtype=torch.int64)
    noise = gumbel(seeds, zero, zero, 203)
    assert noise.shape == (500, 203)
    assert torch.isfinite(noise).all()
    assert abs(noise.mean() - 0.5772) < 0.02
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
    assert torch.equal(gumbel(seeds[7:8], zero[:1], zero[:1], 77), noise[7:8, :77])  # not by vocabulary or batch


def test_gumbel_noise_is_finite_at_the_ends(monkeypatch):
    for word in (0, 0xFFFFFFFF):
        monkeypatch.setattr("verifypd.sampling.philox._words", lambda *keys, word=word: (torch.full((1, 1), word),) * 4)
        zero = torch.zeros(1, dtype=torch.int64)
        noise = gumbel(zero, zero, zero, 4)
        assert torch.isfinite(noise).all()
        assert torch.allclose(noise, torch.full((1, 4), 22.874 if word == 0 else -2.812), atol=1e-2)
