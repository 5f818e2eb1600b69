"""Built by hand: a binding names a node that is not there.

error: UnknownColumn
node: adv
message: node 'adv' reads 'rewards' from node 'rewards', which is not declared
"""

import flowrl as fl
from _by_hand import node

graph = fl.Graph.build(
    "binding_to_no_node",
    [
        node("prompts", []),
        node("reward", ["prompts"]),
        node("adv", ["rewards"]),  # here
    ],
)
