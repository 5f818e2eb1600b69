"""The plan: stages, pools, what waits for what, and graphs that cannot be placed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import flowrl as fl
from flowrl import losses
from flowrl.errors import GraphError, RateError
from flowrl.graph import Binding, Graph
from flowrl.runtime.plan import HOST, compile_plan
from tests.runtime.shapes import ROWS, Shape, centred, score


def test_a_chain_becomes_stages_in_order_with_a_record_at_the_end():
    plan = Shape().plan()
    assert {name: stage.action for name, stage in plan.stages.items()} == {
        "prompts": "prompts",
        "rollout": "rollout",
        "score_0": "function",
        "centred": "function",
        "update": "backward",
        "record": "record",
    }
    assert {name: stage.waits_for for name, stage in plan.stages.items()} == {
        "prompts": (),
        "rollout": ("prompts",),
        "score_0": ("rollout",),
        "centred": ("score_0",),
        "update": ("centred",),
        "record": ("centred",),
    }
    assert [stage.depth for stage in plan.stages.values()] == [0, 1, 2, 3, 4, -1], "writing down goes last"
    assert [name for name, stage in plan.stages.items() if stage.terminal] == ["update"]


def test_a_stage_reads_columns_of_their_writers_and_waits_for_the_last_of_them():
    stage = Shape(reference=True, dropping="group").plan().stages["update"]
    assert dict(stage.reads) == {
        "prompts": ("prompt_ids",),
        "rollout": ("response_ids", "mask", "logprobs"),
        "centred": ("advantages",),
        "reference": ("ref_logprobs",),
    }
    assert set(stage.waits_for) == {"centred", "reference"}, "these wait for the filter, it for the reward, and so on"


def test_a_record_without_an_update_consumes_the_rows():
    plan = Shape(trains=False).plan()
    assert [name for name, stage in plan.stages.items() if stage.terminal] == ["record"]
    assert dict(plan.stages["record"].reads)["score_0"] == ("scores",)


def test_each_rollout_has_its_own_space_and_its_own_record():
    plan = Shape(second=True).plan()
    assert {name for name, stage in plan.stages.items() if stage.space == "look"} == {"look", "strict", "record_2"}
    assert plan.stages["record_2"].terminal
    assert not plan.stages["record"].terminal
    assert plan.in_space["look"] == tuple(plan.stages[name] for name in ("look", "strict", "record_2"))
    assert plan.readers["more"] == (plan.stages["look"],)


def test_meshes_become_pools_with_the_models_that_live_there():
    plan = Shape(dp=2, own_mesh=True, reference=True, critic=True, cpu=3).plan()
    assert {name: (pool.kind, pool.size, set(pool.models)) for name, pool in plan.pools.items()} == {
        "host": ("host", 1, set()),
        "train": ("model", 2, {"policy", "reference", "critic"}),
        "sampler": ("model", 2, {"policy"}),
        "mesh": ("cpu", 3, set()),
    }
    assert plan.workers() == [
        "host", "sampler.0", "sampler.1", "mesh.0", "mesh.1", "mesh.2", "train.0", "train.1",
    ]  # fmt: skip
    assert plan.stages["record"].pool == HOST
    assert plan.model_of == {
        "rollout": "policy",
        "reference": "reference",
        "values": "critic",
        "update": "policy",
        "update_critic": "critic",
    }


def test_an_evaluation_is_a_space_of_its_own():
    plan = Shape(evaluates=2).plan()
    assert plan.stages["evaluate"].space == "evaluate"
    assert plan.stages["evaluate"].waits_for == ("held",)
    assert "evaluate" not in {stage.name for stage in plan.in_space["rollout"]}


def test_a_function_of_the_prompt_alone_waits_for_the_rollout_of_its_prompts():
    @fl.reward
    def of_the_prompt(prompt: str) -> float:
        return float(len(prompt))

    @fl.graph
    def one() -> None:
        samples = fl.rollout(fl.Model("builtin:x"), fl.prompts(ROWS, batch=2), n=2)
        of_the_prompt(samples)

    stage = compile_plan(one()).stages["of_the_prompt"]
    assert stage.space == "rollout"
    assert stage.waits_for == ("rollout",)
    assert stage.reads == (("prompts", ("prompt",)),)


def test_samples_of_two_rollouts_are_not_joined():
    @fl.node(out="both")
    def join(response: str, scores: float) -> float:
        return scores

    @fl.graph
    def crossed() -> None:
        model, prompts = fl.Model("builtin:x"), fl.prompts(ROWS, batch=2)
        one, other = fl.rollout(model, prompts, n=2), fl.rollout(model, prompts, n=2)
        join(one, score(other))

    with pytest.raises(GraphError, match=re.escape("node 'join' belongs to no single rollout")) as raised:
        compile_plan(crossed())
    assert raised.value.found == "'rollout' and 'rollout_2'"
    assert raised.value.node == "join"


def updates(*batches: int | None) -> Graph:
    @fl.graph
    def several() -> None:
        mesh = fl.Mesh(name="train")
        policy = fl.Model("builtin:x", mesh=mesh, optimizer=fl.AdamW(lr=1e-3))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=4), n=2)
        advantage = centred(samples, score(samples))
        for i, batch in enumerate(batches):
            model = fl.Model("builtin:x", mesh=mesh, optimizer=fl.AdamW(lr=1e-3), name=f"model_{i}") if i else policy
            fl.update(model, samples, advantage, loss=losses.ppo_clip(), batch=batch)

    return several()


def test_a_step_has_the_prompts_of_one_version():
    assert compile_plan(updates(None)).prompts_per_step == {"prompts": 4}
    assert compile_plan(updates(12)).prompts_per_step == {"prompts": 12}
    assert compile_plan(updates(8, 8)).prompts_per_step == {"prompts": 8}


@pytest.mark.parametrize(
    ("batches", "node", "found", "wanted", "fix"),
    [
        ((6,), "update", "batch=6, 4 prompts a step", "a multiple of 4", "batch=8"),
        ((3,), "update", "batch=3, 4 prompts a step", "a multiple of 4", "batch=4"),
        ((8, None), "update_2", "batch=4, 4 prompts a step", "batch=8, as the update before it", "batch=8"),
    ],
)
def test_a_batch_that_steps_do_not_add_up_to_is_refused(batches, node, found, wanted, fix):
    with pytest.raises(RateError, match=f"node '{node}' consumes a batch that steps of 'prompts'") as raised:
        compile_plan(updates(*batches))
    assert (raised.value.found, raised.value.wanted, raised.value.fix) == (found, wanted, fix)


def test_a_plan_of_many_layers_is_made_at_once():
    """Every node of a layer reads every node of the one before: 10^5 paths lead through it."""
    base = Shape(trains=False).graph()
    nodes, before = [base["prompts"], base["rollout"]], ["rollout"]
    for layer in range(5):
        names = [f"of_{layer}_{i}" for i in range(10)]
        for name in names:
            bindings = tuple(Binding(f"from_{source}", source, "response") for source in before)
            nodes.append(replace(base["score_0"], name=name, bindings=bindings, outputs=("response",)))
        before = names
    plan = compile_plan(Graph.build("wide", nodes))
    assert len(plan.stages) == 2 + 50 + 1
    assert plan.stages["of_4_9"].waits_for == tuple(f"of_3_{i}" for i in range(10))
    assert plan.stages["record"].waits_for == tuple(f"of_4_{i}" for i in range(10))


def test_the_metrics_of_the_update_that_trains_the_policy_have_plain_names():
    assert Shape(critic=True).plan().prefixes == {"update": "", "update_critic": "critic/"}
    assert two_models("policy", "critic") == {"fit_policy": "", "fit_critic": "critic/"}
    assert two_models("critic", "policy") == {"fit_critic": "critic/", "fit_policy": ""}, "in whatever order"
    assert two_models("policy") == {"fit_policy": ""}
    assert two_models("critic") == {"fit_critic": ""}, "the only one is the run's"


def two_models(*trained: str) -> dict[str, str]:
    @fl.graph
    def graph() -> None:
        optimizer = fl.AdamW(lr=1e-3)
        policy = fl.Model("builtin:x", optimizer=optimizer if "policy" in trained else None, name="policy")
        critic = fl.Model("builtin:x", optimizer=optimizer, name="critic")
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=2), max_new_tokens=4)
        for name in trained:
            fl.update({"policy": policy, "critic": critic}[name], samples, loss=losses.sft(), name=f"fit_{name}")

    return compile_plan(graph()).prefixes
