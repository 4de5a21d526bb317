"""What a policy is told of the engine: counts that are easy to get wrong."""

from __future__ import annotations

from verifypd.control.tuning import MEAN_OUTPUT, PRIOR_TRIALS
from verifypd.engine.views import mean_output
from verifypd.metrics.stats import EngineStats


def test_how_long_answers_are_is_learnt_from_those_still_written_too() -> None:
    """Of requests that came together the short ones end first: by those alone, answers would seem short."""
    assert mean_output(EngineStats()) == MEAN_OUTPUT
    short_have_ended = EngineStats(emitted=8 * 16 + 24 * 100, answered=16)
    assert mean_output(short_have_ended) == (PRIOR_TRIALS * MEAN_OUTPUT + 2528) / (PRIOR_TRIALS + 16)
    assert mean_output(short_have_ended) > MEAN_OUTPUT > mean_output(EngineStats(emitted=8 * 16, answered=16))
