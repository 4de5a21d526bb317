"""What a user installs and what a contributor runs: metadata, declared dependencies, wheel contents, links."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import verifypd

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]

# Import name → distribution, where they differ.
DISTRIBUTION = {
    "flashinfer": "flashinfer-python",
    "huggingface_hub": "huggingface-hub",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
# Parts of the package that may also import what an extra declares.
EXTRA_OF = {
    "attention": ["flashinfer"],
    "distil": ["bench"],
    "server": ["server", "gpu"],
    "cluster": ["server", "ray"],
    "serve_app": ["ray"],
    "bench": ["bench", "gpu"],
    "metrics": ["server", "gpu"],
    "watch": ["server"],
    "cli": ["server", "ray"],
}


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def third_party_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return {name for name in found if name not in sys.stdlib_module_names and name not in ("verifypd", "__future__")}


def test_every_import_is_declared():
    core = {name_of(requirement) for requirement in PROJECT["project"]["dependencies"]}
    undeclared = []
    for path in sorted((ROOT / "verifypd").rglob("*.py")):
        part = path.relative_to(ROOT / "verifypd").parts[0].removesuffix(".py")
        allowed = core.union(*({name_of(r) for r in EXTRAS[extra]} for extra in EXTRA_OF.get(part, [])))
        for name in third_party_imports(path):
            # triton comes with CUDA builds of torch; vLLM is brought by whoever compares with it
            beside = {"triton", "vllm"} if part == "bench" else {"triton"}
            if name not in beside and name_of(DISTRIBUTION.get(name, name)) not in allowed:
                undeclared.append(f"{path.relative_to(ROOT)} imports {name}")
    assert undeclared == []


def test_requirements_are_ranges():
    everything = PROJECT["project"]["dependencies"] + [r for extra in EXTRAS.values() for r in extra]
    assert [r for r in everything if "==" in r.partition(";")[0] or "@" in r] == []
    # CUDA builds of torch pin their own triton; the tests' interpreter takes any, and asks for none elsewhere
    assert [r for r in everything if name_of(r) == "triton"] == ["triton; sys_platform == 'linux'"]
    assert "triton" in {name_of(r) for r in EXTRAS["test"]}
    assert "torch>=2.10,<2.14" in everything  # an open end resolves to gigabytes nobody asked for


def test_extras():
    assert set(EXTRAS) == {"test", "server", "gpu", "flashinfer", "ray", "bench"}


def test_version_has_one_source():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "verifypd/__init__.py"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(verifypd.__version__)}$", citation, re.MULTILINE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## {verifypd.__version__}" in changelog


def test_entry_point_exists():
    module, _, function = PROJECT["project"]["scripts"]["verifypd"].partition(":")
    place = ROOT / module.replace(".", "/")
    source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    tree = ast.parse(source.read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_wheel_holds_the_package(tmp_path):
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    wheel = next(builder.build(directory=str(tmp_path), versions=["standard"]))
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {
        f"verifypd/{path.relative_to(ROOT / 'verifypd').as_posix()}" for path in (ROOT / "verifypd").rglob("*.py")
    }
    assert source <= names
    kernels = {f"verifypd/kernels/{path.name}" for path in (ROOT / "verifypd" / "kernels").glob("native*.[ch]")}
    kernels |= {f"verifypd/kernels/{name}.cu" for name in ("hopper", "numbers", "skinny", "wide")}
    kernels |= {f"verifypd/attention/{name}.cu" for name in ("chunks", "shared", "short")}
    assert {"verifypd/py.typed", *kernels} <= names
    assert {f"verifypd/server/static/{name}" for name in ("dashboard.html", "dashboard.js", "uplot.js")} <= names
    draft = "verifypd/models/data/smollm2-draft"
    assert {f"{draft}/{name}" for name in ("config.json", "distil.json", "model.safetensors")} <= names
    assert zipfile.ZipFile(wheel).getinfo(f"{draft}/model.safetensors").file_size <= 16_000_000
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names), "what the prompt sets ask for"


def test_ci_runs_what_a_contributor_runs():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
    assert "run: .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_test_checks_everything():
    plan = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for tool in ("ruff check", "ruff format --check", "mypy", "pytest"):
        assert tool in plan
    *_, beside, behind = [line for line in plan.splitlines() if "-m pytest" in line]
    assert "not gpu and not soak and not ray" in beside and " -n " in beside
    assert "-m 'ray and not soak'" in behind and " -n " not in behind, "a cluster has the machine to itself"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_test_installs_what_its_tests_need():
    """Ray too; where there is none, the rest."""
    plan = subprocess.run(
        ["make", "-n", "test", "VENV=no-such-folder"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    [line] = [line for line in plan.stdout.splitlines() if "pip install" in line]
    assert line.index(".[test,server,ray]") < line.index("its tests will be skipped") < line.index(".[test,server]'")


def test_links_in_the_documentation_lead_somewhere():
    broken = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
        for target in targets:
            path, _, anchor = target.partition("#")
            if "://" in path or path.startswith("mailto:"):
                continue
            there = page.parent / path if path else page
            if not there.exists() or (anchor and there.suffix == ".md" and anchor not in headings(there)):
                broken.append(f"{page.relative_to(ROOT)} → {target}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them of headings that do not repeat."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_files_named_in_the_documentation_exist():
    missing = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`((?:tests|verifypd|benchmarks|docs)/[\w./]*)`", page.read_text(encoding="utf-8")):
            if not (ROOT / name).exists():
                missing.append(f"{page.relative_to(ROOT)} names {name}")
    assert missing == []
