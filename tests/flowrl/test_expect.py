"""What a node is called with is refused at the line of its call."""

from typing import Any

import pytest

import flowrl as fl
from flowrl import losses
from flowrl.errors import WrongType

ROWS = [{"prompt": str(i)} for i in range(64)]


def sampled(**settings: Any) -> None:
    of_prompts = {name: settings.pop(name) for name in ("epochs", "max_prompt_tokens", "seed") if name in settings}

    @fl.graph
    def declared() -> None:
        prompts = fl.prompts(ROWS, batch=8, **of_prompts)
        fl.rollout(fl.Model("model"), prompts, **settings)

    declared()


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("epochs", 0, "node 'prompts': epochs is no count\n  found:  0\n  wanted: an integer >= 1"),
        ("max_prompt_tokens", "12", "node 'prompts': max_prompt_tokens is no count\n  found:  '12'"),
        ("seed", "3", "node 'prompts': seed is no number\n  found:  '3'\n  wanted: an integer"),
        ("n", True, "node 'rollout': n is no count\n  found:  True"),
        ("max_new_tokens", None, "node 'rollout': max_new_tokens is no count\n  found:  None"),
        ("temperature", float("inf"), "node 'rollout': temperature is no temperature\n  found:  inf"),
        ("top_k", -1, "node 'rollout': top_k is no count\n  found:  -1\n  wanted: an integer >= 0"),
        ("top_p", 0, "node 'rollout': top_p is no share"),
        ("min_p", 1.5, "node 'rollout': min_p is no share\n  found:  1.5\n  wanted: 0 <= min_p <= 1"),
        (
            "stop",
            "",
            "node 'rollout': stop is no text that ends a response\n  found:  ''",
        ),
        ("stop", ("a", 3), "node 'rollout': stop is no text that ends a response"),
        ("stop", 3, "node 'rollout': stop is no text that ends a response"),
        ("mesh", 4, "node 'rollout': mesh is no mesh\n  found:  4\n  wanted: an fl.Mesh, or None"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_at_its_call(setting: str, value: object, says: str) -> None:
    with pytest.raises(WrongType, match=r"test_expect\.py:") as error:
        sampled(**{setting: value})
    assert says in str(error.value)


def test_an_evaluation_of_a_model_that_nothing_samples_has_no_length_of_its_own() -> None:
    @fl.reward
    def right(response: str, prompt: str) -> float:
        return float(response == prompt)

    @fl.graph
    def declared() -> None:
        fl.evaluate(fl.Model("model"), fl.prompts(ROWS, batch=8), right, every=1)

    with pytest.raises(WrongType, match="node 'evaluate': max_new_tokens is not known"):
        declared()


@pytest.mark.parametrize("limit", [0, -0.1, True, "0.1", float("nan")])
def test_a_limit_on_the_mismatch_is_a_number_above_0(limit: Any) -> None:
    @fl.graph
    def declared() -> None:
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=4)
        fl.update(policy, samples, loss=losses.sft(), max_mismatch=limit)

    with pytest.raises(WrongType, match="node 'update': max_mismatch is no limit"):
        declared()


def test_settings_that_can_be_are_taken() -> None:
    sampled(epochs=1, max_prompt_tokens=1, n=1, top_k=0, top_p=1, mesh=fl.Mesh(dp=2))


@pytest.mark.parametrize("norm", [0, -1.0, True, "1", float("nan")])
def test_gradients_are_clipped_to_a_norm_above_0(norm: Any) -> None:
    @fl.graph
    def declared() -> None:
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-3))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=8))
        fl.update(policy, samples, loss=losses.sft(), clip_grad=norm)

    with pytest.raises(WrongType, match="node 'update': clip_grad is no norm"):
        declared()


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"retries": -1}, "retries is no count\n  found:  -1"),
        ({"retries": 1.5}, "retries is no count"),
        ({"max_failure_rate": -0.1}, "max_failure_rate is no share"),
        ({"max_failure_rate": 50}, "max_failure_rate is no share\n  found:  50\n  wanted: 0 <= rate <= 1"),
    ],
)
def test_the_limits_of_a_function_s_calls_are_numbers_that_end(limits: Any, says: str) -> None:
    with pytest.raises(WrongType, match=r"test_expect\.py:") as error:
        fl.reward(**limits)(lambda response: 0.0)
    assert says in str(error.value)
