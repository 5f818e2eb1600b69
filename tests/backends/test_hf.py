"""The Hugging Face backend: numerics, weights, checkpoints, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flowrl as fl
from flowrl.backend import Prompt, Sampling
from flowrl.backends import batch as batch_module
from flowrl.backends import torch_backend
from flowrl.backends.batch import micro_batches
from flowrl.backends.hf import HFBackend
from flowrl.backends.hf_source import describe
from flowrl.checksum import weights_checksum
from flowrl.errors import BackendError, CheckpointError, NodeError
from flowrl.loss import loss
from flowrl.rows import Key, Ragged, Rows

TEXTS = ["12>", "a", "98765432>", "zz>1"]
MakeBackend = Callable[..., HFBackend]
Sampled = Callable[..., Rows]


@loss
def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = (logprobs - old_logprobs).exp()
    clip = ratio.clamp(0.8, 1.2)
    return -torch.min(ratio * advantages, clip * advantages), {"clip_fraction": (ratio != clip).to(ratio.dtype)}


@loss
def uncertain(entropy: Tensor) -> Tensor:
    return -entropy


@loss
def squared(values: Tensor, returns: Tensor) -> Tensor:
    return (values - returns) ** 2


@loss
def broken(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return logprobs * old_logprobs


EXACT = {"gpt2": 1e-12, "llama": 1e-5}
"""Of gradients in float64; transformers computes the norms and angles of a Llama in float32 always."""
POLICY = clipped() + 0.01 * uncertain()


def gradients(backend: HFBackend) -> dict[str, Tensor]:
    parameters = backend.network.module.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def weights(backend: HFBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export_weights()}


def rows_of(*pairs: tuple[list[int], list[int]], **columns: Any) -> Rows:
    made = {
        "prompt_ids": Ragged.pack([prompt for prompt, _ in pairs], "int32"),
        "response_ids": Ragged.pack([response for _, response in pairs], "int32"),
    }
    return Rows([Key(0, i, 0) for i in range(len(pairs))], made | columns)


def train(backend: HFBackend, rows: Rows, **settings: Any) -> dict[str, float]:
    metrics = backend.backward(rows, POLICY, 1.0, settings.pop("max_tokens", None))
    metrics |= backend.step(POLICY.denominator(metrics["tokens"].total, metrics["rows"].total), **settings)
    return {name: value.total for name, value in metrics.items()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_a_row_s_log_probs_do_not_depend_on_padding(name: str, make_backend: MakeBackend) -> None:
    backend = make_backend(name, lr=None)
    row, longer = ([5, 6], [7, 8]), ([3, 4, 5, 6, 7], [8, 9, 10])
    alone = backend.forward(rows_of(row), ["logprobs"], 1.0)["logprobs"]
    beside = backend.forward(rows_of(longer, row), ["logprobs"], 1.0)["logprobs"]
    np.testing.assert_allclose(beside[1], alone[0], atol=1e-5)
    left = torch.tensor([[0] * 3 + [5, 6], [3, 4, 5, 6, 7]])  # as the sampler pads
    with torch.inference_mode():
        decoder = backend.network.decoder(left, torch.tensor([2, 5]), 1, 1)
        first = decoder.logits.log_softmax(-1)[0, 7]
        decoder.advance(torch.tensor([7, 8]))
        second = decoder.logits.log_softmax(-1)[0, 8]
    np.testing.assert_allclose([first, second], alone[0], atol=1e-5)


def test_a_trained_token_is_what_the_mask_says_whatever_its_id(make_backend: MakeBackend) -> None:
    backend = make_backend()
    for response in ([7, 8, 9], [7, 8, 2], [7, 8, 0]):  # cut; ended; and an end token that is the padding
        row, other = ([1, 4], response), ([1, 4, 5], [5, 6, 7, 8, 9, 10])
        rows = rows_of(
            row, other,
            mask=Ragged.pack([[True] * 3, [False] * 6], "bool"),
            old_logprobs=Ragged.pack([[0.0] * 3, [0.0] * 6], "float32"),
            advantages=np.ones(2, np.float32),
        )  # fmt: skip
        metrics = backend.backward(rows, POLICY, 1.0, None)
        assert (metrics["tokens"].total, metrics["rows"].total) == (3, 1)


def test_an_empty_response_has_no_tokens_anywhere(make_backend: MakeBackend) -> None:
    backend = make_backend()
    rows = rows_of(([1] * 50, []), ([1, 2, 3], [4, 5]), advantages=np.ones(2, np.float32))
    found = backend.forward(rows, ["logprobs", "entropy"], 1.0)
    assert found["logprobs"].lengths.tolist() == found["entropy"].lengths.tolist() == [0, 2]
    rows = rows.with_columns(
        mask=Ragged.pack([[], [True, True]], "bool"), old_logprobs=Ragged.pack([[], [-1.0, -1.0]], "float32")
    )
    metrics = backend.backward(rows, POLICY, 1.0, None)
    assert (metrics["tokens"].total, metrics["rows"].total) == (2, 1)
    nothing = backend.forward(rows.take([0]), ["logprobs"], 1.0)
    assert nothing["logprobs"].lengths.tolist() == [0]
    assert len(backend.forward(rows.take([]), ["logprobs"], 1.0)) == 0


def test_micro_batches_take_rows_in_order_under_the_budget() -> None:
    lengths = np.array([3, 4, 4, 20, 2, 2, 2, 3])
    assert micro_batches(lengths, 12) == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert micro_batches(lengths, 8) == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert micro_batches(lengths, 1) == [[i] for i in range(8)]
    assert micro_batches(lengths, None) == [list(range(8))]
    assert micro_batches(lengths[:0], None) == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_do_not_depend_on_micro_batches_order_or_padding(
    name: str, make_backend: MakeBackend, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(name, double=True)
    rows = sampled(backend, TEXTS)
    mask = rows["mask"]
    mask.values[[1, 4, 6]] = False
    whole = backend.backward(rows, POLICY, 0.8, None)
    wanted = gradients(backend)
    assert sum(float(one.abs().sum()) for one in wanted.values()) > 0.1
    mixed = [5, 3, 7, 1, 0, 2, 4, 6]
    for max_tokens, order, logits, share in (
        (1, range(8), 1 << 26, 0), (40, range(8), 1, 9), (None, mixed, 160, 9), (None, mixed, 160, 0), (60, mixed, 1, 9)
    ):  # fmt: skip
        monkeypatch.setattr(torch_backend, "LOGITS_NUMBERS", logits)
        monkeypatch.setattr(batch_module, "SHARED_SHARE", share)
        backend.network.module.zero_grad()
        metrics = backend.backward(rows.take(list(order)), POLICY, 0.8, max_tokens)
        for gradient_name, gradient in gradients(backend).items():
            torch.testing.assert_close(gradient, wanted[gradient_name], rtol=EXACT[name], atol=EXACT[name])
        assert metrics.keys() == whole.keys()
        for metric, value in metrics.items():
            assert tuple(value) == pytest.approx(tuple(whole[metric]), rel=1e3 * EXACT[name])


def test_a_prompt_that_rows_share_is_read_once(
    make_backend: MakeBackend, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    for texts in (["12345678>", "87654321>"], ["1234567>", "87654321>"]):  # of one length, and not
        rows = sampled(backend, texts, n=8, ignore_eos=True)
        seen: list[int] = []
        hook = backend.network.module.get_input_embeddings().register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(args[0].numel())
        )
        shared = backend.forward(rows, ["logprobs"], 1.0)["logprobs"].values
        assert seen == [2 * 10, 16 * 5]
        monkeypatch.setattr(batch_module, "SHARED_SHARE", 0)
        whole = backend.forward(rows, ["logprobs"], 1.0)["logprobs"].values
        assert seen[2:] == [16 * 15]
        hook.remove()
        monkeypatch.undo()
        np.testing.assert_allclose(shared, whole, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gradient_is_the_one_that_torch_finds_without_flowrl(
    name: str, make_backend: MakeBackend, sampled: Sampled
) -> None:
    backend = make_backend(name, double=True)
    rows = sampled(backend, TEXTS)
    backend.backward(rows, POLICY, 0.7, None)
    found = gradients(backend)
    module: Any = backend.network.module
    module.zero_grad()
    total = torch.zeros(())
    for i in range(len(rows)):
        ids = torch.tensor([[*rows["prompt_ids"][i], *rows["response_ids"][i]]]).long()
        logprobs = (module(input_ids=ids).logits / 0.7).log_softmax(-1)[0, len(rows["prompt_ids"][i]) - 1 : -1]
        chosen = logprobs.gather(1, ids[0, -len(logprobs) :, None])[:, 0]
        ratio = (chosen - torch.tensor(rows["old_logprobs"][i]).double()).exp()
        advantage = float(rows["advantages"][i])
        total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
        total = total + 0.01 * (logprobs.exp() * logprobs).sum()
    total.backward()
    for parameter, gradient in gradients(backend).items():
        torch.testing.assert_close(found[parameter], gradient, rtol=EXACT[name], atol=10 * EXACT[name])


def test_what_is_masked_reaches_neither_loss_nor_gradient(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend()
    rows = sampled(backend, TEXTS)
    rows["mask"].values[[0, 3]] = False
    clean = backend.backward(rows, POLICY, 1.0, None)
    wanted = gradients(backend)
    rows["old_logprobs"].values[[0, 3]] = np.nan, -1000.0
    backend.network.module.zero_grad()
    found = backend.backward(rows, POLICY, 1.0, None)
    assert found == clean
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in gradients(backend).items())
    rows["mask"].values[0] = True
    with pytest.raises(NodeError, match=r"(?s)a trained token is not finite.*nan at step 1 prompt 0 sample 0, token 0"):
        backend.backward(rows, POLICY, 1.0, None)


def test_a_loss_that_detaches_what_it_reads_is_refused(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend()

    @loss
    def detached(logprobs: Tensor, advantages: Tensor) -> Tensor:
        return -logprobs.detach() * advantages

    with pytest.raises(
        NodeError, match=r"(?s)the loss has no gradient: it does not.*detached\(\), token-mean of logpr"
    ):
        backend.backward(sampled(backend, TEXTS), detached(), 1.0, None)


def test_rows_without_a_trained_token_change_nothing(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend()
    rows = sampled(backend, TEXTS)
    train(backend, rows)  # momentum that a gradient of zero would follow
    before = weights(backend)
    assert backend.optimizer is not None
    state = {name: tensor.clone() for name, tensor in backend.optimizer.state().items()}
    empty = rows.with_columns(mask=Ragged(np.zeros_like(rows["mask"].values), rows["mask"].offsets))
    metrics = train(backend, empty, clip_grad=1.0)
    assert (metrics["tokens"], metrics["rows"], metrics["loss"], metrics["skipped"]) == (0, 0, 0, 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export_weights())
    assert all(torch.equal(tensor, state[name]) for name, tensor in backend.optimizer.state().items())
    assert backend.optimizer.num_steps == 1
    assert train(backend, rows)["skipped"] == 0


def test_metrics_on_unchanged_weights(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend()
    rows = sampled(backend, TEXTS, temperature=0.5)
    tokens = float(rows["mask"].values.sum())
    metrics = backend.backward(rows.with_columns(sampler_logprobs=rows["old_logprobs"]), POLICY, 0.5, None)
    assert metrics["tokens"] == (tokens, 1)
    assert metrics["rows"] == (8, 1)
    assert metrics["clip_fraction"] == (0, tokens)
    assert metrics["mismatch_kl"].mean == pytest.approx(0, abs=1e-9)
    assert metrics["max_ratio"].value == pytest.approx(1, abs=1e-5)
    assert metrics["ess"].value == pytest.approx(1, abs=1e-9)
    assert metrics["kl"].mean == pytest.approx(0, abs=1e-6)
    entropy = backend.forward(rows, ["entropy"], 0.5)["entropy"].values
    assert metrics["entropy"].total == pytest.approx(float(entropy.sum()), rel=1e-5)
    wanted = -sum(a * n for a, n in zip(rows["advantages"], rows["mask"].lengths, strict=True)) - 0.01 * entropy.sum()
    assert tuple(metrics["loss"]) == pytest.approx((float(wanted), tokens), rel=1e-4)
    reference = Ragged(rows["old_logprobs"].values - 0.5, rows["old_logprobs"].offsets)
    metrics = backend.backward(rows.with_columns(ref_logprobs=reference), POLICY, 0.5, None)
    assert metrics["kl"].mean == pytest.approx(np.exp(-0.5) - 1 + 0.5, rel=1e-4)


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_mismatch_is_of_the_ratio_to_the_sampler_on_trained_tokens(
    max_tokens: int | None, make_backend: MakeBackend, sampled: Sampled
) -> None:
    backend = make_backend(double=True)
    rows = sampled(backend, TEXTS)
    offsets = rows["mask"].offsets
    rng = np.random.default_rng(0)
    trained = rng.random(offsets[-1]) < 0.7
    log_ratio = rng.normal(size=offsets[-1])
    now = backend.forward(rows, ["logprobs"], 1.0)["logprobs"].values.astype(np.float64)
    sampler = np.where(trained, now - log_ratio, np.nan).astype(np.float32)
    rows = rows.with_columns(mask=Ragged(trained, offsets), sampler_logprobs=Ragged(sampler, offsets))
    metrics = backend.backward(rows, POLICY, 1.0, max_tokens)
    w = np.exp(now - sampler)[trained]
    assert metrics["mismatch_kl"].mean == pytest.approx(np.mean(w - 1 - np.log(w)), rel=1e-5)
    assert metrics["max_ratio"].value == pytest.approx(w.max(), rel=1e-5)
    assert metrics["ess"].value == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-5)
    assert metrics["ess"].value < 0.9


def test_a_token_that_the_trainer_thinks_impossible_has_a_finite_mismatch(
    make_backend: MakeBackend, sampled: Sampled
) -> None:
    backend = make_backend()
    rows = sampled(backend, TEXTS)
    sampler = Ragged(rows["old_logprobs"].values - 1000, rows["old_logprobs"].offsets)
    metrics = backend.backward(rows.with_columns(sampler_logprobs=sampler), POLICY, 1.0, None)
    assert metrics["max_ratio"].value == pytest.approx(np.exp(20))
    assert metrics["ess"].value == pytest.approx(1)
    assert np.isfinite(metrics["mismatch_kl"].mean)


def test_logit_energy_is_the_squared_norm_of_the_log_prob_s_gradient(
    make_backend: MakeBackend, sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    rows = sampled(backend, TEXTS, temperature=0.5)
    seen: list[torch.Tensor] = []
    read = backend.network.logits
    monkeypatch.setattr(backend.network, "logits", lambda states: seen.append(read(states)) or seen[-1])
    found = backend.forward(rows, ["logit_energy"], 0.5)["logit_energy"]
    scaled = (torch.cat(seen).clone().double() / 0.5).requires_grad_()
    target = torch.from_numpy(rows["response_ids"].values).long()
    scaled.log_softmax(-1).gather(-1, target[:, None]).sum().backward()
    assert scaled.grad is not None
    torch.testing.assert_close(torch.from_numpy(found.values), scaled.grad.square().sum(-1).float(), rtol=0, atol=1e-5)
    assert np.array_equal(found.offsets, rows["response_ids"].offsets)


def test_a_step_follows_the_schedule_and_clips(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend(optimizer=fl.AdamW(lr=1e-2, warmup_steps=4))
    rows = sampled(backend, TEXTS)
    rates = [train(backend, rows, clip_grad=0.1)["lr"] for _ in range(5)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    norm = train(backend, rows, clip_grad=1e9)["grad_norm"]
    assert norm > 0.1
    backend.backward(rows, POLICY, 1.0, None)
    summed = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients(backend).values()]))
    assert backend.step(7.0)["grad_norm"].total == pytest.approx(float(summed) / 7, rel=1e-5)


def test_a_step_is_that_of_torch_with_decay_of_matrices_alone(make_backend: MakeBackend, sampled: Sampled) -> None:
    settings = fl.AdamW(lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-3)  # no noise where the gradient is 0
    backend, other = make_backend("gpt2", optimizer=settings), make_backend("gpt2", optimizer=settings)
    rows = sampled(backend, TEXTS)
    matrices = [p for p in other.network.module.parameters() if p.dim() >= 2]
    vectors = [p for p in other.network.module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-3)
    for _ in range(3):
        train(backend, rows, clip_grad=0.5)
        tokens = other.backward(rows, POLICY, 1.0, None)["tokens"].total
        for parameter in other.network.module.parameters():
            assert parameter.grad is not None
            parameter.grad /= tokens
        torch.nn.utils.clip_grad_norm_(other.network.module.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
    for name, tensor in other.export_weights():
        torch.testing.assert_close(dict(backend.export_weights())[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing(
    make_backend: MakeBackend, sampled: Sampled
) -> None:
    backend = make_backend()
    rows = sampled(backend, TEXTS)
    backend.backward(rows, POLICY, 1.0, None)
    before = weights(backend)
    next(iter(backend.network.module.parameters())).grad.fill_(float("inf"))
    with pytest.raises(NodeError, match=r"(?s)the norm of the gradients is not finite.*inf after 0 optimizer steps"):
        backend.step(3.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export_weights())
    assert train(backend, rows)["skipped"] == 0


def test_sixteen_bit_weights_have_masters_that_keep_small_updates(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend(dtype="bfloat16", lr=1e-5)
    rows = sampled(backend, TEXTS)
    before = weights(backend)
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    for _ in range(3):
        assert np.isfinite(train(backend, rows, max_tokens=30)["grad_norm"])
    assert backend.optimizer is not None
    masters = {name: tensor for name, tensor in backend.optimizer.state().items() if name.startswith("master.")}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    moved = [float((masters[f"master.{name}"] - tensor.float()).abs().max()) for name, tensor in before.items()]
    assert min(moved) > 1e-5
    for name, tensor in backend.export_weights():
        assert torch.equal(tensor, masters[f"master.{name}"].bfloat16())


def test_weights_go_out_and_in_complete(make_backend: MakeBackend, sampled: Sampled) -> None:
    trainer, replica = make_backend(), make_backend(lr=None)
    exported = dict(trainer.export_weights())
    assert "model.embed_tokens.weight" in exported
    assert "lm_head.weight" not in exported  # tied
    assert "lm_head.weight" in dict(make_backend("mistral", lr=None).export_weights())
    rows = sampled(trainer, TEXTS)
    for value in (0.5, 0.75):
        filled = {name: torch.full_like(tensor, value) for name, tensor in exported.items()}
        assert replica.import_weights(filled, 3) == weights_checksum(filled.items()) == replica.checksum()
        assert all(bool((tensor == value).all()) for _, tensor in replica.export_weights())
    train(trainer, rows)
    assert replica.import_weights(dict(trainer.export_weights()), 5) == trainer.checksum()
    assert replica.version == 5
    same = [backend.forward(rows, ["logprobs"], 1.0)["logprobs"].values for backend in (trainer, replica)]
    assert np.array_equal(*same)


def test_a_checksum_is_of_names_dtypes_shapes_and_bytes_in_any_order() -> None:
    one, two = torch.arange(6.0).reshape(2, 3), torch.ones(3, dtype=torch.bfloat16)
    checksum = weights_checksum([("a", one), ("b", two)])
    assert len(checksum) == 64
    assert weights_checksum([("b", two), ("a", one.clone())]) == checksum
    assert weights_checksum([("a", one.t().contiguous().t()), ("b", two)]) == checksum
    for other in ([("b", one), ("a", two)], [("a", one.view(3, 2)), ("b", two)], [("a", one + 1e-7), ("b", two)],
                  [("a", one), ("b", two.half())], [("a", one)]):  # fmt: skip
        assert weights_checksum(other) != checksum


def test_weights_that_do_not_match_are_refused_and_change_nothing(make_backend: MakeBackend) -> None:
    backend = make_backend()
    before = weights(backend)
    given = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    given["model.norm.weights"] = given.pop("model.norm.weight")
    given["model.embed_tokens.weight"] = given["model.embed_tokens.weight"][:-1]
    given["model.layers.0.mlp.up_proj.weight"] = given["model.layers.0.mlp.up_proj.weight"].bfloat16()
    with pytest.raises(BackendError) as error:
        backend.import_weights(given, 9)
    assert "'model.norm.weight' is missing" in str(error.value)
    assert "'model.norm.weights' is left over" in str(error.value)
    assert "'model.embed_tokens.weight' is float32 [39, 32], not float32 [40, 32]" in str(error.value)
    assert "'model.layers.0.mlp.up_proj.weight' is bfloat16 [48, 32], not float32 [48, 32]" in str(error.value)
    assert backend.version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export_weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_continues_bit_for_bit(
    dtype: str, make_backend: MakeBackend, sampled: Sampled, prompts_of: Any, tmp_path: Path
) -> None:
    backend = make_backend(dtype=dtype, optimizer=fl.AdamW(lr=1e-2, warmup_steps=10, weight_decay=0.1))
    rows = sampled(backend, TEXTS)
    for _ in range(3):
        train(backend, rows, clip_grad=1.0)
    backend.publish(3)
    backend.save(tmp_path)
    resumed = make_backend(dtype=dtype, optimizer=fl.AdamW(lr=1e-2, warmup_steps=10, weight_decay=0.1))
    resumed.load(tmp_path)
    assert resumed.version == 3
    for _ in range(2):
        assert train(backend, rows, clip_grad=1.0) == train(resumed, rows, clip_grad=1.0)
    assert backend.checksum() == resumed.checksum()
    prompts = prompts_of(backend, TEXTS)
    responses = [
        list(chain.from_iterable(one.generate(prompts, Sampling(max_new_tokens=8), 1))) for one in (backend, resumed)
    ]
    assert responses[0] == responses[1]
    plain = make_backend(str(tmp_path), lr=None, dtype=dtype)  # an ordinary model folder
    assert plain.tokenizer.encode("12>") == backend.tokenizer.encode("12>")


def test_a_checkpoint_that_is_not_whole_is_refused(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend()
    with pytest.raises(CheckpointError, match=r"(?s)no complete checkpoint of model 'policy'.*no flowrl_state.json"):
        backend.load(tmp_path)
    backend.save(tmp_path)
    state = json.loads((tmp_path / "flowrl_state.json").read_text())
    (tmp_path / "flowrl_state.json").write_text(json.dumps(state | {"weights": "0" * 64}))
    before = backend.checksum()
    with pytest.raises(CheckpointError, match="are not those that were saved"):
        backend.load(tmp_path)
    (tmp_path / "flowrl_state.json").write_text(json.dumps(state | {"num_steps": 5}))
    with pytest.raises(CheckpointError, match="the saved optimizer state is of another model"):
        backend.load(tmp_path)
    assert backend.checksum() == before


def test_a_value_head_starts_at_zero_and_learns(make_backend: MakeBackend, sampled: Sampled, tmp_path: Path) -> None:
    critic = make_backend(head="value")
    rows = sampled(make_backend(lr=None), TEXTS)
    assert not critic.forward(rows, ["values"], 1.0)["values"].values.any()
    rows = rows.with_columns(returns=Ragged(np.ones(len(rows["mask"].values), np.float32), rows["mask"].offsets))
    for _ in range(60):
        metrics = critic.backward(rows, squared(), 1.0, None)
        critic.step(metrics["tokens"].total, 1.0)
    found = critic.forward(rows, ["values"], 1.0)["values"]
    assert found.lengths.tolist() == rows["mask"].lengths.tolist()
    np.testing.assert_allclose(found.values, 1.0, atol=0.2)
    critic.save(tmp_path)
    other = make_backend(head="value")
    other.load(tmp_path)
    assert np.array_equal(other.forward(rows, ["values"], 1.0)["values"].values, found.values)
    with pytest.raises(BackendError, match=r"(?s)model 'policy' does not compute 'logprobs'.*head='value'"):
        critic.forward(rows, ["logprobs"], 1.0)


def test_a_score_is_one_number_a_row_at_its_last_token(make_backend: MakeBackend) -> None:
    judge = make_backend("gpt2", head="score", lr=None)
    with torch.no_grad():
        torch.nn.init.normal_(judge.network.module.score.weight)
    rows = rows_of(([5, 6], [7, 8]), ([3, 4, 5, 6, 7], [8, 9, 10]), ([5, 6, 7, 8], []))
    scores = judge.forward(rows, ["scores"], 1.0)["scores"]
    assert (scores.shape, scores.dtype) == ((3,), np.float32)
    assert scores[0] == pytest.approx(scores[2], abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3


def test_a_frozen_model_is_not_trained(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend(lr=None)
    with pytest.raises(BackendError, match="model 'model' is frozen and cannot be trained"):
        backend.backward(sampled(backend, TEXTS), POLICY, 1.0, None)
    with pytest.raises(BackendError, match="is frozen"):
        backend.step(1.0)


def test_a_column_that_is_not_there_or_does_not_fit_is_named(make_backend: MakeBackend, sampled: Sampled) -> None:
    backend = make_backend()
    rows = sampled(backend, TEXTS)
    with pytest.raises(NodeError, match="the loss reads column 'advantages', which the rows do not have"):
        backend.backward(rows.project(["prompt_ids", "response_ids", "mask", "old_logprobs"]), POLICY, 1.0, None)
    short = Ragged.pack([one[:-1] for one in rows["old_logprobs"]], "float32")
    with pytest.raises(NodeError, match=r"(?s)column 'old_logprobs' of step 1 prompt 0 sample 0 has not one value"):
        backend.backward(rows.with_columns(old_logprobs=short), POLICY, 1.0, None)
    with pytest.raises(NodeError, match="column 'advantages' holds no numbers"):
        backend.backward(rows.with_columns(advantages=["a"] * 8), POLICY, 1.0, None)


def test_a_mesh_that_splits_the_model_is_refused(folders: dict[str, Path]) -> None:
    model = fl.Model(str(folders["llama"]), mesh=fl.Mesh(tp=2))
    ranks = SimpleNamespace(rank=0, world_size=2, dp_rank=0, dp_size=1)
    with pytest.raises(BackendError, match=r"(?s)replicates model 'model' and cannot split it.*mesh\(tp=2\)"):
        HFBackend(model, ranks, "cpu")


def test_a_model_is_described_without_torch(folders: dict[str, Path]) -> None:
    facts = describe(str(folders["gpt2"]))
    assert (facts.max_length, facts.num_heads, facts.num_layers, facts.vocab_size) == (64, 2, 2, 40)


def test_a_missing_model_is_an_error_that_names_its_neighbours(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"(?s)there is no model '.*lama2'.*did you mean 'llama'"):
        describe(str(folders["llama"].parent / "lama2"))
    with pytest.raises(BackendError, match=r"(?s)there is no model 'builtin:nothing' here"):
        describe("builtin:nothing")
    with pytest.raises(BackendError, match=r"is a folder without a config\.json"):
        HFBackend.load_tokenizer(str(tmp_path))


def test_a_folder_that_lacks_weights_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders["llama"], tmp_path / "part")
    tensors = load_file(folders["llama"] / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "part" / "model.safetensors", {"format": "pt"})
    with pytest.raises(BackendError, match=r"(?s)lacks weights.*model.layers.1.mlp.up_proj.weight"):
        HFBackend(fl.Model(str(tmp_path / "part")), SimpleNamespace(rank=0, world_size=1, dp_rank=0, dp_size=1), "cpu")


def test_every_declared_end_token_ends_a_response(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["llama"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, 5]}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    assert HFBackend.load_tokenizer(str(tmp_path)).eos_ids == {2, 5, 7}


def test_a_prompt_begins_with_one_bos(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = HFBackend.load_tokenizer(str(folders["llama"]))
    assert tokenizer.encode("12>") == tokenizer.encode("^12>") == [1, 4, 5, 39]
    with pytest.raises(BackendError, match="the tokenizer has no chat template"):
        tokenizer.encode([{"role": "user", "content": "12"}])
    tokenizer.wrapped.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert tokenizer.encode([{"role": "user", "content": "12"}]) == [1, 4, 5, 39]
    assert tokenizer.decode([4, 5, 2, 0]) == "12"


def test_the_shipped_model_answers(make_backend: MakeBackend) -> None:
    backend = make_backend("builtin:reverse_digits", lr=None)
    prompt = Prompt(key=Key(0, 0), ids=backend.tokenizer.encode("12345>"))
    responses = list(chain.from_iterable(backend.generate([prompt], Sampling(n=64, max_new_tokens=6), 0)))
    share = sum(backend.tokenizer.decode(response.ids) == "54321" for response in responses) / 64
    assert 0.02 < share <= 1
