"""The lines of a picture: right-angled, each horizontal piece on a track of its own, and the heights that this needs.

Between two layers lies a channel. A line leaves its place straight down, moves sideways on its track, and goes straight
down to the next place. Two pieces share a track only if they are apart; a piece lies above another where that saves a
crossing or an overlap (the left-edge algorithm of Hashimoto & Stevens 1971, with its vertical constraints).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from .layout import CORNER, LANE_GAP, Lane, Place, Placed, place, spread, straighten
from .measure import header_size, label_size
from .scene import Arrow, Scene

TRACK = 11.0
"""Between two tracks of a channel."""
CHANNEL = 18.0
"""Height of a channel without tracks."""
MARGIN = 22.0
"""Around the picture."""
PORT = 18.0
"""Between two lines at a box's edge."""

Point = tuple[float, float]


@dataclass(slots=True, eq=False)
class _Piece:
    """The sideways piece of a line in a channel."""

    top_x: float | None
    """Where its line comes down from above; None when it comes from, or goes to, the gutter."""
    bottom_x: float | None
    left: float
    right: float
    label: float = 0.0
    """Height of the label that stands at its end in the gutter."""
    track: int = 0

    @property
    def in_gutter(self) -> bool:
        """Whether it comes from there, or goes there."""
        return self.top_x is None or self.bottom_x is None


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """An arrow as it is drawn."""

    arrow: Arrow
    points: list[Point]
    label: tuple[float, float] | None
    """Centre of its label."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """Everything in pixels."""

    width: float
    height: float
    boxes: dict[str, Place]
    lines: list[Line]
    lanes: dict[str, tuple[Lane, float, float]]
    """By key of the cluster: its left and right, top and bottom."""


@dataclass(slots=True)
class _Ports:
    """The x at which each line leaves or enters a box, by arrow."""

    out: dict[tuple[str, int], float] = field(default_factory=dict)
    into: dict[tuple[str, int], float] = field(default_factory=dict)


def draw(scene: Scene, top: float = 0.0) -> Drawing:
    """Lay out a folded scene and route its arrows, below a heading of height `top`."""
    placed = place(scene)
    ports = _ports(placed)
    for arrow, chain in placed.chains:
        ends = ports.out[arrow.source, id(arrow)], ports.into[arrow.target, id(arrow)]
        straighten(chain, placed.layers, list(placed.lanes.values()), ends)
    right = max((lane.right for lane in placed.lanes.values()), default=0.0)
    trunks, gutter = _trunks(placed, right)
    channels: dict[int, list[_Piece]] = defaultdict(list)
    hops = [(arrow, _hops(arrow, chain, ports, channels)) for arrow, chain in placed.chains]
    backs = [_back(arrow, placed, ports, trunks, channels) for arrow in placed.loops]
    header = max((header_size(cluster)[1] for cluster in scene.clusters), default=0.0)
    tops, bottom = _heights(placed, channels, MARGIN + top + header)
    for layer, places in enumerate(placed.layers):
        tall = max((at.height for at in places), default=0.0)
        for at in places:
            at.y = tops[layer] + (tall - at.height) / 2
    levels = _Levels(placed, tops, bottom)
    lines = [_down(arrow, pieces, levels) for arrow, pieces in hops]
    ups = zip(placed.loops, backs, strict=True)
    lines += [_up(arrow, placed, *ends, trunks[arrow.source], levels) for arrow, ends in ups]
    drawing = Drawing(
        width=(gutter if placed.loops else right) + 2 * MARGIN,
        height=bottom + MARGIN + 12,
        boxes=placed.boxes,
        lines=[_shift(line) for line in lines],
        lanes={
            key: (Lane(lane.left + MARGIN, lane.right + MARGIN), MARGIN + top, bottom + 12)
            for key, lane in placed.lanes.items()
        },
    )
    for at in placed.boxes.values():
        at.x += MARGIN
    return drawing


def _shift(line: Line) -> Line:
    label = (line.label[0] + MARGIN, line.label[1]) if line.label else None
    return Line(line.arrow, [(x + MARGIN, y) for x, y in line.points], label)


def _ports(placed: Placed) -> _Ports:
    """Lines leave a box in the order of where they go, as near to straight as they can."""
    ports = _Ports()
    leaving: dict[str, list[tuple[float, int]]] = defaultdict(list)
    entering: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for arrow, chain in placed.chains:
        leaving[arrow.source].append((chain[1].x, id(arrow)))
        entering[arrow.target].append((chain[-2].x, id(arrow)))
    for arrow in placed.loops:  # towards the gutter: the last port at the right
        leaving[arrow.source].append((1e6, id(arrow.source)))
        entering[arrow.target].append((1e6, id(arrow)))
    for ends, found in ((leaving, ports.out), (entering, ports.into)):
        for name, wanted in ends.items():
            at, order = placed.boxes[name], sorted(set(wanted))
            gap = min(PORT, (at.width - 2 * CORNER) / max(1, len(order) - 1))
            low, high = at.x - at.width / 2 + CORNER, at.x + at.width / 2 - CORNER
            xs = spread([goal for goal, _ in order], [0.0] * len(order), gap, low, high)
            found.update({(name, key): x for (_, key), x in zip(order, xs, strict=True)})
    return ports


def _trunks(placed: Placed, right: float) -> tuple[dict[str, float], float]:
    """The x of each update's way up, and where the gutter ends: labels stand at the right of the trunk."""
    trunks: dict[str, float] = {}
    at = right + LANE_GAP
    for source in dict.fromkeys(arrow.source for arrow in placed.loops):
        trunks[source] = at
        at += max(label_size(arrow)[0] for arrow in placed.loops if arrow.source == source) + 16
    return trunks, at


def _hops(
    arrow: Arrow, chain: list[Place], ports: _Ports, channels: dict[int, list[_Piece]]
) -> list[tuple[Place, Place, _Piece]]:
    xs = [ports.out[arrow.source, id(arrow)], *(at.x for at in chain[1:-1]), ports.into[arrow.target, id(arrow)]]
    pieces = []
    for (upper, lower), (a, b) in zip(itertools.pairwise(chain), itertools.pairwise(xs), strict=True):
        piece = _Piece(a, b, min(a, b), max(a, b))
        pieces.append((upper, lower, piece))
        channels[upper.layer].append(piece)
    return pieces


def _back(
    arrow: Arrow, placed: Placed, ports: _Ports, trunks: dict[str, float], channels: dict[int, list[_Piece]]
) -> tuple[_Piece, _Piece]:
    """The two sideways pieces of an arrow that runs up: below its source, above its target."""
    source, target, trunk = placed.boxes[arrow.source], placed.boxes[arrow.target], trunks[arrow.source]
    out, into = ports.out[arrow.source, id(arrow.source)], ports.into[arrow.target, id(arrow)]
    below = next((p for p in channels[source.layer] if p.top_x == out and p.bottom_x is None), None)
    if below is None:
        below = _Piece(out, None, out, trunk)
        channels[source.layer].append(below)
    width, height = label_size(arrow)
    above = _Piece(None, into, into, trunk + width, label=height)
    channels[target.layer - 1].append(above)
    return below, above


def _heights(placed: Placed, channels: dict[int, list[_Piece]], top: float) -> tuple[list[float], float]:
    """The top of each layer and the bottom of the last channel; channel i lies below layer i, -1 above the first."""
    tops = []
    y = top + (_channel_height(channels[-1]) if channels[-1] else 0.0)
    for layer, places in enumerate(placed.layers):
        tops.append(y)
        y += max((at.height for at in places), default=0.0) + _channel_height(channels[layer])
    return tops, y


def _channel_height(pieces: list[_Piece]) -> float:
    """Give each piece that moves sideways a track; the height that they need."""
    moving = [piece for piece in pieces if piece.right - piece.left > 0.5]
    if not moving:
        return CHANNEL
    given: list[_Piece] = []
    for piece in _order(moving):
        piece.track = max((other.track + 1 for other in given if _must_lie_above(other, piece)), default=0)
        while any(_too_near(piece, other) for other in given):
            piece.track += 1
        given.append(piece)
    return CHANNEL + TRACK * (max(piece.track for piece in given) + 1)


def _too_near(a: _Piece, b: _Piece) -> bool:
    if a.left - 10 >= b.right or b.left - 10 >= a.right:
        return False
    labels = (a.label + b.label) / 2 + 4 if a.in_gutter and b.in_gutter and a.label + b.label else 0.0
    return abs(a.track - b.track) * TRACK < max(TRACK, labels)


def _must_lie_above(a: _Piece, b: _Piece) -> bool:
    """Else b's way down would run over a's way in, at the same x."""
    return a.top_x is not None and b.bottom_x is not None and abs(a.top_x - b.bottom_x) < 6


def _order(pieces: list[_Piece]) -> list[_Piece]:
    """Pieces from top to bottom: constraints first, then what saves crossings."""
    left = sorted(pieces, key=_preference)
    ordered: list[_Piece] = []
    while left:
        free = (p for p in left if not any(q is not p and _must_lie_above(q, p) for q in left))
        chosen = next(free, left[0])  # a cycle of constraints: one overlap is accepted
        left.remove(chosen)
        ordered.append(chosen)
    return ordered


def _preference(piece: _Piece) -> tuple[int, float]:
    if piece.top_x is None:  # from the gutter: lowest, next to the box that it enters
        return (2, -piece.left)
    if piece.bottom_x is None:
        return (0, -piece.left)
    return (1, -piece.top_x if piece.bottom_x > piece.top_x else piece.top_x)


class _Levels:
    """The y of each track."""

    def __init__(self, placed: Placed, tops: list[float], bottom: float) -> None:
        self._starts = {-1: tops[0] - CHANNEL / 2 if tops else 0.0}
        ends = [*tops[1:], bottom]
        for layer, places in enumerate(placed.layers):
            self._starts[layer] = tops[layer] + max((at.height for at in places), default=0.0)
        self._ends = {-1: tops[0] if tops else 0.0, **dict(enumerate(ends))}

    def y(self, layer: int, piece: _Piece) -> float:
        """Of a piece in the channel below `layer`."""
        if layer == -1:
            return self._ends[-1] - CHANNEL / 2 - TRACK / 2 - TRACK * piece.track
        return self._starts[layer] + CHANNEL / 2 + TRACK / 2 + TRACK * piece.track


def _down(arrow: Arrow, pieces: list[tuple[Place, Place, _Piece]], levels: _Levels) -> Line:
    upper, _, first = pieces[0]
    assert first.top_x is not None
    points: list[Point] = [(first.top_x, upper.y + upper.height)]
    label = None
    for upper, lower, piece in pieces:
        assert piece.top_x is not None
        assert piece.bottom_x is not None
        if piece.right - piece.left > 0.5:
            y = levels.y(upper.layer, piece)
            points += [(piece.top_x, y), (piece.bottom_x, y)]
        if lower.label is arrow and lower.height:
            label = (lower.x, lower.y + lower.height / 2)
    lower = pieces[-1][1]
    x = pieces[-1][2].bottom_x
    assert x is not None
    return Line(arrow, [*points, (x, lower.y)], label)


def _up(arrow: Arrow, placed: Placed, below: _Piece, above: _Piece, trunk: float, levels: _Levels) -> Line:
    source, target = placed.boxes[arrow.source], placed.boxes[arrow.target]
    low, high = levels.y(source.layer, below), levels.y(target.layer - 1, above)
    assert below.top_x is not None
    assert above.bottom_x is not None
    points = [
        (below.top_x, source.y + source.height),
        (below.top_x, low),
        (trunk, low),
        (trunk, high),
        (above.bottom_x, high),
        (above.bottom_x, target.y),
    ]
    width = label_size(arrow)[0]
    return Line(arrow, points, (trunk + 8 + width / 2, high) if width else None)
