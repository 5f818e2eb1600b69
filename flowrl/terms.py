"""One term of a loss: a function of the user's, what it is shown of a pass's rows, and the check of what it gives."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .aggregation import Per
from .errors import NodeError
from .rows import GROUP

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from ._lazy import lazy

    torch = lazy("torch")

Metrics = dict[str, tuple["Tensor", "Tensor"]]
"""By name, a sum and how many it is of."""


@dataclass(frozen=True, slots=True)
class Term:
    """One loss function with its settings, weighted."""

    function: Callable[..., Any]
    settings: Mapping[str, Any]
    weight: float
    weights: str | None = None
    """Column that multiplies the loss of each token (of each row), such as an importance weight; None: by nothing."""
    per: Per = "token"
    where: Callable[..., Any] | None = None
    """Columns [rows] to [rows] bool: the rows that the loss is about; None is about all."""

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", "loss")

    @property
    def names(self) -> dict[str, bool]:
        """What the function, its `where` and its weights name, and whether it can do without it."""
        names = dict(parameters_of(self.function))
        for name, optional in parameters_of(self.where).items() if self.where else ():
            names[name] = optional and names.get(name, True)
        return {**names, self.weights: False} if self.weights else names

    def evaluate(self, columns: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Metrics]:
        """The weighted losses of what `shown_to` gave, and metrics.

        Returns:
            [rows, tokens] or, of a loss per row, [rows].

        Raises:
            NodeError: the function did not give one number a token (a row).
        """
        if self.per == "row" and not len(mask):  # a function need not stand no rows; what is summed keeps its gradient
            return torch.stack([c.sum() for c in columns.values() if c.is_floating_point()])[:0], {}
        known = {**columns, "mask": mask}
        given = {name: known[name] for name, optional in parameters_of(self.function).items()
                 if name in known or not optional}  # fmt: skip
        result = self.function(**given, **self.settings)
        value, extra = result if isinstance(result, tuple) else (result, {})
        trained = mask if self.per == "token" else mask.any(-1)
        self._check("its loss", value, trained)
        metrics = {name: self._sum(name, metric, trained) for name, metric in extra.items()}
        if self.weights:
            self._check(f"its weights, column '{self.weights}',", columns[self.weights], trained)
            value = value * columns[self.weights].detach()
        return self.weight * value, metrics

    def selects(self, columns: Mapping[str, Tensor]) -> Tensor:
        """[rows] bool of `where`.

        Raises:
            NodeError: it gives something else.
        """
        assert self.where is not None
        names = [*parameters_of(self.where)]
        found = self.where(**{name: columns[name] for name in names})
        rows = columns[names[0]].shape
        if getattr(found, "dtype", None) != torch.bool or found.shape != rows:
            raise NodeError(
                f"loss '{self.name}' does not say of each row whether it is about it",
                found=f"{found.dtype} {list(found.shape)}" if hasattr(found, "dtype") else type(found).__name__,
                wanted=f"bool [rows] = {list(rows)} of where={getattr(self.where, '__name__', 'where')}",
            )
        selected: Tensor = found
        return selected

    def _sum(self, name: str, metric: Any, trained: Tensor) -> tuple[Tensor, Tensor]:
        values, where = metric if isinstance(metric, tuple) else (metric, trained)
        for tensor in (values, where):
            self._check(f"its metric '{name}'", tensor, trained)
        counted = trained & where.bool()
        return torch.where(counted, values.detach(), 0).sum(), counted.sum()

    def _check(self, what: str, tensor: Any, trained: Tensor) -> None:
        if getattr(tensor, "shape", None) != trained.shape:
            shape = f"[{'rows, tokens' if self.per == 'token' else 'rows'}] = {list(trained.shape)}"
            raise NodeError(
                f"loss '{self.name}' does not give one number a {self.per}",
                found=f"{what} is {list(tensor.shape) if hasattr(tensor, 'shape') else type(tensor).__name__}",
                wanted=f"a tensor {shape}; averaging is the aggregation's part",
            )


def shown_to(per: Per, columns: Mapping[str, Tensor], mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What loss functions are shown: nothing that is not trained, nan included, reaches them.

    Args:
        per: ``"token"``: one number a row is spread over its tokens, and masked positions are 0. ``"row"``: rows
            without a trained token are left out, and one number a row stays [rows].
        columns: [rows, tokens] with any further axes, or [rows].
        mask: [rows, tokens] bool.

    Returns:
        The columns, and the mask of their rows.
    """
    if per == "token":
        return {n: c if n == GROUP else _clean(_spread(c, mask), mask) for n, c in columns.items()}, mask
    alive = mask.any(-1)
    if not alive.all():
        columns, mask = {name: column[alive] for name, column in columns.items()}, mask[alive]
    return {n: c if c.dim() == 1 else _clean(c, mask) for n, c in columns.items()}, mask


@functools.cache
def parameters_of(function: Callable[..., Any]) -> Mapping[str, bool]:
    """The positional parameters, which are columns, and whether each has a default."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {p.name: p.default is not p.empty for p in positional}


def settings_of(function: Callable[..., Any]) -> Mapping[str, bool]:
    """The keyword-only parameters, and whether each has a default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def _spread(column: Tensor, mask: Tensor) -> Tensor:
    return column[:, None].expand(mask.shape) if column.dim() == 1 else column


def _clean(column: Tensor, mask: Tensor) -> Tensor:
    where = mask.reshape(*mask.shape, *[1] * (column.dim() - mask.dim()))
    return torch.where(where, column, torch.zeros((), dtype=column.dtype, device=column.device))
