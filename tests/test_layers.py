"""The import rule: three leaves on one language, and a light ``import flowrl``."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = ("graphs", "runtime", "backends")
HEAVY = (
    "torch",
    "numpy",
    "networkx",
    "transformers",
    "zmq",
    "msgpack",
    "rich",
    "tyro",
    "pandas",
    "pyarrow",
    "datasets",
)
FILES = sorted(path for folder in ("flowrl", *LEAVES) for path in (ROOT / folder).rglob("*.py"))

pytestmark = pytest.mark.skipif(not (ROOT / "setup.cfg").is_file() or not FILES, reason="needs the checkout")


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names of the modules that a file imports, with lines; relative ones are resolved."""
    package = ["flowrl", *path.relative_to(ROOT).parent.parts]
    if package[1:2] == ["flowrl"]:
        package = package[1:]
    found = []
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            found += [(alias.name, statement.lineno) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            base = package[: len(package) - statement.level + 1] if statement.level else []
            found.append((".".join([*base, *([statement.module] if statement.module else [])]), statement.lineno))
    return found


def room(module: str) -> str | None:
    """The folder that a module of flowrl belongs to; None for others'."""
    parts = module.split(".")
    if parts[0] != "flowrl":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEAVES else "flowrl"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards_to_the_language_and_never_sideways(path: Path) -> None:
    own = path.relative_to(ROOT).parts[0]
    for module, line in imports(path):
        there = room(module)
        assert there in (None, own, "flowrl"), f"{path.name}:{line} imports {module} from a sibling or upwards"


def test_importing_flowrl_loads_nothing_heavy() -> None:
    code = f"import sys, flowrl; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_everything_in_all_is_there_and_has_a_docstring() -> None:
    import flowrl

    assert sorted(flowrl.__all__) == flowrl.__all__
    for name in flowrl.__all__:
        assert getattr(flowrl, name).__doc__ or name == "Dtype", name
