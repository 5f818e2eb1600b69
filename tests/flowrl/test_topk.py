"""Declaring what a teacher is asked, and what the trained model is."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl import losses
from flowrl.backend import ModelFacts
from flowrl.check import check
from flowrl.errors import FlowrlError
from flowrl.graph import Binding, ForwardSpec, Graph

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(64)]


@fl.graph
def distill(k: int | None = 5, by_student: bool = False, temperature: float = 0.5) -> None:
    policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
    teacher = fl.Model("larger", name="teacher")
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=4, temperature=temperature)
    if by_student:
        likely = fl.topk(teacher, samples, at=fl.topk(policy, samples, k=k, name="student"), name="taught")
    else:
        likely = fl.topk(teacher, samples, k=k)
    fl.update(policy, samples, likely, loss=losses.distill() + 0.1 * losses.entropy())


def described(graph: Graph, **sizes: int | None) -> list[FlowrlError]:
    def facts(model: fl.Model) -> ModelFacts:
        return ModelFacts(max_length=None, num_heads=None, num_layers=None, vocab_size=sizes[model.name])

    return check(graph, describe=facts, gpus=0)


def test_a_teacher_writes_ids_and_log_probs_at_the_temperature_of_the_samples() -> None:
    graph = distill()
    node = graph["topk"]
    assert node.outputs == ("teacher_ids", "teacher_logprobs")
    assert node.spec == ForwardSpec(outputs=("topk_ids", "topk_logprobs"), temperature=0.5, k=5)
    assert [binding.parameter for binding in node.bindings] == ["prompt_ids", "response_ids"]
    assert node.kind == "forward"


def test_the_number_of_tokens_is_16_unless_it_is_said() -> None:
    spec = distill(k=None)["topk"].spec
    assert isinstance(spec, ForwardSpec)
    assert spec.k == 16


def test_a_teacher_may_be_asked_about_the_tokens_that_the_student_finds_likely() -> None:
    graph = distill(by_student=True)
    assert graph["student"].outputs == ("student_ids", "student_logprobs")
    taught = graph["taught"]
    assert taught.outputs == ("teacher_ids", "teacher_logprobs")
    assert taught.bindings[-1] == Binding("topk_ids", "student", "student_ids")
    assert isinstance(taught.spec, ForwardSpec)
    assert taught.spec.k == 5
    assert [binding for binding in graph["update"].bindings if binding.source == "taught"] == [
        Binding("teacher_logprobs", "taught", "teacher_logprobs"),
        Binding("teacher_ids", "taught", "teacher_ids"),
    ]
    assert described(graph, policy=1000, teacher=1000) == []


def test_an_update_binds_the_ids_that_its_trained_log_probs_are_about() -> None:
    bound = {binding.parameter: binding.source for binding in distill()["update"].bindings}
    assert bound["teacher_ids"] == bound["teacher_logprobs"] == "topk"
    assert "topk_logprobs" not in bound


@pytest.mark.parametrize(("size", "right"), [(4, False), (5, True), (None, True)])
def test_more_tokens_than_a_model_has_are_refused_as_far_as_its_file_says(size: int | None, right: bool) -> None:
    problems = described(distill(), policy=1000, teacher=size)
    assert bool(problems) is not right
    if problems:
        assert "wants the 5 most likely tokens of model 'teacher', which has 4" in problems[0].problem


def test_given_answers_are_distilled_too() -> None:
    @fl.graph
    def off_policy() -> None:
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        teacher = fl.Model("larger", name="teacher")
        samples = fl.responses(policy, fl.prompts(ROWS, batch=8), columns="answer")
        fl.update(policy, samples, fl.topk(teacher, samples), loss=losses.distill() + losses.sft())

    assert described(off_policy(), policy=1000, teacher=1000) == []
    assert off_policy()["topk"].spec == ForwardSpec(outputs=("topk_ids", "topk_logprobs"), temperature=1.0, k=16)
