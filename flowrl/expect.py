"""Checks of what a node is called with: handles, models, counts and policies.

Each raises at the line of the call, while the graph is traced. What takes the whole graph is checked in `check`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .errors import GraphError, Location, WrongType, did_you_mean
from .loss import TRAINED, Loss
from .mesh import Mesh
from .model import Model
from .stream import Stream


def expect(handle: object, kind: type[Stream], *, node: str, parameter: str, at: Location) -> None:
    """Refuse a handle of the wrong type.

    Raises:
        WrongType: `handle` is no `kind`.
    """
    if not isinstance(handle, kind):
        raise WrongType(
            f"node '{node}' takes {kind.__name__} as its {parameter}",
            at=at,
            node=node,
            found=repr(handle),
            wanted=f"a handle of type {kind.__name__}",
            fix=f"the {kind.__name__.lower()} go first: {node}({kind.__name__.lower()}, ...)"
            if isinstance(handle, Stream)
            else "pass the handle that a node returned; settings go by keyword",
        )


def expect_model(model: object, node: str, at: Location) -> None:
    """Refuse what is no model."""
    if not isinstance(model, Model):
        raise WrongType(
            f"node '{node}' takes a model as its first argument",
            at=at,
            node=node,
            found=repr(model),
            wanted="an fl.Model",
            fix="check the order of the arguments: the model, what it reads, further streams",
        )


def expect_optimizer(model: Model, node: str, at: Location) -> None:
    """Refuse to train a model without an optimizer."""
    if model.optimizer is None:
        raise GraphError(
            f"node '{node}' trains model '{model.name}', which has no optimizer",
            at=at,
            node=node,
            found="optimizer=None",
            wanted="an optimizer",
            fix="fl.Model(..., optimizer=fl.AdamW(lr=1e-6))",
        )


def expect_head(model: Model, head: str, node: str, at: Location) -> None:
    """Refuse a model with another head."""
    if model.head != head:
        raise WrongType(
            f"node '{node}' needs a model with another head",
            at=at,
            node=node,
            found=f"model '{model.name}' has head='{model.head}'",
            wanted=f"head='{head}'",
            fix=f"fl.Model(..., head='{head}')",
        )


def expect_loss(loss: object, node: str, at: Location) -> None:
    """Refuse what is no loss, such as a loss function that was not called, and a coefficient that nothing moves."""
    if not isinstance(loss, Loss):
        fix = "call the loss function: loss=losses.ppo_clip(clip_low=0.2, clip_high=0.2)"
        raise WrongType(
            f"node '{node}' has no loss", at=at, node=node, found=repr(loss), wanted="a flowrl Loss", fix=fix
        )
    if not set(TRAINED).intersection(loss.reads):
        raise WrongType(
            f"node '{node}' has a loss without a gradient: it reads nothing of the model that is trained",
            at=at,
            node=node,
            found=f"{loss} reads {', '.join(loss.reads)}",
            wanted=f"one of {', '.join(TRAINED)} among the parameters of a loss function",
            fix="name 'logprobs' as a parameter; 'old_logprobs' and 'ref_logprobs' have no gradient",
        )
    for coefficient in loss.adaptive:
        if coefficient.column not in loss.reads:
            raise WrongType(
                f"node '{node}' has a coefficient that follows '{coefficient.metric}', which its loss does not measure",
                at=at,
                node=node,
                found=str(loss),
                wanted=f"a loss that reads '{coefficient.column}'",
                fix=f"{coefficient.usage}, or a number",
            )


def expect_mesh(mesh: object, node: str, at: Location) -> None:
    """Refuse what is neither a mesh nor None."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise wrong(node, at, "mesh is no mesh", mesh, "an fl.Mesh, or None", "mesh=fl.Mesh(dp=N)")


def expect_counts(node: str, at: Location, *, least: int = 1, **settings: object) -> None:
    """Refuse numbers that count nothing: no integers, or below `least`."""
    for name, value in settings.items():
        _expect_count(node, at, name, value, least)


def expect_counts_or_none(node: str, at: Location, **settings: object) -> None:
    """As `expect_counts`, for settings that may be left out."""
    for name, value in settings.items():
        if value is not None:
            _expect_count(node, at, name, value, 1)


def expect_policy(node: str, at: Location, setting: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a policy that does not exist."""
    if value not in allowed:
        fix = did_you_mean(str(value), allowed) or f"{setting}={allowed[0]!r}"
        raise wrong(node, at, f"{setting} has an unknown policy", value, " | ".join(allowed), fix)


def expect_sampling(
    node: str,
    at: Location,
    n: int,
    max_new_tokens: int,
    temperature: float,
    *,
    top_p: float,
    top_k: int,
    min_p: float,
) -> None:
    """Refuse numbers that nothing can be sampled with."""
    expect_counts(node, at, n=n, max_new_tokens=max_new_tokens)
    expect_counts(node, at, least=0, top_k=top_k)
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not 0 <= temperature < math.inf:
        raise wrong(node, at, "temperature is no temperature", temperature, "a float >= 0", "1.0 samples, 0 is greedy")
    if isinstance(top_p, bool) or not isinstance(top_p, (int, float)) or not 0 < top_p <= 1:
        raise wrong(node, at, "top_p is no share", top_p, "0 < top_p <= 1", "top_p=1.0 keeps every token")
    if isinstance(min_p, bool) or not isinstance(min_p, (int, float)) or not 0 <= min_p <= 1:
        raise wrong(node, at, "min_p is no share", min_p, "0 <= min_p <= 1", "min_p=0.0 keeps every token")


def expect_clip(node: str, at: Location, clip_grad: object) -> None:
    """Refuse a gradient norm that nothing, or everything, is clipped to."""
    if clip_grad is not None and (
        isinstance(clip_grad, bool) or not isinstance(clip_grad, (int, float)) or not clip_grad > 0
    ):
        raise wrong(node, at, "clip_grad is no norm", clip_grad, "a float > 0, or None", "clip_grad=1.0")


def expect_weights(columns: Sequence[str], *, weights: Sequence[float] | None = None, **settings: object) -> None:
    """Refuse weights that are not one for each of ``*scores``, as the ``check`` of a function that takes them."""
    num_rewards = sum(column.startswith("scores[") for column in columns)
    if weights is not None and len(weights) != num_rewards:
        raise WrongType(
            "each reward has a weight",
            found=f"{len(weights)} weights for {num_rewards} rewards",
            wanted="one weight for each handle that has scores, in their order",
            fix=f"weights={(1.0,) * num_rewards}, or leave weights= out",
        )


def expect_discounts(columns: Sequence[str], *, gamma: float = 1.0, lam: float = 1.0, **settings: object) -> None:
    """Refuse discounts outside 0 to 1, as the ``check`` of an estimator that discounts."""
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not isinstance(value, (int, float)) or not 0 <= value <= 1:
            what, fix = f"{name} discounts nothing", f"{name}=1.0, or less"
            raise WrongType(what, found=f"{name}={value!r}", wanted=f"0 <= {name} <= 1", fix=fix)


def stop_strings(node: str, at: Location, stop: object) -> tuple[str, ...]:
    """The strings that end a response, of one or of several; an empty one would end each with its first token."""
    each = (stop,) if isinstance(stop, str) else stop
    if not isinstance(each, Sequence) or not all(isinstance(text, str) and text for text in each):
        raise wrong(
            node, at, "stop is no text that ends a response", stop, "one or more non-empty str", 'stop=("\\n",)'
        )
    return tuple(each)


def wrong(node: str, at: Location, what: str, value: object, wanted: str, fix: str) -> WrongType:
    """The error of a setting, of which the value is told."""
    return unfit(node, at, what, repr(value), wanted, fix)


def unfit(node: str, at: Location, what: str, found: str, wanted: str, fix: str) -> WrongType:
    """The error of settings that do not fit together, or what they stand beside; `found` says it in words."""
    return WrongType(f"node '{node}': {what}", at=at, node=node, found=found, wanted=wanted, fix=fix)


def _expect_count(node: str, at: Location, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(node, at, f"{name} is no count", value, f"an integer >= {least}", f"{name}={least} or more")
