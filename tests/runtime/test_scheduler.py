"""The scheduler against a world of workers: whatever the graph, the order of events and the faults, a run ends well."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from flowrl.rows import Key
from flowrl.runtime.events import (
    Block,
    Died,
    Failed,
    Finished,
    Fire,
    Firing,
    Free,
    Halt,
    Interrupted,
    Joined,
    Produced,
    Tick,
    Warn,
)
from flowrl.runtime.orders import in_words
from flowrl.runtime.plan import RECORD
from flowrl.runtime.scheduler import MAX_ATTEMPTS, Options, Scheduler
from tests.runtime.shapes import Shape
from tests.runtime.world import Faults, World

often = settings(derandomize=True, deadline=None, max_examples=70, phases=[Phase.generate])
seldom = settings(derandomize=True, deadline=None, max_examples=25, phases=[Phase.generate])

booleans = st.booleans()
shapes = st.builds(
    Shape,
    staleness=st.sampled_from([0, 1, 2]),
    own_mesh=booleans,
    dp=st.integers(1, 3),
    prompts=st.sampled_from([1, 3, 4]),
    n=st.integers(1, 3),
    cpu=st.sampled_from([0, 2]),
    rewards=st.integers(1, 2),
    dropping=st.sampled_from(["nothing", "row", "group", "diamond"]),
    per=st.sampled_from(["group", "batch"]),
    reference=booleans,
    again=booleans,
    critic=booleans,
    trains=booleans,
    minibatches=st.integers(1, 2),
    epochs=st.integers(1, 2),
    max_tokens=st.sampled_from([None, 12]),
    evaluates=st.sampled_from([0, 1, 2]),
    shares_prompts=booleans,
    metric=booleans,
    second=booleans,
    given=st.sampled_from([0, 1, 2]),
)
seeds = st.integers(0, 2**20)
faults = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.3]),
    repeat=st.sampled_from([0.0, 0.2]),
    lose=st.sampled_from([0.0, 0.1]),
    late=st.sampled_from([0.0, 0.5]),
    untrained=st.sampled_from([0.0, 0.5]),
)


def run(shape: Shape, seed: int = 0, *, num_steps: int = 3, data: int | None = None, **options: object) -> World:
    """A run of a shape that has to end well; options of `Faults` go there, the others to `Options`."""
    names = Faults.__dataclass_fields__
    wrong = options.pop("faults", None) or Faults(**{n: options.pop(n) for n in list(options) if n in names})
    return World(shape.plan(), Options(num_steps=num_steps, **options), seed, wrong, data).run()


# --- every run


@given(shapes, seeds, faults, st.sampled_from([1, 3]), st.sampled_from([None, 1, 2]), st.sampled_from([None, 2]))
@often
def test_every_run_ends_with_every_row_accounted_for(shape, seed, faults, num_steps, save_every, data):
    world = run(shape, seed, num_steps=num_steps, save_every=save_every, data=data, faults=faults)
    if world.halt.outcome == "failed":  # `strict` may lose at most half of its rows
        assert "node 'strict' failed" in world.halt.error["problem"]
        assert faults.drop
        return
    steps = min(num_steps, data or num_steps)
    assert world.halt == Halt("done")
    assert [done.step for done in world.steps] == list(range(steps))
    assert world.max_open <= max(world.plan.staleness.values()) + 2  # given answers are read one step ahead
    assert not world.leaked()
    assert world.scheduler.planned == world.scheduler.executed
    for space, totals in world.scheduler.totals().items():
        assert totals.balanced
        assert totals.open == 0
        assert totals.max_lag <= world.plan.staleness[space]
    check_rows(world, shape, steps)
    check_updates(world, shape, steps)


def check_rows(world: World, shape: Shape, steps: int) -> None:
    """Each sample is issued and written down once, and either trained or dropped with a reason."""
    samples = {Key(step, p, i) for step in range(steps) for p in range(shape.prompts) for i in range(shape.n)}
    totals = world.scheduler.totals()["rollout"]
    assert totals.consumed + totals.dropped.pop("the data ended", 0) + sum(totals.dropped.values()) == totals.issued
    records = [firing for _, firing in world.fired("record") if firing.node == RECORD]
    assert Counter(key for firing in records for key in firing.keys) == Counter(samples)
    dropped = {firing.keys[int(row)] for firing in records for row in firing.settings["dropped"]}
    for name, stage in world.plan.stages.items():
        if stage.action in ("forward", "function", "filter") and stage.space == "rollout":
            fired = Counter(key for w, f in world.firings if f.node == name and f.attempt == 1 for key in f.keys)
            assert max(fired.values(), default=1) == 1, f"{name} is fired twice for a row"
            assert set(fired) <= samples
            assert samples - set(fired) <= dropped


def check_updates(world: World, shape: Shape, steps: int) -> None:
    """Versions go up by one, every rank steps, and rows are taken in order of their keys."""
    for update in [stage for stage in world.plan.stages.values() if stage.action == "backward"]:
        workers = world.plan.pools[update.pool].workers
        stepped = [(worker, firing) for worker, firing in world.fired("step") if firing.node == update.name]
        rounds = shape.minibatches * shape.epochs if update.name == "update" else 1
        assert len(stepped) == steps * rounds * len(workers)
        for i in range(0, len(stepped), len(workers)):
            gang = stepped[i : i + len(workers)]
            assert [worker for worker, _ in gang] == list(workers)
            assert {firing.version for _, firing in gang} == {i // len(workers) // rounds + 1}
            assert len({firing.settings["denominator"] for _, firing in gang}) == 1
        published = [firing for worker, firing in stepped if firing.settings["publish"] and worker == workers[0]]
        assert [firing.version for firing in published] == list(range(1, steps + 1))
        for worker in workers:
            passes = [f for w, f in world.fired("backward") if w == worker and f.node == update.name]
            for step in range(steps):
                keys = [key for firing in passes if firing.step == step for key in firing.keys]
                epochs = shape.epochs if update.name == "update" else 1
                once = keys[: len(keys) // epochs]
                assert keys == once * epochs
                assert once == sorted(set(once))
        world_keys = Counter(key for _, f in world.fired("backward") if f.node == update.name for key in f.keys)
        assert set(world_keys.values()) <= {shape.epochs if update.name == "update" else 1}


@given(shapes, seeds, seeds)
@often
def test_at_staleness_0_the_firings_of_models_do_not_depend_on_the_order_of_events(shape, one, other):
    shape = Shape(**{**vars(shape), "staleness": 0})
    runs = [run(shape, seed, num_steps=2) for seed in (one, other)]

    def plan(world: World, *actions: str) -> list:
        models = [(w, f) for w, f in world.firings if f.action in actions]
        return [(w, f.node, f.action, f.step, f.version, f.keys, str(f.settings)) for w, f in models]

    every = ("rollout", "forward", "evaluate", "backward", "step")
    assert sorted(plan(runs[0], *every)) == sorted(plan(runs[1], *every))
    for worker in runs[0].plan.workers():
        for update in ("update", "update_critic"):
            training = [[each for each in plan(r, "backward", "step") if each[:2] == (worker, update)] for r in runs]
            assert training[0] == training[1]


@given(shapes, seeds, st.integers(0, 3))
@seldom
def test_no_prompt_starts_before_its_version_is_near_enough(shape, seed, staleness):
    shape = Shape(**{**vars(shape), "staleness": staleness, "critic": False, "trains": True})
    world = run(shape, seed, num_steps=4)
    version = 0
    for _, firing in world.firings:
        if firing.action == "step" and firing.settings["publish"]:
            version = max(version, firing.version - 1)  # told, but not published yet
        if firing.action == "rollout" and firing.node == "rollout":
            assert firing.step <= firing.version + staleness
            assert firing.version <= version + 1
    assert world.scheduler.totals()["rollout"].max_lag <= staleness


@given(shapes, seeds)
@seldom
def test_an_evaluation_sees_the_versions_that_it_is_due_for(shape, seed):
    shape = Shape(**{**vars(shape), "evaluates": 2, "trains": True})
    world = run(shape, seed, num_steps=3)
    evaluated = [firing for _, firing in world.fired("evaluate")]  # the world checks which version each finds
    assert sorted({firing.version for firing in evaluated}) == [0, 2, 3]
    prompts = 4 if not shape.shares_prompts else shape.prompts
    assert all(len([k for f in evaluated if f.version == v for k in f.keys]) == prompts for v in (0, 2, 3))
    names = ("evaluate/start", "evaluate")
    lines = [tuple(name in done.metrics for name in names) for done in world.steps]
    assert lines == [(True, False), (False, True), (False, True)]


@given(shapes, seeds, faults)
@seldom
def test_a_checkpoint_is_taken_between_two_versions_and_published_after_the_step_before(shape, seed, faults):
    shape = Shape(**{**vars(shape), "trains": True, "second": False})
    world = run(shape, seed, num_steps=5, save_every=2, faults=faults)
    assert world.saved == [2, 4, 5]  # the world checks that the steps before are closed
    held: dict[tuple[str, str], int] = {}
    for worker, firing in world.firings:
        if firing.action == "step":
            held[worker, world.plan.model_of[firing.node]] = firing.version if firing.settings["publish"] else -1
        if firing.action == "save":
            assert {held[worker, model] for model in firing.settings["models"]} == {firing.version}
            assert firing.settings["models"] == list(world.scheduler._weights.home)
    saves = Counter(firing.version for _, firing in world.fired("save"))
    assert saves == dict.fromkeys([2, 4, 5], shape.dp)


@given(shapes, seeds)
@seldom
def test_a_resumed_run_goes_on_where_the_checkpoint_was(shape, seed):
    world = run(shape, seed, num_steps=5, first_step=3, load_from="runs/a/step-3", save_every=5)
    trained = shape.trains or shape.critic
    assert [done.step for done in world.steps] == [3, 4]
    assert world.saved == ([5] if trained else [])
    loads = [firing for _, firing in world.fired("load")]
    assert len(loads) == (shape.dp if trained else 0)
    assert all(f.version == 3 and f.settings["folder"] == "runs/a/step-3" for f in loads)
    assert {firing.step for _, firing in world.fired("rollout")} == {3, 4}
    assert min((f.version for _, f in world.fired("rollout")), default=3) >= (3 if trained else 0)
    assert "evaluate/start" not in world.steps[0].metrics


@pytest.mark.parametrize("first", [1, 2])
def test_a_replica_of_a_resumed_run_samples_nothing_before_it_has_the_version_of_the_checkpoint(first):
    world = run(Shape(staleness=3, own_mesh=True), num_steps=5, first_step=first, load_from="runs/a")
    assert min(firing.version for _, firing in world.fired("rollout")) == first


@given(shapes, seeds, st.integers(1, 3))
@seldom
def test_a_source_that_ends_early_ends_the_run_well(shape, seed, data):
    world = run(shape, seed, num_steps=6, save_every=4, data=data)
    assert world.halt == Halt("done")
    assert [done.step for done in world.steps] == list(range(data))
    assert world.scheduler.last_step == data
    ends = [text for text in world.warnings if "the data of node" in text]
    assert ends[-1].endswith(f"ends after step {data} of 6")
    if shape.trains or shape.critic:
        assert world.saved == [data], "the last version is saved, whichever it is"


def test_of_two_sources_the_shorter_ends_the_run_and_begun_rows_of_the_longer_are_dropped():
    shape = Shape(staleness=2, own_mesh=True, second=True)
    world = World(shape.plan(), Options(num_steps=6), seed=4, ends={"more": 2}).run()
    totals = world.scheduler.totals()
    assert world.halt == Halt("done")
    assert len(world.steps) == 2
    assert totals["rollout"].consumed == 2 * 6
    assert all(each.balanced and each.open == 0 for each in totals.values())


# --- nothing to train


@pytest.mark.parametrize("node", ["score_0", "filter", "centred"])
def test_a_step_without_rows_still_publishes_a_version_and_warns(node):
    world = run(Shape(dropping="row", dp=2), drop_all=frozenset([node]))
    assert world.halt == Halt("done")
    steps = [firing for _, firing in world.fired("step")]
    assert [firing.version for firing in steps] == [1, 1, 2, 2, 3, 3]
    assert {firing.settings["denominator"] for firing in steps} == {0.0}
    assert world.warnings[0] == f"step 1: node 'update' has nothing to train: 6 rows dropped: {node} says no"
    assert len(world.warnings) == 3
    assert world.scheduler.totals()["rollout"].dropped == {f"{node} says no": 18}


@pytest.mark.parametrize("seed", range(8))
def test_a_step_without_rows_is_written_down_however_busy_the_host_is(seed):
    world = run(Shape(staleness=2, own_mesh=True, prompts=4, n=3), seed, drop_all=frozenset(["score_0"]))
    assert sorted((f.step, len(f.keys)) for _, f in world.fired("record")) == [(0, 12), (1, 12), (2, 12)]


@given(seeds, st.sampled_from(["row", "group"]))
@seldom
def test_a_sample_is_written_down_with_every_score_that_it_got_whichever_branch_dropped_it_first(seed, dropping):
    world = run(Shape(rewards=2, dropping=dropping, cpu=2), seed, drop=0.3)
    nodes = {firing.id: firing.node for _, firing in world.firings}
    heard = [(nodes[event.firing], event.block) for event in world.heard if event.block]
    keys = {(block.worker, block.number): block.keys for _, block in heard}
    inputs = [each for _, firing in world.fired("record") for each in firing.inputs]
    for name in ("score_0", "score_1"):
        scored = {key for node, block in heard if node == name for key in block.keys}
        parts = [(keys[each.worker, each.number], each.rows) for each in inputs if each.source == name]
        assert {
            key for part, rows in parts for key in (part if rows is None else map(part.__getitem__, rows))
        } == scored


def test_a_step_whose_rows_have_no_trained_token_warns_too():
    world = run(Shape(), untrained=1.0, num_steps=1)
    assert world.warnings == ["step 1: node 'update' has nothing to train: no row has a trained token"]
    assert world.scheduler.totals()["rollout"].consumed == 6


def test_a_filter_in_one_branch_of_a_diamond_does_not_starve_the_join():
    world = run(Shape(dropping="diamond", prompts=4, cpu=1), seed=3, drop=0.4)
    totals = world.scheduler.totals()["rollout"]
    assert totals.consumed > 0
    assert sum(totals.dropped.values()) > 0
    assert totals.consumed + sum(totals.dropped.values()) == 3 * 8


# --- answers that are lost, late or wrong


def test_a_lost_answer_is_asked_for_again_until_a_deadline_that_names_node_and_worker():
    world = run(Shape(cpu=2), seed=1, lose=1.0, lost_attempts=99)
    assert world.halt.outcome == "failed"
    assert world.halt.error["type"] == "DeadlineError"
    assert world.halt.error["problem"] == (
        "the run waits for node 'prompts' of step 1: no sign from worker 'host' for 606 s"
    )
    assert world.halt.error["node"] == "prompts"
    assert world.halt.error["worker"] == "host"
    attempts = [firing.attempt for _, firing in world.firings if firing.node == "prompts" and firing.step == 0]
    assert attempts == list(range(1, MAX_ATTEMPTS + 1))
    assert len([text for text in world.warnings if "of step 1:" in text]) == MAX_ATTEMPTS - 1
    assert "it is fired again (attempt 2 of 3)" in world.warnings[0]


def test_a_lost_function_is_given_to_another_worker_and_a_lost_rollout_stays_with_its_rank():
    world = run(Shape(cpu=2, dp=2), seed=2, lose=0.5)
    first = {firing.id: worker for worker, firing in world.firings if firing.attempt == 1}
    again = [(first[firing.id], worker, firing.action) for worker, firing in world.firings if firing.attempt == 2]
    assert any(action == "function" for *_, action in again)
    for before, after, action in again:
        assert (before == after) == (action != "function" or before == "host")


def test_what_cannot_be_repeated_fails_at_its_first_deadline():
    scheduler, asked = started(Shape(), num_steps=1)
    for fire in answer_until(scheduler, asked, "step"):
        if fire.firing.action == "record":
            scheduler.on_event(Finished(fire.worker, fire.firing.id, 1))
    commands = scheduler.on_event(Tick(601.0))
    assert commands == [
        Halt(
            "failed",
            {
                "type": "DeadlineError",
                "problem": "the run waits for node 'update' of step 1: no sign from worker 'train.0' for 601 s",
                "found": "attempt 1",
                "node": "update",
                "worker": "train.0",
            },
        )
    ]


def test_an_answer_of_an_attempt_that_was_given_up_is_ignored_and_its_block_freed():
    scheduler, asked = started(Shape(cpu=1))
    asked = answer_until(scheduler, asked, "function")
    [fire] = [command for command in asked if command.firing.action == "function"]
    retried = scheduler.on_event(Tick(601.0))
    again = next(each.firing for each in retried if isinstance(each, Fire) and each.firing.id == fire.firing.id)
    block = Block(fire.worker, 7, fire.firing.keys, ("scores",), 8)
    assert again.attempt == 2
    assert scheduler.on_event(Produced(fire.worker, fire.firing.id, 1, block)) == [Free(fire.worker, (7,))]
    assert scheduler.on_event(Produced(fire.worker, fire.firing.id, 1, block)) == [], "a repeated event frees nothing"
    assert scheduler.counts["late", "answers"] == 1
    assert scheduler.counts["score_0", "passed"] == 0


def test_a_firing_that_ends_without_all_of_its_rows_is_fired_again_and_then_fails():
    scheduler, asked = started(Shape(cpu=1))
    asked = answer_until(scheduler, asked, "function")
    [fire] = [command for command in asked if command.firing.action == "function"]
    problem = "node 'score_0' ended step 1 on worker 'mesh.0' without saying what became of 6 rows"
    for attempt in (1, 2):
        warning, *_ = scheduler.on_event(Finished(fire.worker, fire.firing.id, attempt))
        assert warning == Warn(f"{problem}; it is fired again (attempt {attempt + 1} of 3)")
    [halt] = scheduler.on_event(Finished(fire.worker, fire.firing.id, 3))
    assert halt.error["type"] == "ResultError"
    assert halt.error["problem"] == problem


def test_a_node_that_fails_for_more_rows_than_it_declares_ends_the_run():
    world = run(Shape(second=True), drop_all=frozenset(["strict"]))
    assert world.halt.outcome == "failed"
    assert world.halt.error == {
        "type": "NodeError",
        "problem": "node 'strict' failed for 2 of 2 rows of step 1",
        "found": "2 rows dropped: strict says no",
        "wanted": "at most 50% (max_failure_rate)",
        "fix": "repair the function, or allow more: max_failure_rate=",
        "node": "strict",
    }


@given(
    st.builds(
        Shape,
        staleness=st.sampled_from([0, 1]),
        dp=st.integers(1, 3),
        critic=booleans,
        again=booleans,
        minibatches=st.integers(1, 2),
        epochs=st.integers(1, 2),
        max_mismatch=st.just(0.0625),
    ),
    seeds,
)
@seldom
def test_an_update_stops_before_it_steps_on_samples_whose_sampler_is_too_far(shape, seed):
    world = run(shape, seed, num_steps=4, save_every=1, mismatch=(0.0, 0.0625, 0.5))
    tokens = 3 * shape.n * (shape.prompts // shape.minibatches)
    assert world.halt.outcome == "failed"
    assert world.halt.error == {
        "type": "MismatchError",
        "problem": "node 'update' may not train on the samples of step 3: their sampler is too far from model 'policy'",
        "found": f"mismatch_kl=0.5 over {tokens} tokens",
        "wanted": "at most max_mismatch=0.0625",
        "fix": "look for another temperature, dtype or backend of the sampler, and for weights that did not reach it; "
        "what staleness adds needs a larger max_mismatch",
        "node": "update",
    }
    steps = [firing for _, firing in world.fired("step") if firing.node == "update"]
    assert {firing.step for firing in steps} == {0, 1}
    assert max(world.saved, default=0) <= 2


def test_what_an_update_does_to_its_own_policy_within_a_step_is_no_mismatch():
    world = run(Shape(minibatches=3, epochs=2, max_mismatch=0.05), mismatch=(0.01,))
    assert world.halt.outcome == "done"
    moved = [(firing.step, firing.settings["moved"]) for _, firing in world.fired("backward")]
    assert Counter(moved) == {(step, moved): 5 if moved else 1 for step in range(3) for moved in (True, False)}


def test_a_step_without_a_trained_token_has_no_mismatch():
    world = run(Shape(max_mismatch=0.05), mismatch=(0.4,), untrained=1.0)
    assert world.halt.outcome == "done"


@given(seeds, st.sampled_from([0.2, 0.5]))
@often
def test_lost_rollouts_never_hold_up_training_and_count_from_the_version_that_sampled_them(seed, lose):
    world = run(Shape(staleness=2, minibatches=2, n=1), seed, num_steps=5, lose=lose, drop=0.3)
    assert world.halt == Halt("done")
    world = run(Shape(staleness=2, minibatches=2, n=1), seed, num_steps=5, lose=lose)
    for done in world.steps:
        lags = [done.step - version for key, version in world.sampled.items() if key.step == done.step]
        assert done.metrics["lag"] == pytest.approx(sum(lags) / len(lags))


def test_a_rank_trains_though_it_owes_as_many_rollouts_as_it_may():
    """Between two mini-batches a lost rollout is not fired again: training must not wait for its place."""
    scheduler, asked = started(Shape(staleness=2, minibatches=2), num_steps=3)
    world = World(scheduler.plan, Options(num_steps=3), blocks=1)
    actions = []
    while answerable := [fire for fire in asked if fire.firing.step == 0 or fire.firing.action == "prompts"]:
        fire = answerable[0]
        asked.remove(fire)
        actions.append(fire.firing.action)
        for event in world._answer(fire.worker, fire.firing):
            asked += [command for command in scheduler.on_event(event) if isinstance(command, Fire)]
    assert [(fire.firing.action, fire.firing.step) for fire in asked] == [("rollout", 1), ("rollout", 2)]
    assert [action for action in actions if action in ("backward", "step")] == ["backward", "step"] * 2
    assert scheduler.version("rollout") == 1


@given(seeds)
@often
def test_weights_are_sent_as_they_are_at_a_version_and_never_between_two(seed):
    shape = Shape(staleness=2, own_mesh=True, minibatches=2, epochs=2, prompts=2, n=1)
    world = run(shape, seed, num_steps=6)  # the world checks what each export finds
    exported = [firing.version for _, firing in world.fired("export")]
    assert exported == sorted(set(exported))
    imported = Counter(firing.version for _, firing in world.fired("import"))
    assert imported == dict.fromkeys(exported, 2)


# --- the end before the end


def test_a_failed_firing_halts_at_once_with_the_parts_of_its_error():
    scheduler, asked = started(Shape())
    error = {"type": "ValueError", "problem": "no such file", "traceback": "Traceback ..."}
    fire = asked[0]
    commands = scheduler.on_event(Failed(fire.worker, fire.firing.id, 1, error))
    assert commands == [Halt("failed", {**error, "node": "prompts", "worker": "host"})]
    assert scheduler.on_event(Joined("host")) == [], "nothing follows a halt"


def test_a_worker_that_cannot_start_halts_the_run():
    scheduler = Scheduler(Shape().plan(), Options(num_steps=1))
    [halt] = scheduler.on_event(Failed("train.0", -1, 0, {"type": "BackendError", "problem": "no weights"}))
    assert halt == Halt("failed", {"node": None, "type": "BackendError", "problem": "no weights", "worker": "train.0"})


def test_a_failure_of_an_attempt_that_was_given_up_is_ignored():
    scheduler, asked = started(Shape())
    fire = asked[0]
    scheduler.on_event(Tick(601.0))
    assert scheduler.on_event(Failed(fire.worker, fire.firing.id, 1, {"type": "OSError", "problem": "late"})) == []


def test_a_death_names_the_worker_its_node_and_the_reason():
    scheduler, asked = started(Shape())
    asked = answer_until(scheduler, asked, "rollout")
    [halt] = scheduler.on_event(Died("train.0", "SIGKILL\nlast words"))
    assert halt.outcome == "failed"
    assert halt.error == {
        "type": "WorkerDied",
        "problem": "worker 'train.0' died while it owed node 'rollout' of step 1",
        "found": "SIGKILL\nlast words",
        "node": "rollout",
        "worker": "train.0",
    }


def test_a_deadline_names_who_lends_the_rows_and_a_sync_belongs_to_no_step():
    scheduler, asked = started(Shape(cpu=1))
    answer_until(scheduler, asked, "function")
    for now_s in (601.0, 1202.0, 1803.0):
        commands = scheduler.on_event(Tick(now_s))
    error = commands[-1].error
    assert error["found"].startswith("attempt 3; it needs rows that lie with 'host'")
    sync = Firing(1, "policy>sample", "import", -1, 1, (), version=3)
    assert in_words(sync) == "the import of version 3 ('policy>sample')"


def test_an_interrupt_halts_at_once():
    scheduler, _ = started(Shape())
    [halt] = scheduler.on_event(Interrupted("SIGINT"))
    assert halt == Halt("interrupted", {"type": "Interrupted", "problem": "SIGINT"})


# --- small things


def test_nothing_is_fired_before_every_worker_has_joined():
    scheduler = Scheduler(Shape(dp=2, cpu=1).plan(), Options(num_steps=1))
    for worker in ("host", "train.0", "train.0", "train.1"):
        assert scheduler.on_event(Joined(worker)) == []
    assert [command.firing.action for command in scheduler.on_event(Joined("mesh.0"))] == ["prompts"]


def test_prompts_are_read_one_step_ahead_of_what_may_be_sampled():
    for staleness in (0, 2):
        world = run(Shape(staleness=staleness), num_steps=6)
        read = {firing.step for _, firing in world.fired("prompts")}
        assert read == set(range(6))
        assert world.max_open == staleness + 2


def test_waiting_says_why_rows_wait_and_doing_who_owes():
    scheduler, asked = started(Shape(prompts=1, n=2))
    asked = answer_until(scheduler, asked, "rollout")
    [fire] = [command for command in asked if command.firing.action == "rollout"]
    half = Block(fire.worker, 9, (Key(0, 0, 1),), ("response",), 8, (3,))
    [*_, score] = scheduler.on_event(Produced(fire.worker, fire.firing.id, 1, half))
    scored = Block("host", 99, score.firing.keys, ("scores",), 8)
    scheduler.on_event(Produced("host", score.firing.id, 1, scored))
    scheduler.on_event(Finished("host", score.firing.id, 1))
    assert scheduler.waiting() == [("centred", "their group is incomplete", 1)]
    assert scheduler.doing()["train.0"] == "rollout"
    assert scheduler.version("rollout") == 0


def test_a_metric_node_holds_a_step_open_until_it_has_run():
    world = run(Shape(metric=True), num_steps=2)
    assert len([f for _, f in world.fired("function") if f.node == "length"]) == 2
    assert world.scheduler.executed["length"] == 12


def test_lag_is_the_trainer_version_minus_that_of_the_sampler():
    world = run(Shape(staleness=2, own_mesh=True), num_steps=6)
    assert world.steps[0].metrics["lag"] == 0.0
    assert 0 < world.scheduler.totals()["rollout"].max_lag <= 2


def test_a_group_that_a_rank_shares_with_none_is_whole_in_one_firing():
    world = run(Shape(prompts=4, n=3, dp=3, reference=True, cpu=2), seed=5)
    for _, firing in [*world.fired("rollout"), *world.fired("forward")]:
        prompts = sorted({key.prompt for key in firing.keys})
        assert prompts == list(range(prompts[0], prompts[-1] + 1)), "a rank's prompts are contiguous"
    assert len({worker for worker, _ in world.fired("forward")}) == 3


# --- driving by hand


def started(shape: Shape, num_steps: int = 2) -> tuple[Scheduler, list[Fire]]:
    """A scheduler whose workers have joined, and what it asked of them."""
    scheduler = Scheduler(shape.plan(), Options(num_steps=num_steps))
    asked: list[Fire] = []
    for worker in scheduler.plan.workers():
        asked += [command for command in scheduler.on_event(Joined(worker)) if isinstance(command, Fire)]
    return scheduler, asked


def answer_until(scheduler: Scheduler, asked: list[Fire], action: str) -> list[Fire]:
    """Answer whatever is asked until an action is; returns what is still unanswered."""
    world = World(scheduler.plan, Options(num_steps=1), blocks=1)
    while not any(command.firing.action == action for command in asked):
        fire = asked.pop(0)
        world.queues[fire.worker].clear()
        for event in world._answer(fire.worker, fire.firing):
            asked += [command for command in scheduler.on_event(event) if isinstance(command, Fire)]
    return asked
