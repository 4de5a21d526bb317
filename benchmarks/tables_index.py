"""Tables of this folder: what each script measures; what each result is of, how it was made and where it is shown."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

from cells import RESULTS, read, rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def scripts() -> str:
    """Those that can be run, and what they say of themselves."""
    lines = []
    for path in sorted(HERE.glob("*.py")):
        text = path.read_text()
        said = ast.get_docstring(ast.parse(text))
        if said and re.search(r"^if __name__", text, re.MULTILINE):
            lines.append([f"[`{path.name}`]({path.name})", " ".join(said.split("\n\n")[0].split())])
    return rows(["script", "what it does"], lines)


def results() -> str:
    """All of them."""
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        found = read(path.stem)
        device = found.get("gpu") or "CPU"
        where = f"{device.removeprefix('NVIDIA ')}, {found['commit'][:7]}{unfinished(found)}"
        shown = ", ".join(f"[{page.stem}](../{page.relative_to(ROOT)})" for page in citing(path.name))
        command = re.sub(r"https?://[\w.:]+", "URL", without_launches(found["command"])).replace("|", "\\|")
        lines.append([f"[`{path.stem}`](results/{path.name})", where, shown, f"`{command}`"])
    return rows(["result", "ran on, commit", "shown in", "command"], lines)


def unfinished(found: dict[str, Any]) -> str:
    """Of a bench that ended early: how much of it ran."""
    return "" if found.get("complete", True) else ", **{run} of {planned} runs**".format(**found["cells"])


def without_launches(command: str) -> str:
    """Without how servers were started: that stands in the file itself."""
    if "--about=" not in command:
        return command
    return shlex.join(part for part in shlex.split(command) if not part.startswith("--about="))


def citing(name: str) -> list[Path]:
    """The pages that name a file of results."""
    return [page for page in PAGES if re.search(rf"(?<![\w-]){re.escape(name)}", page.read_text())]
