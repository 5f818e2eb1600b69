"""Every file of tests/bad_graphs is one mistake: its docstring says which error it gives, its marker at which line."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl import errors
from flowrl.backend import ModelFacts
from flowrl.check import check
from flowrl.errors import BackendError, FlowrlError, did_you_mean
from flowrl.graph import Graph
from flowrl.model import Model
from flowrl.runtime.graphfile import load_graph

FOLDER = Path(__file__).parent.parent / "bad_graphs"
FILES = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))
FACTS = ModelFacts(max_length=1024, num_heads=12, num_layers=6, vocab_size=100)


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    before, folders = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = folders
    for name in {"__flowrl_graph__", "_by_hand"} & (set(sys.modules) - before):
        del sys.modules[name]


def describe(model: Model) -> ModelFacts:
    """A registry of three backends, of which one is not installed."""
    if model.backend == "vllm":
        raise BackendError("backend 'vllm' needs the vllm package", fix="pip install 'flowrl[vllm]'")
    known = ("hf", "megatron", "vllm")
    if model.backend not in known:
        fix = did_you_mean(model.backend, known)
        raise BackendError(f"no backend is called '{model.backend}'", wanted=", ".join(known), fix=fix)
    return FACTS


def problems_of(path: Path) -> list[FlowrlError]:
    try:
        loaded = load_graph(str(path))
        graph = loaded if isinstance(loaded, Graph) else loaded()
    except FlowrlError as error:
        return [error]
    return check(graph, describe=describe, gpus=4)


def expected(path: Path) -> dict[str, str]:
    head = path.read_text().split('"""')[1]
    return dict(line.split(": ", 1) for line in head.splitlines()[2:])


def line_of_mistake(path: Path) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if "# here" in line)


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_bad_graph_is_refused_with_the_line_of_the_mistake(path: Path) -> None:
    wanted = expected(path)
    error, *_ = problems_of(path)
    assert type(error) is getattr(errors, wanted["error"]), error
    assert error.exit_code == 2
    assert wanted["message"] in error.problem
    assert error.node == wanted.get("node")
    assert error.at is not None or path.stem == "no_graph_in_file", error
    if error.at is not None:
        assert Path(error.at.file).resolve() == path
        assert error.at.line == line_of_mistake(path), error
    assert error.found is not None, error
    assert error.wanted is not None, error
    assert error.fix is not None, error


def test_a_bad_graph_has_no_other_problem() -> None:
    several = {path.stem: len(problems) for path in FILES if len(problems := problems_of(path)) > 1}
    assert several == {"two_cycles": 2}


def test_there_are_many_kinds_of_mistakes() -> None:
    assert len(FILES) >= 28
    assert len({expected(path)["error"] for path in FILES}) >= 15
