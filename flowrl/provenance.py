"""Where log-probs come from: of which model, at which temperature, over which tokens, of which version.

A ratio, a KL and an importance weight compare log-probs of the same tokens. They mean something only if what differs
between the two sides is what they are to measure. So every column of log-probs has a `Provenance`, which follows from
the graph alone, and the checks here hold each comparison to a rule:

* **temperature**: log-probs that one node compares are taken at one temperature, the trained model's among them.
* **model**: a loss's ratio to ``old_logprobs`` begins at the model that is trained. Rows that another model sampled are
  trained on by saying so: with ``old_logprobs`` recomputed (``fl.logprobs(policy, samples)``), or with a term whose
  ``weights=`` correct for the other sampler (`flowrl.correction`).
* **weights**: importance weights lead from the sampler to where the ratio begins, or what lies between counts twice.

The support is the same for all, by design: ``top_k``, ``top_p`` and ``min_p`` decide which token is drawn, and
log-probs stay those of the full vocabulary, in the sampler and in the trainer. Log-probs that a function of the user's,
or the data set, wrote have no known provenance: they are allowed, and worth a note.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .errors import FlowrlError, ProvenanceError
from .graph import Binding, ForwardSpec, Graph, Node, RolloutSpec, UpdateSpec
from .loss import TRAINED
from .origins import Origins

Version = Literal["as sampled", "before the update", "initial weights"]
"""Of a row's log-probs: the one in its ``versions``; the one that its step begins with; or that of a frozen model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What a column of log-probs is of."""

    model: str
    temperature: float
    version: Version
    support: str = "full vocabulary"
    """The tokens that the probabilities add up to 1 over."""

    def __str__(self) -> str:
        return f"{self.model} ({self.version}, temperature {self.temperature:g})"


def is_logprobs(column: str) -> bool:
    """Whether a column holds log-probs of tokens: ``logprobs``, or a name that ends so."""
    return column == "logprobs" or column.endswith("_logprobs")


def provenance(graph: Graph, node: str, column: str) -> Provenance | None:
    """Of a column of log-probs that a node writes; None where a function or the data set wrote it."""
    writer = graph.nodes.get(node)
    if writer is None or writer.model is None or not is_logprobs(column):
        return None
    name = writer.model.name
    if isinstance(writer.spec, RolloutSpec):
        return Provenance(model=name, temperature=writer.spec.temperature, version="as sampled")
    if isinstance(writer.spec, ForwardSpec):
        trained = any(isinstance(n.spec, UpdateSpec) and n.model is writer.model for n in graph.nodes.values())
        version: Version = "before the update" if trained else "initial weights"
        return Provenance(model=name, temperature=writer.spec.temperature, version=version)
    return None


def compared(graph: Graph, node: Node) -> dict[str, Provenance | None]:
    """By parameter, the provenance of the log-probs that a node reads; of a column under two names, the first."""
    reads: dict[tuple[str, str], str] = {}
    for binding in node.bindings:
        if is_logprobs(binding.column) or is_logprobs(binding.parameter):
            reads.setdefault((binding.source, binding.column), binding.parameter)
    return {parameter: provenance(graph, *column) for column, parameter in reads.items()}


def check_provenance(graph: Graph) -> list[FlowrlError]:
    """Log-probs that are compared are of the model, the temperature and the version that the comparison is about."""
    rollouts = Origins.of(graph).rollouts
    problems: list[FlowrlError] = []
    for node in graph.nodes.values():
        if len(rollouts[node.name]) < 2:  # samples of two rollouts are a mistake of their own
            problems += _temperature_problems(graph, node)
            problems += [*_ratio_problems(graph, node), *_weight_problems(graph, node)]
    return problems


def provenance_notes(graph: Graph) -> list[str]:
    """Log-probs of unknown provenance that an update compares with those of the model that it trains."""
    return [
        f"node '{node.name}': flowrl cannot know of which model and temperature {_column(binding)} is"
        for node in graph.nodes.values()
        for binding in node.bindings
        if isinstance(node.spec, UpdateSpec) and binding.parameter in node.spec.loss.reads
        if is_logprobs(binding.parameter) and provenance(graph, binding.source, binding.column) is None
    ]


def _temperature_problems(graph: Graph, node: Node) -> Iterator[FlowrlError]:
    found = {name: each.temperature for name, each in compared(graph, node).items() if each is not None}
    if isinstance(node.spec, UpdateSpec) and any(is_logprobs(name) for name in TRAINED if name in node.spec.loss.reads):
        found[f"the trained {node.model.name if node.model else 'model'}"] = node.spec.temperature
    if len(set(found.values())) > 1:
        yield ProvenanceError(
            f"node '{node.name}' compares log-probs of different temperatures",
            at=node.at,
            node=node.name,
            found=", ".join(f"{name} at {temperature:g}" for name, temperature in found.items()),
            wanted="one temperature: the samples' own, which fl.logprobs takes when temperature= is left out",
            fix="take them all of one rollout's samples, with fl.logprobs(model, samples)",
        )


def _ratio_problems(graph: Graph, node: Node) -> Iterator[FlowrlError]:
    binding = _binding(node, "old_logprobs")
    if binding is None or not isinstance(node.spec, UpdateSpec) or node.model is None:
        return
    terms = [term for term in node.spec.loss.terms if "old_logprobs" in term.names and not term.weights]
    begins = provenance(graph, binding.source, binding.column)
    if begins is not None and terms and begins.model != node.model.name:
        name = node.model.name
        yield ProvenanceError(
            f"node '{node.name}' trains model '{name}' by its ratio to another model, '{begins.model}'",
            at=node.at,
            node=node.name,
            found=f"{terms[0].name} reads {_column(binding)}, of {begins}",
            wanted=f"log-probs of '{name}' from before the update: there the ratio is 1",
            fix=f"pass fl.logprobs({name}, samples) as old_logprobs; to correct for a sampler that is another model, "
            f"weigh {terms[0].name} too: see flowrl.correction",
        )


def _weight_problems(graph: Graph, node: Node) -> Iterator[FlowrlError]:
    """Weights lead from the sampler to X, and a ratio from X on; without a ratio X is the trained model."""
    if not isinstance(node.spec, UpdateSpec) or node.model is None:
        return
    ratio = _binding(node, "old_logprobs")
    begins = provenance(graph, ratio.source, ratio.column) if ratio else None
    for term in node.spec.loss.terms:
        weights = _binding(node, term.weights) if term.weights else None
        target = _binding(graph[weights.source], "old_logprobs") if weights else None
        ends = provenance(graph, target.source, target.column) if target else None
        if weights is None or target is None or ends is None:
            continue
        lead = f"'{weights.column}' of '{weights.source}' lead to {ends}"
        if "old_logprobs" in term.names and begins not in (None, ends):
            yield ProvenanceError(
                f"node '{node.name}' weighs its loss up to one policy, and its ratio begins at another",
                at=node.at,
                node=node.name,
                found=f"{lead}; old_logprobs are of {begins}",
                wanted="one column for both: what lies between the two counts twice",
                fix=f"give '{node.name}' the old_logprobs that '{weights.source}' reads, those of '{target.source}'",
            )
        elif ends.model != node.model.name:
            yield ProvenanceError(
                f"node '{node.name}' trains model '{node.model.name}' with weights for another model",
                at=node.at,
                node=node.name,
                found=lead,
                wanted=f"weights that lead to '{node.model.name}'",
                fix=f"give '{weights.source}' fl.logprobs({node.model.name}, samples) as its old_logprobs",
            )


def _binding(node: Node, parameter: str) -> Binding | None:
    return next((binding for binding in node.bindings if binding.parameter == parameter), None)


def _column(binding: Binding) -> str:
    renamed = "" if binding.parameter == binding.column else f"{binding.parameter} = "
    return f"{renamed}'{binding.column}' of node '{binding.source}'"


def as_plain(found: Provenance | None) -> dict[str, object]:
    """A provenance as plain values; of one that nobody knows, every part is None."""
    if found is None:
        return dict.fromkeys(field.name for field in dataclasses.fields(Provenance))
    return dataclasses.asdict(found)
