"""Which rows a stage may take: joins, groups, dropped rows, and where the rows of a firing lie."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.rows import PROMPT, Key
from flowrl.runtime.events import Block, Input
from flowrl.runtime.progress import StageProgress, StepRows, parts
from tests.runtime.shapes import Shape

often = settings(derandomize=True, deadline=None, max_examples=150)


def step_of(shape: Shape, number: int = 0) -> StepRows:
    """A step whose prompts are read."""
    step = StepRows(number, shape.plan())
    prompts = tuple(Key(number, i) for i in range(shape.prompts))
    step.stages["prompts"].done.update(prompts)
    step.place("prompts", Block("host", 1, prompts, ("prompt", "prompt_ids", "answer"), 8), set(prompts))
    step.read("prompts")
    step.close("prompts")
    return step


def block(number: int, keys: list[Key], worker: str = "train.0", lengths: tuple[int, ...] | None = None) -> Block:
    return Block(worker, number, tuple(keys), ("response",), 8, lengths)


def test_the_prompts_of_a_step_say_which_rows_each_stage_waits_for():
    step = step_of(Shape(prompts=2, n=2), number=3)
    samples = (Key(3, 0, 0), Key(3, 0, 1), Key(3, 1, 0), Key(3, 1, 1))
    for name in ("rollout", "score_0", "centred", "update", "record"):
        assert step.stages[name].expected == samples
        assert all(type(key) is Key for key in step.stages[name].expected)
    assert step.stages["prompts"].expected == (Key(3, 0, PROMPT), Key(3, 1, PROMPT))


def test_a_row_function_takes_rows_as_they_come_in_order_of_their_keys():
    step = step_of(Shape(prompts=2, n=2))
    score = step.stages["score_0"]
    step.deliver("rollout", {Key(0, 1, 0), Key(0, 0, 1)})
    assert score.takeable() == [Key(0, 0, 1), Key(0, 1, 0)]
    assert score.take(score.takeable()) == {Key(0, 0, 1), Key(0, 1, 0)}
    assert score.takeable() == ()
    step.deliver("rollout", {Key(0, 0, 0)})
    assert score.takeable() == [Key(0, 0, 0)]


def test_a_group_function_takes_whole_groups_and_those_whose_other_rows_are_dead():
    step = step_of(Shape(prompts=3, n=2))
    centred = step.stages["centred"]
    step.deliver("score_0", {Key(0, 0, 0), Key(0, 1, 0), Key(0, 1, 1)})
    assert centred.takeable() == [Key(0, 1, 0), Key(0, 1, 1)]
    step.drop("score_0", [Key(0, 0, 1)], "no number")
    assert centred.takeable() == [Key(0, 0, 0), Key(0, 1, 0), Key(0, 1, 1)]
    centred.take(centred.takeable())
    step.drop("score_0", [Key(0, 2, 0), Key(0, 2, 1)], "no number")
    assert centred.takeable() == ()
    assert centred.complete


def test_a_batch_function_takes_a_step_once_the_last_row_has_come_or_is_dead():
    step = step_of(Shape(prompts=2, n=1, per="batch"))
    whitened = step.stages["whitened"]
    step.deliver("score_0", {Key(0, 1, 0)})
    assert whitened.takeable() == ()
    step.drop("score_0", [Key(0, 0, 0)], "no number")
    assert whitened.takeable() == [Key(0, 1, 0)]


def test_a_dropped_row_is_dead_downstream_and_alive_in_branches_beside():
    step = step_of(Shape(prompts=2, n=1, dropping="diamond", again=True))
    step.drop("filter", [Key(0, 0, 0)], "boring")
    dead = {name for name, progress in step.stages.items() if progress.dead}
    assert dead == {"filter", "weigh", "update", "record"}
    assert step.stages["record"].dead == {Key(0, 0, 0): "boring"}


def test_a_join_waits_for_the_slower_branch():
    step = step_of(Shape(prompts=2, n=1, reference=True))
    update = step.stages["update"]
    step.deliver("centred", {Key(0, 0, 0), Key(0, 1, 0)})
    assert not update.ready
    step.deliver("reference", {Key(0, 1, 0)})
    assert update.ready == {Key(0, 1, 0)}
    step.drop("reference", [Key(0, 0, 0)], "lost")
    assert update.complete
    assert update.ready == {Key(0, 1, 0)}


def test_a_row_that_is_dropped_twice_keeps_its_first_reason():
    step = step_of(Shape(rewards=2, prompts=1, n=2))
    step.drop("score_0", [Key(0, 0, 0)], "first")
    step.drop("score_1", [Key(0, 0, 0)], "second")
    assert step.stages["record"].dead == {Key(0, 0, 0): "first"}


def test_shares_are_contiguous_prompts_with_their_samples():
    step = step_of(Shape(prompts=5, n=2, dp=3))
    rollout = step.plan.stages["rollout"]
    shares = step.shares(rollout, 3)
    assert [[key.prompt for key in share.prompts] for share in shares] == [[0], [1, 2], [3, 4]]
    assert [len(share.samples) for share in shares] == [2, 4, 4]
    assert [key for share in shares for key in share.samples] == list(step.stages["rollout"].expected)
    assert [share.rank for share in step.shares(rollout, 8) if share.samples] == [1, 3, 4, 6, 7]


@given(st.integers(0, 20), st.integers(1, 9))
@often
def test_parts_are_even_and_in_order(length, count):
    found = parts(range(length), count)
    assert [item for part in found for item in part] == list(range(length))
    assert len(found) == count
    assert max(map(len, found)) - min(map(len, found)) <= 1


# --- where rows lie


def test_a_firing_reads_whole_blocks_as_such_and_parts_by_position():
    step = step_of(Shape(prompts=2, n=2))
    first, second = block(5, [Key(0, 1, 1), Key(0, 0, 0)]), block(6, [Key(0, 0, 1), Key(0, 1, 0)])
    step.place("rollout", first, set(first.keys))
    step.place("rollout", second, set(second.keys))
    score = step.plan.stages["score_0"]
    every = step.inputs(score, set(step.stages["score_0"].expected))
    assert every == (
        Input("rollout", "train.0", 5, None, ("response",)),
        Input("rollout", "train.0", 6, None, ("response",)),
        Input("prompts", "host", 1, None, ("answer",)),
    )
    some = step.inputs(score, {Key(0, 0, 0), Key(0, 0, 1)})
    assert some == (
        Input("rollout", "train.0", 5, (1,), ("response",)),
        Input("rollout", "train.0", 6, (0,), ("response",)),
        Input("prompts", "host", 1, (0,), ("answer",)),
    )


def test_a_row_that_two_answers_bring_is_read_from_the_first():
    step = step_of(Shape(prompts=1, n=2))
    step.place("rollout", block(5, [Key(0, 0, 0)]), {Key(0, 0, 0)})
    step.place("rollout", block(9, [Key(0, 0, 0), Key(0, 0, 1)]), {Key(0, 0, 1)})
    rollout = step.inputs(step.plan.stages["score_0"], {Key(0, 0, 0), Key(0, 0, 1)})[:2]
    assert [(each.number, each.rows) for each in rollout] == [(5, None), (9, (1,))]


def test_lengths_are_those_of_the_rollout_whenever_its_blocks_come():
    step = step_of(Shape(prompts=1, n=2))
    step.place("rollout", block(5, [Key(0, 0, 1)], lengths=(7,)), {Key(0, 0, 1)})
    assert step.lengths("rollout", [Key(0, 0, 1)]) == [7]
    step.place("rollout", block(6, [Key(0, 0, 0)], lengths=(3,)), {Key(0, 0, 0)})
    assert step.lengths("rollout", [Key(0, 0, 0), Key(0, 0, 1)]) == [3, 7]


# --- against a slow and simple model


samples = [Key(0, prompt, sample) for prompt in range(3) for sample in range(2)]
happenings = st.permutations([(source, key) for source in ("centred", "reference") for key in samples])


@given(happenings, st.sets(st.sampled_from(samples)), st.sets(st.sampled_from(samples)))
@often
def test_a_join_settles_each_row_once_whatever_the_order(order, lost_here, lost_there):
    step = step_of(Shape(prompts=3, n=2, reference=True))
    update: StageProgress = step.stages["update"]
    lost = {"centred": lost_here, "reference": lost_there}
    come: dict[Key, set[str]] = {key: set() for key in samples}
    dead: set[Key] = set()
    for source, key in order:
        if key in lost[source]:
            step.drop(source, [key], "lost")
            dead.add(key)
        else:
            step.deliver(source, {key})
            come[key].add(source)
        assert update.ready == {key for key, by in come.items() if len(by) == 2}
        assert update.dead.keys() == dead
        assert update.settled == update.ready | dead
    assert update.complete
    assert len(update.ready) + len(update.dead) == len(samples)
