"""The text of matrix instructions: an operand for each sum, and for what is read."""

from __future__ import annotations

import re

import pytest

from verifypd.kernels import wgmma


def joined(text: bytes) -> str:
    """Literals that stand one behind the other are one."""
    return re.sub(r'"\s*"', "", text.decode())


@pytest.mark.parametrize("columns", [48, 64, 128])
def test_of_matrices_in_shared_memory(columns: int) -> None:
    text = joined(wgmma.product("multiply", columns, float16=False))
    sums = columns // 2
    assert "void multiply(float *d, unsigned long long a, unsigned long long b, int add)" in text
    assert f"m64n{columns}k16.f32.bf16.bf16" in text
    assert text.count("+f") == sums
    assert f"%{sums}, %{sums + 1}, add, 1, 1, 0, 0;" in text
    assert f"setp.ne.b32 add, %{sums + 2}, 0;" in text


def test_of_rows_in_registers() -> None:
    """They are four words of a thread; columns lie across."""
    text = joined(wgmma.product("mix", 64, float16=True, left_in_registers=True, across=True))
    assert "m64n64k16.f32.f16.f16" in text
    assert text.count("+f") == 32 and text.count('"r"(a[') == 4
    assert "{%32, %33, %34, %35}, %36, add, 1, 1, 1;" in text
    assert "setp.ne.b32 add, %37, 0;" in text
