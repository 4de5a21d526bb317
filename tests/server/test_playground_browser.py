"""The playground in a real Chromium: it streams, colours, races, constrains, shares, and takes no markup."""

from __future__ import annotations

import json

import pytest

from tests.server.browser import NEEDS, Watched
from tests.server.samples import PROMPT
from tests.server.serving import Server

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.slow, NEEDS]

MARKUP = "<img src=x onerror=window.hacked=1><script>window.hacked=2</script>"


def run(watched: Watched, **fields: str) -> None:
    """Fill the form in, run it, and wait for its end."""
    page = watched.page
    if not page.evaluate("document.getElementById('play-box').open"):
        page.click("#play-box > summary")
    for name, value in fields.items():
        if name == "schema":
            page.evaluate("document.getElementById('p-more').open = true")
        page.fill(f"#p-{name}", value)
    page.click("#p-run")
    watched.until("!document.getElementById('p-run').disabled")


def test_tokens_stream_in_the_colours_of_their_writers_beside_plain_decoding(server: Server, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{server.address}/dashboard")
    run(watched, prompt=PROMPT, max="60", temperature="0.7", seed="5")
    assert "The texts are the same (seed 5)" in page.inner_text("#play-verdict")
    read = "(all) => all.map((each) => [each.dataset.origin, each.textContent])"
    found = [page.eval_on_selector_all(f"#w-{arm} span", read) for arm in ("drafts", "plain")]
    body = {"temperature": 0.7, "seed": 5, "max_tokens": 60, "return_token_origins": True, "top_p": 1}
    told = server.complete(PROMPT, **body)["choices"][0]
    for arm, spans in zip(("drafts", "plain"), found, strict=True):
        assert "".join(text for _, text in spans) == told["text"], arm
    assert [origin for origin, _ in found[0]] == [each["origin"] for each in told["token_origins"]]
    assert {origin for origin, _ in found[1]} == {"plain"} and len({origin for origin, _ in found[0]}) > 2
    colours = page.evaluate(
        "['draft', 'lookup', 'correction', 'bonus', 'plain'].map((o) => {"
        " const s = getComputedStyle(document.querySelector(`.writers [data-origin=${o}]`));"
        " return s.borderBottomColor + s.borderBottomStyle; })"
    )
    assert len(set(colours)) == 5, "told apart by colour and by line"
    fallen = [each["rejected"] for each in told["token_origins"] if "rejected" in each]
    assert page.eval_on_selector_all("#w-drafts del", "(all) => all.map((each) => each.textContent)") == fallen
    assert page.is_hidden("#w-drafts del >> nth=0")
    page.check("#p-rejected")
    assert page.is_visible("#w-drafts del >> nth=0")
    assert watched.errors == [] and watched.outside(server.address) == set()


def test_a_schema_holds_and_its_markup_stays_text(server: Server, watched: Watched) -> None:
    page = watched.page
    page.goto(f"{server.address}/dashboard")
    run(watched, prompt="x", max="150", seed="1", schema=json.dumps({"const": MARKUP}))
    for arm in ("drafts", "plain"):
        spans = page.eval_on_selector_all(f"#w-{arm} span", "(all) => all.map((each) => each.textContent)")
        assert json.loads("".join(spans)) == MARKUP, "it is there, as text"
    assert page.evaluate("window.hacked") is None
    assert page.query_selector("#race img, #race script") is None
    run(watched, schema="{not json")
    assert page.inner_text("#play-error").startswith("The schema is no JSON")
    run(watched, schema="", max="4000")
    assert "maximum context length" in page.inner_text("#play-error")
    errors = [error for error in watched.errors if "Failed to load resource" not in error]
    assert errors == [], "what a browser says of refused requests is not the page's"
