import ast
import importlib.util
import json

import pytest
import yaml

from flowrl.check import check
from flowrl.errors import ConfigError
from flowrl.runtime.init import init, next_steps


def load(path):
    spec = importlib.util.spec_from_file_location("starter_graph", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_init_writes_a_graph_that_passes_every_check(tmp_path):
    graph, data, settings = init(tmp_path / "new" / "folder")
    assert (graph.name, data.name, settings.name) == ("graph.py", "train.jsonl", "settings.yaml")
    assert check(load(graph).grpo(), gpus=0) == []


def test_the_starter_graph_is_short_and_its_reward_runs_as_a_plain_function(tmp_path):
    path = init(tmp_path)[0]
    module = load(path)
    assert module.correct("54321", "54321") == 2.0
    assert module.correct("", "54321") == 0.0
    assert module.correct("54000", "54321") == pytest.approx(0.4)
    ast.parse(path.read_text())
    assert len(path.read_text().splitlines()) < 60


def test_the_starter_data_has_whole_rows(tmp_path):
    lines = init(tmp_path)[1].read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 256
    assert all(row["prompt"] == f"{row['answer'][::-1]}>" for row in rows)


def test_the_starter_settings_name_parameters_of_the_graph(tmp_path):
    graph, _, settings = init(tmp_path)
    parameters = load(graph).grpo.parameters
    assert set(yaml.safe_load(settings.read_text())) <= set(parameters)


def test_init_overwrites_nothing_and_writes_nothing_then(tmp_path):
    (tmp_path / "settings.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"settings\.yaml' exists already[\s\S]*flowrl init OTHER_FOLDER"):
        init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["settings.yaml"]
    assert (tmp_path / "settings.yaml").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"starter files cannot be written to '.*file/below'[\s\S]*Not a directory"):
        init(tmp_path / "file" / "below")


def test_the_next_steps_are_three_commands(tmp_path, monkeypatch):
    lines = next_steps(tmp_path / "my folder").splitlines()
    assert lines[0] == "Next:"
    assert len(lines) == 4
    assert all("my folder' && flowrl " in line for line in lines[1:])
    monkeypatch.chdir(tmp_path)
    assert next_steps(tmp_path).splitlines()[1].startswith("  flowrl check graph.py")
