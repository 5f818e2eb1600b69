"""One update of a model: which rows make a mini-batch, on which rank, in which order, and when the optimizer steps.

The split is a function of the keys: a mini-batch is a contiguous range of prompts, a rank's share a contiguous range of
those, and a pass takes rows in order of their keys. It may start on the first rows of a share while the last do not
exist yet: with ``max_tokens`` it is closed as soon as the next row would not fit, whatever came first. The rows of a
prompt are kept together when the loss compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

from flowrl.backend import Metrics, Sum
from flowrl.graph import UpdateSpec
from flowrl.rows import Key

from .progress import StageProgress, parts


@dataclass(frozen=True, slots=True)
class Pass:
    """Rows that one rank adds to its gradients in one firing."""

    rank: int
    keys: tuple[Key, ...]


class UpdateRound:
    """The passes and optimizer steps that make one version.

    Args:
        spec: epochs, mini-batches and the token budget.
        progress: the rows of the step at the update's stage, which is closed to new prompts.
        num_ranks: data-parallel ranks.
        lengths: tokens of rows, for the budget.
    """

    def __init__(
        self,
        spec: UpdateSpec,
        progress: StageProgress,
        num_ranks: int,
        lengths: Callable[[Sequence[Key]], Sequence[int]],
    ) -> None:
        self.spec = spec
        self.progress = progress
        self.num_ranks = num_ranks
        self.lengths = lengths
        self.steps_done = 0
        """Optimizer steps that ended."""
        self.waiting: list[Pass] = []
        """Passes whose rows have all come and that no rank was given yet."""
        self.running = [0] * num_ranks
        """By rank: passes, or a step, that have not ended."""
        self.stepping = False
        self._ended: list[Metrics] = []
        """Of each pass of the mini-batch that has ended."""
        self._first_epoch: list[Metrics] = []
        """Of each pass of the first epoch that has ended."""
        self._shares = self._split(0)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole round."""
        return self.spec.epochs * self.spec.minibatches

    @property
    def finished(self) -> bool:
        """Whether the last optimizer step has ended."""
        return self.steps_done == self.num_steps

    @property
    def last_step(self) -> bool:
        """Whether the step that is due, or runs, publishes the version."""
        return self.steps_done == self.num_steps - 1

    def gather(self) -> None:
        """Move passes that are complete by now to `waiting`, each once."""
        if not (self.finished or self.stepping):
            for rank in range(self.num_ranks):
                self.waiting += self._close(rank)

    def begin_pass(self, each: Pass) -> None:
        """A rank was given a pass."""
        self.waiting.remove(each)
        self.running[each.rank] += 1

    def step_due(self) -> bool:
        """Whether every pass of the mini-batch has ended and the optimizer has not stepped yet."""
        return not (self.finished or self.stepping or any(self.running) or self.waiting or any(self._shares))

    def sums(self) -> dict[str, float]:
        """Trained tokens and rows of the mini-batch over all ranks."""
        return {name: self._sum(name).total for name in ("tokens", "rows")}

    def observed(self) -> dict[str, Sum]:
        """Metrics that coefficients of the loss follow, summed over the mini-batch."""
        return {each.metric: self._sum(each.metric) for each in self.spec.loss.adaptive}

    def followed(self) -> tuple[Sum, int]:
        """What settings of functions follow: the KL of all rows, each once, and how many were trained on."""
        return _sum_of("kl", self._first_epoch), round(_sum_of("rows", self._first_epoch).total)

    def mismatch(self) -> Sum:
        """KL of the sampler from the trainer, likewise; of no token once an optimizer step has moved the weights."""
        return self._sum("mismatch_kl")

    def begin_step(self) -> None:
        """Every rank was told to step."""
        self.stepping = True
        self.running = [1] * self.num_ranks

    def end_pass(self, rank: int, metrics: Metrics) -> None:
        """A pass ended with these sums."""
        self.running[rank] -= 1
        self._ended.append(metrics)
        if self.steps_done < self.spec.minibatches:
            self._first_epoch.append(metrics)

    def end_step(self, rank: int) -> None:
        """A rank has stepped; after the last one the next mini-batch begins."""
        self.running[rank] -= 1
        if any(self.running):
            return
        self.stepping = False
        self.steps_done += 1
        self._ended.clear()
        if not self.finished:
            self._shares = self._split(self.steps_done % self.spec.minibatches)

    def _sum(self, name: str) -> Sum:
        """Over the mini-batch: the same in whatever order its passes ended."""
        return _sum_of(name, self._ended)

    def _split(self, minibatch: int) -> list[Sequence[Key]]:
        """Keys of a mini-batch by rank, in order; those that are dead by now and those still to come among them."""
        keys, n = self.progress.shared, self.progress.group_size  # sorted: samples of a prompt lie together
        prompts = parts(range(len(keys) // n), self.spec.minibatches)[minibatch]
        shares = parts(prompts, self.num_ranks)
        return [keys[share[0] * n : (share[-1] + 1) * n] if share else () for share in shares]

    def _close(self, rank: int) -> list[Pass]:
        share = self._shares[rank]
        if not share:
            return []
        if self.spec.max_tokens is not None:
            return self._close_by_budget(rank, share, self.spec.max_tokens)
        if not self.progress.settled.issuperset(share):
            return []
        self._shares[rank] = ()
        dead = self.progress.dead
        alive = tuple(key for key in share if key not in dead) if dead else tuple(share)
        return [Pass(rank, alive)] if alive else []

    def _close_by_budget(self, rank: int, share: Sequence[Key], budget: int) -> list[Pass]:
        size = self.progress.group_size if self.spec.loss.couples else 1  # rows that may not be parted
        passes: list[Pass] = []
        rows: list[Key] = []
        begun = longest = 0
        for i in range(0, len(share), size):
            unit = share[i : i + size]
            if not self.progress.settled.issuperset(unit):
                break
            alive = [key for key in unit if key not in self.progress.dead]
            if not alive:
                continue
            length = max(self.lengths(alive))
            if rows and (len(rows) + len(alive)) * max(longest, length) > budget:
                passes.append(Pass(rank, tuple(rows)))
                begun, rows, longest = i, [], 0
            rows += alive
            longest = max(longest, length)
        else:
            if rows:
                passes.append(Pass(rank, tuple(rows)))
            begun = len(share)
        self._shares[rank] = share[begun:]
        return passes


def _sum_of(name: str, passes: Sequence[Metrics]) -> Sum:
    found = [sums for metrics in passes if isinstance(sums := metrics.get(name), Sum)]
    return Sum(fsum(each.total for each in found), fsum(each.weight for each in found))
