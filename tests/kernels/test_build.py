"""The compiler is optional, its result is cached whole, and only one OpenMP runtime is in the process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from verifypd.attention import available_backends
from verifypd.errors import ConfigError
from verifypd.kernels import build, select

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C compiler")


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFYPD_NATIVE", "0")
    assert build.library() is None
    assert select("cpu").name == "torch"
    assert available_backends("cpu") == ["torch"]
    with pytest.raises(ConfigError, match="install gcc or clang"):
        select("cpu", "native")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.INFO):
        assert build.build() is None
    assert "no C compiler found" in caplog.text


def test_failing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO):
        assert build.build() is None
    assert "cannot compile" in caplog.text
    assert list((tmp_path / "cache" / "verifypd" / "kernels").iterdir()) == []


def test_unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build.build() is None


@needs_compiler
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "SOURCE", tmp_path / "small.c")
    monkeypatch.setattr(build, "openmp_runtime", lambda: None)
    (tmp_path / "small.c").write_text("int answer(void) { return 42; }\n")
    first = build.build()
    assert first is not None
    stamp = first.stat().st_mtime_ns
    assert build.build() == first
    assert first.stat().st_mtime_ns == stamp
    (tmp_path / "small.c").write_text('#include "small.h"\nint answer(void) { return ANSWER; }\n')
    (tmp_path / "small.h").write_text("#define ANSWER 43\n")
    second = build.build()
    assert second not in (None, first)
    (tmp_path / "small.h").write_text("#define ANSWER 44\n")
    assert build.build() not in (None, first, second)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime() -> None:
    if build.library() is None:
        pytest.skip("no C compiler")
    code = (
        "import torch; from pathlib import Path; from verifypd.kernels import select; k = select('cpu', 'native');"
        "torch.set_num_threads(2); k.linear(torch.randn(4, 256), torch.randn(256, 256));"
        "maps = Path('/proc/self/maps').read_text().split();"
        "names = {p for p in maps if p.rsplit('/')[-1].startswith(('libgomp', 'libiomp', 'libomp'))};"
        "assert len(names) <= 1, names"
    )
    root = Path(build.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_runtime_is_torchs() -> None:
    runtime = build.openmp_runtime()
    if runtime is None:
        pytest.skip("torch has no OpenMP here")
    assert Path(runtime).is_relative_to(Path(torch.__file__).parents[1])
