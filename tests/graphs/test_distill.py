"""A student learns from its teacher, and on what both can be held against each other."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import flowrl as fl
from flowrl import losses
from flowrl.graphs.distill import distill
from flowrl.graphs.warm_start import make
from flowrl.runtime import run
from flowrl.tasks import ReverseDigits

SHIPPED = Path(str(files("flowrl.graphs") / "warm_start"))
pytestmark = pytest.mark.timeout(100)


def test_the_shipped_teacher_knows_the_task_and_has_its_students_tokens() -> None:
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "reverse_digits_teacher")
    rows = [ReverseDigits(seed=77)[i] for i in range(256)]
    assert make.sampled_accuracy(model, rows, torch.Generator().manual_seed(1)) > 0.95
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (SHIPPED / "reverse_digits_teacher" / name).read_bytes() == (
            SHIPPED / "reverse_digits" / name
        ).read_bytes()


def test_tuning_stops_at_the_share_that_is_asked_for(tmp_path: Path) -> None:
    record = make.make(tmp_path, until=0.0)
    assert record["steps"] == make.CHECK_EVERY
    assert record["sampled_accuracy"] < make.GOOD_ENOUGH


def test_a_student_learns_from_its_teacher_alone(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run(distill(), steps=30, run_dir=tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    right = [record["evaluate"] for record in metrics if record.get("evaluate") is not None]
    assert right[-1] > 0.6  # a quarter at the start
    divergence = [record["divergence"] for record in metrics]
    assert sum(divergence[-5:]) < 0.5 * sum(divergence[:5])
    assert all(0 <= record["teacher_tail"] < 0.1 for record in metrics)


def test_given_answers_are_distilled_too(tmp_path: Path) -> None:
    @fl.graph
    def off_policy() -> None:
        student = fl.Model("builtin:reverse_digits", optimizer=fl.AdamW(lr=2e-3))
        teacher = fl.Model("builtin:reverse_digits_teacher", name="teacher")
        samples = fl.responses(student, fl.prompts("builtin:reverse_digits", batch=16), columns="answer")
        fl.update(student, samples, fl.topk(teacher, samples, k=4), loss=losses.distill())

    torch.set_num_threads(1)
    run(off_policy(), steps=8, run_dir=tmp_path)
    divergence = [json.loads(line)["divergence"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sum(divergence[-3:]) < 0.9 * sum(divergence[:3])
