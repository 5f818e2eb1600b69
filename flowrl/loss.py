"""What an update minimises: a weighted sum of per-token loss functions, and how it is aggregated.

A loss function is plain torch on [rows, tokens]. Its positional parameters are columns, its keyword-only parameters are
settings. Called with tensors it runs; called with settings alone it gives a `Loss`, and losses add up::

    losses.ppo_clip(clip_low=0.2, clip_high=0.28) - 0.005 * losses.entropy() + 0.01 * losses.kl(estimator="k3")

Three columns come from the model that is trained, with a gradient: ``logprobs``, ``entropy`` and ``values``. From
before the update, ``old_logprobs`` is the sampler's ``logprobs`` unless a stream brings its own, and ``old_values`` the
``values`` of a stream; every other name is a column of the update's streams.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeVar, get_args, overload

from .errors import NodeError, UnknownName, WrongType, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

P = ParamSpec("P")
R = TypeVar("R")

Aggregate = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
TRAINED = ("logprobs", "entropy", "values")
"""Columns that the trained model computes, with a gradient."""
EMPTY = 1e-8
"""Added to a row's token count before it divides: a row without tokens gives 0; in float32 it changes no count."""


@dataclass(frozen=True, slots=True)
class Term:
    """One loss function with its settings, weighted."""

    function: Callable[..., Any]
    settings: Mapping[str, Any]
    weight: float
    weights: str | None = None
    """Column that multiplies the loss of each token, such as an importance weight; None multiplies by nothing."""

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", "loss")

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that the function takes, and that of its weights."""
        return tuple(dict.fromkeys([*_columns_of(self.function), *([self.weights] if self.weights else [])]))

    def evaluate(self, columns: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Weighted per-token losses [rows, tokens], and per-token metrics, of columns whose masked positions are 0.

        Raises:
            NodeError: the function did not give one number a token.
        """
        given = {name: mask if name == "mask" else columns[name] for name in _columns_of(self.function)}
        result = self.function(**given, **self.settings)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        for what, tensor in {"its loss": value, **metrics}.items():
            if getattr(tensor, "shape", None) != mask.shape:
                raise NodeError(
                    f"loss '{self.name}' does not give one number a token",
                    found=f"{what} is {list(tensor.shape) if hasattr(tensor, 'shape') else type(tensor).__name__}",
                    wanted=f"a tensor [rows, tokens] = {list(mask.shape)}; averaging is the aggregation's part",
                )
        if self.weights:
            value = value * columns[self.weights].detach()
        return self.weight * value, metrics


@dataclass(frozen=True, slots=True)
class Loss:
    """A weighted sum of terms under one aggregation mode."""

    terms: tuple[Term, ...]
    aggregate: Aggregate | None = None
    """How token losses become one number; None is ``token-mean``."""
    horizon: int | None = None
    """Tokens that ``seq-mean-token-sum-norm`` divides each row's sum by; needed for that mode alone."""

    def __post_init__(self) -> None:
        if self.aggregate is not None and self.aggregate not in get_args(Aggregate):
            raise WrongType(
                "a loss has an unknown aggregation mode",
                found=repr(self.aggregate),
                wanted=", ".join(get_args(Aggregate)),
                fix=did_you_mean(str(self.aggregate), get_args(Aggregate)),
            )
        if self.aggregate == "seq-mean-token-sum-norm" and not (self.horizon or 0) > 0:
            raise WrongType(
                "aggregation 'seq-mean-token-sum-norm' divides by a constant length",
                found=f"horizon={self.horizon}",
                wanted="horizon=N tokens, the same for every row",
                fix="give the longest response length: horizon=max_new_tokens",
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all columns that the terms take, each once."""
        return tuple(dict.fromkeys(name for term in self.terms for name in term.reads))

    def __add__(self, other: Loss) -> Loss:
        if not isinstance(other, Loss):
            return NotImplemented
        return Loss(
            self.terms + other.terms,
            _one("aggregate", self.aggregate, other.aggregate),
            _one("horizon", self.horizon, other.horizon),
        )

    def __sub__(self, other: Loss) -> Loss:
        return self + -1.0 * other

    def __mul__(self, factor: float) -> Loss:
        return replace(self, terms=tuple(replace(term, weight=term.weight * factor) for term in self.terms))

    __rmul__ = __mul__

    def __str__(self) -> str:
        terms = " + ".join(
            f"{'' if term.weight == 1 else f'{term.weight:g} * '}{term.name}({_arguments(term.settings)})"
            for term in self.terms
        )
        return f"{terms}, {self.aggregate or 'token-mean'}"

    def total(self, columns: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The unnormalised loss of some rows, and metrics.

        Masked positions are replaced *before* any arithmetic, so that nothing in them (nan included) reaches the sum or
        its gradient.

        Args:
            columns: [rows, tokens] (or [rows], spread over the row's tokens) for each name in `reads`.
            mask: [rows, tokens] bool, true where a token is trained.

        Returns:
            A scalar that `denominator` divides once, over the whole mini-batch; and for each metric its sum over
            trained tokens with their number.

        Raises:
            NodeError: the loss of a trained token is not finite.
        """
        mask = mask.bool()
        clean = {name: _spread(column, mask) for name, column in columns.items()}
        per_token: Tensor | None = None
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        count = mask.sum()
        for term in self.terms:
            value, extra = term.evaluate(clean, mask)
            per_token = value if per_token is None else per_token + value
            for name, metric in extra.items():
                metrics[name] = (torch.where(mask, metric.detach(), 0).sum(), count)
        assert per_token is not None
        per_token = torch.where(mask, per_token, torch.zeros_like(per_token))
        if not torch.isfinite(per_token).all():
            row, token = (~torch.isfinite(per_token)).nonzero()[0].tolist()
            raise NodeError(
                "the loss of a trained token is not finite",
                found=f"{float(per_token[row, token].detach())} at row {row}, token {token} ({self})",
                fix="look at that row's columns: " + ", ".join(name for name in self.reads),
            )
        return self._numerator(per_token, mask), metrics

    def denominator(self, tokens: float, rows: float) -> float:
        """What divides the sum of all `total` values of a mini-batch.

        Args:
            tokens: trained tokens of the whole mini-batch, over all dp ranks.
            rows: its rows that have a trained token.

        Returns:
            0 when nothing is trained.
        """
        if not tokens:
            return 0.0
        if self.aggregate in (None, "token-mean"):
            return tokens
        return 1.0 if self.aggregate == "token-sum" else rows

    def _numerator(self, per_token: Tensor, mask: Tensor) -> Tensor:
        if self.aggregate == "seq-mean-token-mean":
            return (per_token.sum(-1) / (mask.sum(-1).to(per_token.dtype) + EMPTY)).sum()
        if self.aggregate == "seq-mean-token-sum-norm":
            assert self.horizon is not None
            return per_token.sum() / self.horizon
        return per_token.sum()


class LossFunction(Generic[P, R]):
    """A decorated loss function: runs on tensors, declares on settings."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    @overload
    def __call__(
        self,
        *,
        aggregate: Aggregate | None = None,
        horizon: int | None = None,
        weights: str | None = None,
        **settings: Any,
    ) -> Loss: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        columns = _columns_of(self.function)
        if args or any(name in columns for name in kwargs):
            return self.function(*args, **kwargs)
        aggregate, horizon = kwargs.pop("aggregate", None), kwargs.pop("horizon", None)
        weights = kwargs.pop("weights", None)
        allowed = settings_of(self.function)
        declared = [*allowed, "aggregate", "horizon", "weights"]
        for name in kwargs:
            if name not in allowed:
                raise UnknownName(
                    f"loss '{self.__name__}' has no setting '{name}'",  # type: ignore[attr-defined]
                    found=name,
                    wanted=", ".join(declared),
                    fix=did_you_mean(name, declared),
                )
        return Loss((Term(self.function, MappingProxyType(kwargs), 1.0, weights),), aggregate, horizon)


def loss(function: Callable[P, R]) -> LossFunction[P, R]:
    """Declare a per-token loss.

    The function takes columns as positional parameters ([rows, tokens] tensors) and settings as keyword-only ones. It
    returns per-token losses [rows, tokens], or a pair of them and a dict of per-token metrics. One that looks along a
    row names ``mask`` ([rows, tokens] bool). Its declaration takes three more settings: ``aggregate`` and ``horizon``
    (see `Loss`), and ``weights``, the name of a column that multiplies the loss of each token.
    """
    return LossFunction(function)


def settings_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


@functools.cache
def _columns_of(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _spread(column: Tensor, mask: Tensor) -> Tensor:
    wide = column[:, None].expand(mask.shape) if column.dim() == 1 else column
    return torch.where(mask, wide, torch.zeros((), dtype=wide.dtype, device=wide.device))


def _one(name: str, left: Any, right: Any) -> Any:
    if left is not None and right is not None and left != right:
        raise WrongType(
            f"two terms of one loss have different {name}",
            found=f"{left!r} and {right!r}",
            wanted="one for the whole sum: the denominator divides once",
        )
    return left if left is not None else right


def _arguments(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
