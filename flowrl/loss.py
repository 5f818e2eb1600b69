"""What an update minimises: a weighted sum of loss functions, and how it is aggregated.

A loss function is plain torch. Its positional parameters are columns, its keyword-only parameters are settings. Called
with tensors it runs; called with settings alone it gives a `Loss`, and losses add up::

    losses.ppo_clip(clip_low=0.2, clip_high=0.28) - 0.005 * losses.entropy() + 0.01 * losses.kl(estimator="k3")

Most give one number a token, [rows, tokens]. One under ``@loss(per="row")`` gives one number a row, [rows], and may
name ``group`` to see which rows answer one prompt.

Five columns come from the model that is trained, with a gradient: ``logprobs``, ``entropy``, ``values``, ``scores`` and
``topk_logprobs`` ([rows, tokens, k], at the ids of the column ``teacher_ids``: see `flowrl.topk`). From before the
update, ``old_logprobs`` is the sampler's ``logprobs`` unless a stream brings its own, and ``old_values`` the ``values``
of a stream; every other name is a column of the update's streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from .aggregation import EMPTY, Aggregate, Per, check_aggregate, denominator, numerator, one
from .coefficients import Coefficient
from .errors import NodeError, UnknownName, WrongType, did_you_mean
from .rows import GROUP
from .terms import Metrics, Term, parameters_of, settings_of, shown_to

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

__all__ = ["EMPTY", "TOPK_IDS", "TRAINED", "Aggregate", "Loss", "LossFunction", "Per", "Term", "loss"]

P = ParamSpec("P")
R = TypeVar("R")

TRAINED = ("logprobs", "entropy", "topk_logprobs", "values", "scores")
"""Columns that the trained model computes, with a gradient; ``scores`` are [rows], ``topk_logprobs`` [rows, tokens, k],
the others [rows, tokens]."""
TOPK_IDS = "teacher_ids"
"""The column with the ids that ``topk_logprobs`` are about."""
REFERENCE = "ref_logprobs"
"""The column of the reference, that an update measures the KL of its model from."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A weighted sum of terms under one aggregation mode."""

    terms: tuple[Term, ...]
    aggregate: Aggregate | None = None
    """How losses become one number; None is ``token-mean``, and ``seq-mean`` for terms per row alone."""
    horizon: int | None = None
    """Tokens that ``seq-mean-token-sum-norm`` divides each row's sum by; needed for that mode alone."""

    def __post_init__(self) -> None:
        check_aggregate(self.aggregate, self.horizon, [(term.name, term.per) for term in self.terms])

    @property
    def mode(self) -> Aggregate:
        """The aggregation mode, whether said or implied."""
        return self.aggregate or ("token-mean" if any(term.per == "token" for term in self.terms) else "seq-mean")

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of all columns that the terms take, each once."""
        return tuple(name for name in self._names() if name != GROUP)

    @property
    def optional(self) -> frozenset[str]:
        """Those of them that no term needs: parameters with a default."""
        return frozenset(name for name, optional in self._names().items() if optional)

    @property
    def couples(self) -> bool:
        """Whether a term looks at several rows of a prompt, which then have to share a pass."""
        return GROUP in self._names()

    @property
    def selects_by(self) -> tuple[str, ...]:
        """Names of what `select` reads, ``group`` among them; none when the loss is about every row."""
        return tuple(dict.fromkeys(name for term in self.terms if term.where for name in parameters_of(term.where)))

    @property
    def adaptive(self) -> tuple[Coefficient, ...]:
        """Settings whose value an update moves from one optimizer step to the next."""
        return tuple(v for term in self.terms for v in term.settings.values() if isinstance(v, Coefficient))

    def at(self, coefficients: Sequence[float]) -> Loss:
        """The loss with these numbers in place of its `adaptive` settings."""
        given = iter(coefficients)
        terms = []
        for term in self.terms:
            known = {name: next(given) if isinstance(v, Coefficient) else v for name, v in term.settings.items()}
            terms.append(replace(term, settings=MappingProxyType(known)))
        return replace(self, terms=tuple(terms))

    def __add__(self, other: Loss) -> Loss:
        if not isinstance(other, Loss):
            return NotImplemented
        return Loss(
            self.terms + other.terms,
            one("aggregate", self.aggregate, other.aggregate),
            one("horizon", self.horizon, other.horizon),
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
        return f"{terms}, {self.mode}"

    def select(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Which rows the loss is about, such as those that have a partner of their prompt.

        A row that one term leaves out is left out of the whole loss, as if it had no trained token, and so is another
        that is then without a partner.

        Args:
            columns: [rows] for each name in `selects_by`, of rows that have a trained token.

        Returns:
            [rows] bool.
        """
        kept = torch.ones_like(columns[self.selects_by[0]], dtype=torch.bool)
        while True:
            left = kept.clone()
            for term in self.terms:
                if term.where:
                    some = {name: columns[name][kept] for name in parameters_of(term.where)}
                    left[kept] &= term.selects(some)
            if left.equal(kept):
                return kept
            kept = left

    def total(self, columns: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Metrics]:
        """The unnormalised loss of some rows, and metrics.

        Masked positions are replaced *before* any arithmetic, so that nothing in them (nan included) reaches the sum or
        its gradient; so are rows that the loss is not about.

        Args:
            columns: [rows, tokens], or [rows, tokens, k] (or [rows], which a term per token sees spread over the row's
                tokens) for each name in `reads`, and ``group`` when the loss couples: all rows of a prompt are then
                given together.
            mask: [rows, tokens] bool, true where a token is trained.

        Returns:
            A scalar that `denominator` divides once, over the whole mini-batch; and for each metric its sum over
            trained tokens (over rows) with their number.

        Raises:
            NodeError: the loss of a trained token is not finite.
        """
        mask = self._mask_of(columns, mask.bool())
        found: dict[Per, Tensor] = {}
        metrics: Metrics = {}
        shown = {per: shown_to(per, columns, mask) for per in dict.fromkeys(term.per for term in self.terms)}
        for term in self.terms:
            value, extra = term.evaluate(*shown[term.per])
            found[term.per] = found[term.per] + value if term.per in found else value
            metrics |= extra
        total: Tensor | None = None
        if "token" in found:
            per_token = torch.where(mask, found["token"], torch.zeros_like(found["token"]))
            self._check_finite(per_token, mask)
            total = numerator(self.mode, self.horizon, per_token, mask)
        if "row" in found:
            self._check_finite(found["row"], mask)
            total = found["row"].sum() if total is None else total + found["row"].sum()
        assert total is not None
        return total, metrics

    def denominator(self, tokens: float, rows: float) -> float:
        """What divides the sum of all `total` values of a mini-batch.

        Args:
            tokens: trained tokens of the whole mini-batch, over all dp ranks, of rows that the loss is about.
            rows: those of its rows that have a trained token, and that the loss is about.

        Returns:
            0 when nothing is trained.
        """
        return denominator(self.mode, tokens, rows)

    def _names(self) -> dict[str, bool]:
        names: dict[str, bool] = {}
        for term in self.terms:
            for name, optional in term.names.items():
                names[name] = optional and names.get(name, True)
        return names

    def _mask_of(self, columns: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """The mask, without the rows that the loss is not about."""
        if not self.selects_by:
            return mask
        rows = mask.any(-1)
        selected = self.select({name: columns[name][rows] for name in self.selects_by})
        return mask & rows.masked_scatter(rows, selected)[:, None]

    def _check_finite(self, value: Tensor, mask: Tensor) -> None:
        finite = torch.isfinite(value)
        if finite.all():
            return
        at = (~finite).nonzero()[0].tolist()
        row = at[0] if len(at) == 2 else int(mask.any(-1).nonzero()[at[0]])
        place = f"row {row}, token {at[1]}" if len(at) == 2 else f"row {row}"
        raise NodeError(
            f"the loss of a trained {'token' if len(at) == 2 else 'row'} is not finite",
            found=f"{float(value[tuple(at)].detach())} at {place} ({self})",
            fix="look at that row's columns: " + ", ".join(self.reads),
        )


class LossFunction(Generic[P, R]):
    """A decorated loss function: runs on tensors, declares on settings."""

    def __init__(
        self,
        function: Callable[P, R],
        per: Per = "token",
        where: Callable[..., Tensor] | None = None,
        check: Callable[..., None] | None = None,
    ) -> None:
        self.function, self.per, self.where, self.check = function, per, where, check
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
        columns = parameters_of(self.function)
        if args or any(name in columns for name in kwargs):
            self._check({name: value for name, value in kwargs.items() if name not in columns})
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
        self._check_given(kwargs)
        self._check(kwargs)
        term = Term(self.function, MappingProxyType(kwargs), 1.0, weights, self.per, self.where)
        return Loss((term,), aggregate, horizon)

    def _check_given(self, settings: Mapping[str, Any]) -> None:
        for name, has_default in settings_of(self.function).items():
            if not has_default and name not in settings:
                raise UnknownName(
                    f"loss '{self.__name__}' needs a value for its setting '{name}'",  # type: ignore[attr-defined]
                    found="no value, and no default",
                    wanted=f"{name}=VALUE",
                    fix=f"give {name}= in the call",
                )

    def _check(self, settings: Mapping[str, Any]) -> None:
        if self.check is not None:
            self.check(**settings)


@overload
def loss(function: Callable[P, R], /) -> LossFunction[P, R]: ...
@overload
def loss(
    *, per: Per = "token", where: Callable[..., Tensor] | None = None, check: Callable[..., None] | None = None
) -> Callable[[Callable[P, R]], LossFunction[P, R]]: ...
def loss(
    function: Callable[..., Any] | None = None,
    /,
    *,
    per: Per = "token",
    where: Callable[..., Tensor] | None = None,
    check: Callable[..., None] | None = None,
) -> Any:
    """Declare a loss.

    The function takes columns as positional parameters (tensors [rows, tokens]; one with a default is left out where no
    stream has it) and settings as keyword-only ones. It returns losses, or a pair of them and a dict of metrics of the
    same shape; a metric that only some have is a pair of values and where they count (bool). One that looks along a row
    names ``mask`` ([rows, tokens] bool), one that looks at other rows of a prompt ``group`` ([rows] int): micro-batches
    and ranks then keep prompts whole. Its declaration takes three more settings: ``aggregate`` and ``horizon`` (see
    `Loss`), and ``weights``, the name of a column that multiplies the loss of each token (of each row).

    Args:
        per: ``"token"``: the losses are [rows, tokens], and a column [rows] is spread over the tokens of its row.
            ``"row"``: they are [rows], averaged over rows that have a trained token; a column [rows] stays as it is.
        where: a function of columns [rows] (and ``group``), which gives [rows] bool: the rows that the loss is about.
            Others are left out before anything is computed of them, and count in no mean.
        check: is called with the settings of a declaration, and raises for what makes no loss.
    """
    if per not in ("token", "row"):
        raise WrongType("per= of a loss has an unknown value", found=repr(per), wanted="'token' or 'row'")
    return LossFunction(function) if function else lambda f: LossFunction(f, per, where, check)


def _arguments(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
