"""Whole runs of a graph whose filter refills steps: what they write, read and resume to."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from flowrl.epochs import Epochs
from tests.runtime.test_run import flowrl, inline, lines, weights

pytestmark = pytest.mark.timeout(120)
REFILL = ["--refill", "5"]


def cursor(run_dir: Path, step: int) -> dict[str, Any]:
    record = json.loads((run_dir / "checkpoints" / f"step-{step:06d}" / "run.json").read_text())
    found: dict[str, Any] = record["cursors"]["prompts"]
    return found


def prompts_of(run_dir: Path) -> list[str]:
    """Every prompt that a step has read, in order."""
    rows = sorted((s["step"], s["prompt_index"], s["prompt"]) for s in lines(run_dir / "samples.jsonl"))
    return [prompt for *_, prompt in dict.fromkeys(rows)]


def batches(numbers: list[int], num_rows: int = 12, batch: int = 4) -> Counter[str]:
    """The prompts of some batches."""
    epochs = Epochs(num_rows=num_rows, batch=batch, shuffle=True)
    return Counter(f"{row}>" for number in numbers for row in epochs.rows(number) or ())


def test_a_refilled_step_trains_on_a_full_batch_and_writes_down_every_sample(tmp_path: Path) -> None:
    assert inline(tmp_path / "run", *REFILL, steps=4) == 0
    metrics, samples = lines(tmp_path / "run" / "metrics.jsonl"), lines(tmp_path / "run" / "samples.jsonl")
    assert [record["num_groups"] for record in metrics] == [4] * 4
    assert {record["num_waves"] for record in metrics} != {1}
    for record in metrics:
        own = [sample for sample in samples if sample["step"] == record["step"]]
        assert len(own) == 4 * 4 * record["num_waves"]
        assert len({(sample["prompt_index"], sample["sample_index"]) for sample in own}) == len(own)
        trained = {sample["prompt_index"] for sample in own if sample["dropped"] is None}
        surplus = {s["prompt_index"] for s in own if s["dropped"] == "more than the batch needs"}
        assert len(trained) == 4
        assert all(max(trained) < prompt for prompt in surplus), "the first in order of their prompts are taken"
        assert record["useful_groups"] == (4 + len(surplus)) / (4 * record["num_waves"])
    read = prompts_of(tmp_path / "run")
    for epoch in range(len(read) // 12):
        assert len(set(read[12 * epoch : 12 * epoch + 12])) == 12, "each prompt once an epoch, whichever step it is in"


def test_a_resumed_run_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    assert inline(tmp_path / "whole", *REFILL, steps=6) == 0
    assert inline(tmp_path / "parts", *REFILL, steps=4) == 0
    assert inline(tmp_path / "parts", *REFILL, "--resume", steps=6) == 0
    assert weights(tmp_path / "whole", 6) == weights(tmp_path / "parts", 6)
    assert lines(tmp_path / "whole" / "samples.jsonl") == lines(tmp_path / "parts" / "samples.jsonl")
    assert cursor(tmp_path / "whole", 6) == cursor(tmp_path / "parts", 6)
    assert cursor(tmp_path / "whole", 6)["next"] > 6, "some step has read more than its own batch"


def test_batches_of_steps_that_were_open_are_read_again_and_each_is_trained_on_once(tmp_path: Path) -> None:
    words = [*REFILL, "--staleness", "2", "--save-every", "1"]
    assert inline(tmp_path / "run", *words, steps=5) == 0
    for step in (4, 5):  # the run was killed while steps 4 to 6 were open
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    at_3 = cursor(tmp_path / "run", 3)
    assert [len(given) for given in at_3["given"]] == [1, 1]
    assert inline(tmp_path / "run", *words, "--resume", steps=8) == 0
    end = cursor(tmp_path / "run", 8)
    open_still = {number for given in end["given"] for number in given}
    consumed = [number for number in range(end["next"]) if number not in open_still]
    assert Counter(prompts_of(tmp_path / "run")) == batches(consumed)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert len({(s["step"], s["prompt_index"], s["sample_index"]) for s in samples}) == len(samples)
    assert all(0 <= sample["step"] - 1 - sample["version"] <= 2 for sample in samples)


def test_inline_and_local_runs_agree_bit_for_bit(tmp_path: Path) -> None:
    words = [*REFILL, "--kl", "0.01"]
    assert flowrl(tmp_path, *words).returncode == 0
    assert inline(tmp_path / "inline", *words) == 0
    local, here = (lines(tmp_path / name / "samples.jsonl") for name in ("run", "inline"))
    assert sorted(map(json.dumps, local)) == sorted(map(json.dumps, here))
    assert len(here) > 3 * 16
    assert weights(tmp_path / "run", 3) == weights(tmp_path / "inline", 3)
    assert cursor(tmp_path / "run", 3) == cursor(tmp_path / "inline", 3)


def test_two_ranks_agree_with_one_to_rounding(tmp_path: Path) -> None:
    words = [*REFILL, "--minibatches", "2", "--max-tokens", "20"]
    assert flowrl(tmp_path, *words, "--train.dp", "2", steps=2).returncode == 0
    assert inline(tmp_path / "one", *words, steps=2) == 0
    assert prompts_of(tmp_path / "run") == prompts_of(tmp_path / "one")
    two, one = load(weights(tmp_path / "run", 2)), load(weights(tmp_path / "one", 2))
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-5


@pytest.mark.parametrize(("last", "num_prompts"), [("drop", 8), ("short", 10), ("wrap", 12)])
def test_data_that_ends_within_a_step_ends_the_run_with_it(
    last: str, num_prompts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--refill", "9", "--num-rows", "10", "--passes", "1", "--last", last, "--batch", "4"]
    assert inline(tmp_path / "run", *words, steps=50) == 0
    read = prompts_of(tmp_path / "run")
    assert len(read) == num_prompts
    assert len(set(read)) == min(10, num_prompts)
    assert ("(the data has ended)" in capsys.readouterr().err) == (last != "wrap"), "wrapped, it was enough"


def test_a_checkpoint_without_its_cursor_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inline(tmp_path / "run", *REFILL, "--save-every", "1", steps=2) == 0
    path = tmp_path / "run" / "checkpoints" / "step-000002" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in record.items() if name != "cursors"}))
    assert inline(tmp_path / "run", *REFILL, "--resume", steps=3) == 0
    assert "is incomplete and is passed over: it lacks the prompt cursor of 'prompts'" in capsys.readouterr().err


def test_a_run_without_refill_has_no_cursor(tmp_path: Path) -> None:
    assert inline(tmp_path / "run", steps=1) == 0
    record = json.loads((tmp_path / "run" / "checkpoints" / "step-000001" / "run.json").read_text())
    assert set(record) == {"version", "recipe", "files"}
