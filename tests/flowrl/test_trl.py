"""The preference losses beside those of TRL: its own functions where it is installed, and the numbers that they gave.

TRL's losses are parts of its trainers. They are called here without one, on log-probs that a stand-in for a model
returns. `TRL_1_16` holds what they gave on `batch` with trl 1.16.0 and torch 2.13.0:

    pip install trl==1.16.0 && python -m pytest tests/flowrl/test_trl.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl import losses, preferences
from flowrl.loss import Loss

PAIRS, TOKENS = 3, 5
BETA, GAMMA, SMOOTHING = 0.3, 0.6, 0.1
LOSSES: dict[str, Loss] = {
    "dpo sigmoid": losses.dpo(beta=BETA),
    "dpo hinge": losses.dpo(beta=BETA, variant="hinge"),
    "dpo ipo": losses.dpo(beta=BETA, variant="ipo", normalize_length=True),
    "dpo sigmoid_norm": losses.dpo(beta=BETA, normalize_length=True),
    "cdpo": losses.dpo(beta=BETA, label_smoothing=SMOOTHING),
    "simpo": losses.simpo(beta=BETA, gamma=GAMMA),
    "orpo": losses.orpo(beta=BETA),
    "kto": losses.kto(beta=BETA, desirable_weight=1.3, undesirable_weight=0.7),
    "reward": losses.bradley_terry(center=0.05),
}
TRL_1_16 = {
    "dpo sigmoid": 0.723436311374,
    "dpo hinge": 0.969279591401,
    "dpo ipo": 5.40366920025,
    "dpo sigmoid_norm": 0.752894513664,
    "cdpo": 0.726508352234,
    "simpo": 1.05074309107,
    "orpo": 1.47207171195,
    "kto": 0.503352253664,
    "reward": 1.11553166528,
}


def batch() -> dict[str, Tensor]:
    """Three chosen rows, then three rejected ones, of unequal lengths."""
    at = torch.arange(2 * PAIRS * TOKENS, dtype=torch.float64).view(2 * PAIRS, TOKENS)
    mask = torch.arange(TOKENS) < torch.tensor([5, 3, 4, 2, 5, 1])[:, None]
    logprobs, reference, mismatched = (torch.where(mask, -1.2 - (c * at).sin(), 0.0) for c in (1.7, 2.3, 3.1))
    return {
        "logprobs": logprobs,
        "ref_logprobs": reference,
        "mismatched": mismatched,
        "mask": mask,
        "preference": torch.tensor([1.0] * PAIRS + [-1.0] * PAIRS),
        "group": torch.arange(PAIRS).repeat(2),
        "scores": (2.9 * at[:, 0]).cos(),
        "margin": torch.tensor([0.5, 0.0, 1.0, 9.0, 9.0, 9.0], dtype=torch.float64),
    }


def ours(name: str) -> tuple[float, Tensor]:
    """The loss of the batch and its gradient in log-probs (scores)."""
    columns, loss = batch(), LOSSES[name]
    trained = "scores" if name == "reward" else "logprobs"
    if name == "kto":
        old = torch.cat([columns["logprobs"], columns["mismatched"]])  # of both, before the update
        reference = torch.cat([columns["ref_logprobs"], columns["mismatched"] - 0.04 * columns["mask"]])
        preference = torch.cat([columns["preference"], torch.zeros(2 * PAIRS)])
        columns["kl_baseline"] = preferences.kto_baseline(old, reference, preference)[: 2 * PAIRS].double()
    leaf = columns[trained].requires_grad_()
    total, _ = loss.total(columns, columns["mask"])
    value = total / loss.denominator(int(columns["mask"].sum()), 2 * PAIRS)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_number_that_trl_gave(name: str) -> None:
    assert ours(name)[0] == pytest.approx(TRL_1_16[name], rel=1e-7)


# TRL's functions, without a trainer


def trainer(**settings: Any) -> Any:
    """As much of a trainer as its loss looks at."""
    same = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x)
    return SimpleNamespace(
        model=SimpleNamespace(training=True), accelerator=same, aux_loss_enabled=False, precompute_ref_logps=True,
        beta=BETA, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1, **settings,
    )  # fmt: skip


def outputs(logprobs: Tensor) -> Callable[..., Any]:
    """A model that finds these log-probs."""
    nothing = torch.zeros_like(logprobs)
    found = SimpleNamespace(log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    return lambda **inputs: found


def inputs(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """A prompt of one token and the response."""
    mask = torch.nn.functional.pad(columns["mask"].long(), (1, 0))
    return {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def dpo(columns: dict[str, Tensor], leaf: Tensor, variant: str) -> Tensor:
    from trl import DPOTrainer

    chosen, rejected = columns["ref_logprobs"].sum(-1).chunk(2)
    own = trainer(
        ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[variant], loss_weights=[1.0], use_weighting=False,
        label_smoothing=0.0,
    )  # fmt: skip
    given = {**inputs(columns), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss: Tensor = DPOTrainer._compute_loss(own, outputs(leaf), given, False)
    return loss


def cpo(columns: dict[str, Tensor], leaf: Tensor, name: str) -> Tensor:
    from trl.experimental.cpo import CPOTrainer

    own = trainer(alpha=0.0, loss_type="simpo" if name == "simpo" else "sigmoid", simpo_gamma=GAMMA)
    own.label_smoothing = SMOOTHING if name == "cdpo" else 0.0
    mean, ratio = leaf.sum(-1) / columns["mask"].sum(-1), (leaf - columns["ref_logprobs"]).sum(-1)
    of_rows = mean if name == "simpo" else ratio  # CPO of log-ratios is conservative DPO
    loss: Tensor = CPOTrainer.cpo_loss(own, *of_rows.chunk(2))[0].mean()
    return loss


def orpo(columns: dict[str, Tensor], leaf: Tensor) -> Tensor:
    from trl.experimental.orpo import ORPOTrainer

    mean = leaf.sum(-1) / columns["mask"].sum(-1)
    chosen, rejected = mean.chunk(2)
    losses: Tensor = ORPOTrainer.odds_ratio_loss(trainer(), chosen, rejected)[0]
    return (-chosen - losses).mean()  # the likelihood is a mean over rows here, over all tokens there


def kto(columns: dict[str, Tensor], leaf: Tensor) -> Tensor:
    from trl import KTOTrainer

    mismatched = columns["mismatched"].sum(-1)
    given = {
        **inputs(columns),
        "label": columns["preference"] > 0,
        "ref_logps": columns["ref_logprobs"].sum(-1),
        "ref_KL_logps": mismatched - 0.04 * columns["mask"].sum(-1),
    }
    own = trainer(
        calculate_KL=True, loss_type="kto", desirable_weight=1.3, undesirable_weight=0.7,
        _compute_kl_logps=lambda model, batch: mismatched,
    )  # fmt: skip
    loss: Tensor = KTOTrainer._compute_loss(own, outputs(leaf), given, False)
    return loss


def reward(columns: dict[str, Tensor], leaf: Tensor) -> Tensor:
    from trl import RewardTrainer

    own = trainer(args=SimpleNamespace(center_rewards_coefficient=0.05))
    given = {"attention_mask": torch.ones(2 * PAIRS, 1), "margin": columns["margin"][:PAIRS]}
    found = SimpleNamespace(logits=leaf[:, None])
    loss: Tensor = RewardTrainer.compute_loss(own, lambda **_: found, given)
    return loss


def trls(name: str) -> tuple[float, Tensor]:
    columns = batch()
    leaf = columns["scores" if name == "reward" else "logprobs"].requires_grad_()
    given = leaf if name == "reward" else torch.where(columns["mask"], leaf, 0)
    match name.split():
        case ["dpo", variant]:
            value = dpo(columns, given, variant)
        case ["cdpo" | "simpo"]:
            value = cpo(columns, given, name)
        case _:
            value = {"orpo": orpo, "kto": kto, "reward": reward}[name](columns, given)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_trl(name: str) -> None:
    pytest.importorskip("trl", exc_type=ImportError)
    value, gradient = trls(name)
    found, slope = ours(name)
    exact = 1e-6 if name in ("orpo", "kto") else 1e-12  # TRL's odds, and flowrl's baseline, are float32
    assert found == pytest.approx(value, rel=exact)
    torch.testing.assert_close(slope, gradient, rtol=exact, atol=exact)
