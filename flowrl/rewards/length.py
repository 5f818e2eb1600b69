"""Rewards for the length of a response, to be added to one for what it says."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.errors import WrongType
from flowrl.functions import reward


def _check_cache(columns: Sequence[str], *, max_tokens: int, cache: int, **settings: object) -> None:
    if not 0 < cache <= max_tokens:
        raise WrongType(
            "the punishment has no room to rise in",
            found=f"cache={cache}, max_tokens={max_tokens}",
            wanted="0 < cache <= max_tokens",
            fix="max_tokens= of the rollout's max_new_tokens, and cache= of the last of them",
        )


def _check_target(columns: Sequence[str], *, target: int, scale: float = 1.0, **settings: object) -> None:
    if target < 1 or not scale > 0:
        raise WrongType(
            "no length is aimed at", found=f"target={target}, scale={scale}", wanted="target >= 1, scale > 0"
        )


@reward(check=_check_cache)
def overlong(response_ids: Sequence[int], *, max_tokens: int, cache: int) -> float:
    """Punish a response softly as it comes near the limit, and by -1 beyond it.

    DAPO, eq. 13 of Yu et al. 2025 (arXiv:2503.14476): 0 up to ``max_tokens - cache`` tokens, from there falling
    linearly to -1 at `max_tokens`.

    Args:
        response_ids: [tokens].
        max_tokens: longest response.
        cache: tokens before it over which the punishment rises.
    """
    beyond = len(response_ids) - (max_tokens - cache)
    return -min(max(beyond, 0), cache) / cache


@reward(check=_check_target)
def length_error(response_ids: Sequence[int], *, target: int, scale: float = 1.0) -> float:
    """How far a response is from a length: ``-scale * |tokens - target|``, at most 0.

    The exact form of LCPO (Aggarwal & Welleck 2025, arXiv:2503.04697), which takes 0.0003 for `scale`.

    Args:
        response_ids: [tokens].
        target: tokens aimed at.
        scale: of each token more or less.
    """
    return -scale * abs(len(response_ids) - target)
