"""Every number of the policies that was chosen, with its unit. `benchmarks/tuning.py` shows what half and double of
each do. The thresholds of the original's controller are its own and stand with it.
"""

from __future__ import annotations

# -- whether to draft
MARGIN = 0.02  # gain that drafting must predict before it begins; the error of a fitted cost model's ratios
PROBE_SHARE = 0.005  # of the time may go to drafts of one token while nothing is drafted
PROBED = 16  # requests of one probe, at most
REVIEW_EVERY = 16  # steps between two looks at what drafting would gain while nothing is drafted
LEAST_CHANCE = 0.02  # of standing, below which nothing is drafted, even where its row is free

# -- acceptance
PRIOR = 0.6  # chance of a draft token before anything was seen
PRIOR_TRIALS = 16  # trials, or requests, that a prior counts for: variance of a trial over that between requests
KIND_TRIALS = 400  # trials that the mean of a kind of request looks back; half of it while drafts are only probed
REQUEST_TRIALS = 64  # trials that a request's own mean looks back: half of how long its text stays alike

MEAN_OUTPUT = 64  # tokens a request is expected to come to before any has ended

# -- prompts
PROMPT_SHARE = 0.25  # of a step that prompts are sure of
LEAST_LEFT = 0.25  # of the mean output, that a request which decodes is expected to write yet, at least
OVERDUE = 4  # times its target after which a prompt goes before all others

# -- costs
LEARNING_RATE = 0.02  # of running means: some fifty measurements
