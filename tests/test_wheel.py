"""What was installed is whole: run from an empty folder against the wheel."""

import importlib
import importlib.resources
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = (
    "flowrl",
    "flowrl.advantages",
    "flowrl.losses",
    "flowrl.nodes",
    "flowrl.rewards",
    "flowrl.tasks",
    "flowrl.visualize",
    "flowrl.graphs",
    "flowrl.graphs.warm_start",
    "flowrl.runtime",
    "flowrl.runtime.launch",
    "flowrl.backends",
)


@pytest.mark.parametrize("name", FOLDERS)
def test_every_folder_is_importable(name: str) -> None:
    importlib.import_module(name)


def test_the_start_models_ship_inside_the_package() -> None:
    folder = importlib.resources.files("flowrl.graphs") / "warm_start"
    for model in ("reverse_digits", "reverse_digits_reward", "reverse_digits_teacher", "calculation", "count_up"):
        assert (folder / model / "model.safetensors").is_file()
        assert (folder / model / "tokenizer.json").is_file()


def test_a_users_own_folders_of_the_same_names_stay_theirs(tmp_path: Path) -> None:
    for name in ("runtime", "backends", "graphs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("MINE = True\n")
    code = "import runtime, backends, graphs, flowrl.runtime.cli; print(runtime.MINE, backends.MINE, graphs.MINE)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={"PYTHONPATH": str(Path(importlib.import_module("flowrl").__file__ or "").parent.parent)},
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
