from pathlib import Path

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.backend import ModelFacts
from flowrl.check import check
from flowrl.errors import FlowrlError
from flowrl.graph import Graph
from flowrl.placement import visible_gpus

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(64)]


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


@fl.graph
def grpo(
    train: fl.Mesh,
    generate: fl.Mesh | None = None,
    batch: int = 8,
    backend: str = "megatron",
):
    policy = fl.Model("model", mesh=train, backend=backend, optimizer=fl.AdamW(lr=1e-6))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=batch), n=8, mesh=generate)
    fl.update(policy, samples, advantages.grpo(samples, exact_match(samples)), loss=losses.ppo_clip())


def facts(model: fl.Model) -> ModelFacts:
    return ModelFacts(max_length=1024, num_heads=12, num_layers=6, vocab_size=100)


def problems(graph: Graph, gpus: int = 8) -> list[FlowrlError]:
    return check(graph, describe=facts, gpus=gpus)


def test_two_prompts_leave_two_of_four_ranks_without_a_row() -> None:
    rollout, update = problems(grpo(train=fl.Mesh(dp=4), batch=2, backend="hf"))
    assert (rollout.node, update.node) == ("rollout", "update")
    assert "has 2 prompts for dp=4 ranks of mesh 'train': 2 would have no row" in update.problem
    assert update.found == "batch=2, n=8, dp=4"
    assert update.wanted == "batch >= 4, or dp <= 2"


def test_uneven_shares_need_no_padding() -> None:
    assert problems(grpo(train=fl.Mesh(dp=4), batch=6, backend="hf")) == []


def test_a_mesh_larger_than_the_machine_says_its_axes() -> None:
    [error] = problems(grpo(train=fl.Mesh(dp=2, tp=4, device="cuda")), gpus=4)
    assert error.problem == "mesh 'train' needs 8 CUDA devices (dp=2, tp=4); this machine has 4"
    assert "'rollout', 'update'" in str(error.found)


def test_meshes_of_one_machine_add_up() -> None:
    both = grpo(train=fl.Mesh(dp=3, device="cuda"), generate=fl.Mesh(dp=2, device="cuda"))
    [error] = problems(both, gpus=4)
    assert error.problem == "meshes 'generate' (2) and 'train' (3) need 5 CUDA devices together; this machine has 4"
    assert problems(both, gpus=5) == []


def test_a_cuda_mesh_is_not_moved_to_the_cpu() -> None:
    [error] = problems(grpo(train=fl.Mesh(device="cuda")), gpus=0)
    assert "needs 1 CUDA devices (dp=1); this machine has 0" in error.problem
    assert error.fix == "device='cpu', or a machine with CUDA devices"
    assert problems(grpo(train=fl.Mesh()), gpus=0) == []
    assert problems(grpo(train=fl.Mesh(device="cpu", dp=4)), gpus=0) == []


def test_heads_and_layers_divide() -> None:
    heads, layers = problems(grpo(train=fl.Mesh(tp=8, pp=4)))
    assert "12 attention heads over tp=8" in heads.problem
    assert heads.wanted == "tp in 1, 2, 3, 4, 6, 12"
    assert heads.fix == "tp=6"
    assert "6 layers over pp=4" in layers.problem
    assert problems(grpo(train=fl.Mesh(tp=4, pp=3, dp=2))) == []


def test_the_hf_backend_runs_dp_only() -> None:
    [error] = problems(grpo(train=fl.Mesh(tp=2, cp=2), backend="hf"))
    assert "backend 'hf' runs dp only, and mesh 'train' of model 'policy' has tp=2, cp=2" in error.problem
    [error] = problems(grpo(train=fl.Mesh(), generate=fl.Mesh(pp=2, name="generate"), backend="hf"))
    assert error.node == "rollout"


def test_sequence_parallelism_needs_tensor_parallel_ranks() -> None:
    [error] = problems(grpo(train=fl.Mesh(sequence_parallel=True)))
    assert error.fix == "sequence_parallel=False"


def device_files(root: Path, files: int, listed: int) -> Path:
    for i in range(files):
        (root / "dev").mkdir(exist_ok=True)
        (root / "dev" / f"nvidia{i}").touch()
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev" / "nvidiactl").touch()
    for i in range(listed):
        (root / "proc/driver/nvidia/gpus" / f"0000:0{i}").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("files", "listed", "variable", "count"),
    [
        (4, 4, None, 4),
        (2, 8, None, 2),  # a container with two of eight
        (0, 3, None, 3),
        (0, 0, None, 0),
        (0, 0, "0,1", 0),
        (4, 4, "", 0),
        (4, 4, "-1", 0),
        (4, 4, "2,3", 2),
        (4, 4, "1,9,2", 1),
        (4, 4, "GPU-8f2a, GPU-77bc", 2),
        (4, 4, "MIG-8f2a", 1),
    ],
)
def test_visible_devices_are_those_of_the_variable_that_exist(
    tmp_path: Path, files: int, listed: int, variable: str | None, count: int
) -> None:
    root = device_files(tmp_path, files, listed)
    assert visible_gpus({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}, root) == count
