"""Checkpoints that are complete, half-written, of others, or not ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.errors import CheckpointError
from flowrl.graph import Graph
from flowrl.runtime.checkpoint import FOLDER, Checkpoint, latest, partial_folder, publish, recipe, sweep

from .hands import ROWS, digest, policy


@fl.graph
def small(n: int = 2, name: str = "samples") -> None:
    model = policy(name="policy")
    samples = fl.rollout(model, fl.prompts(ROWS, batch=2), n=n, name=name)
    fl.update(
        model, samples, advantages.grpo(samples, digest(samples)), loss=losses.ppo_clip(clip_low=0.2, clip_high=0.2)
    )


GRAPH: Graph = small()


def write(run_dir: Path, version: int, *models: str) -> Path:
    """What the ranks write."""
    partial = partial_folder(run_dir / FOLDER, version)
    for model in models or ("policy",):
        (partial / model / "deep").mkdir(parents=True)
        (partial / model / "deep" / "weights").write_text(f"weights of {version}")
    return partial


def save(run_dir: Path, version: int) -> Path:
    write(run_dir, version)
    return publish(run_dir, Checkpoint(version=version, recipe=recipe(GRAPH, 0)))


def test_a_version_is_published_under_its_name_and_found_again(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    assert path == tmp_path / FOLDER / "step-000012"
    assert (path / "policy" / "deep" / "weights").read_text() == "weights of 12"
    assert latest(tmp_path, GRAPH) == Checkpoint(version=12, recipe=recipe(GRAPH, 0), path=str(path))
    assert [each.name for each in path.parent.iterdir()] == ["step-000012"]


def test_there_may_be_none(tmp_path: Path) -> None:
    assert latest(tmp_path, GRAPH) is None
    sweep(tmp_path)


def test_the_newest_is_taken_by_number(tmp_path: Path) -> None:
    for version in (2, 999_999, 1_000_000, 30):
        save(tmp_path, version)
    found = latest(tmp_path, GRAPH)
    assert found is not None
    assert found.version == 1_000_000


@pytest.mark.parametrize("models", [(), ("policy",), ("policy", "critic")])
def test_what_is_incomplete_is_not_published(models: tuple[str, ...], tmp_path: Path) -> None:
    partial = partial_folder(tmp_path / FOLDER, 3)
    for model in models:
        (partial / model).mkdir(parents=True)
    if "critic" in models:
        (partial / "critic" / "a").write_text("a")
    told = "nothing in 'policy'" if models else "no model's folder"
    with pytest.raises(CheckpointError, match=rf"(?s)step-000003.partial' is incomplete.*{told}"):
        publish(tmp_path, Checkpoint(version=3, recipe=recipe(GRAPH, 0)))


def test_a_newer_partial_is_passed_over_with_what_it_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = save(tmp_path, 4)
    write(tmp_path, 8, "critic")
    found = latest(tmp_path, GRAPH)
    assert found is not None
    assert found.path == str(old)
    assert "step-000008.partial' is incomplete and is passed over: it lacks 'run.json', model 'policy'" in caplog.text


def test_an_older_partial_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 2)
    save(tmp_path, 4)
    assert latest(tmp_path, GRAPH) is not None
    assert not caplog.records


@pytest.mark.parametrize("damage", ["lost", "short", "record", "half a record", "other version", "not published"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 4)
    path = save(tmp_path, 8)
    weights, record = path / "policy" / "deep" / "weights", path / "run.json"
    match damage:
        case "lost":
            weights.unlink()
        case "short":
            weights.write_text("wei")
        case "record":
            record.unlink()
        case "half a record":
            record.write_text(record.read_text()[:20])
        case "other version":
            record.write_text(json.dumps({**json.loads(record.read_text()), "version": 7}))
        case "not published":
            path.rename(path.with_name(path.name + ".partial"))
    found = latest(tmp_path, GRAPH)
    assert found is not None
    assert found.version == 4
    lacks = {"lost": "'policy/deep/weights' of 12 bytes", "short": "'policy/deep/weights' of 12 bytes"}
    assert f"it lacks {lacks.get(damage, 'its name' if damage == 'not published' else repr('run.json'))}" in caplog.text


def test_a_checkpoint_of_another_graph_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"(?s)of a run with other settings.*answers.*resume"):
        latest(tmp_path, small(name="answers"))


def test_a_checkpoint_of_another_seed_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"(?s)other settings.*found:  seed=5\n  wanted: seed=0"):
        latest(tmp_path, GRAPH, 5)


def test_only_what_is_ours_is_swept(tmp_path: Path) -> None:
    kept = save(tmp_path, 4)
    write(tmp_path, 8)
    for name in ("notes.partial", "step-best.partial", "step-9.partial"):
        (kept.parent / name).mkdir()
    (kept.parent / "step-000009.partial").write_text("a file of that name")
    assert latest(tmp_path, GRAPH) is not None
    sweep(tmp_path)
    left = {path.name for path in kept.parent.iterdir()}
    assert left == {"step-000004", "notes.partial", "step-best.partial", "step-9.partial", "step-000009.partial"}


def test_a_version_that_was_found_damaged_is_written_again(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    (path / "run.json").unlink()
    assert latest(tmp_path, GRAPH) is None
    save(tmp_path, 4)
    assert latest(tmp_path, GRAPH) is not None
