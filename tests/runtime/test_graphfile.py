import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.runtime.graphfile import MODULE, load_graph
from flowrl.trace import GraphFunction

ROOT = Path(__file__).parents[2]
GRAPH = """import flowrl as fl

@fl.graph
def {name}(lr: float = 1.0):
    fl.prompts([{{"prompt": "a"}}], batch=1)
"""


@pytest.fixture(autouse=True)
def _clean_modules() -> Iterator[None]:
    folders = list(sys.path)
    yield
    sys.path[:] = folders
    for name in (MODULE, "my_rewards"):
        sys.modules.pop(name, None)


def write(folder: Path, *names: str, head: str = "") -> str:
    path = folder / "graph.py"
    path.write_text(head + "\n".join(GRAPH.format(name=name) for name in names))
    return str(path)


def refused(spec: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_graph(spec)
    assert caught.value.exit_code == 2
    return caught.value


def test_the_only_graph_needs_no_name(tmp_path: Path) -> None:
    graph = load_graph(write(tmp_path, "grpo"))
    assert isinstance(graph, GraphFunction)
    assert graph.name == "grpo"
    assert graph.function.__module__ == MODULE
    assert sys.modules[MODULE].grpo is graph


def test_one_of_several_is_taken_by_name(tmp_path: Path) -> None:
    spec = write(tmp_path, "grpo", "ppo")
    assert load_graph(f"{spec}:ppo").name == "ppo"
    error = refused(spec)
    assert "has 2 graphs" in error.problem
    assert error.found == "grpo, ppo"
    assert error.fix is not None
    assert "graph.py:grpo or" in error.fix


def test_an_unknown_name_is_told_with_the_nearest(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "grpo", "ppo") + ":gpro")
    assert "has no graph 'gpro'" in error.problem
    assert error.fix == "did you mean 'grpo'?"


def test_a_graph_that_is_only_imported_gives_way_to_the_file_s_own(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(GRAPH.format(name="shipped"))
    spec = write(tmp_path, "mine", head="from my_rewards import shipped\n")
    assert load_graph(spec).name == "mine"
    assert load_graph(f"{spec}:shipped").name == "shipped"


def test_a_second_name_of_one_graph_makes_no_second_graph(tmp_path: Path) -> None:
    path = Path(write(tmp_path, "grpo"))
    path.write_text(path.read_text() + "\nmain = grpo\n")
    assert load_graph(str(path)).name == "grpo"
    assert load_graph(f"{path}:main").name == "grpo"


def test_a_missing_file_is_told_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path, "grpo")
    error = refused(str(tmp_path / "grap.py"))
    assert "no file" in error.problem
    assert error.fix is not None
    assert "graph.py" in error.fix
    assert "there is no folder" in refused(str(tmp_path / "none" / "graph.py")).problem
    assert "is a folder" in refused(str(tmp_path)).problem


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.yaml").write_text("a: 1")
    assert "is no graph file" in refused(str(tmp_path / "graph.yaml")).problem


def test_an_exception_of_the_file_is_shown_with_its_own_traceback(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "grpo", head="def half(x):\n    return 1 / x\n\nhalf(0)\n"))
    assert "ZeroDivisionError: division by zero" in error.problem
    assert error.at is not None
    assert error.at.line == 4
    assert "line 2, in half" in error.problem
    assert "importlib" not in error.problem
    assert "graphfile.py" not in error.problem


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    error = refused(write(tmp_path, "grpo", head="x = = 1\n"))
    assert "SyntaxError" in error.problem
    assert error.at is not None
    assert error.at.line == 1
    assert error.found == "x = = 1"


def test_a_file_that_exits_while_it_is_imported_is_an_error(tmp_path: Path) -> None:
    assert "SystemExit: 3" in refused(write(tmp_path, "grpo", head="raise SystemExit(3)\n")).problem


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    refused(write(tmp_path, "grpo", head="1 / 0\n"))
    assert MODULE not in sys.modules


def test_loading_resolving_and_checking_takes_no_torch_and_under_two_seconds(tmp_path: Path) -> None:
    (tmp_path / "graph.py").write_text(
        """import flowrl as fl
from flowrl import advantages, losses

@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response == answer)

@fl.graph
def grpo(lr: float = 1e-6):
    policy = fl.Model("model", optimizer=fl.AdamW(lr=lr))
    prompts = fl.prompts([{"prompt": "a", "answer": "b"}] * 64, batch=32)
    samples = fl.rollout(policy, prompts, n=8)
    fl.update(policy, samples, advantages.grpo(samples, exact_match(samples)), loss=losses.ppo_clip())
"""
    )
    program = """import sys
from flowrl.runtime.graphfile import load_graph
from flowrl.runtime.config import apply, resolve
from flowrl.check import check
graph = load_graph(sys.argv[1])
problems = check(graph(**apply(graph, resolve(graph, ["--lr", "1e-5"]))))
assert not problems, problems
print(sorted({"torch", "transformers", "zmq"} & set(sys.modules)))
"""
    start = time.monotonic()
    command = [sys.executable, "-c", program, str(tmp_path / "graph.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert time.monotonic() - start < 10  # the machine of a test may be busy; alone it takes 0.5 s
