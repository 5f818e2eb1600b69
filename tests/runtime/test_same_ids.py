"""The ids that are trained on are those that were sampled, whatever lies between: nothing is decoded and encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.backend import Metrics, Prompt, Response
from flowrl.backends.torch_backend import TorchBackend
from flowrl.rows import Key, Rows
from flowrl.runtime import run
from flowrl.runtime.graphfile import load_graph
from flowrl.trace import GraphFunction

GRAPH = str(Path(__file__).parent / "graph_to_run.py")


def digest(prompt: Iterable[int], response: Iterable[int]) -> str:
    """Of a row's ids; where the response begins is part of it."""
    return hashlib.sha256(np.array([*prompt, -1, *response], np.int64).tobytes()).hexdigest()


@pytest.mark.parametrize("backend", ["tiny", "hf"])
@pytest.mark.parametrize(
    "passes", [{}, {"max_tokens": 24, "minibatches": 2, "kl": 0.1, "refill": 2}], ids=["one", "many"]
)
def test_the_trainer_and_the_reference_read_the_ids_that_were_sampled(
    backend: str, passes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled: dict[Key, str] = {}
    read: list[tuple[str, Key, str]] = []
    generate, backward, forward = TorchBackend.generate, TorchBackend.backward, TorchBackend.forward

    def generated(self: Any, prompts: Sequence[Prompt], *rest: Any) -> Iterator[list[Response]]:
        ids = {prompt.key: prompt.ids for prompt in prompts}
        for ended in generate(self, prompts, *rest):
            for response in ended:
                assert response.key not in sampled
                sampled[response.key] = digest(ids[response.key.group], response.ids)
            yield ended

    def note(what: str, rows: Rows) -> None:
        columns = zip(rows.keys, rows["prompt_ids"], rows["response_ids"], strict=True)
        read.extend((what, key, digest(prompt, response)) for key, prompt, response in columns)

    def trained(self: Any, rows: Rows, *rest: Any) -> Metrics:
        note("trained", rows)
        return backward(self, rows, *rest)

    def compared(self: Any, rows: Rows, *rest: Any) -> Rows:
        note("compared", rows)
        return forward(self, rows, *rest)

    monkeypatch.setattr(TorchBackend, "generate", generated)
    monkeypatch.setattr(TorchBackend, "backward", trained)
    monkeypatch.setattr(TorchBackend, "forward", compared)
    graph = load_graph(GRAPH)
    assert isinstance(graph, GraphFunction)
    summary = run(graph(backend=backend, **passes), steps=2)
    assert summary.outcome == "done"
    assert [entry for entry in read if sampled[entry[1]] != entry[2]] == []
    assert len({key for what, key, _ in read if what == "trained"}) == summary.consumed
    assert any(what == "compared" for what, *_ in read) == ("kl" in passes)
