"""Checks of placement: meshes against this machine, against the models on them, and against the batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from .backend import ModelFacts
from .errors import BackendError, FlowrlError, Location, MeshError
from .graph import ForwardSpec, Graph, JudgeSpec, Node, RolloutSpec, UpdateSpec
from .mesh import AXES, Mesh
from .model import Model
from .origins import Origins

DP_ONLY = frozenset({"fsdp", "hf", "tiny"})
"""Backends that split neither layers nor heads."""


def visible_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """CUDA devices that this process may use, without asking CUDA.

    A container may list all devices of its host under /proc, and have device files only for its own: the files go
    first. Of ``CUDA_VISIBLE_DEVICES`` an empty value or -1 hides all; CUDA stops reading it at the first entry that
    names no device.
    """
    files = [path for path in root.glob("dev/nvidia*") if path.name.removeprefix("nvidia").isdigit()]
    present = len(files) or len(list(root.glob("proc/driver/nvidia/gpus/*")))
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not present:
        return present
    count = 0
    for entry in (part.strip() for part in listed.split(",")):
        by_number = entry.isdigit() and int(entry) < present
        if not (by_number or entry.startswith(("GPU-", "MIG-"))):
            break
        count += 1
    return count


def check_function_meshes(graph: Graph) -> list[FlowrlError]:
    """A model node runs on model ranks, not on CPU workers."""
    return [
        MeshError(
            f"node '{node.name}' runs a model and is placed on CPU workers",
            at=node.at,
            node=node.name,
            found=f"mesh {node.mesh}",
            wanted="a mesh of model ranks",
            fix="fl.Mesh(dp=N, device='cpu') runs a model on the CPU; Mesh.cpu(N) is for functions",
        )
        for node in graph.nodes.values()
        if node.model is not None and node.mesh is not None and node.mesh.workers
    ]


def check_ranks(graph: Graph, gpus: int) -> list[FlowrlError]:
    """All meshes with ``device="cuda"`` together have no more ranks than there are devices."""
    meshes = [(mesh, nodes) for mesh, nodes in model_meshes(graph) if mesh.device == "cuda"]
    needed = sum(mesh.world_size for mesh, _ in meshes)
    if needed <= gpus:
        return []
    worst, nodes = max(meshes, key=lambda pair: pair[0].world_size)
    if len(meshes) == 1:
        problem = (
            f"mesh '{graph.mesh_name(worst)}' needs {needed} CUDA devices ({_axes(worst)}); this machine has {gpus}"
        )
    else:
        names = " and ".join(f"'{graph.mesh_name(mesh)}' ({mesh.world_size})" for mesh, _ in meshes)
        problem = f"meshes {names} need {needed} CUDA devices together; this machine has {gpus}"
    users = ", ".join(f"'{node.name}'" for _, mesh_nodes in meshes for node in mesh_nodes)
    return [
        MeshError(
            problem,
            at=_line(nodes[0]),
            node=nodes[0].name,
            found=f"{needed} ranks, one device each, for {users}",
            wanted=f"dp x tp x pp x cp of all meshes <= {gpus}",
            fix=_smaller(gpus, len(meshes)),
        )
    ]


def check_layout(graph: Graph, facts: Mapping[str, ModelFacts]) -> list[FlowrlError]:
    """A model can be split as its mesh says: by its backend, its heads and its layers."""
    problems: list[FlowrlError] = []
    for mesh, nodes in model_meshes(graph):
        for model in {node.model.name: node.model for node in nodes if node.model}.values():
            node = next(node for node in nodes if node.model is model)
            problems += _layout(graph, mesh, model, node, facts.get(model.name))
    return problems


def _layout(graph: Graph, mesh: Mesh, model: Model, node: Node, facts: ModelFacts | None) -> list[FlowrlError]:
    name = graph.mesh_name(mesh)
    at = _line(node)
    split = [axis for axis in AXES if axis != "dp" and getattr(mesh, axis) > 1]
    if model.backend in DP_ONLY and (split or mesh.sequence_parallel):
        found = ", ".join(f"{axis}={getattr(mesh, axis)}" for axis in split) or "sequence_parallel=True"
        problem = f"backend '{model.backend}' runs dp only, and mesh '{name}' of model '{model.name}' has {found}"
        fix = f"dp={mesh.world_size}, or a backend that splits a model"
        return [MeshError(problem, at=at, node=node.name, found=found, wanted="tp = pp = cp = ep = 1", fix=fix)]
    problems: list[FlowrlError] = []
    if mesh.sequence_parallel and mesh.tp == 1:
        problem = f"mesh '{name}' splits the sequence between tensor-parallel ranks, and has one"
        problems.append(
            MeshError(problem, at=at, node=node.name, found="tp=1", wanted="tp > 1", fix="sequence_parallel=False")
        )
    for axis, count, what in (
        ("tp", facts.num_heads if facts else None, "attention heads"),
        ("pp", facts.num_layers if facts else None, "layers"),
    ):
        size = getattr(mesh, axis)
        if count and count % size:
            valid = ", ".join(str(i) for i in range(1, count + 1) if count % i == 0)
            problems.append(
                MeshError(
                    f"mesh '{name}' cannot split model '{model.name}': {count} {what} over {axis}={size}",
                    at=at,
                    node=node.name,
                    found=f"{count} % {size} = {count % size}",
                    wanted=f"{axis} in {valid}",
                    fix=f"{axis}={max(i for i in range(1, size + 1) if count % i == 0)}",
                )
            )
    return problems


def check_shares(graph: Graph) -> list[FlowrlError]:
    """Every data-parallel rank gets a prompt of every step.

    Shares need not be equal: gradients are unnormalised sums, divided once by the whole mini-batch's denominator, so no
    padding is needed. A rank without any row would hold its devices for nothing.
    """
    origins = Origins.of(graph)
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        if node.mesh is None or not isinstance(node.spec, UpdateSpec | RolloutSpec | ForwardSpec | JudgeSpec):
            continue
        batch = origins.step_size(node.name)
        if isinstance(node.spec, UpdateSpec):
            batch = node.spec.batch or batch
        if 0 < batch < node.mesh.dp:
            n, dp = origins.group_size(node.name), node.mesh.dp
            problems.append(
                MeshError(
                    f"node '{node.name}' has {batch} prompts for dp={dp} ranks of mesh '{graph.mesh_name(node.mesh)}': "
                    f"{dp - batch} would have no row (a group of n={n} stays on one rank)",
                    at=node.at,
                    node=node.name,
                    found=f"batch={batch}, n={n}, dp={dp}",
                    wanted=f"batch >= {dp}, or dp <= {batch}",
                    fix=f"batch={dp} in fl.prompts, or dp={batch}",
                )
            )
    return problems


def describe_models(
    graph: Graph, describe: Callable[[Model], ModelFacts]
) -> tuple[dict[str, ModelFacts], list[FlowrlError]]:
    """The facts of every model by name, and what is wrong with those that have none: nothing else is tried instead."""
    facts: dict[str, ModelFacts] = {}
    problems: list[FlowrlError] = []
    for name, model in graph.models.items():
        try:
            facts[name] = describe(model)
        except FlowrlError as error:
            node = next(node for node in graph.nodes.values() if node.model is model)
            problems.append(
                BackendError(
                    f"model '{name}': {error.problem}",
                    at=model.at or node.at,
                    node=error.node or node.name,
                    found=error.found or f"backend={model.backend!r}",
                    wanted=error.wanted or "a backend that is installed and has this model",
                    fix=error.fix or "'flowrl doctor' lists what is installed",
                )
            )
    return facts, problems


def placement_notes(graph: Graph, cores: int) -> list[str]:
    """What is allowed and will be slow."""
    ranks = sum(mesh.world_size for mesh, _ in model_meshes(graph) if mesh.device == "cpu")
    pools = {id(node.mesh): node.mesh.workers for node in graph.nodes.values() if node.mesh and node.mesh.workers}
    total = ranks + sum(pools.values())
    if total <= cores:
        return []
    return [f"{total} processes on CPU ({ranks} model ranks, {total - ranks} workers) share {cores} cores"]


def model_meshes(graph: Graph) -> list[tuple[Mesh, list[Node]]]:
    """Every mesh of model ranks with the nodes on it, in the order of declaration; a mesh is itself, not its shape."""
    found: dict[int, tuple[Mesh, list[Node]]] = {}
    for node in graph.nodes.values():
        if node.model is not None and node.mesh is not None and not node.mesh.workers:
            found.setdefault(id(node.mesh), (node.mesh, []))[1].append(node)
    return list(found.values())


def _line(node: Node) -> Location:
    """The line that chooses a node's mesh: that of its model, or its own when it stands on a mesh of its own."""
    if node.model is not None and node.mesh is node.model.mesh and node.model.at is not None:
        return node.model.at
    return node.at


def _axes(mesh: Mesh) -> str:
    return ", ".join(f"{axis}={getattr(mesh, axis)}" for axis in AXES if getattr(mesh, axis) > 1) or "dp=1"


def _smaller(gpus: int, num_meshes: int) -> str:
    if not gpus:
        return "device='cpu', or a machine with CUDA devices"
    shared = "one mesh for both, " if num_meshes > 1 else ""
    return f"{shared}smaller axes, or a machine with more devices"
