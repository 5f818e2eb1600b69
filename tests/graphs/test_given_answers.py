"""SFT, DPO and KTO on real rows and a small real model: what their first steps must be."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flowrl
from flowrl.graph import Graph
from flowrl.runtime import run
from flowrl.runtime.cli import main
from flowrl.runtime.graphfile import load_graph

DATA = Path(__file__).parent.parent / "data"
MODEL, PAIRS, LABELS = (
    DATA / "stories260K",
    DATA / "preferences/dpo_en_demo.json",
    DATA / "preferences/kto_en_demo.json",
)
FOLDER = Path(str(files("flowrl.graphs")))
SMALL: dict[str, Any] = {"model": str(MODEL), "prompts_per_step": 4, "held_out": 4, "every": 3, "lr": 1e-3}
pytestmark = pytest.mark.timeout(200)


def graph(name: str, **settings: Any) -> Graph:
    declared = load_graph(str(FOLDER / f"{name}.py"))
    assert not isinstance(declared, Graph)
    return declared(**SMALL | settings)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def trained(name: str, tmp_path: Path, data: Path, steps: int = 4) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    run(graph(name, data=str(data), steps=steps), steps=steps, run_dir=tmp_path)
    found = lines(tmp_path)
    assert all(math.isfinite(step["loss"]) for step in found)
    measured = [step["step"] for step in found if any(key.startswith("held_out/") for key in step)]
    assert measured == list(range(1, steps + 1, 3))
    return found


@pytest.fixture(scope="session")
def short_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs that fit into the model's 512 tokens."""
    rows = json.loads(PAIRS.read_text())
    path = tmp_path_factory.mktemp("data") / "pairs.json"
    path.write_text(json.dumps(sorted(rows, key=lambda row: len(json.dumps(row)))[:16]))
    return path


def test_sft_starts_at_the_likelihood_that_transformers_gives(short_pairs: Path, tmp_path: Path) -> None:
    first, *_, last = trained("sft", tmp_path, short_pairs)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    asked = {tuple(row["chosen"]["value"].split()): row for row in json.loads(short_pairs.read_text())}
    assert len(asked) == 16
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    total, count = 0.0, 0
    for sample in samples[: SMALL["prompts_per_step"]]:
        row = asked[tuple(sample["response"].split())]
        turns = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        answer = {"role": "assistant", "content": row["chosen"]["value"]}
        before = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template([*turns, answer])["input_ids"]
        ids = torch.tensor([whole[: len(whole) - whole[::-1].index(tokenizer.eos_token_id)]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        total -= float(logprobs[len(before) - 1 :].sum())
        count += len(ids[0]) - len(before)
    assert first["tokens"] == count
    assert first["loss"] == pytest.approx(total / count, rel=1e-4)
    assert last["held_out/loss"] < first["held_out/loss"]


def test_dpo_starts_where_no_answer_is_better_and_moves_the_pairs_apart(short_pairs: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.json"  # every step has the same pairs
    few.write_text(json.dumps(json.loads(short_pairs.read_text())[: SMALL["prompts_per_step"] + SMALL["held_out"]]))
    first, *_, last = trained("dpo", tmp_path / "run", few)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert first["held_out/loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert first["held_out/accuracy"] == pytest.approx(0.5, abs=0.01)
    assert last["loss"] < 0.6
    assert last["accuracy"] == 1
    assert last["margin"] > 0.1
    assert last["rows"] == 2 * SMALL["prompts_per_step"]


def test_kto_starts_at_a_half_and_trains_no_mismatched_row(tmp_path: Path) -> None:
    first, *_ = trained("kto", tmp_path, LABELS)
    assert first["loss"] == pytest.approx(0.5, abs=1e-3)
    assert first["held_out/accuracy"] == pytest.approx(0.5, abs=0.05)
    assert 0 < first["rows"] == first["samples"] / 2


def test_worker_processes_give_the_same_kto_bit_for_bit(tmp_path: Path) -> None:
    code = "import sys; from flowrl.runtime.cli import main; sys.exit(main())"
    words = ["--data", str(LABELS), "--steps", "2", "--every", "1", "--save-every", "2"]
    words += [f"--{name.replace('_', '-')}={SMALL[name]}" for name in ("model", "prompts_per_step", "held_out", "lr")]
    torch.set_num_threads(1)
    root = str(Path(flowrl.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    found = []
    for launcher in ("inline", "local"):
        where = ["--launcher", launcher, "--run-dir", str(tmp_path / launcher)]
        command = ["run", str(FOLDER / "kto.py"), *where, *words]
        if launcher == "inline":
            assert main(command) == 0
        else:
            subprocess.run([sys.executable, "-P", "-c", code, *command], timeout=150, check=True, env=environment)
        folder = tmp_path / launcher / "checkpoints" / "step-000002" / "policy"
        timed = ("time", "tokens_per_s", "bytes")
        metrics = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines(tmp_path / launcher)]
        found.append(((folder / "model.safetensors").read_bytes(), metrics))
    assert found[0] == found[1]
