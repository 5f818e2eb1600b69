"""Whole runs through the command line, in real processes: what they write, and that they end as they should."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

import flowrl as fl
from flowrl import kl
from flowrl.errors import ConfigError, MeshError
from flowrl.runtime import run
from flowrl.runtime.cli import main
from flowrl.runtime.graphfile import load_graph
from flowrl.runtime.launch.inline import InlineLauncher
from flowrl.runtime.report import Summary
from flowrl.trace import GraphFunction

GRAPH = str(Path(__file__).parent / "graph_to_run.py")
FLOWRL = [sys.executable, "-P", "-c", "import sys; from flowrl.runtime.cli import main; sys.exit(main())"]
pytestmark = pytest.mark.timeout(120)


def environment(tmp_path: Path) -> dict[str, str]:
    """Of a run whose temporary files can be told from others'; a checkout stays importable."""
    import flowrl

    root = str(Path(flowrl.__file__).parent.parent)
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"}


def flowrl(tmp_path: Path, *words: str, steps: int = 3) -> subprocess.CompletedProcess[str]:
    """Run ``flowrl run`` to its end."""
    command = [*FLOWRL, "run", GRAPH, "--steps", str(steps), "--run-dir", str(tmp_path / "run"), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environment(tmp_path), cwd=tmp_path
    )


def start(tmp_path: Path, *words: str) -> "subprocess.Popen[str]":
    """Start a long ``flowrl run``."""
    command = [*FLOWRL, "run", GRAPH, "--steps", "100000", "--run-dir", str(tmp_path / "run"), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(tmp_path), cwd=tmp_path
    )


def inline(run_dir: Path, *words: str, steps: int = 3) -> int:
    """Run in this process."""
    return main(["run", GRAPH, "--launcher", "inline", "--steps", str(steps), "--run-dir", str(run_dir), *words])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(run_dir: Path, step: int) -> bytes:
    return (run_dir / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors").read_bytes()


def kl_coefs(run_dir: Path) -> list[float]:
    return [record["kl_coef"] for record in lines(run_dir / "metrics.jsonl")]


def processes_below(folder: Path) -> dict[int, list[bytes]]:
    """Command lines, by process id, of processes that were started with this folder as their temporary one."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found[int(path.parent.name)] = (path.parent / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
    return found


def assert_nothing_left(tmp_path: Path, within_s: float = 10.0) -> None:
    """No process of the run, no socket and no temporary file is left."""
    deadline = time.monotonic() + within_s
    while processes_below(tmp_path / "tmp") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_below(tmp_path / "tmp")
    assert list((tmp_path / "tmp").glob("flowrl-*")) == []


def wait_for_step(process: "subprocess.Popen[str]", step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step} "):
            return
    raise AssertionError("the run ended early")


# --- results --------------------------------------------------------------------------------------------------------


def test_a_run_writes_a_metrics_line_a_step_every_sample_and_the_graph(tmp_path: Path) -> None:
    done = flowrl(tmp_path, "--trouble", "print")
    assert done.returncode == 0, done.stderr
    assert "[score.0] a word of the reward" in done.stderr
    shown = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(shown) == 3
    assert re.match(r"step 3 loss=\S+ reward=\S+ kl=\S+ lag=\S+ tok/s=\S+", shown[-1])
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3]
    assert {"step", "reward", "loss", "kl", "lag", "tokens_per_s"} <= metrics[0].keys()
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert len(samples) == 3 * 4 * 4
    assert {"prompt", "response", "reward", "dropped", "version"} <= samples[0].keys()
    for name in ("graph.json", "graph.svg", "versions.json", "run.log"):
        assert (tmp_path / "run" / name).stat().st_size > 0
    assert not re.search("Fatal|Error|Warning", (tmp_path / "run" / "run.log").read_text())
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("backend", ["tiny", "hf"])
def test_inline_and_local_runs_agree_bit_for_bit(tmp_path: Path, backend: str) -> None:
    words = ["--backend", backend, "--kl", "0.01", "--kl-target", "0.001"]
    assert flowrl(tmp_path, *words).returncode == 0
    assert inline(tmp_path / "inline", *words) == 0
    local, here = (lines(tmp_path / name / "samples.jsonl") for name in ("run", "inline"))
    assert sorted(map(json.dumps, local)) == sorted(map(json.dumps, here))
    assert weights(tmp_path / "run", 3) == weights(tmp_path / "inline", 3)
    assert kl_coefs(tmp_path / "run") == kl_coefs(tmp_path / "inline")


def test_two_ranks_agree_with_one_to_rounding(tmp_path: Path) -> None:
    words = ["--kl", "0.1", "--kl-target", "0.001"]
    assert flowrl(tmp_path, *words, "--train.dp", "2").returncode == 0
    assert inline(tmp_path / "one", *words) == 0
    assert kl_coefs(tmp_path / "run") == pytest.approx(kl_coefs(tmp_path / "one"), rel=1e-6)
    two, one = load(weights(tmp_path / "run", 3)), load(weights(tmp_path / "one", 3))
    assert two.keys() == one.keys()
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-5


def test_a_token_budget_and_minibatches_change_nothing_that_they_should_not(tmp_path: Path) -> None:
    assert inline(tmp_path / "whole") == 0
    assert inline(tmp_path / "split", "--max-tokens", "20") == 0
    whole, split = load(weights(tmp_path / "whole", 3)), load(weights(tmp_path / "split", 3))
    assert max(float((whole[name] - split[name]).abs().max()) for name in whole) < 1e-5
    assert inline(tmp_path / "steps", "--minibatches", "2") == 0


def test_a_rollout_on_its_own_mesh_gets_each_version_and_lags_no_more_than_the_staleness(tmp_path: Path) -> None:
    done = flowrl(tmp_path, "--own-mesh", "--staleness", "2", steps=8)
    assert done.returncode == 0, done.stderr
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(0 <= record["lag"] <= 2 for record in metrics)
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert all(0 <= sample["step"] - 1 - sample["version"] <= 2 for sample in samples)
    assert len({(s["step"], s["prompt_index"], s["sample_index"]) for s in samples}) == len(samples) == 8 * 16


def test_staleness_zero_on_two_meshes_gives_what_one_mesh_gives(tmp_path: Path) -> None:
    assert flowrl(tmp_path, "--own-mesh", "--max-mismatch", "1e-6").returncode == 0
    assert inline(tmp_path / "one") == 0
    assert weights(tmp_path / "run", 3) == weights(tmp_path / "one", 3)
    for line in lines(tmp_path / "run" / "metrics.jsonl"):  # the replica sampled with the trainer's own weights
        assert line["mismatch_kl"] == pytest.approx(0, abs=1e-9)


def test_an_evaluation_is_in_the_record_of_the_step_that_made_its_version(tmp_path: Path) -> None:
    assert inline(tmp_path / "run", "--every", "2", steps=4) == 0
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert ["evaluate" in record for record in metrics] == [False, True, False, True]


def test_a_sampler_with_wrong_weights_stops_the_run_before_the_optimizer_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("--max-mismatch", "0.01", "--wrong-since", "2", "--save-every", "1")
    assert inline(tmp_path / "run", *wrong, steps=4) == 1
    said = capsys.readouterr().err
    assert "node 'update' may not train on the samples of step 3: their sampler is too far from model 'policy'" in said
    assert "found:  mismatch_kl=0.368 over " in said  # k3 of a log-ratio of -1: exp(-1) - 1 + 1
    assert "wanted: at most max_mismatch=0.01" in said
    assert "temperature, dtype or backend of the sampler" in said
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    assert inline(tmp_path / "right", "--save-every", "1", steps=2) == 0
    assert weights(tmp_path / "run", 2) == weights(tmp_path / "right", 2)


def test_staleness_is_a_mismatch_that_a_loose_limit_allows(tmp_path: Path) -> None:
    assert inline(tmp_path / "stale", "--staleness", "1", "--max-mismatch", "1.0", steps=4) == 0
    assert inline(tmp_path / "fresh", "--max-mismatch", "1e-6", "--minibatches", "2", steps=4) == 0
    stale, fresh = (lines(tmp_path / name / "metrics.jsonl") for name in ("stale", "fresh"))
    for line in fresh:  # whatever the second mini-batch of a step finds: the first has moved the weights
        assert line["mismatch_kl"] == pytest.approx(0, abs=1e-9)
        assert line["ess"] == pytest.approx(1, abs=1e-9)
        assert line["max_ratio"] == pytest.approx(1, abs=1e-5)
    assert stale[0]["mismatch_kl"] == pytest.approx(0, abs=1e-9)
    for line in stale[1:]:
        assert line["lag"] == 1
        assert 1e-6 < line["mismatch_kl"] < 1.0
        assert 0 < line["ess"] < 1 - 1e-6
        assert line["max_ratio"] > 1


def test_a_resumed_run_continues_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    assert inline(tmp_path / "whole", steps=6) == 0
    assert inline(tmp_path / "parts", steps=4) == 0
    assert inline(tmp_path / "parts", "--resume", steps=6) == 0
    assert weights(tmp_path / "whole", 6) == weights(tmp_path / "parts", 6)
    assert lines(tmp_path / "whole" / "samples.jsonl") == lines(tmp_path / "parts" / "samples.jsonl")
    steps = [record["step"] for record in lines(tmp_path / "parts" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_run_that_has_all_its_steps_says_so_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inline(tmp_path / "run", steps=2) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    monkeypatch.setattr(InlineLauncher, "start", lambda self: pytest.fail("a worker is started"))
    assert inline(tmp_path / "run", "--resume", steps=2) == 0
    said = capsys.readouterr().err
    assert f"run folder '{tmp_path / 'run'}' holds 2 steps already, of 2: a larger --steps goes on with it" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_resumed_run_says_which_settings_have_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inline(tmp_path / "run", steps=1) == 0
    assert inline(tmp_path / "run", "--resume", steps=2) == 0
    assert "other settings" not in capsys.readouterr().err
    assert inline(tmp_path / "run", "--resume", "--lr", "0.01", "--staleness", "1", steps=3) == 0
    changed = "policy.optimizer.lr=0.01 (was 0.02), rollout.staleness=1 (was 0)"
    assert f"resumed with other settings than before: {changed}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "says"), [({"steps": 0}, "steps=0"), ({"steps": 1, "save_every": 0}, "save_every=0")]
)
def test_a_run_of_no_steps_is_refused(settings: dict[str, int], says: str, tmp_path: Path) -> None:
    graph = load_graph(GRAPH)
    assert isinstance(graph, GraphFunction)
    with pytest.raises(ConfigError) as error:
        run(graph(), run_dir=tmp_path / "run", **settings)
    assert error.value.found == says
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", ["3", 1.5, True])
def test_a_seed_that_is_no_whole_number_is_refused(seed: Any) -> None:
    @fl.graph
    def measured(seed: Any = 0) -> None:
        samples = fl.rollout(fl.Model("tiny", backend="tiny"), fl.prompts([{"prompt": "a"}], batch=1), max_new_tokens=2)
        fl.reward(lambda response: 0.0)(samples)

    with pytest.raises(ConfigError, match="the seed of a run is no number"):
        run(measured(seed=seed), steps=1)


def test_an_adaptive_coefficient_follows_the_kl_and_goes_on_where_it_was(tmp_path: Path) -> None:
    words = ["--kl", "0.1", "--kl-target", "0.002", "--minibatches", "2"]
    assert inline(tmp_path / "whole", *words, steps=6) == 0
    assert inline(tmp_path / "parts", *words, steps=3) == 0
    assert inline(tmp_path / "parts", *words, "--resume", steps=6) == 0
    whole = kl_coefs(tmp_path / "whole")
    assert kl_coefs(tmp_path / "parts") == whole
    assert weights(tmp_path / "whole", 6) == weights(tmp_path / "parts", 6)
    assert len(set(whole)) == 6


def test_each_step_s_coefficient_is_the_one_before_moved_by_its_kl(tmp_path: Path) -> None:
    assert inline(tmp_path / "run", "--kl", "0.1", "--kl-target", "0.0002", steps=6) == 0
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["kl_coef"] == 0.1
    for one, following in pairwise(metrics):
        wanted = kl.adapt(one["kl_coef"], one["kl"], target=0.0002, samples=int(one["rows"]), horizon=64)
        assert following["kl_coef"] == pytest.approx(wanted, rel=1e-12)
    assert metrics[2]["kl_coef"] < metrics[1]["kl_coef"] < 0.1
    assert metrics[-1]["kl_coef"] > metrics[-2]["kl_coef"]


def test_a_checkpoint_that_lost_its_coefficients_is_not_resumed_from(tmp_path: Path) -> None:
    words = ["--kl", "0.1", "--kl-target", "0.002"]
    assert inline(tmp_path / "run", *words, steps=1) == 0
    folder = tmp_path / "run" / "checkpoints" / "step-000001"
    record = json.loads((folder / "run.json").read_text())
    assert record["files"].pop("policy/flowrl_coefficients.json") > 0
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "policy" / "flowrl_coefficients.json").unlink()
    assert inline(tmp_path / "run", *words, "--resume", steps=2) == 1


def test_a_run_is_not_resumed_with_other_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inline(tmp_path / "run", steps=2) == 0
    assert inline(tmp_path / "run", "--resume", "--batch", "2", "--n", "3", steps=4) == 1
    assert "found:  prompts.batch=2, " in capsys.readouterr().err


def test_a_run_is_resumed_on_another_number_of_ranks(tmp_path: Path) -> None:
    assert inline(tmp_path / "run", steps=2) == 0
    assert flowrl(tmp_path, "--resume", "--train.dp", "2").returncode == 0
    assert inline(tmp_path / "whole") == 0
    two, one = (load(weights(tmp_path / name, 3)) for name in ("run", "whole"))
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-5


def test_a_run_without_a_checkpoint_is_not_started_over_by_resuming_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inline(tmp_path / "run", "--save-every", "1", steps=2) == 0
    newest, before = (tmp_path / "run" / "checkpoints" / f"step-{step:06d}" for step in (2, 1))
    (newest / "run.json").unlink()
    assert inline(tmp_path / "run", "--resume", steps=2) == 0
    said = capsys.readouterr().err
    assert f"warning: checkpoint '{newest}' is incomplete and is passed over: it lacks 'run.json'" in said
    assert "from step 1" in said
    for folder in (newest, before):
        shutil.rmtree(folder)
    written = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert inline(tmp_path / "run", "--resume", steps=2) == 1
    assert "holds steps, and no complete checkpoint to go on from" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == written


def test_an_inline_run_has_no_deadline_for_a_worker_that_waits_for_its_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inline(tmp_path / "run", "--lease", "0.0001") == 0
    assert "no sign from worker" not in capsys.readouterr().err


def test_a_run_folder_is_not_started_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inline(tmp_path / "run", steps=1) == 0
    assert inline(tmp_path / "run", steps=1) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_notebook_runs_a_graph_inside_its_event_loop(tmp_path: Path) -> None:
    async def notebook() -> Summary:
        graph = load_graph(GRAPH)
        assert isinstance(graph, GraphFunction)
        return run(graph(batch=2), steps=1, run_dir=tmp_path / "run")

    summary = asyncio.run(notebook())
    assert (summary.outcome, summary.steps, summary.consumed) == ("done", 1, 8)


def test_a_notebook_gets_what_is_wrong_as_an_exception() -> None:
    graph = load_graph(GRAPH)
    assert isinstance(graph, GraphFunction)
    with pytest.raises(MeshError, match="prompts"):
        run(graph(batch=1, train=fl.Mesh(dp=2, device="cpu")), steps=1)


def test_the_inline_launcher_refuses_several_ranks_and_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inline(tmp_path / "run", "--train.dp", "2") == 2
    assert "--launcher local" in capsys.readouterr().err


# --- ends -----------------------------------------------------------------------------------------------------------


def test_a_breakpoint_in_a_worker_says_how_to_reach_it(tmp_path: Path) -> None:
    done = flowrl(tmp_path, "--trouble", "breakpoint")
    assert done.returncode == 1
    assert "breakpoint() in a worker process, which has no terminal" in done.stderr
    assert "fix:    --launcher inline" in done.stderr
    assert "graph_to_run.py:" in done.stderr


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_an_exception_in_a_reward_ends_the_run_with_its_own_traceback(tmp_path: Path, launcher: str) -> None:
    done = flowrl(tmp_path, "--trouble", "raise", "--launcher", launcher)
    assert done.returncode == 1
    assert "'digits' raised ValueError: the sandbox is gone (worker 'score.0')" in done.stderr
    assert "graph_to_run.py" in done.stderr
    assert 'raise ValueError("the sandbox is gone")' in done.stderr
    assert "nothing is saved to go on from: --save-every N keeps checkpoints" in done.stderr
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("trouble", "how"), [("exit", "exit code 3"), ("kill", "SIGKILL")])
def test_a_worker_that_dies_ends_the_run_and_is_named(tmp_path: Path, trouble: str, how: str) -> None:
    done = flowrl(tmp_path, "--trouble", trouble)
    assert done.returncode == 1
    assert "worker 'score.0' died while it owed node 'digits' of step 1" in done.stderr
    assert how in done.stderr
    assert_nothing_left(tmp_path)


def test_a_killed_trainer_ends_the_run_within_ten_seconds(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_step(process, 2)
    [pid] = [pid for pid, words in processes_below(tmp_path / "tmp").items() if b"train.0" in words]
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=20)
    assert time.monotonic() - begun < 10
    assert process.returncode == 1
    assert "worker 'train.0' died" in output
    assert_nothing_left(tmp_path)


def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = flowrl(tmp_path, "--model", "nowhere/at/all")
    assert done.returncode == 2
    assert "nowhere/at/all" in done.stderr
    assert not (tmp_path / "run").exists()


def test_weights_that_cannot_be_read_end_the_run_with_the_workers_own_words(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(str(files("flowrl.graphs") / "warm_start" / "reverse_digits"), model)
    (model / "model.safetensors").write_bytes(b"half a file")
    done = flowrl(tmp_path, "--backend", "hf", "--model", str(model))
    assert done.returncode == 1
    assert "(worker 'train.0')" in done.stderr
    assert "Traceback" in done.stderr
    assert_nothing_left(tmp_path)


def test_a_value_that_the_wire_does_not_carry_is_refused_where_it_is_sent(tmp_path: Path) -> None:
    done = flowrl(tmp_path, "--trouble", "unsendable")
    assert done.returncode == 1
    assert "node 'prompts', rows for worker 'score.0'" in done.stderr
    assert "extra" in done.stderr
    assert "tags" in done.stderr
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("when", ["starting", "training", "hanging"])
def test_one_signal_ends_everything(tmp_path: Path, sent: int, code: int, when: str) -> None:
    words = ["--trouble", "hang", "--at", str(tmp_path / "now")] if when == "hanging" else ["--save-every", "1"]
    process = start(tmp_path, *words)
    if when == "starting":
        assert process.stderr is None
        assert process.stdout is not None
        process.stdout.readline()  # "flowrl: graph 'learn'": workers are being started
    else:
        wait_for_step(process, 2)
    if when == "hanging":
        (tmp_path / "now").touch()
        time.sleep(0.5)
    begun = time.monotonic()
    process.send_signal(sent)
    time.sleep(0.05)
    process.send_signal(sent)  # somebody who cannot wait
    output, _ = process.communicate(timeout=20)
    assert time.monotonic() - begun < 10
    assert process.returncode == code, output
    assert_nothing_left(tmp_path)
    assert not list((tmp_path / "run").glob("checkpoints/*.partial"))


def test_children_of_a_reward_go_with_the_run(tmp_path: Path) -> None:
    assert flowrl(tmp_path, "--trouble", "child", steps=1).returncode == 0
    assert_nothing_left(tmp_path)


def test_killing_the_launcher_takes_every_worker_along(tmp_path: Path) -> None:
    process = start(tmp_path, "--trouble", "child")
    wait_for_step(process, 1)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while processes_below(tmp_path / "tmp") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_below(tmp_path / "tmp")
    assert list((tmp_path / "tmp").glob("flowrl-*")) == []


def test_a_terminal_that_goes_away_ends_the_run(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_step(process, 1)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert_nothing_left(tmp_path)
