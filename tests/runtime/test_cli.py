"""What the command line says of words that cannot be right, before anything starts."""

from pathlib import Path

import pytest

from flowrl.errors import GraphError
from flowrl.runtime.cli import main

GRAPH = str(Path(__file__).parent / "graph_to_run.py")

BODY = """import flowrl as fl
from flowrl import losses

@fl.graph
def wrong(steps: int = 2):
    policy = fl.Model("builtin:reverse_digits", optimizer=fl.AdamW(lr=1e-3))
    prompts = fl.prompts("builtin:reverse_digits", batch=4)
    samples = fl.rollout(policy, prompts, max_tokens=6)
    fl.update(policy, samples, loss=losses.ppo_clip())
"""


@pytest.mark.parametrize("words", [("--steps", "0"), ("--steps", "-1"), ("--steps", "abc"), ("--save-every", "0")])
def test_a_count_below_one_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", GRAPH, *words])
    assert ended.value.code == 2
    assert f"'{words[1]}' is no integer >= 1" in "".join(capsys.readouterr())


def test_resuming_needs_the_folder_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", GRAPH, "--resume"]) == 2
    assert "--run-dir runs/NAME" in capsys.readouterr().err


def test_an_exception_in_a_graph_function_shows_the_users_lines_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(BODY)
    assert main(["check", str(tmp_path / "wrong.py")]) == GraphError.exit_code == 2
    shown = capsys.readouterr().err
    assert "wrong.py:8: declaring graph 'wrong' failed: TypeError: rollout() got an unexpected" in shown
    assert shown.count('File "') == 1


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("samples.colums", "did you mean 'columns'?"),
        ("losses.ppo_clipp()", "did you mean 'ppo_clip'?"),
        ("(lambda response, answer: 1.0)(samples)", "a function of your own is a node under @fl.reward"),
    ],
)
def test_a_slip_in_a_graph_function_comes_with_the_way_out(
    line: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.py").write_text(BODY.replace("max_tokens=6)", f"max_new_tokens=6)\n    {line}"))
    assert main(["check", str(tmp_path / "wrong.py")]) == 2
    assert f"  fix:    {fix}" in capsys.readouterr().err


def test_one_wrong_graph_of_a_folder_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(BODY)
    (tmp_path / "b.py").write_text(BODY)
    assert main(["check", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("declaring graph 'wrong' failed") == 2


def test_help_of_a_graph_lists_its_parameters_and_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", GRAPH, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.lower().count("parameters of graph") == 1
    assert "--steps N" in shown
    assert "None" not in shown.partition("usage:")[2]
