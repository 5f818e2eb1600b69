"""The pictures and the table of docs/algorithms.md are those of the graphs as they are."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from flowrl.graph import Graph
from flowrl.rates import bound_texts
from flowrl.runtime.graphfile import load_graph
from flowrl.visualize import to_string

DOCS = Path(__file__).parents[2] / "docs"
GRAPHS = sorted(path for path in Path(str(files("flowrl.graphs"))).glob("*.py") if path.name != "__init__.py")
pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the docs are not part of a wheel")


@pytest.mark.parametrize("path", GRAPHS, ids=[path.stem for path in GRAPHS])
def test_the_picture_of_a_ready_graph_is_its_own(path: Path) -> None:
    declared = load_graph(str(path))
    graph = declared if isinstance(declared, Graph) else declared()
    drawn = (DOCS / "graphs" / f"{path.stem}.svg").read_text()
    assert drawn == to_string(graph, ".svg", bounds=bound_texts(graph))


@pytest.mark.parametrize("path", GRAPHS, ids=[path.stem for path in GRAPHS])
def test_the_page_names_every_ready_graph(path: Path) -> None:
    page = (DOCS / "algorithms.md").read_text()
    assert f"| `{path.stem}` |" in page
    assert f"graphs/{path.stem}.svg" in page
