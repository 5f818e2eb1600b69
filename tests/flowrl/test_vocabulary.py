"""An id means the same to the model that made it and to every model that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.backend import ModelFacts
from flowrl.backends.hf_source import read_vocabulary
from flowrl.check import check
from flowrl.errors import ProvenanceError
from flowrl.runtime import registry

ROWS = [{"prompt": f"{i}", "answer": "1", "chosen": "1", "rejected": "2"} for i in range(4)]
WORDS = {"a": 0, "b": 1, "<end>": 2}
VOCABULARIES: Mapping[str, Mapping[str, int] | None] = {
    "words": WORDS,
    "more": {**WORDS, "<pad>": 3},
    "fewer": {"a": 0, "b": 1},
    "swapped": {"a": 1, "b": 0, "<end>": 2},
    "silent": None,
}


def describe(model: fl.Model) -> ModelFacts:
    tokens = VOCABULARIES[model.source]
    size = 3 if tokens is None else len(tokens)
    return ModelFacts(max_length=None, num_heads=2, num_layers=2, vocab_size=size, vocabulary=lambda: tokens)


def problems(node: Callable[[fl.Samples], Any], policy: str = "words") -> list[tuple[str | None, str, str | None]]:
    """Of a graph with one more node, which may give scores."""

    @fl.graph
    def graph() -> None:
        model = fl.Model(policy, optimizer=fl.AdamW(lr=1e-3))
        samples = fl.rollout(model, fl.prompts(ROWS, batch=4), n=2, max_new_tokens=4)
        given = node(samples)
        if isinstance(given, fl.Scores):
            fl.update(model, samples, advantages.grpo(samples, given), loss=losses.ppo_clip())
        else:
            fl.update(model, samples, given, loss=losses.sft() + losses.kl(coef=0.1))

    found = check(graph(), describe=describe, gpus=0)
    assert all(isinstance(problem, ProvenanceError) for problem in found), found
    return [(problem.node, str(problem.found), problem.fix) for problem in found]


def reward_model(source: str, *, text: bool = False) -> Callable[[fl.Samples], fl.Scores]:
    return lambda samples: fl.score(fl.Model(source, head="score", name="rm"), samples, text=text)


def test_a_reward_model_with_other_tokens_reads_text_or_is_refused() -> None:
    assert problems(reward_model("swapped")) == [
        ("score", "id 0 is 'a' to 'policy', and 'b' to 'rm'", SCORE_TEXT),
    ]
    assert problems(reward_model("swapped", text=True)) == []
    assert problems(reward_model("fewer")) == [
        ("score", "id 2 is '<end>' to 'policy', and no token to 'rm'", SCORE_TEXT),
    ]


SCORE_TEXT = "fl.score(rm, samples, text=True): it then reads the text in its own tokens"


@pytest.mark.parametrize("source", ["words", "more"])
def test_a_model_may_have_more_tokens_than_the_policy(source: str) -> None:
    assert problems(reward_model(source)) == []


def test_a_model_that_does_not_say_its_tokens_is_taken_at_their_number() -> None:
    assert problems(reward_model("silent")) == []
    assert problems(reward_model("silent"), policy="more") == [
        ("score", "'policy' has ids up to 3, 'rm' 3 of them", SCORE_TEXT),
    ]
    assert problems(reward_model("swapped"), policy="silent") == []


def test_a_reference_with_other_tokens_is_refused() -> None:
    found = problems(lambda samples: fl.logprobs(fl.Model("swapped", name="reference"), samples))
    assert found == [
        ("logprobs", "id 0 is 'a' to 'policy', and 'b' to 'reference'", "a model with the tokenizer of 'policy'"),
    ]


def test_a_critic_with_other_tokens_is_refused_where_it_values_and_where_it_is_trained() -> None:
    @fl.graph
    def ppo() -> None:
        model = fl.Model("words", optimizer=fl.AdamW(lr=1e-3))
        critic = fl.Model("swapped", head="value", name="critic", optimizer=fl.AdamW(lr=1e-3))
        samples = fl.rollout(model, fl.prompts(ROWS, batch=4), n=2, max_new_tokens=4)
        values = fl.values(critic, samples)
        scores = fl.score(fl.Model("words", head="score", name="rm"), samples)
        advantage = advantages.gae(samples, advantages.token_rewards(samples, scores), values)
        fl.update(model, samples, advantage, loss=losses.ppo_clip(), name="actor")
        fl.update(critic, samples, advantage, values, loss=losses.value_clip(), name="critic_update")

    found = check(ppo(), describe=describe, gpus=0)
    assert [problem.node for problem in found] == ["values", "critic_update"]


def test_a_judge_reads_text_and_may_have_any_tokens() -> None:
    def ask(response: str, prompt_ids: Any, response_ids: Any) -> str:
        return response

    def judge(samples: fl.Samples) -> fl.Scores:
        return fl.judge(fl.Model("swapped", name="judge"), samples, prompt=ask, parse=float, max_new_tokens=2)

    assert problems(judge) == []


def test_given_answers_are_in_the_tokens_of_the_model_that_they_were_given() -> None:
    @fl.graph
    def dpo() -> None:
        model = fl.Model("words", optimizer=fl.AdamW(lr=1e-3))
        given = fl.responses(model, fl.prompts(ROWS, batch=4), columns={"chosen": 1, "rejected": -1})
        reference = fl.logprobs(fl.Model("swapped", name="reference"), given)
        fl.update(model, given, reference, loss=losses.dpo())

    assert [problem.node for problem in check(dpo(), describe=describe, gpus=0)] == ["logprobs"]


@pytest.mark.parametrize(
    ("teacher", "by_student", "refused"),
    [
        ("words", False, []),
        ("more", False, ["update"]),
        ("more", True, []),
        ("swapped", False, ["topk", "update"]),
        ("swapped", True, ["topk"]),
        ("fewer", True, ["topk"]),
        ("silent", False, []),
    ],
)
def test_a_teacher_names_tokens_that_mean_the_same_to_its_student(
    teacher: str, by_student: bool, refused: list[str]
) -> None:
    @fl.graph
    def distil() -> None:
        model = fl.Model("words", optimizer=fl.AdamW(lr=1e-3))
        samples = fl.rollout(model, fl.prompts(ROWS, batch=4), max_new_tokens=4)
        expert = fl.Model(teacher, name="teacher")
        if by_student:
            likely = fl.topk(expert, samples, at=fl.topk(model, samples, k=2, name="own"))
        else:
            likely = fl.topk(expert, samples, k=2)
        fl.update(model, samples, likely, loss=losses.distill())

    found = check(distil(), describe=describe, gpus=0)
    assert all(isinstance(problem, ProvenanceError) for problem in found)
    assert [problem.node for problem in found] == refused
    if teacher == "more" and refused:
        assert found[0].found == "id 3 is '<pad>' to 'teacher', and no token to 'policy'"
        assert "at=fl.topk(policy, samples)" in str(found[0].fix)


# --- what folders say ------------------------------------------------------------------------------------------------


def write(folder: Path, **files: Any) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


FAST = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}}
UNIGRAM = {"model": {"vocab": [["a", -1.0], ["b", -2.5]]}, "added_tokens": [{"id": 2, "content": "<e>"}]}
CONFIG = {"added_tokens_decoder": {"2": {"content": "<q>"}}}


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({"tokenizer": FAST}, {"a": 0, "b": 1}),
        ({"tokenizer": UNIGRAM}, {"a": 0, "b": 1, "<e>": 2}),
        ({"vocab": {"a": 0}, "added_tokens": {"<p>": 1}, "tokenizer_config": CONFIG}, {"a": 0, "<p>": 1, "<q>": 2}),
        ({"tokenizer_config": {}}, None),
    ],
)
def test_tokens_are_read_from_the_files_of_a_tokenizer(files: Any, tokens: Any, tmp_path: Path) -> None:
    assert read_vocabulary(write(tmp_path / "model", **files)) == tokens


def test_shipped_models_say_what_their_tokenizers_say() -> None:
    facts = registry.describe("hf", "builtin:count_up")
    tokenizer = registry.load_backend("hf").load_tokenizer("builtin:count_up")
    assert facts.vocabulary() == tokenizer.wrapped.get_vocab()  # type: ignore[attr-defined]
    tiny = registry.describe("tiny", "tiny").vocabulary()
    assert tiny is not None
    assert sorted(tiny.values()) == list(range(258))
