"""Advantage estimators against formulas written out here, and on inputs that people really met."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flowrl as fl
from flowrl import advantages
from flowrl.errors import WrongType


def tensor(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Tensor, wanted: object, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=found.dtype), rtol=0, atol=atol)


SEVEN_OF_EIGHT = torch.tensor([0.0] + [0.95] * 7)
ONE_GROUP = torch.zeros(8, dtype=torch.int64)


# Groups


def test_one_failure_of_eight_stays_within_the_largest_possible_score() -> None:
    found = advantages.grpo(SEVEN_OF_EIGHT, ONE_GROUP)
    close(found, [-2.47487] + [0.353553] * 7)
    assert found.abs().max() <= 7 / math.sqrt(8)


def test_leave_one_out_of_one_failure_of_eight() -> None:
    close(advantages.rloo(SEVEN_OF_EIGHT, ONE_GROUP), [-0.95] + [0.135714] * 7)


def test_leave_one_out_over_a_standard_deviation_is_refused() -> None:
    with pytest.raises(TypeError, match="normalize_std"):
        advantages.rloo(SEVEN_OF_EIGHT, ONE_GROUP, normalize_std=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("score", [0.95, 0.1 + 0.2, 1e6 + 1, -1e-3, 0.0])
@pytest.mark.parametrize(
    "estimator", [advantages.grpo, advantages.dr_grpo, advantages.rloo, advantages.gpg, advantages.grpo_passk]
)
def test_equal_scores_give_exactly_zero(estimator: object, score: float, dtype: torch.dtype) -> None:
    scores = torch.full((7,), score, dtype=dtype)
    assert estimator(scores, torch.tensor([3, 3, 9, 3, 9, 9, 9])).eq(0).all()  # type: ignore[operator]


def test_equal_scores_give_exactly_zero_without_eps_too() -> None:
    assert advantages.grpo(torch.full((8,), 0.95), ONE_GROUP, eps=0.0).eq(0).all()


def test_a_common_offset_of_a_million_costs_nothing() -> None:
    found = advantages.grpo(torch.tensor([1e6, 1e6 + 1, 1e6, 1e6 + 1]), torch.tensor([4, 4, 4, 4]))
    close(found, [-0.866025, 0.866025, -0.866025, 0.866025])


def test_rows_of_a_group_need_not_stand_together() -> None:
    found = advantages.grpo(torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 1, 0, 1]))
    close(found, [0.707107, 0.0, -0.707107, 0.0])


def test_a_dropped_row_enters_no_baseline() -> None:
    close(advantages.grpo(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([5, 5, 5])), [0.57735, -1.154701, 0.57735])


def test_an_empty_response_counts_in_its_group() -> None:
    mask = torch.tensor([[False, False, False], [True, True, True]])
    scores = torch.tensor([10.0, 0.0])
    close(advantages.grpo(scores, torch.tensor([0, 0])), [0.707107, -0.707107])
    rewards = advantages.token_rewards(scores, mask)
    assert rewards.eq(0).all()
    assert advantages.token_rewards(torch.tensor([0.0, 10.0]), mask).tolist() == [[0, 0, 0], [0, 0, 10]]


def test_a_group_of_one_row_gets_zero_from_grpo() -> None:
    found = advantages.grpo(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([7, 2, 2]))
    close(found, [0.0, 0.707107, -0.707107])


@pytest.mark.parametrize("estimator", [advantages.rloo, advantages.grpo_passk])
def test_a_group_of_one_row_is_refused_where_peers_are_needed(estimator: object) -> None:
    with pytest.raises(ValueError, match="needs 2 rows of each prompt; group 8 has 1"):
        estimator(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([7, 7, 8]))  # type: ignore[operator]


def test_a_failed_score_is_refused_and_never_averaged() -> None:
    with pytest.raises(ValueError, match="the score of row 1 is nan: a failure has no score, drop its row"):
        advantages.grpo(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scores and group are \[rows\] each; found \[2, 1\] and \[2\]"):
        advantages.grpo(torch.zeros(2, 1), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="prompt ids, which are integers"):
        advantages.grpo(torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"rewards is \[2, 4\]; the mask needs \[2, 3\]"):
        advantages.reinforce_pp(torch.zeros(2, 4), torch.ones(2, 3))


def test_no_rows_give_no_advantages() -> None:
    assert advantages.grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert advantages.reinforce_pp(torch.zeros(2, 0), torch.zeros(2, 0))[0].shape == (2, 0)
    assert advantages.token_rewards(torch.zeros(2), torch.zeros(2, 0)).shape == (2, 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=12), st.randoms())
def test_group_estimators_agree_with_the_statistics_module(rows: list[tuple[int, float]], random: object) -> None:
    random.shuffle(rows)  # type: ignore[attr-defined]
    group = torch.tensor([g for g, _ in rows])
    scores = tensor(*(score for _, score in rows))
    found, plain = advantages.grpo(scores, group, eps=1e-3), advantages.dr_grpo(scores, group)
    for i, (g, score) in enumerate(rows):
        peers = [s for other, s in rows if other == g]
        centred = score - statistics.fmean(peers)
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        assert float(plain[i]) == pytest.approx(centred, abs=1e-12)
        assert float(found[i]) == pytest.approx(centred / (std + 1e-3), abs=1e-9)


def test_leave_one_out_is_the_difference_from_the_others() -> None:
    scores, group = tensor(1.0, 4.0, 2.0, 9.0, 3.0), torch.tensor([0, 1, 0, 1, 0])
    close(advantages.rloo(scores, group), [1 - 2.5, 4 - 9, 2 - 2, 9 - 4, 3 - 1.5], 1e-12)


def test_the_optimal_baseline_weighs_by_length() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    close(advantages.opo(tensor(1.0, 5.0), mask, torch.tensor([0, 0])), [1 - 2.0, 5 - 2.0], 1e-12)


def test_only_the_best_of_a_group_leads() -> None:
    scores, group = tensor(1.0, 3.0, 2.5, 7.0, 7.0), torch.tensor([9, 9, 9, 2, 2])
    close(advantages.grpo_passk(scores, group, normalize_std=False), [0, 0.5, 0, 0, 0], 1e-12)


def test_rows_without_a_score_scale_up_the_others_of_gpg() -> None:
    scores, group = tensor(1.0, 0.0, 0.0, 0.0, 3.0), torch.tensor([0, 0, 1, 1, 0])
    close(advantages.gpg(scores, group), [5 / 2 * x for x in (1 - 4 / 3, -4 / 3, 0, 0, 3 - 4 / 3)], 1e-12)


@pytest.mark.parametrize("weights", [None, (2.0, 0.5, 1.0)])
def test_gdpo_normalises_each_reward_in_its_group_and_their_sum_over_the_batch(weights: object) -> None:
    torch.manual_seed(0)
    group = torch.tensor([3, 1, 3, 1, 3, 1, 3, 1])
    rewards = [torch.randn(8).double(), 1e3 * torch.randn(8).double(), torch.ones(8).double()]
    added = [0.0] * 8
    for reward, weight in zip(rewards, weights or (1.0, 1.0, 1.0), strict=True):  # type: ignore[call-overload]
        for i in range(8):
            peers = [float(reward[j]) for j in range(8) if group[j] == group[i]]
            added[i] += weight * (float(reward[i]) - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6)
    mean, std = statistics.fmean(added), statistics.stdev(added)
    found = advantages.gdpo(group, *rewards, weights=weights)  # type: ignore[arg-type]
    close(found, [(x - mean) / std for x in added], 1e-7)


def test_gdpo_tells_apart_what_added_rewards_do_not_and_no_reward_decides_by_its_scale() -> None:
    group = torch.tensor([0, 0, 1, 1])
    correct, brief = tensor(0.0, 1.0, 0.0, 1.0), tensor(0.0, 0.0, 0.0, 1.0)  # one of them differs, then both
    close(advantages.grpo(correct + brief, group), [-0.707107, 0.707107, -0.707107, 0.707107])
    found = advantages.gdpo(group, correct, brief)
    assert float(found[3] / found[1]) == pytest.approx(2.0)
    close(advantages.gdpo(group, correct, 100 * brief), found.tolist())
    with pytest.raises(ValueError, match="each reward needs a weight; found 2 rewards and 1 weights"):
        advantages.gdpo(torch.tensor([0, 0]), tensor(1.0, 0.0), tensor(1.0, 1.0), weights=[1.0])


def test_float32_in_gives_float32_and_float64_in_float64() -> None:
    group = torch.tensor([0, 0])
    assert advantages.grpo(torch.tensor([1.0, 0.0]), group).dtype == torch.float32
    assert advantages.grpo(torch.tensor([1, 0]), group).dtype == torch.float32
    assert advantages.grpo(tensor(1.0, 0.0), group).dtype == torch.float64


# Tokens


def test_rewards_lie_on_the_last_trained_token_less_the_penalty() -> None:
    mask = torch.tensor([[1, 0, 1, 0]])
    logprobs, ref = tensor([-1.0, math.nan, -2.0, -9.0]), tensor([-1.5, 0.0, -1.0, math.nan])
    close(advantages.token_rewards(tensor(3.0), mask), [[0, 0, 3, 0]])
    found = advantages.token_rewards(tensor(3.0), mask, logprobs, ref, kl_coef=0.1)
    close(found, [[-0.05, 0, 3.1, 0]], 1e-12)


def test_a_penalty_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs logprobs and ref_logprobs: pass fl.logprobs"):
        advantages.token_rewards(tensor(3.0), torch.tensor([[1]]), kl_coef=0.1)


def test_an_adaptive_penalty_has_no_value_where_the_function_is_called_with_tensors() -> None:
    coef = fl.Adaptive(initial=0.1, target=0.05)
    with pytest.raises(WrongType, match="the coefficient 'kl_coef' of 'token_rewards' has no value outside a run"):
        advantages.token_rewards(tensor(3.0), torch.tensor([[1]]), tensor([0.0]), tensor([0.0]), kl_coef=coef)


@pytest.mark.parametrize("place", [1, 3], ids=["on the last trained token", "on the last token"])
@pytest.mark.parametrize(("gamma", "wanted"), [(0.9, [0.9, 1.0]), (0.0, [0.0, 1.0])])
def test_a_terminal_reward_neither_decays_nor_is_lost_on_tool_tokens(
    place: int, gamma: float, wanted: list[float]
) -> None:
    mask, rewards = torch.tensor([[1, 1, 0, 0]]), torch.zeros(1, 4)
    rewards[0, place] = 1.0
    found, returns = advantages.gae(rewards, torch.zeros(1, 4), mask, gamma=gamma, lam=1.0, normalize=False)
    close(found[0, :2], wanted)
    close(advantages.reinforce_pp(rewards, mask, gamma=gamma)[1][0, :2], wanted)
    assert found[0, 2:].eq(0).all()
    assert returns[0, 2:].eq(0).all()


def test_the_value_of_a_tool_token_is_not_read() -> None:
    values, rewards = torch.tensor([[0.5, 9.0, 0.2]]), torch.tensor([[0.0, 0.0, 1.0]])
    found, _ = advantages.gae(rewards, values, torch.tensor([[1, 0, 1]]), gamma=1.0, lam=0.5, normalize=False)
    close(found, [[0.1, 0.0, 0.8]])
    values[0, 1] = math.nan
    close(advantages.gae(rewards, values, torch.tensor([[1, 0, 1]]), lam=0.5, normalize=False)[0], [[0.1, 0.0, 0.8]])


def test_only_what_the_engine_cut_off_is_bootstrapped() -> None:
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    values, zero = torch.full((2, 5), 0.5), torch.zeros(2, 5)
    stop, final = ["length", "eos"], torch.tensor([0.7, 0.7])
    found, _ = advantages.gae(zero, values, mask, stop, final, gamma=1.0, lam=1.0, normalize=False)
    close(found, [[0.2, 0.2, 0.2, 0, 0], [-0.5] * 5])
    with pytest.raises(ValueError, match="final_values needs the stop reason of 2 rows; found None"):
        advantages.gae(zero, values, mask, final_values=final)


def test_gae_is_the_double_sum_of_its_paper() -> None:
    torch.manual_seed(0)
    rewards, values, gamma, lam = torch.randn(6).double(), torch.randn(6).double(), 0.9, 0.8
    delta = [rewards[t] + (gamma * values[t + 1] if t < 5 else 0) - values[t] for t in range(6)]
    wanted = [float(sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, 6))) for t in range(6)]
    found, returns = advantages.gae(
        rewards[None], values[None], torch.ones(1, 6), gamma=gamma, lam=lam, normalize=False
    )
    close(found[0], wanted, 1e-12)
    close(returns[0] - values, wanted, 1e-12)


def test_remax_is_the_return_less_the_greedy_score() -> None:
    rewards, mask = tensor([0.5, -1.0, 9.0, 2.0], [1.0, 9.0, 9.0, 9.0]), torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
    rewards[0, 2] = rewards[1, 1] = rewards[1, 2] = rewards[1, 3] = 0.0
    found, returns = advantages.remax(rewards, mask, tensor(0.25, 3.0))
    close(returns, [[1.5, 1.0, 0, 2.0], [1.0, 0, 0, 0]], 1e-12)
    close(found, [[1.25, 0.75, 0, 1.75], [-2.0, 0, 0, 0]], 1e-12)


def test_the_group_gives_the_mean_and_the_batch_the_scale_of_reinforce_pp_with_a_baseline() -> None:
    scores, group = tensor(1.0, 0.0, 5.0, 2.0, 1.0), torch.tensor([0, 0, 1, 1, 1])
    lengths = [3, 1, 2, 4, 2]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    centred = [0.5, -0.5, 7 / 3, -2 / 3, -5 / 3]
    tokens = [x for x, length in zip(centred, lengths, strict=True) for _ in range(length)]
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    found = advantages.reinforce_pp_baseline(scores, mask, group)
    close(found[mask], [(x - mean) / std for x in tokens], 1e-7)
    assert found[~mask].eq(0).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_the_optimal_token_baseline_weighs_returns_by_what_each_response_has_put_into_the_gradient(
    weighted: bool,
) -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]).bool()
    group = torch.tensor([4, 4, 4, 9])
    rewards = torch.where(mask, torch.randn(4, 5).double(), 0)
    energy, rho = torch.rand(4, 5).double(), torch.rand(4, 5).double() * 2 if weighted else torch.ones(4, 5).double()
    found, returns = advantages.otb(rewards, mask, energy, group, rho if weighted else None)
    for i in range(4):
        own = [t for t in range(5) if mask[i, t]]
        for place, t in enumerate(own):
            peers = []  # return from there on, and energy up to there, of each response of the group that is so long
            for j in range(4):
                tokens = [u for u in range(5) if mask[j, u]]
                if group[j] == group[i] and len(tokens) > place:
                    here = tokens[place]
                    peers.append((
                        sum(float(rewards[j, u]) for u in tokens[place:]),
                        sum(float(energy[j, u] * rho[j, u] ** 2) for u in tokens if u <= here),
                    ))  # fmt: skip
            own_return = sum(float(rewards[i, u]) for u in own[place:])
            baseline = sum(g * w for g, w in peers) / sum(w for _, w in peers) if len(peers) > 1 else 0.0
            assert float(found[i, t]) == pytest.approx(own_return - baseline, abs=1e-12)
            assert float(returns[i, t]) == pytest.approx(own_return, abs=1e-12)
    assert found[~mask].eq(0).all()


def test_the_tail_of_the_longest_response_has_no_baseline_or_no_advantage() -> None:
    mask, group = torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([0, 0])
    rewards, energy = tensor([0.0, 0.0, 2.0], [1.0, 0.0, 0.0]), torch.ones(2, 3).double()
    close(advantages.otb(rewards, mask, energy, group)[0], [[0.5, 2.0, 2.0], [-0.5, 0, 0]], 1e-12)
    close(advantages.otb(rewards, mask, energy, group, zero_tail=False)[0], [[0.5, 0, 0], [-0.5, 0, 0]], 1e-12)


def test_equal_returns_and_certain_tokens_give_no_advantage_under_the_optimal_token_baseline() -> None:
    mask = torch.ones(3, 2)
    rewards, group = advantages.token_rewards(torch.full((3,), 0.95), mask), torch.tensor([5, 5, 5])
    assert advantages.otb(rewards, mask, torch.rand(3, 2), group)[0].eq(0).all()
    assert advantages.otb(rewards, mask, torch.zeros(3, 2), group)[0].isfinite().all()


def test_whitening_is_over_all_trained_tokens_of_the_batch() -> None:
    torch.manual_seed(0)
    mask = torch.rand(4, 7) < 0.6
    rewards = torch.where(mask, torch.randn(4, 7).double(), math.nan)
    found, returns = advantages.reinforce_pp(rewards, mask, gamma=0.9)
    picked = returns[mask].tolist()
    mean, std = statistics.fmean(picked), statistics.stdev(picked)
    torch.testing.assert_close(found[mask], tensor(*((x - mean) / std for x in picked)), rtol=0, atol=1e-7)
    assert found[~mask].eq(0).all()


def test_whitening_of_equal_returns_gives_exactly_zero() -> None:
    scores, mask = torch.full((4,), 0.95), torch.ones(4, 3)
    found, _ = advantages.reinforce_pp(advantages.token_rewards(scores, mask), mask)
    assert found.eq(0).all()


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_padding_on_either_side_changes_no_advantage(extra: int) -> None:
    torch.manual_seed(0)
    mask, rewards, values = torch.rand(3, 6) < 0.7, torch.randn(3, 6).double(), torch.randn(3, 6).double()
    rewards = torch.where(mask, rewards, 0)
    wanted = advantages.gae(rewards, values, mask, gamma=0.9)
    for pad in [(0, extra), (extra, 0)]:
        wide = [torch.nn.functional.pad(x, pad, value=fill) for x, fill in [(rewards, math.nan), (values, math.nan)]]
        found = advantages.gae(*wide, torch.nn.functional.pad(mask, pad), gamma=0.9)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a[:, pad[0] : pad[0] + 6], b, rtol=0, atol=1e-14)


# Nodes


@fl.reward
def length(response: str) -> float:
    return float(len(response))


def test_an_estimator_is_a_node_inside_a_graph_and_a_function_outside() -> None:
    @fl.graph
    def graph() -> None:
        policy = fl.Model("any", mesh=fl.Mesh(dp=1), optimizer=fl.AdamW(lr=1e-3))
        reference = policy.frozen()
        samples = fl.rollout(policy, fl.prompts([{"prompt": "a"}], batch=1), n=4)
        scores = length(samples)
        rewards = advantages.token_rewards(samples, scores, fl.logprobs(reference, samples), kl_coef=0.1)
        plus = advantages.reinforce_pp(samples, rewards, gamma=0.9)
        group = advantages.grpo(samples, scores, normalize_std=False, name="group")
        assert isinstance(plus, fl.Advantages)
        assert isinstance(group, fl.Advantages)
        fl.update(policy, samples, advantages=group, loss=fl.loss(lambda logprobs, advantages: logprobs)())
        fl.update(policy, samples, plus, loss=fl.loss(lambda logprobs, advantages, returns: logprobs)())

    nodes = graph().nodes
    assert nodes["reinforce_pp"].outputs == ("advantages", "returns")
    assert nodes["reinforce_pp"].per == "batch"
    assert nodes["group"].per == "group"
    assert nodes["group"].spec.min_group == 2
    bound = {binding.parameter for binding in nodes["token_rewards"].bindings}
    assert bound == {"scores", "mask", "logprobs", "ref_logprobs"}


def test_importing_the_estimators_loads_no_torch() -> None:
    code = "import sys, flowrl.advantages, flowrl.losses, flowrl.kl; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_a_greedy_baseline_is_found_by_prompt_and_keeps_large_scores_exact() -> None:
    scores = tensor(1e6, 3.0, 1e6 + 1, 5.0, 1e6 + 2)
    greedy = torch.tensor([False, True, True, False, False])
    group = torch.tensor([7, 2, 7, 2, 7])
    found = advantages.greedy_baseline(scores, greedy, group)
    assert found.tolist() == [1e6 + 1, 3.0, 1e6 + 1, 3.0, 1e6 + 1]


def test_a_prompt_whose_greedy_response_is_gone_has_no_baseline() -> None:
    with pytest.raises(ValueError, match="group 2 has no greedy response"):
        advantages.greedy_baseline(tensor(1.0, 2.0), torch.tensor([True, False]), torch.tensor([1, 2]))
