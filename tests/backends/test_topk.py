"""The k most likely tokens of a teacher, and the trained model's log-probs at them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl import losses
from flowrl.backends import batch as batch_module
from flowrl.backends import torch_backend
from flowrl.backends.hf import HFBackend
from flowrl.errors import NodeError
from flowrl.loss import Loss
from flowrl.rows import Key, Ragged, Rows

from .conftest import ALPHABET

TEXTS = ["12>", "a", "98765432>", "zz>1"]
TEMPERATURE = 0.7
EXACT = {"gpt2": 1e-12, "llama": 1e-5}
"""Of gradients in float64; transformers computes the norms and angles of a Llama in float32 always."""
MakeBackend = Callable[..., HFBackend]
Sampled = Callable[..., Rows]
LOSS = losses.distill(divergence="reverse") + 0.5 * losses.distill(divergence="generalised", beta=0.3)


def distribution(backend: HFBackend, rows: Rows, row: int) -> Tensor:
    """[response tokens, vocabulary] log-probs of one row, without flowrl."""
    ids = torch.tensor([[*rows["prompt_ids"][row], *rows["response_ids"][row]]]).long()
    module: Any = backend.network.module
    logits = module(input_ids=ids).logits / TEMPERATURE
    found: Tensor = logits.log_softmax(-1)[0, len(rows["prompt_ids"][row]) - 1 : -1]
    return found


def taught(rows: Rows, teacher: HFBackend, k: int = 5) -> Rows:
    """The rows with what a teacher says of them."""
    found = teacher.forward(rows, ["topk_ids", "topk_logprobs"], TEMPERATURE, k)
    return rows.with_columns(teacher_ids=found["topk_ids"], teacher_logprobs=found["topk_logprobs"])


def gradients(backend: HFBackend) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in backend.network.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("k", [1, 5, len(ALPHABET)])
def test_the_likely_tokens_are_those_of_the_whole_distribution(
    name: str, k: int, make_backend: MakeBackend, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(name, lr=None)
    rows = sampled(backend, TEXTS)
    for at_a_time in (1 << 26, 3 * len(ALPHABET)):
        monkeypatch.setattr(torch_backend, "LOGITS_NUMBERS", at_a_time)
        found = backend.forward(rows, ["topk_ids", "topk_logprobs"], TEMPERATURE, k)
        ids, logprobs = found["topk_ids"], found["topk_logprobs"]
        assert (ids.values.dtype, logprobs.values.dtype) == (np.int32, np.float32)
        assert ids.lengths.tolist() == rows["response_ids"].lengths.tolist()
        for row in range(len(rows)):
            wanted = distribution(backend, rows, row).detach()
            torch.testing.assert_close(torch.tensor(logprobs[row]), wanted.topk(k).values, rtol=1e-4, atol=1e-5)
            chosen = wanted.gather(-1, torch.tensor(ids[row]).long())
            torch.testing.assert_close(torch.tensor(logprobs[row]), chosen, rtol=1e-4, atol=1e-5)
            assert all(len(set(place)) == k for place in ids[row].tolist())


def test_log_probs_are_taken_at_tokens_that_another_model_names(make_backend: MakeBackend, sampled: Sampled) -> None:
    student, teacher = make_backend("llama", lr=None), make_backend("gpt2", lr=None)
    rows = sampled(student, TEXTS)
    named = student.forward(rows, ["topk_ids"], TEMPERATURE, 4)
    found = teacher.forward(rows.with_columns(**named.columns), ["topk_ids", "topk_logprobs"], TEMPERATURE)
    assert found["topk_ids"].values.tolist() == named["topk_ids"].values.tolist()
    for row in range(len(rows)):
        wanted = distribution(teacher, rows, row).detach().gather(-1, torch.tensor(named["topk_ids"][row]).long())
        torch.testing.assert_close(torch.tensor(found["topk_logprobs"][row]), wanted, rtol=1e-4, atol=1e-5)


def test_only_some_logits_lie_in_memory_at_a_time(
    make_backend: MakeBackend, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = make_backend(), make_backend("gpt2", lr=None)
    monkeypatch.setattr(torch_backend, "LOGITS_NUMBERS", 4 * len(ALPHABET))
    seen: list[int] = []
    for backend in (student, teacher):
        compute = backend.network.logits

        def count(states: Tensor, compute: Any = compute) -> Any:
            seen.append(len(states))
            return compute(states)

        monkeypatch.setattr(backend.network, "logits", count)
    rows = taught(sampled(make_backend(), TEXTS), teacher)
    num_tokens = len(rows["response_ids"].values)
    assert max(seen) == 4
    assert sum(seen) == num_tokens
    seen.clear()
    student.backward(rows, LOSS, TEMPERATURE, None)
    assert max(seen) == 4
    assert sum(seen) == 2 * num_tokens  # once more in backward


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gradient_is_the_one_that_torch_finds_on_the_whole_distribution(
    name: str, make_backend: MakeBackend, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = make_backend(name, double=True), make_backend("mistral", lr=None)
    rows = taught(sampled(student, TEXTS), teacher)
    student.backward(rows, LOSS, TEMPERATURE, None)
    found = gradients(student)
    student.network.module.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(rows)):
        whole = distribution(student, rows, row).exp()
        kept = whole.gather(-1, torch.tensor(rows["teacher_ids"][row]).long())
        q = torch.cat([kept, 1 - kept.sum(-1, keepdim=True)], -1)
        p = torch.tensor(rows["teacher_logprobs"][row]).double().exp()
        p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], -1)
        m = 0.3 * p + 0.7 * q
        total = total + (q * (q / p).log()).sum()
        total = total + 0.5 * (0.3 * (p * (p / m).log()).sum() + 0.7 * (q * (q / m).log()).sum())
    total.backward()
    wanted = gradients(student)
    assert sum(float(gradient.abs().sum()) for gradient in wanted.values()) > 0.1
    for parameter, gradient in wanted.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=EXACT[name], atol=10 * EXACT[name])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_depend_neither_on_micro_batches_order_or_padding_nor_on_what_is_masked(
    name: str, make_backend: MakeBackend, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make_backend(name, double=True)
    rows = taught(sampled(student, TEXTS), make_backend("mistral", lr=None))
    masked = [1, 4, 6]
    rows["mask"].values[masked] = False
    whole = student.backward(rows, LOSS, TEMPERATURE, None)
    wanted = gradients(student)
    rows["teacher_logprobs"].values[masked] = np.nan
    mixed = [5, 3, 7, 1, 0, 2, 4, 6]
    for max_tokens, order, logits, share in ((1, range(8), 1 << 26, 0), (40, range(8), 1, 9), (None, mixed, 160, 9)):
        monkeypatch.setattr(torch_backend, "LOGITS_NUMBERS", logits)
        monkeypatch.setattr(batch_module, "SHARED_SHARE", share)
        student.network.module.zero_grad()
        metrics = student.backward(rows.take(list(order)), LOSS, TEMPERATURE, max_tokens)
        for parameter, gradient in gradients(student).items():
            torch.testing.assert_close(gradient, wanted[parameter], rtol=EXACT[name], atol=EXACT[name])
        for metric, value in metrics.items():
            assert tuple(value) == pytest.approx(tuple(whole[metric]), rel=1e3 * EXACT[name])
    assert {"divergence", "teacher_tail"} <= whole.keys()


def test_a_student_that_learns_from_itself_stays_as_it_is(make_backend: MakeBackend, sampled: Sampled) -> None:
    student = make_backend(double=True)
    rows = sampled(student, TEXTS)
    largest = []
    for teacher in (student, make_backend("gpt2", lr=None)):
        student.network.module.zero_grad()
        metrics = student.backward(taught(rows, teacher), losses.distill(divergence="reverse"), TEMPERATURE, None)
        largest.append((metrics["divergence"].mean, max(float(one.abs().max()) for one in gradients(student).values())))
    (divergence, gradient), other = largest
    assert divergence == pytest.approx(0, abs=1e-12)
    assert gradient < 1e-5 * other[1]  # the teacher's columns are float32


def test_empty_responses_have_tables_without_rows(make_backend: MakeBackend) -> None:
    backend = make_backend()
    keys = [Key(0, 0, 0), Key(0, 0, 1)]
    ids = {"prompt_ids": Ragged.pack([[1, 5], [1]], "int32")}
    for responses in ([[], []], [[], [3, 4]]):
        rows = Rows(keys, ids | {"response_ids": Ragged.pack(responses, "int32")})
        found = backend.forward(rows, ["topk_ids", "topk_logprobs"], 1.0, 3)
        for column in found.columns.values():
            assert column.values.shape == (len(responses[1]), 3)
            assert column.lengths.tolist() == [0, len(responses[1])]
        again = backend.forward(rows.with_columns(topk_ids=found["topk_ids"]), ["topk_logprobs"], 1.0)
        assert again["topk_logprobs"].values.tolist() == found["topk_logprobs"].values.tolist()
    rows = taught(rows.with_columns(mask=Ragged.pack([[], [False, False]], "bool")), backend)
    assert backend.backward(rows, LOSS, 1.0, None)["tokens"].total == 0


def test_ids_that_only_fill_the_vocabulary_up_are_not_among_the_likely(
    make_backend: MakeBackend, sampled: Sampled
) -> None:
    backend = make_backend("gpt2", lr=None)
    rows = sampled(backend, TEXTS)
    whole = backend.forward(rows, ["topk_ids", "topk_logprobs"], TEMPERATURE, 40)
    backend.tokenizer.num_ids = 20
    found = backend.forward(rows, ["topk_ids", "topk_logprobs"], TEMPERATURE, 20)
    for row in range(len(rows)):
        for place in range(len(found["topk_ids"][row])):
            kept = whole["topk_ids"][row][place] < 20
            assert found["topk_ids"][row][place].tolist() == whole["topk_ids"][row][place][kept].tolist()
            assert found["topk_logprobs"][row][place].tolist() == whole["topk_logprobs"][row][place][kept].tolist()
    with pytest.raises(NodeError, match=r"(?s)model 'model' has no 21 most likely tokens.*1 <= k <= 20"):
        backend.forward(rows, ["topk_ids"], TEMPERATURE, 21)


def test_an_id_of_another_vocabulary_is_an_error_that_names_its_row(
    make_backend: MakeBackend, sampled: Sampled
) -> None:
    backend = make_backend()
    rows = taught(sampled(backend, TEXTS), backend)
    rows["teacher_ids"].values[-1, 2] = 40
    what = (
        r"(?s)column 'teacher_ids' names a token that model 'policy' does not have.*id 40 for step 1 prompt 3 sample 1"
    )
    with pytest.raises(NodeError, match=what):
        backend.backward(rows, LOSS, TEMPERATURE, None)
    named = rows.with_columns(topk_ids=rows["teacher_ids"])
    with pytest.raises(NodeError, match="column 'topk_ids' names a token"):
        backend.forward(named, ["topk_logprobs"], TEMPERATURE)
    flat = rows.with_columns(teacher_ids=rows["response_ids"])
    with pytest.raises(NodeError, match="column 'teacher_ids' is no table of ids"):
        backend.backward(flat, LOSS, TEMPERATURE, None)


def test_log_probs_without_their_ids_are_an_error(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend()
    rows = taught(sampled(backend, TEXTS), backend)
    without = rows.project([name for name in rows.columns if name != "teacher_ids"])
    with pytest.raises(NodeError, match="ids of column 'teacher_ids', which the rows do not have"):
        backend.backward(without, LOSS, TEMPERATURE, None)


def test_the_loss_of_a_mini_batch_names_the_loss_it_declares() -> None:
    assert isinstance(LOSS, Loss)
    assert LOSS.reads == ("topk_logprobs", "teacher_logprobs", "mask")
