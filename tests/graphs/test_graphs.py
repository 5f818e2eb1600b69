"""Every ready graph: it is short, it is right, and it trains for three steps on a small model."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.check import check
from flowrl.graph import Graph, PromptsSpec, UpdateSpec
from flowrl.runtime import run
from flowrl.runtime.graphfile import load_graph
from flowrl.runtime.registry import describe

FOLDER = Path(str(files("flowrl.graphs")))
GRAPHS = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")
SMALL: dict[str, Any] = {"prompts_per_step": 4, "samples_per_prompt": 4, "steps": 3}
"""Parameters that a graph may have, as small as its algorithm allows."""
every_graph = pytest.mark.parametrize("path", GRAPHS, ids=[path.stem for path in GRAPHS])
pytestmark = pytest.mark.timeout(60)


def small(path: Path) -> Graph:
    declared = load_graph(str(path))
    assert not isinstance(declared, Graph)
    known = inspect.signature(declared.function).parameters
    return declared(**{name: value for name, value in SMALL.items() if name in known})


@every_graph
def test_a_ready_graph_is_one_screen_long(path: Path) -> None:
    lines = path.read_text().rstrip().splitlines()
    docstring = ast.parse(path.read_text()).body[0]
    assert isinstance(docstring, ast.Expr)
    assert docstring.end_lineno is not None
    assert len(lines) - docstring.end_lineno <= 60


@every_graph
def test_a_ready_graph_says_whose_algorithm_it_is(path: Path) -> None:
    declared = load_graph(str(path))
    assert not isinstance(declared, Graph)
    assert "arXiv:" in (declared.function.__doc__ or "")


@every_graph
def test_the_commands_that_a_ready_graph_tells_name_its_parameters(path: Path) -> None:
    declared = load_graph(str(path))
    assert not isinstance(declared, Graph)
    told = (ast.get_docstring(ast.parse(path.read_text())) or "").split("flowrl run ", 1)[1]
    assert told.startswith(path.name)
    flags = {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", told)} - {"save_every"}
    assert flags <= inspect.signature(declared.function).parameters.keys()


@every_graph
def test_the_learning_rate_of_a_ready_graph_falls_over_all_its_optimizer_steps(path: Path) -> None:
    declared = load_graph(str(path))
    assert not isinstance(declared, Graph)
    minibatches = {"minibatches": 4} if "minibatches" in inspect.signature(declared.function).parameters else {}
    for node in declared(steps=7, **minibatches).nodes.values():
        if isinstance(node.spec, UpdateSpec) and node.model is not None and node.model.optimizer is not None:
            assert node.model.optimizer.decay_steps in (None, 7 * node.spec.minibatches)


@every_graph
def test_a_ready_graph_measures_on_other_questions_than_it_begins_with(path: Path) -> None:
    declared = load_graph(str(path))
    assert not isinstance(declared, Graph)
    specs = [node.spec for node in declared(seed=3).nodes.values() if isinstance(node.spec, PromptsSpec)]
    asked = [[spec.source[row]["prompt"] for row in range(8)] for spec in specs]
    assert len({tuple(prompts) for prompts in asked}) == len(specs)


@every_graph
def test_a_ready_graph_is_right_with_its_defaults(path: Path) -> None:
    declared = load_graph(str(path))
    assert not isinstance(declared, Graph)
    assert check(declared(), describe=lambda model: describe(model.backend, model.source)) == []


@every_graph
def test_a_ready_graph_trains_for_three_steps(path: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    summary = run(small(path), steps=3, run_dir=tmp_path)
    assert summary.outcome == "done"
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    losses = [value for step in steps for name, value in step.items() if name.split("/")[-1] == "loss"]
    assert losses
    assert all(math.isfinite(loss) for loss in losses)
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")


def test_the_metrics_of_a_policy_and_its_critic_are_told_apart(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run(small(FOLDER / "ppo.py"), steps=2, run_dir=tmp_path)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        step = json.loads(line)
        assert step["rows"] == step["critic/rows"] == 16
        assert step["tokens"] == step["critic/tokens"] == step["response_tokens"]
        assert {"clip_fraction", "mismatch_kl", "ess", "max_ratio", "critic/value", "critic/grad_norm"} <= step.keys()
        assert not {"critic/clip_fraction", "critic/mismatch_kl", "value", "value_clip_fraction"} & step.keys()
        assert step["loss"] != step["critic/loss"]
        assert step["lr"] != step["critic/lr"]
