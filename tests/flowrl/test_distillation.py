"""Distillation against its formulas, finite differences and TRL, and against how a batch is cut and padded."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from flowrl import advantages, losses
from flowrl.errors import WrongType
from flowrl.loss import Loss

VOCABULARY = 9
KINDS: list[dict[str, Any]] = [
    {"divergence": "forward"},
    {"divergence": "reverse"},
    {"divergence": "generalised", "beta": 0.5},
    {"divergence": "generalised", "beta": 0.1},
]


def logits(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Float64 logits [..., vocabulary] of a student, with a gradient, and of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2 * torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64) for _ in "ab")
    return student.requires_grad_(), teacher


def likely(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-probs [..., k] of the student and of the teacher at the teacher's most likely tokens."""
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    ids = p.topk(k).indices
    return q.gather(-1, ids), p.gather(-1, ids)


def total(student: Tensor, teacher: Tensor, k: int, **kind: Any) -> Tensor:
    q, p = (x.reshape(-1, 1, k) for x in likely(student, teacher, k))
    return losses.distill(q, p, torch.ones(len(p), 1, dtype=torch.bool), **kind)[0].sum()


def by_hand(student: list[float], teacher: list[float], k: int, *, tail: bool = True, **kind: Any) -> float:
    """The divergence at one token, in plain Python, from logits."""

    def probabilities(logits: list[float]) -> list[float]:
        weights = [math.exp(x) for x in logits]
        return [weight / sum(weights) for weight in weights]

    def buckets(of: list[float]) -> list[float]:
        kept = [of[i] for i in chosen]
        return [*kept, 1 - sum(kept)] if tail else [x / sum(kept) for x in kept]

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    whole_p, whole_q = probabilities(teacher), probabilities(student)
    chosen = sorted(range(len(whole_p)), key=lambda i: -whole_p[i])[:k]
    p, q = buckets(whole_p), buckets(whole_q)
    if kind["divergence"] != "generalised":
        return kl(p, q) if kind["divergence"] == "forward" else kl(q, p)
    beta = kind["beta"]
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("k", [1, 3, VOCABULARY - 1])
def test_a_divergence_is_its_formula_and_so_is_its_gradient(kind: dict[str, Any], k: int, tail: bool) -> None:
    student, teacher = logits(2, 3)
    found = total(student, teacher, k, tail=tail, **kind)
    (gradient,) = torch.autograd.grad(found, student)

    def formula(at: Tensor) -> float:
        pairs = zip(at.view(-1, VOCABULARY).tolist(), teacher.view(-1, VOCABULARY).tolist(), strict=True)
        return math.fsum(by_hand(q, p, k, tail=tail, **kind) for q, p in pairs)

    assert float(found.detach()) == pytest.approx(formula(student.detach()), abs=1e-12)
    step = 1e-5
    for place in [(0, 0, 0), (0, 2, 4), (1, 1, 8), (1, 0, 3)]:
        moved = torch.zeros_like(teacher)
        moved[place] = step
        slope = (formula(student.detach() + moved) - formula(student.detach() - moved)) / (2 * step)
        assert float(gradient[place]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_the_whole_vocabulary_it_is_the_whole_divergence(kind: dict[str, Any], tail: bool) -> None:
    student, teacher = logits(4, 5)
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    beta = kind.get("beta", 0.5)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.nn.functional.kl_div(b, a, log_target=True, reduction="sum")

    wanted = {"forward": kl(p, q), "reverse": kl(q, p), "generalised": beta * kl(p, m) + (1 - beta) * kl(q, m)}
    found = total(student, teacher, VOCABULARY, tail=tail, **kind)
    torch.testing.assert_close(found, wanted[kind["divergence"]], rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x, student)[0] for x in (found, wanted[kind["divergence"]])]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("beta", "kind"), [(0, KINDS[0]), (1, KINDS[1]), (0.5, KINDS[2]), (0.1, KINDS[3])], ids=["0", "1", "0.5", "0.1"]
)
def test_it_agrees_with_trl(beta: float, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trl = pytest.importorskip("trl.experimental.gkd", exc_type=ImportError)
    student, teacher = logits(3, 4)
    labels = torch.zeros(3, 4, dtype=torch.int64)
    labels[1, 2:] = -100
    wanted = trl.GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta=beta, reduction="sum")
    q, p = likely(student, teacher, VOCABULARY)
    found, _ = losses.distill(**kind).total({"topk_logprobs": q, "teacher_logprobs": p}, labels >= 0)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(x, student)[0] for x in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@given(st.integers(0, 1000), st.sampled_from(KINDS))
@settings(deadline=None, max_examples=40)
def test_more_tokens_see_more_of_the_divergence(seed: int, kind: dict[str, Any]) -> None:
    student, teacher = logits(3, seed=seed)
    found = [float(total(student, teacher, k, **kind).detach()) for k in range(1, VOCABULARY + 1)]
    rounding = 1e-10  # of what k tokens leave over, a difference of nearly 1 from 1
    assert found[0] > -rounding
    assert all(more >= less - rounding for less, more in pairwise(found))
    assert float(total(teacher, teacher, 3, **kind)) == pytest.approx(0, abs=1e-14)


def test_the_generalised_divergence_tends_to_the_others() -> None:
    student, teacher = logits(3)
    for beta, kind, share in [(1e-6, "forward", 1e-6), (1 - 1e-6, "reverse", 1e-6)]:
        found = total(student, teacher, 4, divergence="generalised", beta=beta) / share
        wanted = total(student, teacher, 4, divergence=kind)
        assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_certain_model_has_a_finite_divergence_and_gradient(kind: dict[str, Any]) -> None:
    for student, teacher in [(60.0, 0.0), (0.0, 60.0), (60.0, 60.0), (-60.0, 60.0)]:
        q = torch.tensor([student, 0, 0, 0]).requires_grad_()
        p = torch.tensor([teacher, 0, 0, 0])
        value = total(q[None], p[None], 2, **kind)
        value.backward()
        assert torch.isfinite(value)
        assert q.grad is not None
        assert torch.isfinite(q.grad).all()


def gradients(loss: Loss, parts: list[tuple[slice, tuple[int, int]]]) -> tuple[Tensor, Tensor]:
    """The loss of a mini-batch of 6 rows cut into parts (rows, padding at left and right), and its gradient."""
    student, teacher = logits(6, 5)
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[2] = False
    q, p = (torch.where(mask[..., None], x, math.nan) for x in likely(student, teacher, 3))
    value = torch.zeros((), dtype=torch.float64)
    for where, (left, right) in parts:
        wide = {"topk_logprobs": q[where], "teacher_logprobs": p[where]}
        given_columns = {name: pad(x, (0, 0, left, right), value=math.nan) for name, x in wide.items()}
        value = value + loss.total(given_columns, pad(mask[where], (left, right)))[0]
    value = value / loss.denominator(float(mask.sum()), float(mask.any(-1).sum()))
    return value.detach(), torch.autograd.grad(value, student)[0]


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("aggregate", ["token-mean", "seq-mean-token-mean"])
def test_neither_micro_batches_nor_padding_nor_what_is_masked_change_it(
    aggregate: Any, kind: dict[str, Any], tail: bool
) -> None:
    loss = losses.distill(aggregate=aggregate, tail=tail, **kind)
    whole = gradients(loss, [(slice(0, 6), (0, 0))])
    assert all(torch.isfinite(x).all() for x in whole)
    assert float(whole[0]) > 0
    for parts in (
        [(slice(i, i + 1), (0, 0)) for i in range(6)],
        [(slice(0, 6), (2, 3))],
        [(slice(4, 6), (1, 0)), (slice(0, 4), (0, 2))],
    ):
        for found, wanted in zip(gradients(loss, parts), whole, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_metrics_say_how_far_and_how_much_is_left_over() -> None:
    student, teacher = logits(1, 4)
    q, p = likely(student, teacher, 3)
    mask = torch.tensor([[True, True, True, False]])
    loss = losses.distill(divergence="reverse")
    value, metrics = loss.total({"topk_logprobs": q, "teacher_logprobs": p}, mask)
    assert {name: int(count) for name, (_, count) in metrics.items()} == {"divergence": 3, "teacher_tail": 3}
    torch.testing.assert_close(metrics["divergence"][0], value.detach())
    torch.testing.assert_close(metrics["teacher_tail"][0], 3 - p[0, :3].exp().sum())


def test_nothing_to_train_is_a_loss_of_nothing() -> None:
    student, teacher = logits(1, 2)
    q, p = likely(student, teacher, 3)
    value, _ = losses.distill().total({"topk_logprobs": q, "teacher_logprobs": p}, torch.zeros(1, 2, dtype=torch.bool))
    value.backward()
    assert float(value.detach()) == 0
    assert student.grad is not None
    assert not student.grad.any()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"divergence": "foward"}, r"(?s)no such divergence.*forward \| reverse \| generalised.*mean 'forward'"),
        ({"divergence": "generalised", "beta": 0.0}, r"(?s)share of a mixture.*beta=0.0.*0 < beta < 1"),
        ({"beta": 1.0}, "beta=1.0"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(WrongType, match=what):
        losses.distill(**change)


def test_numbers_that_are_no_log_probs_are_refused() -> None:
    student, teacher = logits(1, 2)
    q, p = likely(student, teacher, 3)
    mask = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"teacher's probabilities at a token add up to 4.576, not to 1"):
        losses.distill(q, p.exp(), mask)
    with pytest.raises(ValueError, match=r"found \[1, 2, 3\], \[1, 2, 2\] and \[1, 2\]"):
        losses.distill(q, p[..., :2], mask)
    with pytest.raises(ValueError, match=r"found \[2, 3\], \[2, 3\] and \[1, 2\]"):
        losses.distill(q[0], p[0], mask)


# --- one sample of the reverse KL, as an advantage


def test_the_advantage_of_a_token_is_how_much_likelier_the_teacher_finds_it() -> None:
    student = torch.tensor([[-1.0, -2.0, -3.0, math.nan]], dtype=torch.float64)
    teacher = torch.tensor([[-1.5, -0.5, -3.25, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, False]])
    assert advantages.distill(student, teacher, mask).tolist() == [[-0.5, 0, -0.25, 0]]
    assert advantages.distill(student, teacher, mask, gamma=0.5).tolist() == [[-0.625, 0, -0.25, 0]]
    with pytest.raises(ValueError, match="ref_logprobs is nan"):
        advantages.distill(student, torch.where(mask, math.nan, teacher), mask)


def test_its_policy_gradient_is_that_of_the_reverse_kl_on_average() -> None:
    student, teacher = logits(1)
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    ids = torch.arange(VOCABULARY)[:, None]  # one row for each token that could be sampled
    chosen, taught = q[0, ids], p[0, ids]
    mask = torch.ones(VOCABULARY, 1, dtype=torch.bool)
    gained = advantages.distill(chosen.detach(), taught, mask)
    surrogate = (q[0].exp().detach() * losses.policy_gradient(chosen, gained)[:, 0]).sum()
    wanted = total(student, teacher, VOCABULARY, divergence="reverse")
    gradients = [torch.autograd.grad(x, student, retain_graph=True)[0] for x in (surrogate, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
