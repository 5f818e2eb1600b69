"""Built by hand: a node reads its own output.

error: GraphCycle
node: smooth
message: node 'smooth' reads its own output: smooth -> smooth
"""

import flowrl as fl
from _by_hand import node

graph = fl.Graph.build(
    "self_loop",
    [
        node("prompts", []),
        node("smooth", ["prompts", "smooth"]),  # here
        node("update", ["smooth"]),
    ],
)
