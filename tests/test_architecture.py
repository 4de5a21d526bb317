"""Holds the shape of the package: imports point left, policies know no torch, waiting for the device has one home.

Every check is a function from source text to a list of complaints, and is itself tested on small bad samples.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("architecture")  # files are parsed once

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "verifypd"

# A module may import its own package and whatever stands to its left.
ORDER = (
    "errors hints progress config buckets inflight request batch metrics | control | simulate"
    " | tokenizer kernels kv attention sampling | models | runtime | parallel | drafters | lanes testing | engine"
    " | server cluster serve_app bench watch distil | cli"
).replace("|", " ")
RANK = {name: rank for rank, name in enumerate(ORDER.split())}
RANK["__main__"] = len(RANK)

TORCH_FREE = {
    "errors",
    "hints",
    "progress",
    "config",
    "buckets",
    "inflight",
    "request",
    "batch",
    "metrics",
    "control",
    "simulate",
}
PUBLIC = {
    "LLM": "engine",
    "AsyncLLM": "engine",
    "SamplingParams": "request",
    "RequestOutput": "request",
    "CompletionOutput": "request",
    "select_architecture": "control",
    "__version__": None,
}

WAITS = {"item", "cpu", "tolist", "synchronize"}
# Modules, or single functions of them, that may use those names, with the reason.
MAY_WAIT = {
    "runtime/streams.py": "the one place that waits for the device",
    "attention/flashinfer.py::_known": "FlashInfer plans on the host; for comparison, never the default",
    "lanes/verify.py::_read": "reads numpy arrays that a ticket has brought to the host",
    "lanes/verify.py::_token_logprobs": "the same",
    "models/gguf.py": "reads a file; never sees a device",
    "distil/generate.py": "offline: one look every few steps, and the text at the end",
    "distil/measure.py": "offline: counts on the host",
    "distil/text.py": "numpy arrays from files",
    "distil/train.py": "offline: the loss, a few times a run",
}
SLOT_TENSORS = {
    "runtime/inputs.py": "Slots: text and drafts; BlockTables: where a pool holds them",
    "sampling/state.py": "SamplingState: what each request asks for",
}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def home(module: str) -> str | None:
    """The top-level part of the package a file belongs to; None for verifypd/__init__.py."""
    first = Path(module).parts[0].removesuffix(".py")
    return None if first == "__init__" else first


@lru_cache(512)
def parsed(source: str) -> ast.Module:
    """Every check reads the same files."""
    return ast.parse(source)


# --- the checks -------------------------------------------------------------------------------------------------------


def imports(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in a file, at whatever depth; relative ones made absolute."""
    here = ["verifypd", *Path(module).parts[:-1]]
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def wrong_way(source: str, module: str) -> list[str]:
    """Imports that point right."""
    own = home(module)
    complaints = []
    for line, name in imports(source, module):
        parts = name.split(".")
        if own is None or parts[0] != "verifypd" or len(parts) == 1:
            continue
        target = PUBLIC.get(parts[1], parts[1])
        if target is None:
            continue
        if target not in RANK or own not in RANK:
            complaints.append(f"{module}:{line} {target if target not in RANK else own} has no place in the order")
        elif RANK[target] > RANK[own]:
            complaints.append(f"{module}:{line} imports {target}, which stands to the right of {own}")
    return complaints


def torch_imports(source: str, module: str) -> list[str]:
    """Imports of torch in a part that must not know it."""
    if home(module) not in TORCH_FREE:
        return []
    return [
        f"{module}:{line} imports {name}" for line, name in imports(source, module) if name.split(".")[0] == "torch"
    ]


def device_waits(source: str, module: str) -> list[str]:
    """Uses of .item(), .cpu(), .tolist() and synchronize, each as `module::outermost definition:line …`."""
    return [
        f"{module}::{getattr(statement, 'name', '')}:{node.lineno} uses .{node.attr}"
        for statement in parsed(source).body
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and node.attr in WAITS
    ]


def allowed_wait(complaint: str) -> str | None:
    """The entry of MAY_WAIT that allows it."""
    module, _, rest = complaint.partition("::")
    return next((key for key in (module, f"{module}::{rest.partition(':')[0]}") if key in MAY_WAIT), None)


def prints(source: str, module: str) -> list[str]:
    """Uses of print outside the command line."""
    if module == "cli/terminal.py":
        return []
    return [
        f"{module}:{node.lineno} prints"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Name) and node.id == "print"
    ]


def circles(sources: dict[str, str]) -> list[str]:
    """Modules of one folder that import each other, over however many steps: TYPE_CHECKING and imports within functions
    count. sources: module -> text. Each circle is named by its members.
    """
    known = {_dotted(module): module for module in sources}
    reached: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = {_nearest(name, known) for _, name in imports(source, module)}
        folder = Path(module).parent
        reached[module] = {known[t] for t in targets if t and Path(known[t]).parent == folder} - {module}
    growing = True
    while growing:
        growing = False
        for found in reached.values():
            more = set().union(*(reached[target] for target in found)) - found
            growing = growing or bool(more)
            found |= more
    rounds = {frozenset(m for m in reached if m in reached[n] and n in reached[m]) for n in reached if n in reached[n]}
    return sorted(" <-> ".join(sorted(members)) for members in rounds)


def _dotted(module: str) -> str:
    return "verifypd." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _nearest(name: str, known: dict[str, str]) -> str | None:
    """The module that a dotted name is, or is in."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def missing_docstring(source: str, module: str) -> list[str]:
    """A module that does not say what it is."""
    return [] if ast.get_docstring(parsed(source)) else [f"{module} has no docstring"]


def slot_tensors(source: str, module: str) -> list[str]:
    """Device tensors with a row for each slot that are made elsewhere than in the types that hold them."""
    makers = {"zeros", "ones", "full", "empty", "arange"}
    calls = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call) and node.args]
    return [
        f"{module}:{call.lineno} makes a tensor of slots"
        for call in calls
        if module not in SLOT_TENSORS and isinstance(call.func, ast.Attribute) and call.func.attr in makers
        if re.search(r"\bslots\b", ast.unparse(call.args[0]))
    ]


def banned_names(paths: list[str]) -> list[str]:
    """Files of odds and ends."""
    return [path for path in paths if Path(path).stem in BANNED_NAMES and path.endswith(".py")]


# Spelt in halves, so that this file passes its own check.
_HOSTS = (
    "py" + "pi.org",
    "python" + "hosted.org",
    "download.py" + "torch.org",
    "ana" + "conda.org",
    "ana" + "conda.com",
)
_PLACES = re.compile(
    "|".join([*map(re.escape, _HOSTS), r"(?<![\w.~-])/(?:home|Users)/\w+", r"(?<![\w.~-])/ro" + "ot/"])
)


def private_places(text: str, path: str) -> list[str]:
    """Hosts of package registries, and absolute paths of somebody's home."""
    return [
        f"{path}:{number} names {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in _PLACES.finditer(line)
    ]


def repository_files() -> list[Path]:
    """Files that are tracked or would be; every file of the source tree where there is no git."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        found = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        found = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if not {".git", ".venv"} & set(p.parts)]
    return [ROOT / name for name in found if name and (ROOT / name).is_file()]


# --- the package passes them ------------------------------------------------------------------------------------------


def complaints_of(check) -> list[str]:
    return [line for path in modules() for line in check(path.read_text(encoding="utf-8"), relative(path))]


def test_imports_point_left():
    assert complaints_of(wrong_way) == []


def test_modules_of_a_folder_import_in_one_direction():
    sources = {relative(path): path.read_text(encoding="utf-8") for path in modules()}
    assert circles(sources) == []


def test_policies_import_no_torch():
    assert complaints_of(torch_imports) == []


@pytest.mark.parametrize("module", ["verifypd", "verifypd.cli", *sorted(f"verifypd.{name}" for name in TORCH_FREE)])
def test_module_loads_without_torch(module):
    names = [module]
    folder = ROOT / module.replace(".", "/")
    if module != "verifypd" and folder.is_dir():
        names += [f"{module}.{path.stem}" for path in folder.glob("[!_]*.py")]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr or f"importing {names} imports torch"


def test_public_names_stay():
    import verifypd

    assert set(verifypd.__all__) == set(PUBLIC)
    for name in PUBLIC:
        assert getattr(verifypd, name) is not None
    with pytest.raises(AttributeError):
        verifypd.nothing_of_this_name  # noqa: B018


def test_waiting_for_the_device_has_one_home():
    waits = complaints_of(device_waits)
    assert [line for line in waits if allowed_wait(line) is None] == []
    assert set(MAY_WAIT) == {allowed_wait(line) for line in waits}, "an entry of MAY_WAIT is no longer needed"


def test_tensors_of_slots_are_of_few_types():
    assert complaints_of(slot_tensors) == []


def test_only_the_command_line_prints():
    assert complaints_of(prints) == []


def test_every_module_says_what_it_is():
    assert complaints_of(missing_docstring) == []


def test_every_folder_is_a_package():
    folders = {path.parent for path in modules()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_file_of_odds_and_ends():
    assert banned_names([str(path.relative_to(ROOT)) for path in repository_files()]) == []


def test_nothing_names_a_registry_or_a_home():
    complaints = []
    for path in repository_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # an image
            continue
        complaints += private_places(text, str(path.relative_to(ROOT)))
    assert complaints == []


# --- the checks catch what they are for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("control/x.py", "from verifypd.engine import llm"),
        ("control/x.py", "import verifypd.kv.pool"),
        ("control/x.py", "from verifypd import LLM"),
        ("control/x.py", "from verifypd import models"),
        ("control/x.py", "def f():\n    from verifypd.models.hub import pull"),
        ("control/x.py", "from ..engine import llm"),
        ("control/x.py", "from .. import engine"),
        ("control/deep/x.py", "from ...engine.llm import LLM"),
        ("control/x.py", "if TYPE_CHECKING:\n    from verifypd.lanes import base"),
        ("control/x.py", "import importlib\nimportlib.import_module('verifypd.engine')"),
        ("kv/x.py", "from verifypd.attention.base import PassLayout"),
        ("request.py", "from verifypd.batch import Verdict"),
        ("engine/x.py", "from verifypd.cli import main"),
        ("engine/x.py", "from verifypd.oddments import thing"),
        ("oddments.py", "from verifypd.errors import VerifyPDError"),
    ],
)
def test_wrong_way_is_caught(module, source):
    assert len(wrong_way(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attention/x.py", "from verifypd.kv.pool import KVCache"),
        ("control/x.py", "from .snapshot import Snapshot\nfrom . import cost"),
        ("cli/x.py", "from verifypd import __version__, LLM"),
        ("kv/x.py", "import torch, os.path\nimport verifypd"),
        ("__init__.py", "from verifypd.engine.llm import LLM"),
        ("__main__.py", "from verifypd.cli import main"),
    ],
)
def test_right_way_passes(module, source):
    assert wrong_way(source, module) == []


@pytest.mark.parametrize(
    "back",
    [
        "from verifypd.kv.a import x",
        "from . import a",
        "if TYPE_CHECKING:\n    from verifypd.kv.a import x",
        "def f():\n    import verifypd.kv.a",
        "from verifypd.kv.c import x",
    ],
)
def test_a_circle_is_caught(back):
    sources = {"kv/a.py": "from .b import x", "kv/b.py": back, "kv/c.py": "from verifypd.kv import a", "kv/d.py": ""}
    members = ["kv/a.py", "kv/b.py", "kv/c.py"] if ".c " in back else ["kv/a.py", "kv/b.py"]
    assert circles(sources) == [" <-> ".join(members)]


def test_one_direction_is_no_circle():
    assert (
        circles({"kv/a.py": "from .b import x", "kv/b.py": "import torch", "kv/__init__.py": "from .a import x"}) == []
    )


@pytest.mark.parametrize("source", ["import torch", "def f():\n    import torch.cuda", "from torch import nn"])
def test_torch_is_caught(source):
    assert torch_imports(source, "control/x.py")
    assert torch_imports(source, "request.py")
    assert not torch_imports(source, "kv/pool.py")


@pytest.mark.parametrize(
    "source", ["x.item()", "y = x.cpu()", "x[0].tolist()", "torch.cuda.synchronize()", "wait = event.synchronize"]
)
def test_device_wait_is_caught(source):
    assert len(device_waits(source, "sampling/x.py")) == 1


def test_a_wait_is_allowed_in_one_function_only():
    [inside, outside] = device_waits("def _read(x):\n    x.tolist()\ndef other(x):\n    x.tolist()", "lanes/verify.py")
    assert allowed_wait(inside) == "lanes/verify.py::_read"
    assert allowed_wait(outside) is None


def test_names_that_only_look_like_waits_pass():
    assert device_waits("items = d.items(); cpu = 'cpu'; x.to('cpu', non_blocking=True)", "kv/x.py") == []


@pytest.mark.parametrize("source", ["torch.zeros(config.slots, 4)", "x = torch.full((slots, 2), 1.0, device=d)"])
def test_a_loose_tensor_of_slots_is_caught(source):
    assert len(slot_tensors(source, "engine/x.py")) == 1
    assert slot_tensors(source, "runtime/inputs.py") == []
    assert slot_tensors("torch.zeros(len(spans)); range(config.slots)", "engine/x.py") == []


def test_print_is_caught():
    assert prints("def f():\n    print('x')", "kv/x.py")
    assert not prints("self.pprint(); fingerprint()", "kv/x.py")


def test_missing_docstring_is_caught():
    assert missing_docstring("import os\n'''late'''", "kv/x.py")
    assert missing_docstring("", "kv/__init__.py")
    assert not missing_docstring('"""Says so."""', "kv/x.py")


def test_odds_and_ends_are_caught():
    assert banned_names(["verifypd/kv/utils.py", "tests/helpers.py", "verifypd/kv/pool.py"]) == [
        "verifypd/kv/utils.py",
        "tests/helpers.py",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "https://" + _HOSTS[0] + "/simple",
        "see " + _HOSTS[1],
        "'/ho" + "me/ann/x'",
        "a:/ro" + "ot/.cache",
        "/Us" + "ers/bob",
    ],
)
def test_private_places_are_caught(text):
    assert len(private_places(text, "x")) == 1


@pytest.mark.parametrize(
    "text", ["$HOME/x", "~/.cache", "docs/home/start.md", "https://example.org/home/page", "the root/leaf"]
)
def test_ordinary_places_pass(text):
    assert private_places(text, "x") == []
