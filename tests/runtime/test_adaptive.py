"""Adaptive settings of functions: how they move, that a step sees one value, and that runs resume with it."""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import kl, losses
from flowrl.backend import Sum
from flowrl.errors import BackendError, CheckpointError
from flowrl.rows import Key
from flowrl.runtime import coefficients
from flowrl.runtime.adaptive import Moving
from flowrl.runtime.plan import Plan, compile_plan
from flowrl.runtime.scheduler import Options
from tests.runtime import test_run
from tests.runtime.test_run import lines, weights
from tests.runtime.world import Faults, World, kl_of

pytestmark = pytest.mark.timeout(120)
GRAPH = str(Path(__file__).parent / "graph_to_adapt.py")
COEF = fl.Adaptive(initial=0.1, target=1.0, horizon=50)


# --- one coefficient ------------------------------------------------------------------------------------------------


def test_a_coefficient_moves_by_the_controller_and_rows_see_it_as_late_as_they_may_be() -> None:
    kls = [0.3, 2.0, 1.1, 5.0]
    values = [0.1]
    for measured in kls:
        values.append(kl.adapt(values[-1], measured, target=1.0, samples=8, horizon=50))
    for staleness in (0, 1, 2):
        moving = Moving(COEF, staleness)
        for step, measured in enumerate(kls):
            assert moving.at(step) == values[max(0, step - staleness)]
            moving.move(step, Sum(3 * measured, 3), 8)
            moving.forget(step)
        assert moving.at(4) == values[4 - staleness]


def test_a_step_that_trained_on_nothing_moves_nothing() -> None:
    moving = Moving(COEF, 0)
    moving.move(0, Sum(0.0, 0.0), 0)
    assert moving.at(1) == 0.1


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_resumed_coefficient_goes_on_where_it_was_also_with_other_staleness(before: int, after: int) -> None:
    whole, first = Moving(COEF, after), Moving(COEF, before)
    for step in range(5):
        for moving in (whole, first):
            moving.move(step, Sum(0.5 * step, 1), 8)
    state = json.loads(json.dumps(first.state(5)))
    assert len(state) == before + 1
    rest = Moving(COEF, after, first_step=5, state=state)
    for step in range(5, 6 + after):  # those that may start; values older than the first run needed are gone
        assert rest.at(step) == whole.at(max(step, 5 - before + after))


@pytest.mark.parametrize("state", [[], {}, [0.1, "x"], [0.0], [float("nan")], 0.1])
def test_a_state_that_is_no_list_of_coefficients_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="an adaptive coefficient cannot be read"):
        Moving(COEF, 0, first_step=1, state=state)


# --- the scheduler --------------------------------------------------------------------------------------------------


@fl.reward
def score(response: str) -> float:
    return 1.0


@fl.node(out="shaped", per="row")
def shape(scores: float, *, coef: float | fl.Adaptive = COEF, bonus: float | fl.Adaptive = 1.0) -> float:
    return scores


@fl.advantage
def centred(shaped: Any) -> Any:
    return shaped


def plan_of(staleness: int, minibatches: int, epochs: int, dp: int, *, dropping: bool) -> Plan:
    def declare() -> None:
        policy = fl.Model("x", mesh=fl.Mesh(dp=dp, name="train"), optimizer=fl.AdamW(lr=1e-3))
        prompts = fl.prompts([{"prompt": "1+1="}] * 64, batch=4)
        samples = fl.rollout(policy, prompts, n=2, max_new_tokens=4, staleness=staleness)
        scores = score(samples, mesh=fl.Mesh.cpu(2))
        reference = fl.logprobs(policy.frozen(), samples)
        shaped = shape(samples, scores, bonus=fl.Adaptive(initial=2.0, target=0.5, horizon=30))
        kept = fl.filter(samples, scores, keep=lambda scores: True) if dropping else samples
        loss = losses.policy_gradient()
        fl.update(policy, kept, centred(kept, shaped), reference, loss=loss, minibatches=minibatches, epochs=epochs)

    return compile_plan(fl.graph(declare)())


def seen(world: World) -> dict[int, dict[str, float]]:
    """By step, what its firings saw, the same for all of them."""
    found: dict[int, dict[str, float]] = {}
    for _, firing in world.firings:
        if firing.node == "shape":
            assert found.setdefault(firing.step, firing.settings) == firing.settings
    return found


def trained(world: World, step: int) -> list[Key]:
    """Rows that the update took in its first epoch, each once."""
    passes = [f.keys for _, f in world.firings if f.action == "backward" and f.step == step]
    return list(dict.fromkeys(key for keys in passes for key in keys))


@settings(derandomize=True, deadline=None, max_examples=40, phases=[Phase.generate])
@given(
    staleness=st.sampled_from([0, 1, 2]),
    minibatches=st.integers(1, 2),
    epochs=st.integers(1, 2),
    dp=st.integers(1, 2),
    drop=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 1000),
)
def test_all_rows_of_a_step_see_one_value_that_follows_the_steps_before(
    staleness: int, minibatches: int, epochs: int, dp: int, drop: float, seed: int
) -> None:
    plan = plan_of(staleness, minibatches, epochs, dp, dropping=drop > 0)
    world = World(plan, Options(num_steps=5, save_every=2), seed, Faults(drop=drop, repeat=0.1, lose=0.05)).run()
    coefs, bonuses = [0.1], [2.0]
    for step in range(5):
        rows = trained(world, step)
        measured = sum(map(kl_of, rows)) / len(rows) if rows else None
        for values, target, horizon in ((coefs, 1.0, 50), (bonuses, 0.5, 30)):
            moved = {"target": target, "samples": len(rows), "horizon": horizon}
            values.append(values[-1] if measured is None else kl.adapt(values[-1], measured, **moved))
    for step, found in seen(world).items():
        version = max(0, step - staleness)
        assert found == pytest.approx({"coef": coefs[version], "bonus": bonuses[version]}, rel=1e-12)
        metrics = world.steps[step].metrics
        assert metrics["kl_coef/shape.coef"] == found["coef"]
        assert metrics["kl_coef/shape.bonus"] == found["bonus"]
    assert world.coefficients[4]["shape.coef"] == pytest.approx(coefs[4 - staleness : 5], rel=1e-12)


def test_a_resumed_run_sees_what_one_without_a_break_sees() -> None:
    for staleness in (0, 2):
        plan = plan_of(staleness, 1, 1, 1, dropping=False)
        whole = World(plan, Options(num_steps=6, save_every=1), 1).run()
        options = {"first_step": 3, "load_from": "x", "coefficients": whole.coefficients[3]}
        rest = World(plan, Options(num_steps=6, save_every=1, **options), 2).run()
        assert seen(rest) == {step: found for step, found in seen(whole).items() if step >= 3}
        assert rest.coefficients[6] == whole.coefficients[6]


def test_a_backend_that_measures_no_kl_does_not_leave_a_coefficient_where_it_is() -> None:
    worker: Any = SimpleNamespace(plan=plan_of(0, 1, 1, 1, dropping=False))
    measured = {"tokens": Sum(6.0, 1.0), "rows": Sum(2.0, 1.0), "kl": Sum(0.1, 6.0)}
    coefficients.expect_measured(worker, "update", measured)
    coefficients.expect_measured(worker, "update", {"tokens": Sum(0.0, 1.0), "rows": Sum(0.0, 1.0)})
    del measured["kl"]
    with pytest.raises(BackendError, match="the backend of model 'policy' measures no KL, which a coefficient follows"):
        coefficients.expect_measured(worker, "update", measured)


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_run, "GRAPH", GRAPH)


def kl_coefs(run_dir: Path) -> list[float]:
    return [record["kl_coef"] for record in lines(run_dir / "metrics.jsonl")]


def test_inline_and_local_runs_agree_bit_for_bit(tmp_path: Path) -> None:
    done = test_run.flowrl(tmp_path, steps=4)
    assert done.returncode == 0, done.stderr
    assert test_run.inline(tmp_path / "inline", steps=4) == 0
    assert kl_coefs(tmp_path / "run") == kl_coefs(tmp_path / "inline")
    assert len(set(kl_coefs(tmp_path / "run"))) == 4
    assert weights(tmp_path / "run", 4) == weights(tmp_path / "inline", 4)


def test_rewards_are_computed_with_the_coefficient_that_the_step_before_led_to(tmp_path: Path) -> None:
    assert test_run.inline(tmp_path / "run", "--target", "0.0001", steps=6) == 0
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["kl_coef"] == 0.5
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-9)  # from the reference, that the policy begins as
    for one, following in pairwise(metrics):
        wanted = kl.adapt(one["kl_coef"], one["kl"], target=0.0001, samples=int(one["rows"]), horizon=64)
        assert following["kl_coef"] == pytest.approx(wanted, rel=1e-12)
        assert following["seen"] == pytest.approx(following["kl_coef"], rel=1e-4)
    assert metrics[1]["kl_coef"] < 0.5
    assert metrics[-1]["kl_coef"] > metrics[-2]["kl_coef"]


@pytest.mark.parametrize("words", [["--minibatches", "2", "--epochs", "2"], ["--staleness", "2"]])
def test_a_resumed_run_continues_as_if_it_had_never_stopped(tmp_path: Path, words: list[str]) -> None:
    assert test_run.inline(tmp_path / "whole", *words, steps=6) == 0
    assert test_run.inline(tmp_path / "parts", *words, steps=3) == 0
    assert test_run.inline(tmp_path / "parts", *words, "--resume", steps=6) == 0
    assert kl_coefs(tmp_path / "parts") == kl_coefs(tmp_path / "whole")
    if "--staleness" not in words:
        assert weights(tmp_path / "parts", 6) == weights(tmp_path / "whole", 6)


def test_a_coefficient_of_the_reward_is_told_from_one_of_the_loss(tmp_path: Path) -> None:
    assert test_run.inline(tmp_path / "run", "--loss-target", "0.01", steps=2) == 0
    record = lines(tmp_path / "run" / "metrics.jsonl")[0]
    assert (record["kl_coef"], record["kl_coef/token_rewards.kl_coef"]) == (0.01, 0.5)


def test_a_number_trains_as_before_and_leaves_no_trace(tmp_path: Path) -> None:
    assert test_run.inline(tmp_path / "run", "--fixed", "--initial", "0.1", steps=2) == 0
    assert "kl_coef" not in lines(tmp_path / "run" / "metrics.jsonl")[0]
    record = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "run.json").read_text())
    assert set(record) == {"version", "recipe", "files"}


def test_a_checkpoint_without_its_coefficients_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert test_run.inline(tmp_path / "run", "--save-every", "1", steps=2) == 0
    path = tmp_path / "run" / "checkpoints" / "step-000002" / "run.json"
    record = json.loads(path.read_text())
    assert list(record["coefficients"]) == ["token_rewards.kl_coef"]
    path.write_text(json.dumps({name: value for name, value in record.items() if name != "coefficients"}))
    assert test_run.inline(tmp_path / "run", "--resume", steps=3) == 0
    assert "is passed over: it lacks the coefficient 'token_rewards.kl_coef'" in capsys.readouterr().err


def test_a_run_is_not_resumed_with_another_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert test_run.inline(tmp_path / "run", steps=1) == 0
    assert test_run.inline(tmp_path / "run", "--resume", "--target", "0.2", steps=2) == 1
    told = capsys.readouterr().err
    assert "found:  token_rewards.settings={'kl_coef': 'Adaptive(initial=0.5, target=0.2, horizon=64)'}" in told
