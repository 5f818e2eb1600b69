"""How an update is cut into passes and optimizer steps: a function of the keys and of nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flowrl as fl
from flowrl import losses
from flowrl.backend import Max, Sum
from flowrl.graph import UpdateSpec
from flowrl.loss import loss
from flowrl.rows import Key
from flowrl.runtime.progress import StageProgress
from flowrl.runtime.updates import Pass, UpdateRound
from tests.runtime.shapes import Shape

PLAN = Shape().plan()
SPEC = PLAN.graph["update"].spec
assert isinstance(SPEC, UpdateSpec)


def round_of(prompts: int, n: int = 2, ranks: int = 1, **settings: Any) -> UpdateRound:
    """An update's round; a row has as many tokens as its prompt's number plus one."""
    progress = StageProgress(PLAN.stages["update"])
    keys = tuple(Key(0, prompt, sample) for prompt in range(prompts) for sample in range(n))
    progress.expect(keys, [Key(0, prompt) for prompt in range(prompts)])
    progress.close()
    return UpdateRound(replace(SPEC, **settings), progress, ranks, lambda rows: [key.prompt + 1 for key in rows])


def come(update: UpdateRound, *keys: Key) -> list[Pass]:
    """These rows come; the passes that are complete now."""
    update.progress.arrive("centred", set(keys))
    before = len(update.waiting)
    update.gather()
    return update.waiting[before:]


def finish(update: UpdateRound, tokens: int = 5) -> dict[str, float]:
    """Every pass ends, and the optimizer steps; returns the sums it steps by."""
    for each in list(update.waiting):
        update.begin_pass(each)
        assert not update.step_due()
        update.end_pass(each.rank, {"tokens": Sum(tokens, 1), "rows": Sum(len(each.keys), 1)})
    assert update.step_due()
    sums = update.sums()
    update.begin_step()
    assert not update.step_due()
    for rank in range(update.num_ranks):
        update.end_step(rank)
    return sums


def prompts_of(passes: list[Pass]) -> list[tuple[int, list[int]]]:
    return [(each.rank, sorted({key.prompt for key in each.keys})) for each in passes]


def test_without_a_budget_a_rank_takes_its_share_once_it_is_there():
    update = round_of(4, ranks=2)
    keys = update.progress.expected
    assert come(update, *keys[5:]) == []
    assert come(update, *keys[:4]) == [Pass(0, keys[:4])]
    assert come(update, keys[4]) == [Pass(1, keys[4:])]
    assert finish(update) == {"tokens": 10.0, "rows": 8.0}
    assert update.finished


def test_dead_rows_are_left_out_and_a_dead_share_makes_no_pass():
    update = round_of(2, ranks=2)
    keys = update.progress.expected
    update.progress.kill([keys[0], keys[2], keys[3]], "boring")
    assert come(update, keys[1]) == [Pass(0, (keys[1],))]
    assert finish(update)["rows"] == 1.0


def test_a_round_without_rows_steps_by_nothing():
    update = round_of(2)
    update.progress.kill(update.progress.expected, "boring")
    update.gather()
    assert finish(update) == {"tokens": 0.0, "rows": 0.0}


def test_minibatches_split_between_prompts_and_epochs_repeat_them():
    update = round_of(3, n=2, minibatches=2, epochs=2)
    come(update, *update.progress.expected)
    taken = []
    for number in range(4):
        assert update.last_step == (number == 3)
        update.gather()
        taken += prompts_of(update.waiting)
        assert finish(update)["rows"] == 2.0 * len(taken[-1][1])
    assert taken == [(0, [0]), (0, [1, 2]), (0, [0]), (0, [1, 2])]
    assert update.finished
    update.gather()
    assert update.waiting == []


def test_a_pass_is_closed_when_the_next_row_would_not_fit():
    update = round_of(4, n=1, max_tokens=6)  # 1, 2, 3 and 4 tokens
    keys = update.progress.expected
    assert come(update, keys[0], keys[1]) == [], "a third row may still fit"
    assert come(update, keys[2]) == [Pass(0, keys[:2])], "3 rows of 3 tokens do not"
    assert come(update, keys[3]) == [Pass(0, (keys[2],)), Pass(0, (keys[3],))]


def test_a_row_longer_than_the_budget_is_a_pass_of_its_own():
    update = round_of(3, n=1, max_tokens=1)
    assert [each.keys for each in come(update, *update.progress.expected)] == [(k,) for k in update.progress.expected]


@loss(per="row")
def compare(logprobs: Tensor, group: Tensor) -> Tensor:
    """A loss that looks at all rows of a prompt."""
    return logprobs.sum(-1)


def test_a_loss_that_compares_rows_keeps_prompts_whole():
    update = round_of(4, n=2, max_tokens=7, loss=compare())  # two rows each of 1, 2, 3 and 4 tokens
    keys = update.progress.expected
    assert come(update, keys[0], keys[1], keys[2]) == [], "the second prompt is not there yet"
    update.progress.kill([keys[3]], "boring")
    assert come(update, keys[4]) == []
    assert come(update, keys[5]) == [Pass(0, keys[:3])], "the third prompt does not fit"
    assert come(update, keys[6], keys[7]) == [Pass(0, keys[4:6]), Pass(0, keys[6:])], "nor does the fourth: alone"


def test_no_pass_begins_while_the_optimizer_steps():
    update = round_of(2, n=1, minibatches=2)
    keys = update.progress.expected
    come(update, keys[0])
    [only] = update.waiting
    update.begin_pass(only)
    update.end_pass(0, {})
    update.begin_step()
    assert come(update, keys[1]) == []
    update.end_step(0)
    update.gather()
    assert update.waiting == [Pass(0, (keys[1],))]


shapes = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.sampled_from([None, 1, 4, 9, 100]))


@given(shapes, st.booleans(), st.randoms(use_true_random=False), st.data())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_passes_do_not_depend_on_the_order_in_which_rows_come(shape, couples, chance, data):
    prompts, n, ranks, budget = shape
    declared = compare() if couples else SPEC.loss
    rounds = [round_of(prompts, n, ranks, max_tokens=budget, loss=declared) for _ in range(2)]
    keys = rounds[0].progress.expected
    dead = data.draw(st.sets(st.sampled_from(keys)))
    rounds[0].progress.kill(dead, "boring")
    come(rounds[0], *(key for key in keys if key not in dead))
    for key in chance.sample(keys, len(keys)):
        if key in dead:
            rounds[1].progress.kill([key], "boring")
            rounds[1].gather()
        else:
            come(rounds[1], key)
    by_rank = [[[each for each in r.waiting if each.rank == rank] for rank in range(ranks)] for r in rounds]
    assert by_rank[0] == by_rank[1]
    taken = [key for rank in by_rank[0] for each in rank for key in each.keys]
    assert taken == [key for key in keys if key not in dead], "ranks hold contiguous parts, in order"
    if couples:
        homes = [{key.prompt for key in each.keys} for each in rounds[0].waiting]
        assert sum(map(len, homes)) == len(set().union(*homes)), "each prompt in one pass"
    for each in rounds[0].waiting:
        if budget is not None and len({key.prompt for key in each.keys} if couples else each.keys) > 1:
            assert len(each.keys) * max(key.prompt + 1 for key in each.keys) <= budget
    finish(rounds[0])
    assert rounds[0].finished


def test_the_mismatch_is_a_mean_over_the_tokens_of_a_mini_batch() -> None:
    update = round_of(2, ranks=2)
    come(update, *update.progress.expected)
    for each, mean, tokens in zip(list(update.waiting), (0.5, 0.1), (30.0, 10.0), strict=True):
        update.begin_pass(each)
        update.end_pass(each.rank, {"mismatch_kl": Sum(mean * tokens, tokens), "max_ratio": Max(2.0)})
    assert update.mismatch().mean == pytest.approx(0.4)
    update.begin_step()
    for rank in range(2):
        update.end_step(rank)
    assert update.mismatch().weight == 0


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_ranks_without_prompts_take_part_in_the_step(ranks):
    update = round_of(2, n=1, ranks=ranks)
    come(update, *update.progress.expected)
    assert len(update.waiting) == min(2, ranks)
    assert finish(update)["rows"] == 2.0


@given(st.permutations([0.1, 1e16, -1e16, 0.2, 0.3]))
def test_what_a_coefficient_follows_does_not_depend_on_which_pass_ended_first(totals: list[float]) -> None:
    update = round_of(5, ranks=5, loss=losses.kl(coef=fl.Adaptive(initial=0.1, target=0.1)))
    for each in come(update, *update.progress.expected):
        update.begin_pass(each)
        update.end_pass(each.rank, {"kl": Sum(totals[each.rank], 3.0)})
    assert update.observed() == {"kl": (0.6, 15.0)}
    update.begin_step()
    for rank in range(5):
        update.end_step(rank)
    assert update.observed() == {"kl": (0.0, 0.0)}
