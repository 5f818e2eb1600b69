"""Which batches steps read where they may read more than their own: one order, whoever is first, and on resume."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import CheckpointError
from flowrl.runtime.cursor import Cursor

often = settings(derandomize=True, deadline=None, max_examples=200)
again = st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=6)
"""By step: batches of each wave after the first."""


def read(cursor: Cursor, waves: list[list[int]], first_step: int = 0) -> list[list[tuple[int, ...]]]:
    """Read all waves of some steps, one step after the other."""
    found = []
    for step, counts in enumerate(waves, first_step):
        begun = cursor.first(step)
        assert begun is not None
        found.append([begun, *(cursor.again(step, count) for count in counts)])
        cursor.close(step)
    return found


def test_without_further_waves_the_batches_of_a_step_are_a_function_of_its_number():
    for staleness in (0, 2):
        assert read(Cursor(2, staleness), [[]] * 4) == [[(0, 1)], [(2, 3)], [(4, 5)], [(6, 7)]]


def test_on_policy_steps_read_one_after_the_other():
    assert read(Cursor(1, 0), [[2, 1], [], [1]]) == [[(0,), (1, 2), (3,)], [(4,)], [(5,), (6,)]]


def test_steps_ahead_have_their_first_batches_before_an_earlier_one_reads_again():
    assert read(Cursor(1, 2), [[1], [1], []]) == [[(0,), (3,)], [(1,), (5,)], [(2,)]]


def test_a_step_too_far_ahead_waits_until_an_earlier_one_is_closed():
    cursor = Cursor(1, 1)
    assert cursor.first(1) == (1,)
    assert cursor.first(2) is None
    assert cursor.again(0, 1) == (2,)
    assert cursor.first(2) is None
    cursor.close(0)
    assert cursor.first(2) == (3,)


@given(again, st.integers(1, 3), st.integers(0, 3), st.randoms(use_true_random=False))
@often
def test_when_first_batches_are_asked_for_changes_nothing(waves, per_step, staleness, chance: random.Random):
    plain = read(Cursor(per_step, staleness), waves)
    cursor = Cursor(per_step, staleness)
    found = []
    for step, counts in enumerate(waves):
        for other in chance.sample(range(len(waves)), len(waves)):
            if cursor.first(other) is not None and step <= other < len(plain):
                assert cursor.first(other) == plain[other][0]
        found.append([cursor.first(step), *(cursor.again(step, count) for count in counts)])
        cursor.close(step)
    assert found == plain
    flat = [number for step in found for wave in step for number in wave]
    assert len(set(flat)) == len(flat)


@given(again, st.integers(1, 3), st.integers(0, 3), st.data())
@often
def test_a_cursor_goes_on_from_a_state_of_its_own_as_if_it_had_never_stopped(waves, per_step, staleness, data):
    at = data.draw(st.integers(0, len(waves)))
    whole = Cursor(per_step, staleness)
    plain = read(whole, waves)
    state = json.loads(json.dumps(whole.state(at)))
    rest = Cursor(per_step, staleness, first_step=at, state=state)
    assert read(rest, waves[at:], at) == plain[at:]
    assert rest.state(len(waves)) == whole.state(len(waves))


@given(again, again, st.integers(1, 3), st.integers(0, 3), st.integers(0, 3))
@often
def test_with_another_staleness_each_batch_is_still_read_once(before, after, per_step, one, other):
    first = Cursor(per_step, one)
    found = read(first, before)
    second = Cursor(per_step, other, first_step=len(before), state=first.state(len(before)))
    found += read(second, after, len(before))
    flat = [number for step in found for wave in step for number in wave]
    assert len(set(flat)) == len(flat)
    state = second.state(len(found))
    ahead = {number for batches in state["given"] for number in batches}
    assert {*flat, *ahead} == set(range(state["next"])), "none is left out"


def test_a_run_that_had_no_waves_goes_on_at_its_step():
    assert read(Cursor(3, 0, first_step=2), [[]], 2) == [[(6, 7, 8)]]


def test_states_that_nobody_will_ask_for_are_forgotten():
    cursor = Cursor(1, 1)
    read(cursor, [[1], [], []])
    cursor.forget(1)
    assert list(cursor._states) == [2, 3]


@pytest.mark.parametrize(
    "state", [{}, {"next": -1, "given": []}, {"next": 3, "given": [[True]]}, {"next": 3, "given": "12"}, {"next": 1.5}]
)
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(CheckpointError, match=r"(?s)a prompt cursor cannot be read.*found: .*wanted: .*resume from"):
        Cursor(1, 0, first_step=3, state=state)
