"""Tables in the pages are those of their JSON."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load
from verifypd.bench.figures import cut, figures


@pytest.fixture(scope="module")
def tables() -> Any:
    return load("tables")


def test_pages_are_up_to_date(tables: Any) -> None:
    assert tables.main(["--check"]) == 0, "run: python benchmarks/tables.py"


def test_every_table_stands_somewhere(tables: Any) -> None:
    used = {match[2] for page in tables.PAGES for match in tables.PLACE.finditer(page.read_text())}
    assert used == set(tables.TABLES)
    assert {path.stem for path in tables.index.HERE.glob("texts/*.md")} <= used


HISTORY = re.compile(
    r"\b(?:older|newer|previous) (?:\w+ )?(?:code|commits?|runs?|results?|than (?:a|the|that|this) change)\b"
    r"|\bthe default (?:then|before)\b|\bchanged since\b|\bsince then\b|\bdifferent commits\b"
    r"|\bpresent (?:code|kernels?)\b|\d before, by hand\b|\b(?:formerly|previously|used to be)\b"
    r"|\bat [0-9a-f]{7}\b|\b[0-9a-f]{7} (?:does|did|loads?|ha[sd]|is|was)\b",
    re.IGNORECASE,
)
NO_RESULTS = {  # typed tables with numbers in them that nobody measured: settings, limits, arithmetic, definitions
    "data.md": ("set", "source"),
    "distil.md": ("sitting",),
    "drafters.md": ("pair",),
    "gpu.md": ("setting", "part"),
    "kernels.md": ("rows",),
    "scale.md": ("what",),
    "security.md": ("what",),
    "serving.md": ("path", "limit"),
    "simulator.md": ("traffic",),
}


def told(tables: Any) -> dict[str, str]:
    """The pages but the log, which may tell what was, and figures of which nothing was kept."""
    return {str(page.relative_to(tables.ROOT)): page.read_text() for page in tables.PAGES if page.name != "log.md"}


def test_pages_tell_no_history(tables: Any) -> None:
    """The log does. Others say what was set and show a table's commit."""
    found = {name: [match[0] for match in HISTORY.finditer(text)] for name, text in told(tables).items()}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize("words", [
    "The same at 262b59f, other seeds", "Older committed results lack it", "Since then passes are padded",
    "All these runs are older than a change that", "ran at different commits", "not in the present code",
    "plans in 1.0 ms (1.9 before, by hand)", "At start 2d8a37f loads every kernel", "a03ccff does not",
])  # fmt: skip
def test_history_is_found(words: str) -> None:
    assert HISTORY.search(words)


def typed(text: str, place: re.Pattern[str]) -> list[str]:
    """First header cells of the tables outside the markers that have a cell beginning with a number."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", place.sub("", text), re.MULTILINE):
        header, _, *lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
        if any(re.match(r"[^\w`]*\d", cell) for line in lines for cell in line):
            found.append(header[0])
    return found


def test_tables_of_results_are_made_from_their_json(tables: Any) -> None:
    found = {name.removeprefix("docs/"): tuple(typed(text, tables.PLACE)) for name, text in told(tables).items()}
    assert {name: headers for name, headers in found.items() if headers} == NO_RESULTS


def test_a_table_that_was_typed_is_found(tables: Any) -> None:
    table = "| engine | tokens/s |\n|---|---|\n| a step every 10 ms | **3,182** |\n"
    made = f"<!-- table cluster-cost -->\n{table}<!-- end -->\n"
    assert typed(f"Words.\n\n{table}", tables.PLACE) == ["engine"] and typed(made, tables.PLACE) == []
    assert typed("| arm | what |\n|---|---|\n| `8` | a batch of `8` |\n", tables.PLACE) == []


def test_what_a_page_says_comes_from_the_json(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table head-low-acceptance -->\nold\n<!-- end -->\nafter\n")
    made = tables.written(page)
    ratio = tables.beside.read("h200-auto")["figures"]["auto_over_plain_0.3_32"]
    assert f"| {ratio:.2f} |" in made and "old" not in made
    assert made.startswith("before\n") and made.endswith("after\n")


def test_a_ratio_beside_vllm_says_whether_it_is_certain(tables: Any) -> None:
    """The glance at mixed traffic as at the closed loop; one that is certainly worse is named."""
    cells, answers = tables.beside, tables.answers
    sure, open_ = {"ratio": 0.8, "verdict": "faster"}, {"ratio": 1.1, "verdict": "no difference"}
    assert answers.where_certain({8: sure, 16: open_, 20: sure}) == "certain at 8 and 20"
    assert answers.where_certain({8: open_}) == "not certain" and answers.where_certain({8: sure}) == "certain"
    assert answers.which_certain({1: sure, 8: open_}).startswith("Only 0.80 is certain: the other 95 % interval")
    assert cells.which_certain({1: open_}).startswith("None is certain")
    for name in ("e2e_ms_mean", "ttft_ms_p50"):
        assert f"({answers.where_certain(answers.over_vllm(answers.MIXED, name))})" in answers.mixed_glance()
    worse = answers._lost()
    assert all(each in answers.vllm_faster() for each in worse)
    loads = ("32 clients", "20 requests/s", "32 requests/s")
    assert all(load in each for load, each in zip(loads, worse, strict=True))


def test_auto_is_alone_the_lowest_only_where_other_arms_are_certainly_above_it(
    tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for names, alone in ((["auto"], True), (["pd", "auto"], False)):
        monkeypatch.setattr(tables.answers.advice, "lowest", lambda *_, names=names: names)
        said = tables.answers._lowest()
        assert said["lowest"] == said["loads"] and (said["alone"] == said["loads"]) is alone


def test_an_interval_shows_on_which_side_of_1_it_lies(tables: Any) -> None:
    each = {"ratio": 1.147, "low": 1.005, "high": 1.309, "verdict": "slower"}
    assert tables.answers.judged(each) == "1.15 (1.005–1.31) slower"


def test_the_picture_of_the_map_has_the_tables_medians(tables: Any) -> None:
    pytest.importorskip("matplotlib")
    drawn = load("draw_cpu", tables.ROOT / "docs" / "images")
    runs = tables.cpu.read("cpu-map-auto")["runs"]
    levels = sorted({run["concurrency"] for run in runs})
    speeds = [drawn.medians([run for run in runs if run["concurrency"] == level]) for level in levels]
    lines = [["`plain`", *(f"{each['plain']:.0f}" for each in speeds)]]
    lines += [["`auto` over `plain`", *(f"{each['auto'] / each['plain']:.3f}" for each in speeds)]]
    assert all(f"| {' | '.join(line)} |" in tables.cpu.cpu_map() for line in lines)


def test_the_originals_metric_turns_equal_systems_into_3000_per_cent(tables: Any) -> None:
    """Both emit 100 tokens/s, one request after the other or all together; 9.515 s is a cut-off like any other."""
    one, two = (figures([cut(each, 9.515)]) for each in tables.lanes.equal_systems())
    assert one["tok_s"] == pytest.approx(two["tok_s"]) == pytest.approx(100, rel=0.01)
    assert one["tok_s_original"] / two["tok_s_original"] - 1 > 30
    earlier = figures([cut(tables.lanes.equal_systems()[1], 9.5)])
    assert earlier["tok_s_original"] == 0 and earlier["tok_s"] == pytest.approx(100)
    assert "+4,600 %" in tables.lanes.equal_metric()


def test_a_pdv_that_planned_as_pd_is_marked_wherever_it_stands(tables: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    legend = "° PDV hardly pipelined"
    for name in ("deploy-h200-mixed", "deploy-mixed", "deploy-h200"):
        assert "°" in tables.TABLES[name]().partition(legend)[0] and legend in tables.TABLES[name]()
    assert "later verify pass: `pdv pipelined` B n=1 0 %, B n=5 9" in tables.TABLES["deploy-h200"]()
    monkeypatch.setattr(tables.lanes.pipelining, "pipelined", lambda *_: True)
    assert "°" not in tables.lanes.deploy_tails()


def test_every_result_is_shown_on_some_page(tables: Any) -> None:
    names = [path.name for path in sorted(tables.index.RESULTS.glob("*.json"))]
    assert len(names) > 50 and [name for name in names if not tables.index.citing(name)] == []


def test_the_index_names_every_result_and_only_what_can_be_run(tables: Any) -> None:
    listed = tables.index.results()
    assert all(f"(results/{path.name})" in listed for path in tables.index.RESULTS.glob("*.json"))
    assert "127.0.0.1" not in listed
    assert "[`h200.py`](h200.py)" in tables.index.scripts() and "cells.py" not in tables.index.scripts()


def test_the_index_says_of_a_result_that_is_not_complete_how_much_of_it_ran(tables: Any) -> None:
    lines = {line.partition("`]")[0].removeprefix("| [`"): line for line in tables.index.results().splitlines()}
    partial = {
        path.stem for path in tables.index.RESULTS.glob("*.json") if not tables.index.read(path.stem).get("complete", 1)
    }
    assert "bench-models-h200" in partial and ", **16 of 30 runs** |" in lines["bench-models-h200"]
    assert {name for name, line in lines.items() if " runs** |" in line} == partial


def verdicts(table: str, claim: str) -> list[str]:
    """The last cells of the rows of a claim."""
    return [line.strip("| ").split(" | ")[-1] for line in table.splitlines() if line.startswith(f"| {claim}")]


def test_every_claim_of_the_advice_has_a_verdict_on_itself(tables: Any) -> None:
    table = tables.TABLES["deploy-claims"]()
    assert verdicts(table, "best at 3–7 ×") == ["not seen"] and "at 3–7 × in 0 of 7 loads, elsewhere in 6" in table
    assert verdicts(table, "medium concurrency, balanced models") == ["seen"]
    assert verdicts(table, "smaller batches at lower loads") == ["not seen"] * 2
    assert "not measured" not in table and "not compared |" not in table
