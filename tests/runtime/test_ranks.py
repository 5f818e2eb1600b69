"""Places in a mesh, and devices."""

from __future__ import annotations

import os
from typing import Any, Literal

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.errors import MeshError
from flowrl.runtime.plan import Plan, Pool, compile_plan
from flowrl.runtime.ranks import devices, num_threads, place

from .hands import ROWS, digest, policy

Device = Literal["auto", "cpu", "cuda"]


def plan_of(train: fl.Mesh, sample: fl.Mesh) -> Plan:
    """A plan with a mesh that trains, one that samples, and a CPU worker."""

    @fl.graph
    def apart(train: fl.Mesh = train, sample: fl.Mesh = sample) -> None:
        model = policy(mesh=train)
        samples = fl.rollout(model, fl.prompts(ROWS, batch=2), n=2, mesh=sample)
        scores = digest(samples, mesh=fl.Mesh.cpu(1))
        fl.update(model, samples, advantages.grpo(samples, scores), loss=losses.ppo_clip(clip_low=0.2, clip_high=0.2))

    return compile_plan(apart())


def two(first: Device = "auto", second: Device = "auto", dp: int = 2) -> Plan:
    return plan_of(fl.Mesh(dp=dp, device=first), fl.Mesh(dp=1, device=second))


def pool(**axes: Any) -> Pool:
    mesh = fl.Mesh(**axes)
    return Pool(name="m", kind="model", size=mesh.world_size, mesh=mesh)


def test_ranks_of_a_data_parallel_mesh_are_replicas() -> None:
    places = [place(pool(dp=4), i) for i in range(4)]
    assert [(p.rank, p.world_size, p.dp_rank, p.dp_size) for p in places] == [(i, 4, i, 4) for i in range(4)]


def test_neighbours_share_a_replica_in_a_tensor_parallel_mesh() -> None:
    assert [place(pool(dp=2, tp=2, pp=2), i).dp_rank for i in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place(pool(dp=2, cp=2), i).dp_rank for i in range(4)] == [0, 0, 1, 1]


def test_the_host_and_cpu_workers_have_places_too() -> None:
    assert place(Pool(name="host", kind="host", size=1), 0).dp_size == 1
    assert place(Pool(name="c", kind="cpu", size=3, mesh=fl.Mesh.cpu(3)), 2).dp_rank == 2


def test_without_devices_models_compute_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    assert set(devices(two(), 0).values()) == {"cpu"}
    assert not caplog.records


def test_each_rank_gets_a_device_of_its_own() -> None:
    assert devices(two(), 4) == {"sample.0": "cuda:0", "train.0": "cuda:1", "train.1": "cuda:2"}


def test_too_few_devices_are_left_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert set(devices(two(), 2).values()) == {"cpu"}
    assert "meshes 'sample', 'train' compute on the CPU: all need 3 devices, 2 are visible" in caplog.text


def test_a_mesh_that_must_have_devices_gets_them_first(caplog: pytest.LogCaptureFixture) -> None:
    assert devices(two(second="cuda"), 2) == {"train.0": "cpu", "train.1": "cpu", "sample.0": "cuda:0"}
    assert "meshes 'train' compute on the CPU" in caplog.text


def test_a_mesh_on_the_cpu_takes_no_device() -> None:
    assert devices(two(first="cpu"), 1) == {"train.0": "cpu", "train.1": "cpu", "sample.0": "cuda:0"}


@pytest.mark.parametrize(
    ("visible", "told"),
    [
        ("2,3", "'2,3'"),
        ("", "''"),
        ("GPU-8f1a,GPU-77b2", "'GPU-8f1a,GPU-77b2'"),
        (None, "CUDA_VISIBLE_DEVICES is unset"),
    ],
)
def test_more_ranks_than_devices_name_the_meshes_and_what_is_visible(
    visible: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    num_gpus = len([each for each in (visible or "").split(",") if each])
    with pytest.raises(MeshError) as error:
        devices(two("cuda", "cuda"), num_gpus)
    text = str(error.value)
    assert "meshes 'sample', 'train' need 3 CUDA devices" in text
    assert f"found:  {num_gpus} visible" in text
    assert told in text


def test_devices_are_numbered_as_the_users_list_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert list(devices(two("cuda", "cuda"), 3).values()) == ["cuda:0", "cuda:1", "cuda:2"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3,5"


@pytest.mark.parametrize(("asked", "threads"), [("3", 3), ("0", 2), ("many", 2), (None, 2)])
def test_workers_share_the_cores(asked: str | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(11)))
    assert num_threads(two()) == threads  # host, three ranks and a CPU worker
