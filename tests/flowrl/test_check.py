import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

import flowrl as fl
from flowrl import advantages, losses
from flowrl.backend import ModelFacts
from flowrl.check import check, notes
from flowrl.errors import (
    BackendError,
    DataError,
    FlowrlError,
    GraphCycle,
    LengthError,
    Location,
    NameConflict,
    UnknownColumn,
    UnreadOutput,
)
from flowrl.graph import Binding, FunctionSpec, Graph, Node

ROWS = [{"prompt": str(i), "answer": str(i)} for i in range(64)]
FACTS = ModelFacts(max_length=1024, num_heads=12, num_layers=6, vocab_size=100)


@fl.reward
def exact_match(response: str, answer: str) -> float:
    return float(response == answer)


def hand_node(name: str, sources: list[str], line: int = 1) -> Node:
    spec = FunctionSpec(
        function=print, settings={}, timeout_s=None, on_error="fail", retries=0, max_failure_rate=0.0, role="node"
    )
    return Node(
        name=name,
        spec=spec,
        per="row",
        bindings=tuple(Binding(source, source, source) for source in sources),
        gates=(),
        outputs=(name,),
        at=Location("graph.py", line),
    )


def hand_graph(**sources: str) -> Graph:
    nodes = [hand_node(name, text.split(), line) for line, (name, text) in enumerate(sources.items(), 1)]
    return Graph.build("hand", nodes)


@fl.graph
def grpo(
    rows: Any = None,
    batch: int = 8,
    n: int = 4,
    max_prompt_tokens: int | None = None,
    max_new_tokens: int = 64,
    last: str = "drop",
    minibatches: int = 1,
    train: fl.Mesh | None = None,
):
    policy = fl.Model("model", mesh=train or fl.Mesh(device="cpu"), optimizer=fl.AdamW(lr=1e-6))
    prompts = fl.prompts(ROWS if rows is None else rows, batch=batch, max_prompt_tokens=max_prompt_tokens, last=last)
    samples = fl.rollout(policy, prompts, n=n, max_new_tokens=max_new_tokens)
    advantage = advantages.grpo(samples, exact_match(samples))
    reference = fl.logprobs(policy.frozen(), samples)
    loss = losses.ppo_clip() + 0.1 * losses.kl()
    fl.update(policy, samples, advantage, reference, loss=loss, minibatches=minibatches)


@fl.graph
def ppo(n: int = 1):
    """PPO with a critic, a length reward as a metric, a group filter and an evaluation."""
    policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
    critic = fl.Model("model", head="value", name="critic", optimizer=fl.AdamW(lr=1e-5))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=2 * n, staleness=2)
    scores = exact_match(samples)
    mean_score(samples, scores)
    kept = fl.filter(samples, scores, keep=differ, per="group")
    values = fl.values(critic, kept)
    advantage = advantages.gae(kept, advantages.token_rewards(kept, scores), values)
    fl.update(policy, kept, advantage, loss=losses.ppo_clip(), batch=16)
    fl.update(critic, kept, advantage, old_values=values, loss=losses.value_clip(), batch=16, name="fit")
    held_out = fl.prompts(ROWS, batch=4, name="held_out")
    fl.evaluate(policy, held_out, exact_match, every=5)


@fl.graph
def sample_only():
    samples = fl.rollout(fl.Model("model"), fl.prompts(ROWS, batch=8), n=4)
    exact_match(samples)


@fl.node(out=fl.Metrics)
def mean_score(scores: list[float]) -> float:
    return sum(scores) / len(scores)


def differ(scores: list[float]) -> bool:
    return len(set(scores)) > 1


@fl.graph
def two_rollouts_of_one_source():
    """Each filter reads only the data set; which rollout's samples it is about, its first argument says."""
    prompts = fl.prompts(ROWS, batch=8)
    for name in ("one", "two"):
        policy = fl.Model("model", name=name, optimizer=fl.AdamW(lr=1e-6))
        kept = fl.filter(fl.rollout(policy, prompts, n=4), keep=is_easy)
        fl.update(policy, kept, advantages.grpo(kept, difficulty(kept)), loss=losses.ppo_clip())


@fl.reward
def difficulty(answer: str) -> float:
    return float(len(answer))


def is_easy(answer: str) -> bool:
    return len(answer) < 2


def facts(model: fl.Model) -> ModelFacts:
    return FACTS


@pytest.mark.parametrize("graph", [grpo, ppo, sample_only, two_rollouts_of_one_source], ids=lambda graph: graph.name)
def test_a_good_graph_has_no_problem(graph: Callable[[], Graph]) -> None:
    assert check(graph(), describe=facts, gpus=0) == []


def test_a_node_that_reads_only_the_data_set_is_about_the_samples_that_it_is_given() -> None:
    graph = two_rollouts_of_one_source()
    assert [graph[name].sources for name in ("filter", "filter_2")] == [
        ("prompts", "rollout"),
        ("prompts", "rollout_2"),
    ]


def test_a_cycle_is_printed_as_a_path_with_lines() -> None:
    graph = hand_graph(
        prompts="", rollout="prompts update", reward="rollout", adv="reward", update="adv", rest="update"
    )
    [error] = check(graph)
    assert isinstance(error, GraphCycle)
    assert "rollout -> reward -> adv -> update -> rollout" in error.problem
    assert error.found == "rollout (graph.py:2); reward (graph.py:3); adv (graph.py:4); update (graph.py:5)"
    assert error.wanted is not None
    assert "the only feedback edge is a model's version" in str(error.wanted)


def test_a_self_loop_is_a_cycle() -> None:
    [error] = check(hand_graph(a="", b="a b"))
    assert error.problem == "node 'b' reads its own output: b -> b"


def test_separate_cycles_are_all_listed() -> None:
    problems = check(hand_graph(a="b", b="a", c="d", d="c", e="e"))
    assert [problem.problem.split(": ")[-1] for problem in problems] == ["a -> b -> a", "c -> d -> c", "e -> e"]


def test_cycles_through_one_node_are_told_apart() -> None:
    problems = check(hand_graph(a="b c", b="a", c="a"))
    assert sorted(problem.problem.split(": ")[-1] for problem in problems) == ["a -> b -> a", "a -> c -> a"]


def test_a_dense_component_lists_no_more_cycles_than_one_reads() -> None:
    names = [f"n{i}" for i in range(12)]
    assert len(check(hand_graph(**{name: " ".join(set(names) - {name}) for name in names}))) == 20


def test_a_binding_to_a_column_that_its_node_does_not_write_is_refused() -> None:
    reader = Node(**{**fields(hand_node("b", ["a"])), "bindings": (Binding("x", "a", "scoers"),)})
    writer = Node(**{**fields(hand_node("a", [])), "outputs": ("scores",)})
    [error] = check(Graph.build("hand", [writer, reader]))
    assert isinstance(error, UnknownColumn)
    assert error.fix == "did you mean 'scores'?"


def fields(node: Node) -> dict[str, Any]:
    return {name: getattr(node, name) for name in Node.__slots__}


def test_two_rewards_of_one_factory_get_names_of_their_own() -> None:
    def make(word: str) -> Any:
        @fl.reward
        def reward(response: str) -> float:
            return float(word in response)

        return reward

    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=4)
        first, second = make("a")(samples), make("b")(samples)
        advantage = weigh(samples, first=first, second=second)
        fl.update(policy, samples, advantage, loss=losses.ppo_clip())

    assert [name for name in graph().nodes if name.startswith("reward")] == ["reward", "reward_2"]
    assert check(graph(), gpus=0) == []


@fl.advantage
def weigh(first: Any, second: Any) -> Any:
    return first + second


def test_one_function_used_twice_makes_two_nodes() -> None:
    score = fl.reward(lambda response: float(len(response)))

    @fl.graph
    def graph():
        samples = fl.rollout(fl.Model("model"), fl.prompts(ROWS, batch=8), n=4)
        score(samples)
        score(samples)

    assert list(graph().nodes)[-2:] == ["lambda", "lambda_2"]


def test_a_function_named_like_a_part_of_the_runtime_gets_a_suffix_and_an_explicit_name_is_refused() -> None:
    @fl.reward
    def record(response: str) -> float:
        return 0.0

    @fl.graph
    def graph(name: str | None = None):
        record(fl.rollout(fl.Model("model"), fl.prompts(ROWS, batch=8), n=4), name=name)

    assert "record_2" in graph().nodes
    with pytest.raises(NameConflict, match="node name 'sync' is reserved for the runtime"):
        graph(name="sync")


def test_two_explicit_names_show_both_lines() -> None:
    @fl.graph
    def graph():
        samples = fl.rollout(fl.Model("model"), fl.prompts(ROWS, batch=8), n=4)
        exact_match(samples, name="match")
        exact_match(samples, name="match")

    with pytest.raises(NameConflict, match="two nodes are named 'match'") as caught:
        graph()
    first, second = str(caught.value.found).split(" and ")
    assert int(second.rsplit(":")[-1]) == int(first.rsplit(":")[-1]) + 1


class Scorer:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, response: str) -> float:
        return self.weight * len(response)

    def method(self, response: str) -> float:
        return self.weight * len(response)

    class Nested:
        def __call__(self, response: str) -> float:
            return float(len(response))


def weighted(response: str, *, weight: float) -> float:
    return weight * len(response)


def doubled(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> float:
        return 2 * function(*args, **kwargs)

    return wrapper


def closure(weight: float) -> Callable[[str], float]:
    def inner(response: str) -> float:
        return weight * len(response)

    return inner


CALLABLES: Mapping[str, Callable[..., float]] = {
    "lambda": lambda response: 2.0 * len(response),
    "closure": closure(2.0),
    "nested class": Scorer.Nested(),
    "callable object": Scorer(2.0),
    "partial": functools.partial(weighted, weight=2.0),
    "wrapped": doubled(lambda response: float(len(response))),
    "bound method": Scorer(2.0).method,
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_any_callable_is_a_node_function(kind: str) -> None:
    score = fl.reward(CALLABLES[kind])

    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=4)
        fl.update(policy, samples, advantages.grpo(samples, score(samples)), loss=losses.ppo_clip())

    node = list(graph().nodes.values())[2]
    assert [binding.column for binding in node.bindings] == ["response"]
    assert check(graph(), gpus=0) == []
    assert score("abc") in (3.0, 6.0)


def test_a_forgotten_node_is_named() -> None:
    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=4)
        fl.logprobs(policy.frozen(), samples, name="kl")
        fl.update(policy, samples, advantages.grpo(samples, exact_match(samples)), loss=losses.ppo_clip())

    [error] = check(graph(), gpus=0)
    assert isinstance(error, UnreadOutput)
    assert "nobody reads the output of node 'kl'" in error.problem


def test_an_unread_chain_is_told_by_its_end() -> None:
    @fl.graph
    def graph():
        policy = fl.Model("model", optimizer=fl.AdamW(lr=1e-6))
        samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=4)
        advantages.grpo(samples, exact_match(samples), name="unused")
        fl.update(policy, samples, loss=losses.entropy())

    assert [error.node for error in check(graph(), gpus=0)] == ["unused"]


def test_fewer_rows_than_a_batch_are_refused_unless_the_last_batch_may_be_short() -> None:
    [error] = check(grpo(rows=ROWS[:3], batch=8), gpus=0)
    assert isinstance(error, DataError)
    assert "3 usable of 3 rows, batch needs 8" in error.problem
    assert check(grpo(rows=ROWS[:10], batch=4), gpus=0) == []
    assert check(grpo(rows=ROWS[:3], batch=8, last="short"), gpus=0) == []


def test_a_generator_is_read_once() -> None:
    graph = grpo(rows=(dict(row) for row in ROWS))
    assert check(graph, gpus=0) == []
    assert check(graph, gpus=0) == []


def test_a_reward_that_needs_a_column_of_the_data_lists_those_present_and_wanted() -> None:
    with pytest.raises(UnknownColumn, match="node 'exact_match' reads column 'answer'") as caught:
        grpo(rows=[{"messages": [{"role": "user", "content": "2+2"}]}] * 8)
    assert "messages" in str(caught.value.found)
    assert caught.value.wanted == "a column 'answer'"


def test_a_prompt_and_a_response_longer_than_the_model_are_refused() -> None:
    [error] = check(grpo(max_prompt_tokens=1000, max_new_tokens=25), describe=facts, gpus=0)[:1]
    assert isinstance(error, LengthError)
    assert "1000 + 25 = 1025 tokens" in error.problem
    assert error.fix == "max_new_tokens=24 or less"
    assert check(grpo(max_prompt_tokens=1000, max_new_tokens=24), describe=facts, gpus=0) == []
    assert len(check(grpo(max_new_tokens=1024), describe=facts, gpus=0)) == 2  # of the policy and of the reference


def test_a_backend_that_is_not_there_is_never_replaced() -> None:
    asked: list[str] = []

    def describe(model: fl.Model) -> ModelFacts:
        asked.append(model.name)
        raise BackendError("backend 'megatron' needs the megatron-core package", fix="pip install 'flowrl[megatron]'")

    problems: list[FlowrlError] = check(grpo(), describe=describe, gpus=0)
    assert sorted(asked) == ["policy", "reference"]
    assert [type(problem) for problem in problems] == [BackendError, BackendError]
    assert "model 'policy': backend 'megatron' needs the megatron-core package" in problems[0].problem
    assert problems[0].fix == "pip install 'flowrl[megatron]'"


def test_every_problem_is_told_at_once() -> None:
    problems = check(grpo(rows=ROWS[:3], batch=4, n=1, minibatches=5), gpus=0)
    assert [problem.node for problem in problems] == ["grpo", "update", "prompts"]


def test_crowded_cores_and_idle_ranks_are_worth_a_note() -> None:
    graph = grpo(train=fl.Mesh(dp=4, device="cpu", name="train"), minibatches=4)
    assert check(graph, gpus=0) == []
    crowded, idle = notes(graph, cores=2)
    assert crowded == "4 processes on CPU (4 model ranks, 0 workers) share 2 cores"
    assert "a mini-batch has 2 prompts" in idle
    assert notes(grpo(), cores=2) == []
