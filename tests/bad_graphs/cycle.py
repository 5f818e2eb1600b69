"""Built by hand: the update feeds the rollout its weights as rows.

error: GraphCycle
node: rollout
message: nodes wait for each other in a cycle: rollout -> reward -> adv -> update -> rollout
"""

import flowrl as fl
from _by_hand import node

graph = fl.Graph.build(
    "cycle",
    [
        node("prompts", []),
        node("rollout", ["prompts", "update"]),  # here
        node("reward", ["rollout"]),
        node("adv", ["reward"]),
        node("update", ["adv"]),
    ],
)
