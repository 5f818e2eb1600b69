"""Rows to tensors: micro-batches, padded ids, and where each response token stands in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrl.errors import NodeError
from flowrl.loss import TRAINED, Loss
from flowrl.rows import GROUP, Key, Ragged, Rows

Indices = NDArray[np.int64]
SHARED_SHARE = 0.8
"""A second, shorter pass over a model has a cost of its own."""


def micro_batches(lengths: Indices, max_tokens: int | None, groups: Indices | None = None) -> list[list[int]]:
    """Positions of rows, packed greedily in the given order.

    Args:
        lengths: [rows] tokens of prompt and response.
        max_tokens: most padded tokens (rows x longest) of a micro-batch; a longer row stands alone. None packs all
            rows into one.
        groups: [rows] number of each row's prompt: rows of one are never parted, and stand alone when they are more
            tokens. None parts any rows.
    """
    units: dict[int, list[int]] = {}
    for row, unit in enumerate(range(len(lengths)) if groups is None else groups.tolist()):
        units.setdefault(unit, []).append(row)
    batches: list[list[int]] = []
    longest = 0
    for rows in units.values():
        length = int(lengths[rows].max())
        longest = max(longest, length)
        if batches and (max_tokens is None or (len(batches[-1]) + len(rows)) * longest <= max_tokens):
            batches[-1] += rows
        else:
            batches.append(rows)
            longest = length
    return batches


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompts:
    """Rows whose prompts are read once for all rows that have them."""

    prompts: Tensor
    """[prompts, tokens] int64, no two equal, padded with 0 on the right."""
    lengths: Tensor
    """[prompts] int64 real tokens."""
    prompt_of: Tensor
    """[rows] int64: each row's prompt."""
    responses: Tensor
    """[rows, longest response - 1] int64, padded with 0 on the right; the last token of all predicts nothing."""
    padded: bool
    """Whether prompts are of unequal lengths."""
    samples: int
    """Rows of each prompt, when all have as many and stand together; else 0."""

    def to_rows(self, values: Tensor) -> Tensor:
        """[rows, ...] of [prompts, ...]: each row gets its prompt's.

        The gradient of an expanded tensor is a plain sum. That of `index_select` is added up in any order on CUDA.
        """
        if not self.samples:
            return values.index_select(0, self.prompt_of)
        return values[:, None].expand(-1, self.samples, *values.shape[1:]).reshape(-1, *values.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The rows of one forward pass, and the response tokens that are wanted of them."""

    rows: Rows
    ids: Tensor
    """[rows, tokens] int64 prompt and response, padded with 0 on the right, up to the last wanted `position`."""
    row: Tensor
    """[wanted] int64: row of each wanted response token."""
    token: Tensor
    """[wanted] int64: its place in the response."""
    position: Tensor
    """[wanted] int64: the token before it in `ids`, whose state predicts it."""
    target: Tensor
    """[wanted] int64: its id."""
    mask: Tensor
    """[rows, longest response] bool: true at the wanted tokens."""
    shared: SharedPrompts | None = None
    """The same rows with each prompt once, when that leaves much less to compute."""

    def grid(self, values: Tensor) -> Tensor:
        """[rows, longest response] with the wanted tokens' values ([wanted]) in place and 0 elsewhere; k numbers a
        token ([wanted, k]) stay together."""
        shape = (*self.mask.shape, *values.shape[1:])
        if len(values) == self.mask.numel():
            return values.view(shape)  # no padding: they stand in order
        return values.new_zeros(shape).index_put((self.row, self.token), values)

    def flat(self, column: Tensor) -> Tensor:
        """[wanted] or [wanted, k] of a column that `column` gave."""
        if column.dim() == 1:
            return column[self.row]
        all_wanted = len(self.row) == self.mask.numel()
        return column.flatten(0, 1) if all_wanted else column[self.row, self.token]

    def columns(self, loss: Loss, dtype: torch.dtype) -> dict[str, Tensor]:
        """What a loss reads beside the model's own columns and the mask."""
        own = {*TRAINED, "mask", *(name for name in loss.optional if name not in self.rows.columns)}
        columns = {name: self.column(name, dtype) for name in loss.reads if name not in own}
        if loss.couples:
            columns[GROUP] = torch.from_numpy(groups_of(self.rows)).to(self.mask.device)
        return columns

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """A column as a tensor: [rows, longest response] or [rows, longest response, k] when it is ragged, else [rows];
        floats become `dtype`.

        Raises:
            NodeError: there is no such column, it holds no numbers, or a row's length is not its response's.
        """
        column = _find(self.rows, name)
        if isinstance(column, Ragged):
            response: Ragged = self.rows["response_ids"]
            if not np.array_equal(column.offsets - column.offsets[0], response.offsets - response.offsets[0]):
                raise _wrong_length(self.rows, name, column, response)
            array = np.zeros((*self.mask.shape, *column.values.shape[1:]), column.values.dtype)
            array[grid_of(column.lengths)] = packed(column)
        else:
            array = _numbers(name, column)
        return torch.from_numpy(array).to(self.mask.device, dtype if array.dtype.kind == "f" else None)


def grid_of(lengths: Indices) -> tuple[Indices, Indices]:
    """Row and place of each value of packed arrays of the given lengths."""
    starts = np.cumsum(lengths) - lengths
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - starts[row]


def sequences(rows: Rows) -> Indices:
    """[rows, longest] int64 prompts and responses, padded with 0 on the right."""
    prompt: Ragged = rows["prompt_ids"]
    response: Ragged = rows["response_ids"]
    lengths = prompt.lengths + response.lengths
    ids = np.zeros((len(rows), int(lengths.max(initial=0))), np.int64)
    ids[grid_of(prompt.lengths)] = packed(prompt)
    row, token = grid_of(response.lengths)
    ids[row, prompt.lengths[row] + token] = packed(response)
    return ids


def packed(column: Ragged) -> NDArray[Any]:
    """All values of the rows, one after the other."""
    return column.values[column.offsets[0] : column.offsets[-1]]


def make_batch(
    rows: Rows, device: torch.device, wanted: NDArray[np.bool_] | None = None, *, share: bool = False
) -> Batch:
    """Pad rows into a batch.

    Args:
        rows: ``prompt_ids`` and ``response_ids``.
        device: where the tensors go.
        wanted: [all response tokens] which of them; None wants all.
        share: whether a network is to read it that can read shared prompts.
    """
    before, after = rows["prompt_ids"].lengths, rows["response_ids"].lengths
    ids = sequences(rows)
    row, token = grid_of(after)
    position = before[row] + token
    target = ids[row, position]
    shape = (len(rows), int(after.max(initial=0)))
    if wanted is not None:
        row, token, target, position = row[wanted], token[wanted], target[wanted], position[wanted]
    mask = np.zeros(shape, np.bool_)
    mask[row, token] = True
    ids = np.ascontiguousarray(ids[:, : position.max(initial=0)])
    tensors = [torch.from_numpy(array).to(device) for array in (ids, row, token, position - 1, target, mask)]
    shared = _share(rows, int(token.max(initial=0)), ids.size, device) if share else None
    padded, row_at, token_at, before_at, target_at, mask_at = tensors
    return Batch(rows, padded, row_at, token_at, before_at, target_at, mask_at, shared)


def _share(rows: Rows, num_tokens: int, whole: int, device: torch.device) -> SharedPrompts | None:
    """Read each prompt once, if that leaves at most `SHARED_SHARE` of `whole` padded tokens.

    Args:
        num_tokens: response tokens that are read; the last wanted one is only predicted.
    """
    prompt: Ragged = rows["prompt_ids"]
    response: Ragged = rows["response_ids"]
    number: dict[bytes, int] = {}
    prompt_of = [number.setdefault(ids.tobytes(), len(number)) for ids in prompt]
    first = [prompt_of.index(one) for one in range(len(number))] if len(number) < len(rows) else []
    lengths = prompt.lengths[first]
    longest = int(lengths.max(initial=0))
    if not first or len(first) * longest + len(rows) * num_tokens > SHARED_SHARE * whole:
        return None
    prompts = np.zeros((len(first), longest), np.int64)
    prompts[grid_of(lengths)] = packed(prompt.take(first))
    row, token = grid_of(response.lengths)
    read = token < num_tokens
    responses = np.zeros((len(rows), num_tokens), np.int64)
    responses[row[read], token[read]] = packed(response)[read]
    arrays = (prompts, lengths, np.array(prompt_of), responses)
    read_once, real, owner, own = (torch.from_numpy(array).to(device) for array in arrays)
    samples = len(rows) // len(first)
    even = prompt_of == [row // samples for row in range(len(rows))] and samples * len(first) == len(rows)
    return SharedPrompts(
        read_once, real, owner, own, padded=bool(lengths.min() < longest), samples=samples if even else 0
    )


def check_prompts(rows: Rows) -> None:
    """Every response token needs a token before it.

    Raises:
        NodeError: a prompt has no tokens.
    """
    empty = np.flatnonzero(rows["prompt_ids"].lengths == 0)
    if len(empty):
        raise NodeError(f"the prompt of {rows.keys[int(empty[0])]} has no tokens", wanted="at least one token")


def mask_of(rows: Rows) -> Ragged:
    """The ``mask`` column, checked against the responses' lengths.

    Raises:
        NodeError: a row's mask is not as long as its response.
    """
    mask: Ragged = rows["mask"]
    response: Ragged = rows["response_ids"]
    if not np.array_equal(mask.lengths, response.lengths):
        raise _wrong_length(rows, "mask", mask, response)
    return mask


def trained_rows(mask: Ragged) -> Sequence[int]:
    """Positions of the rows that have a trained token."""
    row, _ = grid_of(mask.lengths)
    trained = row[packed(mask).astype(np.bool_)]
    return [int(one) for one in np.unique(trained)]


def selected_rows(rows: Rows, loss: Loss) -> Sequence[int]:
    """Positions of the rows that a loss is about, of rows that have a trained token.

    Raises:
        NodeError: a column that it selects by is missing, or has not one number a row.
    """
    if not (loss.selects_by and len(rows)):
        return range(len(rows))
    selected = loss.select({name: _row_column(rows, name) for name in loss.selects_by})
    return [int(row) for row in selected.nonzero()[:, 0]]


def groups_of(rows: Rows) -> Indices:
    """[rows] int64: the number of each row's prompt, by order of first appearance."""
    number: dict[Key, int] = {}
    return np.fromiter((number.setdefault(key.group, len(number)) for key in rows.keys), np.int64, len(rows))


def _row_column(rows: Rows, name: str) -> Tensor:
    """[rows] of a column with one number a row, or ``group``."""
    if name == GROUP:
        return torch.from_numpy(groups_of(rows))
    column = _find(rows, name)
    if isinstance(column, Ragged):
        wanted = "one number a row: a loss selects rows by it"
        raise NodeError(f"column '{name}' has one number a token", found="[tokens] a row", wanted=wanted)
    return torch.from_numpy(_numbers(name, column))


def _find(rows: Rows, name: str) -> Any:
    if name not in rows.columns:
        raise NodeError(
            f"the loss reads column '{name}', which the rows do not have", found=", ".join(rows.columns), wanted=name
        )
    return rows[name]


def _numbers(name: str, column: Any) -> NDArray[Any]:
    array = np.array(column)  # a copy: what came over a socket is read-only, and torch warns of that
    if array.dtype.kind not in "biuf":
        raise NodeError(f"column '{name}' holds no numbers", found=f"dtype {array.dtype}", wanted="numbers")
    return array


def _wrong_length(rows: Rows, name: str, column: Ragged, response: Ragged) -> NodeError:
    row = int(np.flatnonzero(column.lengths != response.lengths)[0])
    return NodeError(
        f"column '{name}' of {rows.keys[row]} has not one value for each response token",
        found=f"{column.lengths[row]} values",
        wanted=f"{response.lengths[row]}, the length of response_ids",
    )
