"""Advantage estimators: plain torch, called on tensors or declared as nodes (``advantages.grpo(samples, scores)``).

Statistics are taken per prompt id, wherever the rows stand, in float64 and in two passes, from each group's smallest
score: a group of equal scores gets exactly 0, and scores near 1e6 lose nothing. Rows that were dropped are absent: they
enter no baseline. A row without a trained token still counts in its group; its advantage reaches no token. Results are
float32, float64 for float64 input, without a gradient.
"""

from .distillation import distill
from .group import dr_grpo, gdpo, gpg, grpo, grpo_passk, opo, reinforce_pp_baseline, rloo
from .returns import gae, greedy_baseline, otb, reinforce_pp, remax, token_rewards

__all__ = [
    "distill",
    "dr_grpo",
    "gae",
    "gdpo",
    "gpg",
    "greedy_baseline",
    "grpo",
    "grpo_passk",
    "opo",
    "otb",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "token_rewards",
]
