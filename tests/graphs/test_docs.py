"""The code of the docs: it checks, it trains, and mistakes in it are found before it starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowrl.check import check
from flowrl.errors import FlowrlError
from flowrl.graph import Graph
from flowrl.runtime import run
from flowrl.runtime.graphfile import load_graph
from flowrl.runtime.registry import describe

PAGE = Path(__file__).parents[2] / "docs" / "your_own.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the docs are not part of a wheel")
OWN = re.compile(r"@fl\.(?:advantage|loss|node)\b.*?(?=\n\n\n)", re.DOTALL)


def code(page: Path = PAGE) -> str:
    return page.read_text().split("```python\n")[1].split("```")[0]


def load(text: str, folder: Path) -> Graph:
    path = folder / "mine.py"
    path.write_text(text)
    loaded = load_graph(str(path))
    return loaded if isinstance(loaded, Graph) else loaded()


def test_each_function_of_a_user_is_at_most_fifteen_lines() -> None:
    own = OWN.findall(code())
    assert len(own) == 4
    assert all(len(each.splitlines()) <= 15 for each in own)


def test_a_graph_of_a_user_s_own_functions_trains(tmp_path: Path) -> None:
    summary = run(load(code(), tmp_path), steps=3)
    assert summary.outcome == "done"
    assert summary.consumed == 3 * 32 * 8


def test_the_graph_with_every_precaution_trains_and_measures_what_it_corrects(tmp_path: Path) -> None:
    graph = load(code(PAGE.with_name("algorithms.md")), tmp_path)
    assert run(graph, steps=3, run_dir=tmp_path / "run").outcome == "done"
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["lag"] for step in steps] == [0, 1, 1]
    assert all({"kl_coef", "mismatch_kl", "ess", "max_ratio", "reject/rejected"} <= step.keys() for step in steps)
    assert 0 <= steps[0]["mismatch_kl"] < 1e-6 < steps[-1]["mismatch_kl"]


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("    logprobs: torch.Tensor, old_logprobs", "    logprobs: torch.Tensor, old_logprob", "old_logprob"),
        ("(scores: float, novelty", "(score: float, novelty", "reads column 'score'"),
        ("weight=0.05", "weigth=0.05", "did you mean 'weight'"),
        ("n=8", "n=1", "needs 2 samples of a prompt"),
        (
            "samples, above_median(samples, scores), loss",
            "above_median(samples, scores), samples, loss",
            "takes Samples",
        ),
    ],
)
def test_a_mistake_in_them_is_found_before_anything_starts(right: str, wrong: str, said: str, tmp_path: Path) -> None:
    text = code()
    changed = text.replace(right, wrong) if right in text else text.replace(right.strip(), wrong.strip())
    assert changed != text
    try:
        found = check(load(changed, tmp_path), describe=lambda model: describe(model.backend, model.source))
    except FlowrlError as error:
        found = [error]
    assert any(said in str(each) for each in found), found
    assert any("mine.py:" in str(each) for each in found), found
