"""Steps that a filter refills: which batches they read, which groups they train on, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flowrl.rows import Key
from flowrl.runtime.events import Finished, Halt
from flowrl.runtime.plan import RECORD
from flowrl.runtime.scheduler import Options
from flowrl.runtime.waves import TOO_MANY
from tests.runtime.shapes import Shape
from tests.runtime.world import Faults, World

often = settings(derandomize=True, deadline=None, max_examples=90, phases=[Phase.generate])
seldom = settings(derandomize=True, deadline=None, max_examples=30, phases=[Phase.generate])

booleans = st.booleans()
shapes = st.builds(
    Shape,
    staleness=st.sampled_from([0, 1, 2]),
    own_mesh=booleans,
    dp=st.integers(1, 3),
    prompts=st.sampled_from([1, 2, 3]),
    n=st.integers(1, 3),
    cpu=st.sampled_from([0, 2]),
    per=st.sampled_from(["group", "batch"]),
    reference=booleans,
    again=booleans,
    critic=booleans,
    minibatches=st.integers(1, 2),
    epochs=st.integers(1, 2),
    max_tokens=st.sampled_from([None, 12]),
    evaluates=st.sampled_from([0, 1, 2]),
    shares_prompts=booleans,
    metric=booleans,
    second=booleans,
    refill=st.integers(1, 4),
    batches=st.integers(1, 3),
    beside=booleans,
)
seeds = st.integers(0, 2**20)
shares = st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0])
faults = st.builds(
    Faults,
    choosy=shares,
    drop=st.sampled_from([0.0, 0.2]),
    repeat=st.sampled_from([0.0, 0.2]),
    lose=st.sampled_from([0.0, 0.1]),
    late=st.sampled_from([0.0, 0.5]),
)


def run(shape: Shape, seed: int = 0, *, num_steps: int = 3, data: int | None = None, **options: object) -> World:
    """A run of a shape that ends well; options of `Faults` go there, the others to `Options`."""
    names = Faults.__dataclass_fields__
    wrong = options.pop("faults", None) or Faults(**{n: options.pop(n) for n in list(options) if n in names})
    return World(shape.plan(), Options(num_steps=num_steps, **options), seed, wrong, data, max_events=60000).run()


def passed(world: World, step: int) -> list[int]:
    """Prompts of which the filter has let a sample pass, by the first answer that counts, in order."""
    filters = {f.id for _, f in world.firings if f.node == "filter" and f.step == step}
    answers: dict[Key, bool] = {}
    for event in world.heard:
        if event.firing in filters:
            answers = dict.fromkeys(event.dropped, False) | answers
            answers = dict.fromkeys(event.block.keys if event.block else (), True) | answers
    return sorted({key.prompt for key, passes in answers.items() if passes})


def order_of_batches(counts: list[list[int]], staleness: int) -> list[list[list[int]]]:
    """Which batches steps read, by how many each wave takes: said again, in the plainest way."""
    order: list[tuple[int, int]] = [(step, 0) for step in range(staleness + 1)]
    for step, waves in enumerate(counts):
        order += [(step, wave) for wave in range(1, len(waves))]
        order.append((step + staleness + 1, 0))
    found = [[list[int]() for _ in waves] for waves in counts]
    following = 0
    for step, wave in order:
        size = counts[step][wave] if step < len(counts) else counts[0][0]
        if step < len(counts):
            found[step][wave] = list(range(following, following + size))
        following += size
    return found


# --- every run


@given(shapes, seeds, faults, st.integers(1, 3), st.sampled_from([None, 1, 2]), st.sampled_from([None, 2, 4]))
@often
def test_every_refilled_run_ends_with_every_row_accounted_for(shape, seed, faults, num_steps, save_every, data):
    world = run(shape, seed, num_steps=num_steps, save_every=save_every, data=data, faults=faults)
    if world.halt.outcome == "failed":
        assert "node 'strict' failed" in world.halt.error["problem"]
        return
    assert world.halt == Halt("done")
    assert [done.step for done in world.steps] == list(range(len(world.steps)))
    assert data or len(world.steps) == num_steps
    assert world.max_open <= shape.staleness + 2
    assert not world.leaked()
    assert world.scheduler.planned == world.scheduler.executed
    for space, totals in world.scheduler.totals().items():
        assert totals.balanced
        assert totals.open == 0
        assert totals.max_lag <= world.plan.staleness[space]
        assert totals.issued == totals.consumed + sum(totals.dropped.values())
    check_batches(world, shape)
    check_groups(world, shape)
    check_record(world, shape)


def check_batches(world: World, shape: Shape) -> None:
    """Each batch is read once, in the one order; a wave reads as many as were missing at least."""
    read, data = world.read["prompts"], world.num_steps_of_data
    flat = list(chain.from_iterable(chain.from_iterable(read.values())))
    assert len(set(flat)) == len(flat), "no batch is read twice"
    for step, done in enumerate(world.steps):
        waves = [wave for wave in read[step] if wave]
        assert len(waves) <= shape.refill
        assert done.metrics["num_waves"] == len(waves)
        assert len(waves[0]) == shape.batches
        survivors, first = passed(world, step), 0
        for number, wave in enumerate(waves):
            first += len(wave) * shape.prompts
            missing = shape.batches * shape.prompts - sum(prompt < first for prompt in survivors)
            if number + 1 < len(waves):
                assert missing > 0, "no wave is read beyond the need"
                wanted = -(-missing // shape.prompts)
                assert len(waves[number + 1]) == wanted or (data is not None and len(waves[number + 1]) < wanted)
            else:
                assert missing <= 0 or len(waves) == shape.refill or data is not None
    if data is None:
        steps = [read[step] for step in range(len(world.steps))]
        assert steps == order_of_batches([[len(w) for w in waves] for waves in steps], shape.staleness)


def check_groups(world: World, shape: Shape) -> None:
    """A step trains on the first groups that pass, in order of their keys, and is split as if there were no others."""
    batch = shape.batches * shape.prompts
    for update in [stage for stage in world.plan.stages.values() if stage.action == "backward"]:
        spec = world.plan.graph[update.name].spec
        for step, done in enumerate(world.steps):
            chosen = passed(world, step)[:batch]
            fired = [f for _, f in world.fired("backward") if f.node == update.name and f.step == step]
            trained = Counter(key for firing in fired for key in firing.keys)
            assert {key.prompt for key in trained} <= set(chosen)
            assert set(trained.values()) <= {spec.epochs}
            assert done.metrics["num_groups"] == len(chosen)
            if not world.faults.drop:
                samples = {Key(step, prompt, sample) for prompt in chosen for sample in range(shape.n)}
                assert set(trained) == samples, "all of them are trained on"
            stepped = [f for _, f in world.fired("step") if f.node == update.name and f.step == step]
            assert len(stepped) == spec.epochs * spec.minibatches * shape.dp
            if not world.faults.drop and spec.max_tokens is None and spec.epochs == 1:
                sizes = [len({key.prompt for key in firing.keys}) for firing in fired]
                parts = shape.dp * spec.minibatches
                assert max(sizes, default=0) <= -(-len(chosen) // parts) + 1, "groups are shared out evenly"


def check_record(world: World, shape: Shape) -> None:
    """Every sample of every wave is written once, with why it was not trained on."""
    records = {f.step: f for _, f in world.fired("record") if f.node == RECORD}
    assert sorted(records) == list(range(len(world.steps)))
    for step, firing in records.items():
        waves = world.read["prompts"][step]
        prompts = range(sum(map(len, waves)) * shape.prompts)
        assert list(firing.keys) == [Key(step, prompt, sample) for prompt in prompts for sample in range(shape.n)]
        why = {firing.keys[int(row)]: reason for row, reason in firing.settings["dropped"].items()}
        surplus = {key.prompt for key, reason in why.items() if reason == TOO_MANY}
        batch = shape.batches * shape.prompts
        assert surplus <= set(passed(world, step)[batch:])
        if not world.faults.drop:
            assert surplus == set(passed(world, step)[batch:])
            assert {key.prompt for key, reason in why.items() if reason != TOO_MANY} == (
                set(prompts) - set(passed(world, step))
            )
    if world.num_steps_of_data is None:
        totals = world.scheduler.totals()["rollout"]
        assert totals.issued == sum(len(firing.keys) for firing in records.values())


# --- a function of the keys


@given(shapes, shares, seeds, seeds)
@seldom
def test_at_staleness_0_the_firings_of_models_do_not_depend_on_the_order_of_events(shape, choosy, one, other):
    shape = Shape(**{**vars(shape), "staleness": 0})
    runs = [run(shape, seed, num_steps=2, choosy=choosy) for seed in (one, other)]

    def plan(world: World, *actions: str) -> list:
        models = [(w, f) for w, f in world.firings if f.action in actions]
        return [(w, f.node, f.action, f.step, f.version, f.keys, str(f.settings)) for w, f in models]

    every = ("rollout", "forward", "evaluate", "backward", "step")
    assert sorted(plan(runs[0], *every)) == sorted(plan(runs[1], *every))
    assert runs[0].prompt_of == runs[1].prompt_of
    for worker in runs[0].plan.workers():
        for update in ("update", "update_critic"):
            training = [[each for each in plan(r, "backward", "step") if each[:2] == (worker, update)] for r in runs]
            assert training[0] == training[1]


# --- checkpoints


@given(shapes, seeds, shares, st.integers(1, 3))
@seldom
def test_a_resumed_run_reads_each_batch_that_was_not_consumed_and_no_other(shape, seed, choosy, at):
    shape = Shape(**{**vars(shape), "second": False})
    whole = run(shape, seed, num_steps=4, save_every=1, choosy=choosy)
    assert whole.saved == [1, 2, 3, 4]
    cursors = whole.cursors[at]
    parts = run(
        shape, seed + 1, num_steps=4, first_step=at, load_from="x", save_every=1, cursors=cursors, choosy=choosy
    )
    read = {step: whole.read["prompts"][step] for step in range(4)}
    assert {step: parts.read["prompts"][step] for step in range(at, 4)} == {step: read[step] for step in range(at, 4)}
    assert {version: parts.cursors[version] for version in range(at + 1, 5)} == {
        version: whole.cursors[version] for version in range(at + 1, 5)
    }
    trained = [[f.keys for _, f in world.fired("backward") if f.step >= at] for world in (whole, parts)]
    assert sorted(trained[0]) == sorted(trained[1])


@given(shapes, seeds, shares, st.integers(0, 3))
@seldom
def test_a_run_that_is_resumed_with_another_staleness_still_reads_each_batch_once(shape, seed, choosy, staleness):
    shape = Shape(**{**vars(shape), "second": False})
    before = run(shape, seed, num_steps=2, save_every=2, choosy=choosy)
    other = Shape(**{**vars(shape), "staleness": staleness})
    options = {"first_step": 2, "load_from": "x", "cursors": before.cursors[2]}
    after = run(other, seed, num_steps=7, choosy=choosy, **options)
    consumed = [before.read["prompts"][step] for step in range(2)] + [after.read["prompts"][s] for s in range(2, 7)]
    flat = sorted(chain.from_iterable(chain.from_iterable(consumed)))
    assert len(set(flat)) == len(flat)
    given_out = before.cursors[2]["prompts"]
    lost = set(range(given_out["next"])) - set(flat)
    assert not lost, "what open steps had been given is given out again"


def test_a_run_without_refill_saves_no_cursor():
    assert run(Shape(dropping="group"), save_every=1, choosy=0.5).cursors == {1: {}, 2: {}, 3: {}}


# --- one step by hand

SOME = frozenset({3, 5, 7, 10, 11})


def test_dropped_groups_are_replaced_and_what_is_beyond_the_need_is_dropped_in_order_of_the_keys():
    world = run(Shape(prompts=4, n=2, refill=5), num_steps=1, passes=SOME)
    assert world.read["prompts"][0] == [[0], [1], [2]]
    trained = [key.prompt for _, firing in world.fired("backward") for key in firing.keys]
    assert trained == [3, 3, 5, 5, 7, 7, 10, 10]
    assert world.scheduler.totals()["rollout"].dropped == {"filter says no": 14, TOO_MANY: 2}
    metrics = world.steps[0].metrics
    assert (metrics["num_waves"], metrics["num_groups"], metrics["useful_groups"]) == (3, 4, 5 / 12)
    assert metrics["num_dropped"] == 16
    assert world.warnings == []


def test_a_wave_reads_no_more_batches_than_may_be_missing():
    world = run(Shape(prompts=2, batches=4, n=1, refill=9), num_steps=1, passes=SOME | frozenset(range(15, 19)))
    assert [len(wave) for wave in world.read["prompts"][0]] == [4, 3, 2]
    assert [key.prompt for _, f in world.fired("backward") for key in f.keys] == [3, 5, 7, 10, 11, 15, 16, 17]


def test_a_step_whose_waves_are_used_up_trains_on_what_it_has_and_says_so():
    world = run(Shape(prompts=4, n=2, refill=2), num_steps=1, passes=SOME)
    assert world.warnings == ["step 1: filter 'filter' lets pass 3 of 8 groups in 2 waves, fewer than 4 (refill=2)"]
    assert [key.prompt for _, f in world.fired("backward") for key in f.keys] == [3, 3, 5, 5, 7, 7]
    assert world.steps[0].metrics["num_groups"] == 3


def test_a_step_that_no_group_passes_publishes_a_version_and_warns_twice():
    world = run(Shape(prompts=2, n=2, refill=3, dp=2, minibatches=2), num_steps=1, choosy=1.0)
    assert world.halt == Halt("done")
    assert world.warnings[0] == "step 1: filter 'filter' lets pass 0 of 6 groups in 3 waves, fewer than 2 (refill=3)"
    assert world.warnings[1].startswith("step 1: node 'update' has nothing to train: 12 rows dropped")
    assert [f.settings["denominator"] for _, f in world.fired("step")] == [0.0] * 4


def test_data_that_ends_within_a_step_closes_it():
    world = run(Shape(prompts=4, n=2, refill=5), num_steps=3, data=2, passes=SOME)
    assert world.read["prompts"][0] == [[0], [1], []]
    assert [done.step for done in world.steps] == [0]
    assert world.warnings == [
        "step 1: filter 'filter' lets pass 3 of 8 groups in 2 waves, fewer than 4 (the data has ended)",
        "the data of node 'prompts' ends after step 1 of 3",
    ]


def test_one_wave_is_no_refill_and_no_news():
    world = run(Shape(prompts=4, n=2, refill=1), num_steps=1, passes=SOME)
    assert world.warnings == []
    assert world.steps[0].metrics["num_waves"] == 1


def test_groups_that_rewards_have_dropped_are_replaced_too_though_the_filter_is_never_asked():
    world = run(Shape(prompts=2, n=2, refill=4), num_steps=1, drop_all=frozenset({"score_0"}))
    assert world.read["prompts"][0] == [[0], [1], [2], [3]]
    assert not [firing for _, firing in world.fired("filter")]
    assert world.scheduler.totals()["rollout"].dropped == {"score_0 says no": 16}


def test_a_reward_that_fails_too_often_ends_the_run_in_its_first_wave():
    shape = Shape(prompts=2, n=2, refill=4, second=True)
    world = World(shape.plan(), Options(num_steps=2), 0, Faults(drop_all=frozenset({"strict"})))
    world.run()
    assert world.halt.outcome == "failed"
    assert "node 'strict' failed for 2 of 2 rows" in world.halt.error["problem"]


def test_a_later_step_that_needs_more_waits_for_the_one_before():
    world = run(Shape(prompts=2, n=2, refill=4, staleness=2, own_mesh=True), num_steps=5, choosy=0.6, seed=2)
    closed = -1
    for event in world.trace:
        if isinstance(event, Finished):
            firing = next((f for _, f in world.firings if f.id == event.firing), None)
            if firing is not None and firing.action == "prompts" and firing.settings.get("first_prompt"):
                assert firing.step >= closed
                closed = firing.step
    steps = [world.read["prompts"][step] for step in range(5)]
    assert steps == order_of_batches([[len(w) for w in waves] for waves in steps], 2)
    assert any(len(waves) > 1 for waves in steps)


@pytest.mark.parametrize("staleness", [0, 2])
def test_stages_behind_the_filter_share_out_what_it_kept_and_those_beside_each_wave(staleness):
    shape = Shape(prompts=4, n=2, dp=2, refill=5, reference=True, again=True, staleness=staleness)
    world = run(shape, num_steps=1, passes=SOME)
    forwards = [(f.node, worker, sorted({key.prompt for key in f.keys})) for worker, f in world.fired("forward")]
    behind = sorted((worker, prompts) for node, worker, prompts in forwards if node == "reference")
    assert behind == [("train.0", [3, 5]), ("train.1", [7, 10])]
    beside = sorted((prompts, worker) for node, worker, prompts in forwards if node == "again")
    assert beside == [([2 * i, 2 * i + 1], f"train.{i % 2}") for i in range(6)]


def test_rows_that_wait_for_further_prompts_are_told_of_as_such():
    shape = Shape(prompts=4, n=2, refill=5)
    world = World(shape.plan(), Options(num_steps=1), 0, Faults(passes=SOME))
    said = set()
    take = world._take

    def look(commands: list) -> None:
        said.update((stage, why) for stage, why, _ in world.scheduler.waiting())
        take(commands)

    world._take = look
    world.run()
    assert ("update", "their step may read further prompts") in said
    assert ("record", "their step may read further prompts") in said
