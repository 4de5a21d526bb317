"""Tables of the documentation, made from the JSON of the results they show.

    python benchmarks/tables.py            # write them into the pages
    python benchmarks/tables.py --check    # say which are out of date

A page has a table between `<!-- table NAME -->` and `<!-- end -->`. Each family of tables has a module of its own.
Where figures stand among words, the words are in `texts/NAME.md`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import tables_answers as answers
import tables_beside as beside
import tables_claims as claims
import tables_cluster as cluster
import tables_cpu as cpu
import tables_devices as devices
import tables_index as index
import tables_lanes as lanes
import tables_pairs as pairs
import tables_rounding as rounding
import tables_server as server
import tables_settings as settings
import tables_steps as steps
import tables_tuning as tuning

from verifypd.cluster.config import ClusterConfig
from verifypd.config import EngineConfig
from verifypd.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = (*index.PAGES, ROOT / "benchmarks" / "README.md")
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    "planner": steps.planner,
    "planner-gaps": steps.gaps("h200-gaps"),
    "planner-gaps-a03ccff": steps.gaps("h200-gaps-a03ccff"),
    "priced-too-low": steps.priced,
    "planner-targets": steps.targets,
    "planner-targets-bound": steps.targets_bound,
    "planner-toy": steps.toy,
    "planner-toy-simulated": steps.toy_simulated,
    "engine-steps": steps.engine,
    "shape-steps": steps.shapes,
    "host-work": steps.host,
    "attention": steps.attention,
    "fp8-steps": steps.eight_bits,
    "distilled": steps.distilled,
    "draft-kinds": steps.draft_kinds,
    "fp8-text": rounding.weights,
    "fp8-drafts": rounding.drafts,
    "fp8-kv": rounding.keys_and_values,
    "server-cost": server.cost,
    "cluster-cost": server.cluster_cost,
    "viewers-cost": server.viewers,
    "longer-runs": server.longer_runs,
    "server-clients": server.clients,
    "tuning": tuning.numbers,
    "map-glance": tuning.map_glance,
    "deploy-sweep": lanes.deploy(lanes.SWEEP),
    "deploy-mixed": lanes.deploy(lanes.MIXED),
    "deploy-three-way": lanes.deploy(lanes.THREE),
    "deploy-models": lanes.deploy(lanes.MODELS, lanes.EVERY),
    "deploy-h200": lanes.deploy(lanes.THREE_H200, lanes.EVERY_H200),
    "deploy-h200-sweep": lanes.deploy(lanes.SWEEP_H200, "bench-sweep-7b-h200"),
    "deploy-h200-models": lanes.deploy("bench-models-h200", "bench-models-qwen2-gemma-h200"),
    "deploy-h200-mixed": lanes.deploy_tails,
    "deploy-cpu": lanes.deploy(*(f"bench-{name}-cpu" for name in ("sweep", "three-way", "comprehensive", "mixed"))),
    "deploy-rules": lanes.deploy_rules,
    "deploy-claims": lanes.deploy_claims,
    "deploy-figures": claims.figures,
    "deploy-published": claims.changes,
    "equal-systems": lanes.equal_metric,
    "bench-original-metric": lanes.original_metric,
    "bench-serve-cpu": beside.serve_cpu,
    "serve-closed": beside.serve_h200("bench-serve-h200-closed", beside.CLIENTS),
    "serve-closed-384": beside.serve_h200("bench-serve-h200-closed-384", beside.CLIENTS),
    "serve-mixed": beside.serve_h200("bench-serve-h200-mixed", beside.RATES),
    "serve-mixed-ratios": beside.traffic("bench-serve-h200-mixed"),
    "serve-32": beside.serve_h200("bench-serve-h200-32", beside.RATES),
    "serve-32-long": beside.serve_h200("bench-serve-h200-32-86b7a45", beside.RATES),
    "serve-plain": beside.serve_h200("bench-serve-h200-plain", beside.RATES),
    "serve-plain-ratios": beside.traffic("bench-serve-h200-plain"),
    "serve-plain-closed": beside.serve_h200("bench-serve-h200-plain-closed", beside.CLIENTS),
    "mixed-glance": answers.mixed_glance,
    "vllm-settings": answers.vllm_settings,
    "serve-tiny1b": beside.serve_h200("bench-serve-h200-tiny1b", beside.CLIENTS),
    "serve-tiny1b-mixed": beside.serve_h200("bench-serve-h200-tiny1b-mixed", beside.RATES),
    "serve-tiny1b-mixed-ratios": beside.traffic("bench-serve-h200-tiny1b-mixed"),
    "head-low-acceptance": beside.low_acceptance,
    "closed-glance": answers.closed_glance,
    "when-not": answers.when_not,
    "gpu-expect": answers.gpu_expect,
    "vllm-faster": answers.vllm_faster,
    "deploy-choice": answers.deploy_choice,
    "deploy-findings": answers.deploy_findings,
    "deploy-cpu-auto": answers.deploy_cpu_auto,
    "x86-passes": cpu.x86_passes,
    "panel-passes": cpu.panel_passes,
    "x86-tiles": cpu.x86_tiles,
    "busy-machine": cpu.busy_machine,
    "cpu-map": cpu.cpu_map,
    "arm-passes": cpu.arm_passes,
    "cpu-transformers": cpu.transformers,
    "cpu-glance": pairs.cpu_glance,
    "cpu-pairs": pairs.cpu_pairs,
    "cpu-copying": pairs.cpu_copying,
    "cpu-float32": pairs.cpu_float32,
    "cpu-sampled": pairs.cpu_sampled,
    "xeon-numbers": pairs.xeon_numbers,
    "weights-kl": pairs.weights_kl,
    "dual-measured": devices.measured,
    "dual-simulated": devices.simulated,
    "cluster-capacity": cluster.capacity,
    "cluster-needed": cluster.needed,
    "cluster-routing": cluster.routings,
    "cluster-thousand": cluster.thousand,
    "cluster-beside-ray": cluster.beside_ray,
    "settings-engine": settings.settings(EngineConfig),
    "settings-server": settings.settings(ServerConfig),
    "settings-cluster": settings.settings(ClusterConfig),
    "index-scripts": index.scripts,
    "index-results": index.results,
}


def written(page: Path) -> str:
    """The page with its tables made anew."""
    results = "benchmarks/results" if page.parent == ROOT else "../benchmarks/results"
    return PLACE.sub(
        lambda match: match[1] + TABLES[match[2]]().replace("RESULTS", results) + match[4], page.read_text()
    )


def main(given: list[str] | None = None) -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(given)
    old = [page for page in PAGES if written(page) != page.read_text()]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'out of date' if args.check else 'written'}")
        if not args.check:
            page.write_text(written(page))
    return int(args.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
