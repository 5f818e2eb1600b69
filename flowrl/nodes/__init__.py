"""The built-in nodes, one file a kind."""

from .data import prompts
from .evaluation import evaluate
from .forward import logit_energy, logprobs, score, topk, values
from .given import responses
from .judging import judge
from .sampling import rollout
from .selection import filter
from .training import update

__all__ = [
    "evaluate",
    "filter",
    "judge",
    "logit_energy",
    "logprobs",
    "prompts",
    "responses",
    "rollout",
    "score",
    "topk",
    "update",
    "values",
]
