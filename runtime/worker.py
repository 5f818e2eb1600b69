"""One rank: its models, its blocks and its readers of prompts. It knows no sockets and no actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flowrl.backend import Backend, BackendFactory, Tokenizer
from flowrl.data import PromptReader
from flowrl.model import Model
from flowrl.rows import Column, Rows

from .events import Block, Firing
from .plan import Plan, Pool
from .ranks import Rank
from .record import Recorder

Content = Any
"""`Rows`, or a dict of named tensors in a weight sync."""


@dataclass(kw_only=True, slots=True)
class Worker:
    """A rank's state."""

    name: str
    plan: Plan
    pool: Pool
    rank: Rank
    device: str
    seed: int
    load_backend: Callable[[str], BackendFactory]
    """By name, for the models of this pool and the tokenizers of its prompts."""
    recorder: Recorder | None = None
    """Writes samples; on the host only."""
    models: dict[str, Backend] = field(default_factory=dict)
    coefficients: dict[str, list[float]] = field(default_factory=dict)
    """By update, those of its loss that move, once they have (coefficients.py)."""
    readers: dict[str, PromptReader] = field(default_factory=dict)
    tokenizers: dict[tuple[str, str], Tokenizer] = field(default_factory=dict)
    """By backend and source of a model."""
    blocks: dict[int, Content] = field(default_factory=dict)
    makers: dict[int, str] = field(default_factory=dict)
    """The node that made each block, for errors."""
    _next_block: int = 0

    def load(self) -> None:
        """Load the pool's models."""
        for name in self.pool.models:
            model = self.plan.graph.models[name]
            self.models[name] = self.load_backend(model.backend)(model, self.rank, self.device)

    def block(self, number: int, rows: Sequence[int] | None, columns: Sequence[str]) -> Content:
        """Part of a block that lies here; tensors are given whole."""
        content = self.blocks[number]
        if not isinstance(content, Rows):
            return content
        part = content.project(columns)
        return part if rows is None else part.take(rows)

    def free(self, numbers: Sequence[int]) -> None:
        """Forget blocks."""
        for number in numbers:
            self.blocks.pop(number, None)
            self.makers.pop(number, None)

    def arguments(self, firing: Firing, parts: Sequence[Content]) -> dict[str, Column]:
        """Columns [rows of the firing, in its order] for each parameter that the node binds."""
        by_source: dict[str, list[Rows]] = {}
        for each, part in zip(firing.inputs, parts, strict=True):
            by_source.setdefault(each.source, []).append(part)
        tables = {source: Rows.join(firing.keys, found) for source, found in by_source.items()}
        bindings = self.plan.graph[firing.node].bindings
        return {b.parameter: tables[b.source].columns[b.column] for b in bindings}

    def tokenizer_of(self, model: Model) -> Tokenizer:
        """A model's tokenizer, loaded once for all nodes here that read with it."""
        key = model.backend, model.source
        if key not in self.tokenizers:
            self.tokenizers[key] = self.load_backend(model.backend).load_tokenizer(model.source)
        return self.tokenizers[key]

    def model_of(self, firing: Firing) -> Backend:
        """The model that a node runs."""
        model = self.plan.graph[firing.node].model
        assert model is not None
        return self.models[model.name]

    def keep(self, node: str, content: Content, lengths: tuple[int, ...] | None) -> Block:
        """Hold what a node made, under a number that no block had before."""
        self._next_block += 1
        self.makers[self._next_block] = node
        self.blocks[self._next_block] = content
        if isinstance(content, Rows):
            keys, columns = tuple(content.keys), tuple(content.columns)
            return Block(self.name, self._next_block, keys, columns, content.num_bytes, lengths)
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
        return Block(self.name, self._next_block, (), (), num_bytes)
