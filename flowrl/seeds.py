"""Seeds and orders that are functions of names, never of when or where something happens.

The hash is SplitMix64's finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"), chained
over the parts. It is written out here, in whole numbers, because the streams of `random` and of
`numpy.random.Generator` may change between versions, and a resumed run must see the same rows in the same order.
"""

from __future__ import annotations

from .rows import Key

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
"""2**64 / golden ratio, odd: SplitMix64's increment; it keeps a part of 0 from being a fixed point."""
_ROUNDS = 6
"""Of the Feistel network: four make a pseudorandom permutation (Luby & Rackoff 1988); two more for small blocks."""
_MIN_HALF_BITS = 4
"""Narrower halves reach only some of the orders of three or four rows."""


def mix(*parts: int) -> int:
    """A 64-bit hash of whole numbers of any sign; every bit depends on every part and on their order."""
    state = 0
    for part in parts:
        state = _scramble((state ^ (part & _MASK)) + _GAMMA)
    return state


def row_seed(run_seed: int, key: Key) -> int:
    """The seed of one row's sampler, in 0 .. 2**64 - 1: ``mix(run_seed, step, prompt, sample)``.

    A row's random numbers so depend neither on the worker, the batch nor the restart that makes it.
    """
    return mix(run_seed, *key)


def turn_seed(run_seed: int, turn: int) -> int:
    """The run seed of a later turn of all responses; that of turn 0 is the run's own.

    So a first turn is what a rollout without a tool samples, and no turn repeats the random numbers of another.
    """
    return mix(run_seed, turn) if turn else run_seed


def permuted(position: int, num_rows: int, seed: int) -> int:
    """Which row stands at `position` of a shuffled pass over `num_rows` rows.

    For a fixed seed this is a permutation of ``range(num_rows)``, in O(1) memory: a Feistel network over the next power
    of four, walked until it lands inside the range ("cycle walking", Black & Rogaway 2002).
    """
    assert 0 <= position < num_rows
    half = max(_MIN_HALF_BITS, ((num_rows - 1).bit_length() + 1) // 2)
    row = _feistel(position, half, seed)
    while row >= num_rows:
        row = _feistel(row, half, seed)
    return row


def _feistel(block: int, half: int, seed: int) -> int:
    """One encryption of a block of ``2 * half`` bits."""
    mask = (1 << half) - 1
    left, right = block >> half, block & mask
    for number in range(1, _ROUNDS + 1):
        left, right = right, left ^ (_scramble((seed ^ right) + number * _GAMMA) & mask)
    return left << half | right


def _scramble(state: int) -> int:
    """SplitMix64's finaliser: one to one on 64 bits."""
    state &= _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
