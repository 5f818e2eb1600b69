"""flowrl: reinforcement learning for language models as a dataflow graph.

``import flowrl as fl`` gives the whole language: declare nodes inside a function under `graph`, and run it with
``flowrl run file.py``. Importing it loads neither torch nor transformers nor zmq.
"""

from pathlib import Path

# Installed, runtime/, backends/ and graphs/ lie inside this folder (see setup.cfg). In a checkout they stand beside it.
_checkout = Path(__file__).parent.parent
if (_checkout / "setup.cfg").is_file():
    __path__.append(str(_checkout))

from .coefficients import Adaptive, Lagrange  # noqa: E402
from .functions import advantage, node, reward  # noqa: E402
from .graph import Graph, Node  # noqa: E402
from .loss import Loss, loss  # noqa: E402
from .mesh import Mesh  # noqa: E402
from .model import AdamW, Dtype, Model  # noqa: E402
from .nodes import (  # noqa: E402
    evaluate,
    filter,
    judge,
    logit_energy,
    logprobs,
    prompts,
    responses,
    rollout,
    score,
    topk,
    update,
    values,
)
from .stream import Advantages, LogProbs, Metrics, Prompts, Samples, Scores, Stream, TopK, Values  # noqa: E402
from .tool import Tool, tool  # noqa: E402
from .trace import GraphFunction, graph  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "Adaptive",
    "Advantages",
    "Dtype",
    "Graph",
    "GraphFunction",
    "Lagrange",
    "LogProbs",
    "Loss",
    "Mesh",
    "Metrics",
    "Model",
    "Node",
    "Prompts",
    "Samples",
    "Scores",
    "Stream",
    "Tool",
    "TopK",
    "Values",
    "advantage",
    "evaluate",
    "filter",
    "graph",
    "judge",
    "logit_energy",
    "logprobs",
    "loss",
    "node",
    "prompts",
    "responses",
    "reward",
    "rollout",
    "score",
    "tool",
    "topk",
    "update",
    "values",
]
