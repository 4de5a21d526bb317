"""Tables of what serving costs, and of long runs and outside tools against the server."""

from __future__ import annotations

from cells import read, rows, source, text

SERVER, CLUSTER, VIEWERS = "server_cost", "cluster_cost", "viewers-cost"
SOAK, GRAMMARS, SCHEMATHESIS, CLIENTS = "server-soak", "server-soak-grammars", "server_schemathesis", "server_clients"


def cost() -> str:
    """What HTTP costs beside an engine that answers at once, and a real one."""
    found = read(SERVER)
    lines = []
    for kind in ("instant_engine", "paced_engine"):
        own = found[kind]
        offered = own["offered_tokens_per_second"]
        name = (
            f"a step every {own['engine_step_ms']:g} ms, which offers {offered:,} tokens/s"
            if offered
            else "as fast as it can; tokens that wait for a busy worker share an event"
        )
        speeds = [f"{own[f'median_{each}_per_second']:,}" for each in ("tokens", "events")]
        lines.append([name, *speeds, f"{own['cpu_us_per_token']['api']:.1f} µs a token"])
    header = ["engine", "tokens/s", "events/s", "processor time of the API worker"]
    real = found["step_time"]
    words = (
        "\nThe same script times the real engine's steps behind HTTP and offline, in turn "
        f"({real['model']} without drafts, {real['streams']} streams, one compute thread).\n"
        f"Behind HTTP a step takes {real['median_step_ratio']:.4f} times as long, "
        f"a whole turn of the loop with its messages {real['median_turn_ratio']:.3f} times.\n"
    )
    return rows(header, lines) + words + source(SERVER)


def cluster_cost() -> str:
    """Two servers called directly, and through Ray."""
    found = read(CLUSTER)
    lines = []
    for kind in ("instant_engine", "paced_engine"):
        own, streams = found[kind], found["streams"]
        step = own["engine_step_ms"]
        offered = f"a step every {step:g} ms, which offers {streams * 1e3 / step:,.0f} tokens/s" if step else ""
        speeds = [f"{own[each]['median_tokens_per_second']:,} tokens/s" for each in ("two_servers", "ray_serve")]
        lines.append([offered or "as fast as it can", *speeds, f"{own['ratio']:.2f}"])
    return rows(["engine", "two servers", "through Ray", "ratio"], lines) + source(CLUSTER)


def viewers() -> str:
    """What five viewers of the dashboard cost."""
    found = read(VIEWERS)
    names = {"tokens_s": "tokens a second", "cpu_ms_token": "the engine's processor time a token"}
    lines = [
        [name, f"{found[key]['ratio']:.3f}", f"{found[key]['low']:.3f}–{found[key]['high']:.3f}"]
        for key, name in names.items()
    ]
    header = [f"with {['no', 'one', 'two', 'three', 'four', 'five'][found['settings']['viewers']]} viewers", "ratio"]
    return rows([*header, "95 % interval"], lines) + source(VIEWERS)


def longer_runs() -> str:
    """Overload, formats that take too much, and schemathesis."""
    soak, formats, cases = read(SOAK), read(GRAMMARS), read(SCHEMATHESIS)
    requests = {each: f"{soak[each]:,}" for each in ("requests", "served", "refused", "left_early")}
    found = {
        "soak_minutes": f"{soak['seconds'] / 60:.0f}",
        "clients": str(soak["clients"]),
        **requests,
        "without": str(soak["neither_served_nor_refused"] or "none"),
        "growth": f"{100 * soak['memory_growth']:.1f}",
        "patterns": f"{formats['gap_s_refused_patterns']:.2f}",
        "grammars": f"{formats['gap_s_ambiguous_grammars']:.2f}",
        "alone": f"{formats['gap_s_alone']:.2f}",
        "before": str(formats["memory_mib"]["before"]),
        "after": str(formats["memory_mib"]["after_ambiguous_grammars"]),
        "seconds": str(cases["seconds"]),
        "operations": str(cases["operations"]),
        "cases": f"{cases['cases']:,}",
        "errors": str(cases["answers_of_5xx"] or "no"),
        "generations": f"{sum(cases['answers_200_of_generation'].values()):,}",
    }
    first, second, third = (f"{each:.2f}" for each in soak["p99_s_by_quarter"])
    return text("longer-runs", **found, p99=f"{first}, {second} and {third}") + source(SOAK, GRAMMARS, SCHEMATHESIS)


def clients() -> str:
    """Tools that ran against the server."""
    found = read(CLIENTS)
    guide, perf, evaluation = found["guidellm"], found["aiperf"], found["lm_eval"]
    drafts = perf["speculation_table"]
    return text(
        "server-clients",
        guidellm=guide["version"],
        guide_requests=str(guide["requests"]),
        guide_streams=str(guide["streams"]),
        guide_good=str(guide["successful"]),
        guide_incomplete=str(guide["incomplete"] or "none"),
        guide_tokens=" to ".join(map(str, dict.fromkeys(guide["output_tokens_each"]))),
        aiperf=perf["version"],
        perf_requests=str(perf["requests"]),
        perf_streams=str(perf["concurrency"]),
        perf_errors=str(perf["errors"] or "no"),
        steps=str(drafts["steps"]),
        drafted=str(drafts["draft_tokens"]),
        accepted=str(drafts["accepted"]),
        lm_eval=evaluation["version"],
        eval_requests=str(evaluation["requests"]),
        right=f"{evaluation['accuracy'] * evaluation['questions']:.0f} of {evaluation['questions']}",
    ) + source(CLIENTS)
