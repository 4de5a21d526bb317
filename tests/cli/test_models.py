"""`verifypd models`, `pull` and `version`."""

from __future__ import annotations

from tests.cli.program import program


def test_models_lists_the_built_in_names():
    result = program("models")
    assert result.returncode == 0
    assert "smollm2" in result.stdout
    assert "qwen2-7b" in result.stdout


def test_pull_refuses_an_unknown_name():
    result = program("pull", "nonsense")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_version():
    import verifypd

    assert program("version").stdout.startswith(f"verifypd {verifypd.__version__}\n")
    assert program("--version").stdout == f"verifypd {verifypd.__version__}\n"
