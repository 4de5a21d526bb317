"""What kernels for Hopper share: the text of its matrix instructions, which have an operand for each sum, and a source.

Knows no kernel.
"""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).with_name("hopper.cu")  # before the source of each
CAPABILITY = (9, 0)  # the one that has these instructions


def product(name: str, columns: int, float16: bool, *, left_in_registers: bool = False, across: bool = False) -> bytes:
    """A function `name` in CUDA C++: sums [columns / 2] of a thread, 64 rows by `columns` in a group of four warps, +=
    64 rows by sixteen of the depth, times those by columns; only = where not `add`.

    left_in_registers: a thread has four words of the rows; else they are in shared memory, as the columns are.
    across: a row of what is in shared memory has several columns, and not several of the depth.
    """
    sums, kind = columns // 2, "f16" if float16 else "bf16"
    left = 4 if left_in_registers else 1
    places = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    taken = ", ".join(f"%{sums + i}" for i in range(left))
    if left_in_registers:
        declared, rows = "const unsigned *a", f"{{{taken}}}"
        given = ", ".join(f'"r"(a[{i}])' for i in range(left))
    else:
        declared, rows, given = "unsigned long long a", taken, '"l"(a)'
    order = f"{int(across)}" if left_in_registers else f"0, {int(across)}"
    return f"""
__device__ __forceinline__ void {name}(float *d, {declared}, unsigned long long b, int add) {{
    asm volatile("{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{sums + left + 1}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{places}}}, {rows}, %{sums + left},"
                 " add, 1, 1, {order};\\n}}"
                 : {operands} : {given}, "l"(b), "r"(add));
}}
""".encode()
