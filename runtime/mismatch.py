"""Stopping before a step on samples whose sampler is too far from the trainer (``fl.update(..., max_mismatch=)``)."""

from __future__ import annotations

from typing import Any

from flowrl.graph import Node, UpdateSpec

from .course import shown
from .updates import UpdateRound


def mismatch_error(node: Node, step: int, update: UpdateRound) -> dict[str, Any] | None:
    """What is wrong with the mini-batch that the optimizer is about to step on, as the parts of an error; None when it
    may step."""
    assert isinstance(node.spec, UpdateSpec)
    limit, mismatch = node.spec.max_mismatch, update.mismatch()
    if limit is None or not mismatch.weight or mismatch.mean <= limit:
        return None
    return {
        "type": "MismatchError",
        "problem": f"node '{node.name}' may not train on the samples of step {shown(step)}: their sampler is too far "
        f"from model '{node.model.name if node.model else ''}'",
        "found": f"mismatch_kl={mismatch.mean:.3g} over {mismatch.weight:,.0f} tokens",
        "wanted": f"at most max_mismatch={limit:g}",
        "fix": "look for another temperature, dtype or backend of the sampler, and for weights that did not reach it; "
        "what staleness adds needs a larger max_mismatch",
        "node": node.name,
    }
