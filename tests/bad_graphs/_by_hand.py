"""Nodes without a tracer, for the graphs that only a hand can make."""

import sys

from flowrl.errors import Location
from flowrl.graph import Binding, FunctionSpec, Node


def node(name: str, sources: list[str]) -> Node:
    """A node that reads the column of each source that bears the source's name, declared on the caller's line."""
    spec = FunctionSpec(
        function=print, settings={}, timeout_s=None, on_error="fail", retries=0, max_failure_rate=0.0, role="node"
    )
    frame = sys._getframe(1)
    return Node(
        name=name,
        spec=spec,
        per="row",
        bindings=tuple(Binding(source, source, source) for source in sources),
        gates=(),
        outputs=(name,),
        at=Location(frame.f_code.co_filename, frame.f_lineno),
    )
