"""The budget printed at start is what the process really takes."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, resource
from verifypd import LLM, SamplingParams
llm = LLM("smollm2", draft="ngram", dtype="float32", kv_memory="600MB", batch_size=16)
words = " ".join(str(i) for i in range(60))
llm.generate([f"{i} {words}" for i in range(20)], SamplingParams(max_tokens=4, temperature=0.8, ignore_eos=True))
llm.shutdown()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak": peak, "budget": llm.budget.total, "shown": str(llm.budget)}))
"""


def test_peak_memory_is_within_15_percent_of_the_budget() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    result = json.loads(found.stdout.splitlines()[-1])
    assert abs(result["peak"] / result["budget"] - 1) <= 0.15, result
