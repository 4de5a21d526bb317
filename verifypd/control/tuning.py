"""Every number of the policies that was chosen: what it is, its unit, and where it is from.

`benchmarks/tuning.py` shows what half of each, double and none do. The thresholds of the original's controller are its
own and stand with it.
"""

from __future__ import annotations

# -- whether to draft
# unit: share of the time. Origin: unseen seeds; 0.01 is 2 % better where acceptance changes, 0.8 % worse where low
PROBE_SHARE = 0.005  # that may go to drafts of one token while nothing is drafted
# unit: steps. Origin: host work, a sixteenth of that of a look at every step, which gains nothing
REVIEW_EVERY = 16  # between two looks at what drafting would gain while nothing is drafted

# -- acceptance
# unit: chance. Origin: heads and draft models measured so far stand at 0.5 to 0.8
PRIOR = 0.6  # of a draft token before anything was seen
# unit: trials, or requests. Origin: variance of a trial over that between requests, in simulated traffic
PRIOR_TRIALS = 16  # that a prior counts for
# unit: trials. Origin: standard error of 0.025 of a mean at 0.5, the least that is asked of a gain
KIND_TRIALS = 400  # that the mean of a kind of request looks back; half of it while drafts are only probed
# unit: trials. Origin: half of how long simulated text stays alike
REQUEST_TRIALS = 64  # that a request's own mean looks back
# unit: tokens. Origin: by hand, half of what simulated chat writes; the first answers replace it
MEAN_OUTPUT = 64  # that a request is expected to come to before any has ended

# -- prompts
# unit: share of a step. Origin: a guard; where steps were bound to 20 ms, first tokens took 907 ms (p95) on an H200
PROMPT_SHARE = 0.25  # that prompts are sure of
# unit: times its target. Origin: by hand; short ones go first until then, and long ones must not starve
OVERDUE = 4  # after which a prompt goes before all others

# -- costs
# unit: share of the difference. Origin: some fifty measurements, half a second of steps
LEARNING_RATE = 0.02  # by which a running mean follows what is measured
