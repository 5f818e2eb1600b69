"""Where everything goes: a layered drawing in which nothing overlaps, by construction.

Sugiyama, Tagawa & Toda 1981: generations of the graph are layers from top to bottom, and long arrows pass each layer at
a place of their own. Three things are different here. A mesh is a lane, a column of the picture, so that clusters never
cross each other. An arrow's label is itself a place in a layer of its own, between the layers of boxes (as in Gansner
et al. 1993), so that no label can cover anything. Version edges, which run backwards, have a gutter at the right.

Coordinates come from sweeps that move each place towards its neighbours; the least-squares answer under "in this order,
at least so far apart" is isotonic regression, computed by pooling adjacent violators.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .fold import generations, rows_digraph
from .measure import box_size, header_size, label_size
from .scene import Arrow, Box, Scene

GAP = 26.0
"""Between two places of a layer."""
CORNER = 16.0
"""Between a box's corner and its nearest line."""
LANE_PAD = 18.0
LANE_GAP = 22.0
THREAD = 14.0
"""Width of the place where an arrow passes a layer."""
SWEEPS = 12


@dataclass(slots=True, eq=False)
class Place:
    """A box, a label, or the passage of an arrow, in one layer."""

    layer: int
    lane: int
    width: float
    height: float
    box: Box | None = None
    label: Arrow | None = None
    x: float = 0.0
    """Of its centre."""
    y: float = 0.0
    """Of its top."""
    above: list[Place] = field(default_factory=list)
    below: list[Place] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lane:
    """A column of the picture."""

    left: float
    right: float


@dataclass(frozen=True, slots=True)
class Placed:
    """Places with their x; `routes` adds y and the lines between them."""

    layers: list[list[Place]]
    """From top to bottom: boxes at even numbers, labels at odd ones."""
    boxes: dict[str, Place]
    chains: list[tuple[Arrow, list[Place]]]
    """Each arrow that runs down, with the places that it passes, its two boxes included."""
    loops: list[Arrow]
    """Arrows that run up, or stay on a layer."""
    lanes: dict[str, Lane]
    """By key of the cluster."""


def place(scene: Scene) -> Placed:
    """Lay out a scene that was folded to a readable size."""
    layer_of = _layers(scene)
    lane_of = {key: i for i, key in enumerate(_lane_order(scene))}
    boxes = {
        box.name: Place(2 * layer_of[box.name], lane_of[box.cluster], *box_size(box), box=box) for box in scene.boxes
    }
    layers: list[list[Place]] = [[] for _ in range(2 * max(layer_of.values(), default=0) + 1)]
    for at in boxes.values():
        layers[at.layer].append(at)
    down = [a for a in scene.arrows if not a.runs_back and boxes[a.source].layer < boxes[a.target].layer]
    room = _Room(layers, len(lane_of))
    # Short arrows have the least choice of a lane: they choose first.
    down.sort(key=lambda arrow: boxes[arrow.target].layer - boxes[arrow.source].layer)
    chains = [(arrow, _chain(arrow, boxes[arrow.source], boxes[arrow.target], room)) for arrow in down]
    known = set(map(id, down))
    loops = [arrow for arrow in scene.arrows if id(arrow) not in known]
    headers = {cluster.key: header_size(cluster)[0] for cluster in scene.clusters}
    lanes = _lanes(layers, lane_of, headers)
    _relax(layers, [lanes[key] for key in lane_of])
    for _, chain in sorted(chains, key=lambda chained: -len(chained[1])):
        straighten(chain, layers, [lanes[key] for key in lane_of])
    return Placed(layers, boxes, chains, loops, lanes)


def _layers(scene: Scene) -> dict[str, int]:
    """The generation of each box; one that reads nothing stands right above its first reader."""
    digraph = rows_digraph(scene)
    rank = generations(digraph)
    for name in digraph:
        if not digraph.pred[name] and digraph.succ[name]:
            rank[name] = max(0, min(rank[reader] for reader in digraph.succ[name]) - 1)
    used = {value: i for i, value in enumerate(sorted(set(rank.values())))}
    return {name: used[value] for name, value in rank.items()}


def _lane_order(scene: Scene) -> list[str]:
    """The order of clusters with the shortest arrows; those with versions lie near the gutter at the right."""
    keys = list(dict.fromkeys(box.cluster for box in scene.boxes))
    if not 1 < len(keys) <= 6:
        return keys
    cluster = {box.name: box.cluster for box in scene.boxes}
    joined: dict[tuple[str, str], int] = defaultdict(int)
    for arrow in scene.arrows:
        joined[cluster[arrow.source], cluster[arrow.target]] += 0 if arrow.runs_back else 1
    ends = [cluster[name] for arrow in scene.arrows if arrow.runs_back for name in (arrow.source, arrow.target)]

    def cost(order: Iterable[str]) -> float:
        order = list(order)
        at = {key: i for i, key in enumerate(order)}
        across = sum(count * abs(at[a] - at[b]) for (a, b), count in joined.items())
        return across + 0.45 * sum(len(order) - 1 - at[key] for key in ends)

    return list(min(itertools.permutations(keys), key=cost))


class _Room:
    """How much of each lane is taken, layer by layer."""

    def __init__(self, layers: list[list[Place]], num_lanes: int) -> None:
        self.layers = layers
        self.used = [[0.0] * num_lanes for _ in layers]
        for places in layers:
            for at in places:
                self._take(at)
        self.wide = [max(row[lane] for row in self.used) for lane in range(num_lanes)]

    def _take(self, at: Place) -> None:
        self.used[at.layer][at.lane] += at.width + GAP

    def add(self, at: Place) -> Place:
        """Take room for a place."""
        self.layers[at.layer].append(at)
        self._take(at)
        self.wide[at.lane] = max(self.wide[at.lane], self.used[at.layer][at.lane])
        return at

    def growth(self, lane: int, layer: int, width: float) -> float:
        """By how much the lane would have to grow."""
        return max(0.0, self.used[layer][lane] + width + GAP - self.wide[lane])


def _chain(arrow: Arrow, source: Place, target: Place, room: _Room) -> list[Place]:
    """Places for an arrow in every layer that it passes: one holds its label, all lie in one lane."""
    width, height = label_size(arrow)
    layers = range(source.layer + 1, target.layer)
    lanes = range(min(source.lane, target.lane), max(source.lane, target.lane) + 1)

    def cost(lane: int, label: int) -> float:
        growth = sum(room.growth(lane, layer, width if layer == label else THREAD) for layer in layers)
        off = (lane not in (source.lane, target.lane)) * 60 + (lane != target.lane) * 20
        return growth + off + 6 * abs(label - target.layer + 1) + 0.25 * room.used[label][lane]

    labels = [layer for layer in layers if layer % 2]
    lane, label = min(itertools.product(lanes, labels), key=lambda choice: cost(*choice))
    passed = [
        room.add(Place(layer, lane, width, height, label=arrow) if layer == label else Place(layer, lane, THREAD, 0))
        for layer in layers
    ]
    chain = [source, *passed, target]
    for upper, lower in itertools.pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return chain


def _lanes(layers: list[list[Place]], lane_of: dict[str, int], headers: dict[str, float]) -> dict[str, Lane]:
    lanes, left = {}, 0.0
    for key, lane in lane_of.items():
        rows = [[at.width for at in places if at.lane == lane] for places in layers]
        widest = max(sum(row) + GAP * (len(row) - 1) for row in rows if row)
        width = max(widest + 2 * LANE_PAD, headers[key])
        lanes[key] = Lane(left, left + width)
        left += width + LANE_GAP
    return lanes


def _relax(layers: list[list[Place]], lanes: Sequence[Lane]) -> None:
    """Give each place an order in its layer and an x, by sweeps down and up."""
    for places in layers:
        for at in places:
            at.x = (lanes[at.lane].left + lanes[at.lane].right) / 2
    for sweep in range(SWEEPS):
        downwards = sweep % 2 == 0
        for places in layers if downwards else reversed(layers):
            for lane in range(len(lanes)):
                _settle([at for at in places if at.lane == lane], lanes[lane], downwards, last=sweep >= SWEEPS - 2)


def _settle(places: list[Place], lane: Lane, downwards: bool, *, last: bool) -> None:
    """Move one lane's places of a layer towards their neighbours: those above, those below, at last both."""

    def wanted(at: Place) -> float:
        near = [*at.above, *at.below] if last else (at.above if downwards else at.below) or [at]
        goals = [reach(neighbour, at.x) if last and not at.box else neighbour.x for neighbour in near]
        return sum(goals) / len(goals) if goals else at.x

    goals = {id(at): wanted(at) for at in places}
    places.sort(key=lambda at: at.x if last else goals[id(at)])
    widths = [at.width for at in places]
    found = spread([goals[id(at)] for at in places], widths, GAP, lane.left + LANE_PAD, lane.right - LANE_PAD)
    for at, x in zip(places, found, strict=True):
        at.x = x


def reach(at: Place, x: float) -> float:
    """The x nearest to `x` at which a line can meet a place."""
    half = max(0.0, at.width / 2 - CORNER) if at.box else 0.0
    return min(max(x, at.x - half), at.x + half)


def straighten(
    chain: list[Place], layers: list[list[Place]], lanes: Sequence[Lane], ends: tuple[float, float] | None = None
) -> None:
    """Let an arrow bend as rarely as its neighbours allow: the greedy choice of the longest straight runs is optimal.

    Args:
        ends: the x at which it leaves and enters its boxes; None while that may be anywhere along their edges.
    """
    first, last = chain[0], chain[-1]
    run: list[Place] = []
    low, high = _span(first, ends[0] if ends else None)

    def fix(goal: float) -> None:
        for at in run:
            at.x = min(max(goal, low), high)

    for at in chain[1:-1]:
        left, right = _free(at, layers[at.layer], lanes[at.lane])
        if run and (max(low, left) > min(high, right)):
            fix(at.x)
            run, low, high = [], left, right
        elif not run:  # the source's edge is a wish, not a must
            low, high = (max(low, left), min(high, right)) if max(low, left) <= min(high, right) else (left, right)
        else:
            low, high = max(low, left), min(high, right)
        run.append(at)
    left, right = _span(last, ends[1] if ends else None)
    if max(low, left) <= min(high, right):
        low, high = max(low, left), min(high, right)
    fix(min(max(run[-1].x, left), right) if run else 0.0)


def _span(at: Place, x: float | None) -> tuple[float, float]:
    return (x, x) if x is not None else (reach(at, float("-inf")), reach(at, float("inf")))


def _free(at: Place, places: list[Place], lane: Lane) -> tuple[float, float]:
    """Between which x a place may move without touching its neighbours or its lane's edge."""
    gap = GAP / 2
    low, high = lane.left + LANE_PAD + at.width / 2, lane.right - LANE_PAD - at.width / 2
    for other in places:
        if other is not at and other.lane == at.lane:
            apart = (at.width + other.width) / 2 + gap
            if other.x <= at.x:
                low = max(low, other.x + apart)
            else:
                high = min(high, other.x - apart)
    return min(low, at.x), max(high, at.x)


def spread(goals: Sequence[float], widths: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Centres nearest to `goals` (least squares), in order, at least `gap` apart, inside [low, high].

    What does not fit keeps its order and distance and runs over at the right.
    """
    offsets, at = [], low
    for width in widths:
        offsets.append(at + width / 2)
        at += width + gap
    slack = max(0.0, high - (at - gap if widths else low))
    # Less its offset, a centre has only to be no smaller than the one before it.
    pools: list[tuple[float, int]] = []
    for goal, offset in zip(goals, offsets, strict=True):
        mean, count = goal - offset, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (mean * count + before * size) / (count + size), count + size
        pools.append((mean, count))
    shifts = [min(max(mean, 0.0), slack) for mean, count in pools for _ in range(count)]
    return [offset + shift for offset, shift in zip(offsets, shifts, strict=True)]
