import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import flowrl as fl
from flowrl.errors import ConfigError
from flowrl.loss import loss
from flowrl.rows import Key
from flowrl.runtime.graph_record import graph_record
from flowrl.runtime.json_lines import JsonLines, dump, read, rewind
from flowrl.runtime.rundir import open_run_dir, sample_row
from flowrl.runtime.versions import commit, installed


@fl.reward
def exact_match(response, answer):
    return float(response == answer)


@fl.advantage
def centre(scores, group):
    return scores


@loss
def clip(logprobs, advantages, *, low: float = 0.2):
    return logprobs


@fl.graph
def grpo(lr: float = 1e-6, train: fl.Mesh = fl.Mesh(dp=2)):
    """Group-relative policy optimisation."""
    policy = fl.Model("builtin:reverse_digits", mesh=train, optimizer=fl.AdamW(lr=lr))
    samples = fl.rollout(policy, fl.prompts([{"prompt": "a", "answer": "b"}] * 64, batch=32), n=8)
    fl.update(policy, samples, centre(samples, exact_match(samples)), loss=clip())


def strict(text):
    """What a reader that takes no NaN reads."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_run_folder_holds_what_a_run_writes_and_nothing_lies_outside(tmp_path):
    path = tmp_path / "runs" / "first"
    with open_run_dir(path) as run:
        run.describe_run(grpo(), command=["flowrl", "run", "grpo.py"], seed=7)
        run.metrics.write({"step": 1, "reward": 0.5})
        run.samples.write({"step": 0, "prompt": "a"})
        logging.getLogger("flowrl.test").info("begun")
        assert set(run.written()) == {"metrics", "samples", "graph", "log"}
    assert sorted(os.listdir(path)) == [
        "graph.json", "graph.svg", "metrics.jsonl", "run.lock", "run.log", "samples.jsonl", "versions.json"
    ]  # fmt: skip
    assert os.listdir(tmp_path) == ["runs"]
    assert os.listdir(tmp_path / "runs") == ["first"]
    assert "INFO flowrl.test begun" in (path / "run.log").read_text()
    assert (path / "graph.svg").read_text().startswith("<svg")


def test_versions_name_the_packages_the_command_the_parameters_and_the_seed(tmp_path):
    with open_run_dir(tmp_path / "run") as run:
        run.describe_run(grpo(lr=3e-6), command=["flowrl", "run", "grpo.py", "--lr", "3e-6"], seed=7)
    found = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert found["command"] == ["flowrl", "run", "grpo.py", "--lr", "3e-6"]
    assert found["seed"] == 7
    assert found["parameters"]["lr"] == 3e-6
    assert found["parameters"]["train"]["dp"] == 2
    assert found["packages"]["torch"] == installed("torch")
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_commit_of_the_users_repository_is_recorded_with_its_changes(tmp_path):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    assert commit(tmp_path / "nowhere") is None
    git("init")
    (tmp_path / "grpo.py").write_text("1\n")
    git("add", "grpo.py")
    git("commit", "-m", "one")
    clean = commit(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["changed"] is False
    (tmp_path / "grpo.py").write_text("2\n")
    assert commit(tmp_path) == {**clean, "changed": True}


def test_a_folder_that_holds_a_run_is_not_started_over(tmp_path):
    with open_run_dir(tmp_path / "run") as run:
        run.metrics.write({"step": 1})
    with pytest.raises(ConfigError, match=r"run' holds a run already[\s\S]*metrics\.jsonl[\s\S]*--resume to go on"):
        open_run_dir(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_folder_of_a_run_that_never_began_may_be_used_again(tmp_path):
    open_run_dir(tmp_path / "run").close()
    open_run_dir(tmp_path / "run").close()


def test_resuming_appends_and_keeps_the_record_of_each_start(tmp_path):
    for resume in (False, True, True):
        with open_run_dir(tmp_path / "run", resume=resume) as run:
            run.describe_run(grpo(), command=["flowrl"], seed=0)
            run.metrics.write({"step": 1})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1}\n' * 3
    kept = sorted(path.name for path in (tmp_path / "run").glob("versions*"))
    assert kept == ["versions.1.json", "versions.2.json", "versions.json"]


def test_resuming_where_no_run_is_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"run' holds no run to resume[\s\S]*leave --resume out"):
        open_run_dir(tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"run folder '.*run' is a file"):
        open_run_dir(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run folder '.*run/below' cannot be written[\s\S]*Not a directory"):
        open_run_dir(tmp_path / "run" / "below")


def hold(path, opened, done):
    with open_run_dir(path):
        opened.set()
        done.wait(30)


def test_a_second_process_in_one_folder_is_refused_by_the_first_ones_id(tmp_path):
    spawn = multiprocessing.get_context("fork")
    opened, done = spawn.Event(), spawn.Event()
    other = spawn.Process(target=hold, args=(tmp_path / "run", opened, done))
    other.start()
    try:
        assert opened.wait(30)
        with pytest.raises(ConfigError, match=rf"another process runs in '.*run'[\s\S]*process {other.pid}"):
            open_run_dir(tmp_path / "run")
    finally:
        done.set()
        other.join(30)
    open_run_dir(tmp_path / "run").close()


def test_rewinding_drops_what_is_written_again_and_a_line_cut_off(tmp_path):
    with open_run_dir(tmp_path / "run") as run:
        for step in range(1, 5):
            run.metrics.write({"step": step})
            run.samples.write({"step": step})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    with open_run_dir(tmp_path / "run", resume=True) as run:
        run.rewind(3)
        run.metrics.write({"step": 3, "again": True})
    assert list(read(tmp_path / "run" / "metrics.jsonl")) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert list(read(tmp_path / "run" / "samples.jsonl")) == [{"step": 1}, {"step": 2}]
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_rewinding_a_file_that_is_not_there_does_nothing(tmp_path):
    rewind(tmp_path / "none.jsonl", 0)
    assert list(read(tmp_path / "none.jsonl")) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.array([1.0, np.nan])])
def test_numbers_that_are_not_finite_are_null(value):
    assert strict(dump({"x": value})) == {"x": [1.0, None] if isinstance(value, np.ndarray) else None}


def test_every_value_becomes_json(tmp_path):
    odd = {1: np.int64(3), "a": (1, np.bool_(True)), "b": {"c": {2}}, "d": tmp_path, "e": "line\nbreak \ud800 ü"}
    assert strict(dump(odd)) == {"1": 3, "a": [1, True], "b": {"c": [2]}, "d": str(tmp_path), "e": "line\nbreak ? ü"}


def test_a_line_is_there_when_the_write_returns(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"text": "two\nlines"})
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 1
    lines.close()
    lines.close()


def sample(**changes):
    given = {"prompt": "2+2=", "response": "4", "rewards": {"exact": 1.0}, "version": 3, "stop": "eos", "num_tokens": 2}
    return sample_row(Key(7, 5, 1), **{**given, **changes})


def test_a_sample_row_has_its_key_with_steps_from_1_its_texts_and_its_fate():
    assert sample() == {
        "step": 8, "prompt_index": 5, "sample_index": 1, "prompt": "2+2=", "response": "4", "reward": 1.0,
        "dropped": None, "version": 3, "stop": "eos", "num_tokens": 2,
    }  # fmt: skip


def test_several_rewards_are_kept_by_name_and_columns_of_the_data_set_do_not_replace_ours():
    row = sample(rewards={"exact": 0.0, "format": 0.5}, answer="4", step="theirs")
    assert row["reward"] == 0.0
    assert row["rewards"] == {"exact": 0.0, "format": 0.5}
    assert row["answer"] == "4"
    assert row["step"] == 8


def test_pandas_reads_the_samples_with_missing_and_not_finite_rewards(tmp_path):
    with open_run_dir(tmp_path / "run") as run:
        run.samples.write(sample())
        run.samples.write(sample(rewards={"exact": math.nan}, response='line\nbreak\u2028 "quoted"'))
        run.samples.write(sample(rewards={}, dropped="timeout", version=None, stop=None, num_tokens=None))
    table = pd.read_json(tmp_path / "run" / "samples.jsonl", lines=True)
    assert table["reward"].isna().tolist() == [False, True, True]
    assert table["response"][1] == 'line\nbreak\u2028 "quoted"'
    assert table["dropped"].tolist()[2] == "timeout"


def test_graph_json_holds_nodes_bindings_settings_and_parameters():
    found = strict(dump(graph_record(grpo(lr=3e-6))))
    assert found["name"] == "grpo"
    assert found["parameters"]["lr"] == 3e-6
    assert found["models"]["policy"]["optimizer"]["lr"] == 3e-6
    assert found["nodes"]["rollout"]["settings"]["sampling"]["n"] == 8
    assert found["nodes"]["exact_match"]["reads"] == {"response": "rollout.response", "answer": "prompts.answer"}
    assert found["nodes"]["exact_match"]["settings"]["function"].endswith(":exact_match")
    assert found["nodes"]["prompts"]["settings"]["source"] == "the list, 64 rows"
    assert found["nodes"]["update"]["settings"]["loss"] == "clip(), token-mean"
    assert found["nodes"]["rollout"]["provenance"]["logprobs"] == {
        "model": "policy",
        "temperature": 1.0,
        "version": "as sampled",
        "support": "full vocabulary",
    }
    assert "provenance" not in found["nodes"]["exact_match"]
    version = {"from": "update", "to": "rollout", "column": "version", "kind": "version", "tokens": 0}
    assert version in found["edges"]
    assert " at 0x" not in json.dumps(found)
