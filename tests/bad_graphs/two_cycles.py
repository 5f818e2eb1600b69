"""Built by hand: two cycles that share no node.

error: GraphCycle
node: actor
message: nodes wait for each other in a cycle: actor -> reward -> actor
"""

import flowrl as fl
from _by_hand import node

graph = fl.Graph.build(
    "two_cycles",
    [
        node("prompts", []),
        node("actor", ["prompts", "reward"]),  # here
        node("reward", ["actor"]),
        node("critic", ["prompts", "values"]),
        node("values", ["critic"]),
        node("update", ["reward", "values"]),
    ],
)
