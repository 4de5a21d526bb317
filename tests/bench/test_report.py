"""Reports of committed results: whole from a small file, legible, and the pictures of the pages are there."""

from __future__ import annotations

import csv
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.scripts import load
from verifypd import cli
from verifypd.bench import charts, page, part_charts, pictures, svg
from verifypd.bench.charts import Chart, Series
from verifypd.bench.pipelining import APART, SAID
from verifypd.bench.report import read_kept, write_kept
from verifypd.bench.results import as_markdown, itself_line
from verifypd.bench.statistics import NONE, UNKNOWN
from verifypd.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FIVE = ("throughput_comparison", "latency_comparison", "gpu_utilization", "acceptance_rate", "improvement_heatmap")
LARGEST = 200_000  # bytes of a picture of a report


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def test_a_committed_result_has_a_whole_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "report", str(RESULTS / "bench-three-way-h200.json"), "--out", str(tmp_path)]) == 0
    made = {path.name for path in tmp_path.iterdir()}
    assert {"report.html", "results.csv", "results.json", "summary.md", "modes.md"} <= made
    assert {f"{name}.png" for name in FIVE} <= made
    text = (tmp_path / "report.html").read_text()
    assert "Where the time went" in text and "Histograms" not in text, "small files have no histograms"
    assert not [words for words in ("Share that took", "Requests by lane", "Draft tokens a verdict") if words in text]
    assert not [path.name for path in tmp_path.glob("cdf-*.png")]
    assert "<h3></h3>" not in text and "nan" not in text


@pytest.mark.parametrize(
    "name", [path.stem for path in sorted(RESULTS.glob("bench-*.json")) if '"scenarios":' in path.read_text()]
)
def test_every_committed_result_of_bench_has_a_page(name: str) -> None:
    found = read_kept(RESULTS / f"{name}.json")
    text = page.page(found)
    assert all(arm.replace("&", "&amp;") in text for arm in found["arms"])


def test_older_results_lose_the_utilisation_of_short_runs(tmp_path: Path) -> None:
    """All runs of one request took less than a second."""
    pytest.importorskip("matplotlib")
    found = read_kept(RESULTS / "bench-three-way-h200.json")
    told = {name.split(",")[0]: {arm for arm, own in each["arms"].items() if "gpu_utilization" in own["parts"]["means"]}
            for name, each in found["scenarios"].items()}  # fmt: skip
    assert told["B n=1"] == set() and {"baseline", "plain", "pdv pipelined"} <= told["B n=50"]
    chart = part_charts.overview(found)[0]
    assert "too short for the counter" in chart.note and ">–</text>" in svg.draw(chart)
    pictures.draw_chart(tmp_path / "x.png", [chart])


def test_what_is_no_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no scenarios"):
        write_kept(RESULTS / "allocator.json", tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        write_kept(tmp_path / "nothing.json", tmp_path)


@pytest.mark.parametrize("more", [[], ["--out", "x", "--reference", "pd"], ["--out", "x", "--small", "y"]])
def test_a_file_takes_a_folder_and_no_other_reference(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(RESULTS / "bench-three-way-h200.json"), *more]) != 0
    assert "--out DIR" in capsys.readouterr().err


def test_pages_show_the_pictures_that_are_drawn() -> None:
    drawn = load("draw_bench", ROOT / "docs" / "images")
    files = [drawn.place(name, each) for name, wanted in drawn.SHOWN.items() for each in wanted]
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = set(re.findall(r"images/(bench-[\w.-]+\.png)", text))
    assert shown == {path.name for path in files} == {path.name for path in (ROOT / "docs/images").glob("bench-*.png")}
    assert {path.name: path.stat().st_size for path in files if path.stat().st_size > LARGEST} == {}


def test_pictures_of_the_pages_say_what_was_random(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights and drafts of all results of a GPU that are drawn were, and the frontier beside vLLM's says so."""
    pytest.importorskip("matplotlib")
    drawn = load("draw_bench", ROOT / "docs" / "images")
    assert all("random weights" in read(name)["note"] for name in drawn.SHOWN if "h200" in name)
    [name] = [name for name, wanted in drawn.SHOWN.items() if "frontier" in wanted]
    said: dict[str, str] = {}
    draw = pictures.draw_chart
    monkeypatch.setattr(pictures, "_below", lambda _figure, note: said.update(last=note))
    monkeypatch.setattr(
        pictures, "draw_chart", lambda file, *args: (draw(file, *args), said.update({file.stem: said["last"]}))
    )
    write_kept(RESULTS / f"{name}.json", tmp_path)
    assert said["frontier"].endswith("[random weights (llama-2-7b), drafts accepted by chance (α = 0.8)]")


def test_a_report_marks_pdv_that_hardly_pipelined(tmp_path: Path) -> None:
    """In pages, summaries and counts: at one request both did what PD does, at fifty one of them did."""
    found = write_kept(RESULTS / "bench-three-way-h200.json", tmp_path, pictures=False)
    text, summary = ((tmp_path / name).read_text() for name in ("report.html", "summary.md"))
    for part in (text, summary):
        assert SAID in part and APART in part and "pdv pipelined°" in part
    assert summary.count("| pdv pipelined° |") == 3, "figures, latencies and ratios of one of four scenarios"
    assert "| mean E2E | 0 / 3 / 1 | 3 / 0 / 1 | 0 / 0 / 0 + 4° | 0 / 3 / 0 + 1° | 4 / 0 / 0 |" in summary
    for each in found["scenarios"].values():
        each["arms"] = {arm: own for arm, own in each["arms"].items() if "pdv" not in arm}
        each["compared"] = {arm: own for arm, own in each["compared"].items() if "pdv" not in arm}
    found["arms"] = {arm: own for arm, own in found["arms"].items() if "pdv" not in arm}
    for part in (page.page(found), as_markdown(found)):
        assert SAID not in part and APART not in part


def test_an_alarm_of_an_arm_beside_itself_is_no_must() -> None:
    found = read("bench-serve-h200-tiny1b")
    line = itself_line(found)
    assert "38 of 40 comparisons of it with itself read “no difference”; these do not, so small" in line
    assert "as they must" not in line
    for one in found["scenarios"].values():
        for each in one["itself"].values():
            each["verdict"] = NONE
    assert itself_line(found).endswith("40 of 40 comparisons of it with itself read “no difference”, as they must.")


def test_names_along_an_axis_tell_scenarios_apart() -> None:
    """What they share stands once: the pair in the title, words of a server's traffic along the axis."""
    [bars] = charts.by_pair(read("bench-three-way-h200"), charts.overview(read("bench-three-way-h200"))[0])
    assert bars.groups == ("n=1", "n=5", "n=20", "n=50") and bars.title.endswith("\ntinyllama-1.1b:llama-2-7b (random)")
    [bars] = charts.by_pair({"grid": {}}, Chart("x", "T", "", "s", (), "bars", ("fixed closed 1", "fixed closed 8")))
    assert (bars.groups, bars.x) == (("1", "8"), "fixed closed")


def test_a_frontier_of_wide_heights_has_powers() -> None:
    [chart] = [each for each in charts.overview(read("bench-three-way-h200")) if each.name == "frontier"]
    assert chart.log_y and chart.series[0].labels == ("n=1", "n=5", "n=20", "n=50")
    assert "NaN" not in svg.draw(chart) and "nan" not in svg.draw(chart)


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of a run of one seed."""
    folder = tmp_path_factory.mktemp("one-seed")
    command = ["bench", "simulate", "three-way", "--quick", "--num-requests", "1,50", "--seeds", "1"]
    assert cli.main([*command, "--reference", "plain", "--out", str(folder / "run"), "--no-png"]) == 0
    small = folder / "small.json"
    assert cli.main(["bench", "report", str(folder / "run"), "--small", str(small), "--no-png"]) == 0
    return small


def test_one_seed_wins_nothing_and_has_no_picture_of_it(one_seed: Path) -> None:
    assert "scenarios_won" not in {each.name for each in part_charts.overview(read_kept(one_seed))}
    assert "scenarios_won" in {each.name for each in part_charts.overview(read("simulated-three-way-h200"))}


def test_one_seed_is_said_to_judge_nothing(one_seed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "report", str(one_seed), "--out", str(tmp_path), "--no-png"]) == 0
    printed = capsys.readouterr().out
    page, summary, modes = ((tmp_path / name).read_text() for name in ("report.html", "summary.md", "modes.md"))
    for text in (printed, page, summary):
        assert "plain ran twice (A/A), but with one seed nothing can be judged." in text
        assert "as they must" not in text and not re.search(r"\d–\d\S*( |<br>)(<span \S+>)?one seed", text)
    for text in (page, summary):
        assert "one seed, so no interval" in text and "95 % interval over" not in text
        assert "Scenarios won and lost" not in text
    assert "not seen" not in modes and "not judged" in modes and "0 of 1" not in modes
    lines = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    [line] = [each for each in lines if (each["scenario"][:4], each["arm"]) == ("B n=", "pd")][:1]
    assert line["tok_s_over_reference_ratio"] and line["tok_s_over_reference_low"] == ""


def test_of_two_seeds_all_is_said(tmp_path: Path) -> None:
    """Comparisons of one seed among others are left out of the count of A/A."""
    found = write_kept(RESULTS / "bench-serve-h200-closed.json", tmp_path, pictures=False)
    assert "95 % interval over 2 seeds" in (tmp_path / "summary.md").read_text()
    itself = [each for one in found["scenarios"].values() for each in one["itself"].values()]
    assert f"{len(itself)} comparisons of it with itself" in itself_line(found)
    itself[0]["verdict"] = UNKNOWN
    assert f"{len(itself) - 1} comparisons of it with itself" in itself_line(found)


def test_labels_cover_neither_points_nor_labels() -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    xs, ys = (100.0, 101.0, 102.0, 300.0), (5.0, 5.05, 5.1, 9.0)
    chart = Chart(
        "frontier", "T", "x", "y", tuple(Series(name, xs, ys, ("n=1", "n=5", "n=20", "n=50")) for name in "ab")
    )
    figure, axis = plt.subplots()
    pictures._curves(axis, chart)
    axis.set_ylim(0, 10)
    pictures._label_points(axis, chart)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axis.texts]
    names = [text.get_text() for text in axis.texts]
    assert "n=50" in names and names.count("n=50") == 1, "two arms at one place are labelled once"
    assert not any(one.overlaps(two) for one, two in itertools.combinations(boxes, 2))
    plt.close(figure)


def test_charts_are_legible_on_a_phone() -> None:
    """They keep a width at which their letters can be read, and scroll within their frame; so do last columns."""
    rules = (r"svg text .*?(\d+)px", r"svg {.*min-width: (\d+)px")
    letters, least = (int(re.findall(rule, page.STYLE)[0]) for rule in rules)
    assert letters * least / svg.WIDTH > 8
    assert re.search(r"\nfigure {[^}]*overflow-x: auto", page.STYLE)
    assert re.search(r"\.words td:last-child {[^}]*min-width", page.STYLE)


def test_a_report_says_what_its_words_mean() -> None:
    """Its protocol, its arms by their architecture, and no word twice; a server's name says nothing of its kind."""
    found = read_kept(RESULTS / "bench-three-way-h200.json")
    told = dict(page.words(found))
    assert len(told) == len(page.words(found)) and set(found["arms"]) < set(told)
    assert told["protocol B"].startswith("three-way: all requests at once")
    assert told["pdv pipelined"].startswith("PDV: ") and "half the batch" in told["pdv pipelined"]
    assert "as large as the batch" in told["pdv whole"] and told["plain"].startswith("no drafts")
    arms = {"plain": {"spec": {"url": "http://h:1"}}, "auto:max_draft=2": {"spec": {"settings": {"arch": "auto"}}}}
    told = dict(page.words(found | {"arms": arms, "protocol": None}))
    assert "plain" not in told and "measured costs" in told["auto:max_draft=2"] and "protocol B" not in told


def test_a_chart_of_nothing_says_so() -> None:
    found = read("bench-three-way-h200") | {"note": "a note"}
    for each in found["scenarios"].values():
        for own in each["arms"].values():
            own["figures"]["goodput"] = 0.0
    goodput, tokens = (
        charts.labelled(found, next(each for each in charts.overview(found) if each.name == name))
        for name in ("goodput", "throughput_comparison")
    )
    assert goodput.note == f"{charts.NONE_GOOD} [a note]" and tokens.note == "[a note]"


def test_long_names_below_bars_are_in_two_lines_and_not_cut() -> None:
    """What the original claims stands beside three loads in half of a page."""
    groups = ("C=8", "C=32", "C=128", part_charts.CLAIM)
    chart = Chart("x", "x", "", "share", (Series("one", (0.0, 1.0, 2.0, 3.0), (0.1, 0.2, 0.3, 0.5)),), "bars", groups)
    told = re.findall(r'<text class="tick mid"[^>]*>([^<]*)</text>', svg.draw(chart))
    assert " ".join(told) == " ".join(groups) and not any("…" in each for each in told)
    names = re.findall(r">([^<]*)</text>", svg.draw(replace(chart, groups=("n=5, a pair", *groups[1:]))))
    assert "n=5" in names and "a pair" in names
