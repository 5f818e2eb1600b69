"""SVG, written by hand: no font, script or picture from elsewhere, and colours for a light and a dark page.

Colours are classes with plain values, overridden inside ``@media (prefers-color-scheme: dark)``: a viewer that knows no
media query shows the light ones.
"""

from __future__ import annotations

import re
from html import escape

from .fold import fold
from .layout import Place
from .measure import LABEL_LINE, LINE, PAD, SMALL, bold_width, label_lines, label_size, mono_width, title_of
from .routes import MARGIN, Drawing, Line, Point, draw
from .scene import HOST, Box, Cluster, Scene

HEADING, NAME = 50.0, 28.0
"""Height of the graph's name with its docstring, and without."""
LEGEND = 24.0
"""Height of the line that explains dashes and dots."""
RADIUS = 7.0
"""Of a line's corners."""

KINDS = {
    "prompts": ("#475569", "#94a3b8"),
    "rollout": ("#2563eb", "#60a5fa"),
    "responses": ("#2563eb", "#60a5fa"),
    "forward": ("#0e7490", "#22d3ee"),
    "judge": ("#b45309", "#fbbf24"),
    "reward": ("#b45309", "#fbbf24"),
    "advantage": ("#7c3aed", "#a78bfa"),
    "node": ("#4d7c0f", "#a3e635"),
    "metric": ("#64748b", "#94a3b8"),
    "filter": ("#be185d", "#f472b6"),
    "update": ("#15803d", "#4ade80"),
    "evaluate": ("#4338ca", "#818cf8"),
    "group": ("#475569", "#94a3b8"),
    "missing": ("#b91c1c", "#f87171"),
}
"""Accent of each kind, on a light and on a dark page; both have a contrast of 4.5 or more."""

SANS = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif'
MONO = 'ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace'

_STYLE = f"""
.fl text{{font-family:{MONO};font-size:{SMALL}px;fill:#475569}}
.fl .head{{font-family:{SANS};font-size:20px;font-weight:650;fill:#0f172a}}
.fl .doc{{font-family:{SANS};font-size:12.5px;fill:#64748b}}
.fl .page{{fill:#ffffff}}
.fl .lane{{fill:#f5f7fa;stroke:#e2e8f0}}
.fl .host{{fill:none;stroke:#d5dce5;stroke-dasharray:3 4}}
.fl .lane-name{{font-family:{SANS};font-size:13px;font-weight:650;fill:#1e293b}}
.fl .box{{fill:#ffffff;stroke:#cbd5e1}}
.fl .name{{font-family:{SANS};font-size:14px;font-weight:650;fill:#0f172a}}
.fl .kind{{font-family:{SANS};font-size:9.5px;font-weight:650;letter-spacing:.05em}}
.fl .pill{{fill:#ffffff;stroke:#dbe2ea}}
.fl .column{{fill:#1e293b}}
.fl .note{{fill:#64748b}}
.fl .line{{fill:none;stroke:#8593a6;stroke-width:1.4}}
.fl .tip{{fill:#8593a6}}
.fl .gate .line{{stroke:#be185d;stroke-dasharray:1.5 4;stroke-linecap:round;stroke-width:1.8}}
.fl .gate .tip{{fill:#be185d}}
.fl .version .line{{stroke:#15803d;stroke-dasharray:6 4;stroke-width:1.7}}
.fl .version .tip{{fill:#15803d}}
.fl .version .column{{fill:#15803d}}
.fl .refill .line{{stroke:#be185d;stroke-dasharray:6 4;stroke-width:1.7}}
.fl .refill .tip{{fill:#be185d}}
.fl .refill .column{{fill:#be185d}}
"""
_DARK = """
.fl text{fill:#a3b1c4}
.fl .head,.fl .name{fill:#f1f5f9}
.fl .doc,.fl .note{fill:#8b9bb0}
.fl .page{fill:#0d1117}
.fl .lane{fill:#141b25;stroke:#263140}
.fl .host{fill:none;stroke:#2f3b4b}
.fl .lane-name,.fl .column{fill:#dbe3ee}
.fl .box{fill:#1a2330;stroke:#35435a}
.fl .pill{fill:#141b25;stroke:#2f3b4d}
.fl .line{stroke:#66758c}
.fl .tip{fill:#66758c}
.fl .gate .line{stroke:#f472b6}
.fl .gate .tip{fill:#f472b6}
.fl .version .line{stroke:#4ade80}
.fl .version .tip{fill:#4ade80}
.fl .version .column{fill:#4ade80}
.fl .refill .line{stroke:#f472b6}
.fl .refill .tip{fill:#f472b6}
.fl .refill .column{fill:#f472b6}
"""


def style() -> str:
    """The style sheet, of a light page and of a dark one."""
    light = "".join(f".fl .k-{kind}{{fill:{colour}}}\n" for kind, (colour, _) in KINDS.items())
    dark = "".join(f".fl .k-{kind}{{fill:{colour}}}\n" for kind, (_, colour) in KINDS.items())
    return f"{_STYLE}{light}@media (prefers-color-scheme:dark){{{_DARK}{dark}}}\n"


def to_svg(scene: Scene) -> str:
    """A picture that stands alone."""
    scene = fold(scene)
    drawing = draw(scene, HEADING if scene.subtitle else NAME)
    heading = max(bold_width(scene.title, 20), mono_width(_doc(scene), 12.5)) + 2 * MARGIN
    legend = _legend(scene, drawing.height + 2)
    width = round(max(drawing.width, heading))
    height = round(drawing.height + (LEGEND if legend else 0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="fl" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{_quote(f"Dataflow graph {scene.title}")}">',
        f"<style>{style()}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text class="head" x="{MARGIN:g}" y="34">{_quote(scene.title)}</text>',
        f'<text class="doc" x="{MARGIN:g}" y="54">{_quote(_doc(scene))}</text>',
        *(_lane(cluster, drawing) for cluster in scene.clusters if cluster.key in drawing.lanes),
        *(_line(line) for line in drawing.lines),
        *(_label(line) for line in drawing.lines if line.label),
        *(_box(box, drawing.boxes[box.name]) for box in scene.boxes),
        *legend,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


_ILLEGAL = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\U00010000-\U0010ffff]")


def _quote(text: str) -> str:
    """Text inside an element or an attribute. Characters that XML does not have become U+FFFD."""
    return escape(_ILLEGAL.sub("\ufffd", text))


def _doc(scene: Scene) -> str:
    return scene.subtitle if len(scene.subtitle) <= 100 else f"{scene.subtitle[:99]}…"


def _text(kind: str, x: float, y: float, text: str, anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    # White space is kept as it is: an indented line of settings goes on from the one above.
    space = ' xml:space="preserve"' if text.startswith(" ") else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{where}{space}>{_quote(text)}</text>'


def _rect(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def _lane(cluster: Cluster, drawing: Drawing) -> str:
    lane, top, bottom = drawing.lanes[cluster.key]
    x = lane.left + PAD
    kind = "host" if cluster.key == HOST else "lane"
    after = x + bold_width(cluster.title, 13) + 10
    return "\n".join(
        [
            f'<g class="cluster">{_rect(kind, lane.left, top, lane.right - lane.left, bottom - top, 12)}',
            _text("lane-name", x, top + 23, cluster.title),
            _text("note", after, top + 23, cluster.shape),
            *(_text("note", x, top + 42 + LABEL_LINE * i, line) for i, line in enumerate(cluster.models)),
            "</g>",
        ]
    )


def _box(box: Box, at: Place) -> str:
    left, top = at.x - at.width / 2, at.y
    kind = box.kind if box.kind in KINDS else "node"
    stacked = _rect("box", left + 4, top + 4, at.width, at.height, 9) if box.members else ""
    tip = "\n".join([f"{box.title} ({box.kind})", box.at, *box.lines])
    return "\n".join(
        [
            f'<g class="node" data-name="{_quote(box.name)}"><title>{_quote(tip)}</title>{stacked}',
            _rect("box", left, top, at.width, at.height, 9),
            _rect(f"k-{kind}", left + 6, top + 9, 3.5, at.height - 18, 1.75),
            _text("name", left + PAD + 4, top + 24, title_of(box)),
            _text(f"kind k-{kind}", left + at.width - PAD, top + 23, box.kind.upper(), "end"),
            *(_text("setting", left + PAD + 4, top + 44 + LINE * i, line) for i, line in enumerate(box.lines)),
            "</g>",
        ]
    )


def _line(line: Line) -> str:
    arrow = line.arrow
    x, y = line.points[-1]
    ends = f'data-from="{_quote(arrow.source)}" data-to="{_quote(arrow.target)}"'
    tip = "\n".join([f"{arrow.source} → {arrow.target}", *arrow.columns, *arrow.notes])
    return (
        f'<g class="arrow {arrow.kind}" {ends}><title>{_quote(tip)}</title>'
        f'<path class="line" d="{_path([*line.points[:-1], (x, y - 5)])}"/>'
        f'<path class="tip" d="M{x:.1f} {y:.1f}l-4.2 -8.4q4.2 2.4 8.4 0z"/></g>'
    )


def _label(line: Line) -> str:
    assert line.label
    (x, y), (width, height), arrow = line.label, label_size(line.arrow), line.arrow
    lines = label_lines(arrow)
    pill = _rect("pill", x - width / 2, y - height / 2, width, height, 7)
    texts = [
        _text("column" if column else "note", x, y - height / 2 + 14 + LABEL_LINE * i, text, "middle")
        for i, (text, column) in enumerate(lines)
    ]
    ends = f'data-from="{_quote(arrow.source)}" data-to="{_quote(arrow.target)}"'
    return "\n".join([f'<g class="label {arrow.kind}" {ends}>{pill}', *texts, "</g>"])


def _legend(scene: Scene, y: float) -> list[str]:
    """What the kinds of lines mean; nothing where there is one kind only."""
    texts = {
        "column": "columns",
        "gate": "gate: only rows that a filter kept",
        "version": "a model's next version",
        "refill": "further prompts for groups that a filter dropped",
    }
    kinds = [kind for kind in texts if any(arrow.kind == kind for arrow in scene.arrows)]
    parts, x = [], MARGIN + 2
    for kind in kinds if len(kinds) > 1 else []:
        parts.append(f'<g class="{kind}"><path class="line" d="M{x:.1f} {y - 4:.1f}h26"/></g>')
        parts.append(_text("note", x + 34, y, texts[kind]))
        x += 34 + mono_width(texts[kind]) + 26
    return parts


def _path(points: list[Point]) -> str:
    """A right-angled line with rounded corners."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        radius = min(RADIUS, _distance(before, corner) / 2, _distance(corner, after) / 2)
        start, end = _towards(corner, before, radius), _towards(corner, after, radius)
        parts.append(f"L{start[0]:.1f} {start[1]:.1f}Q{corner[0]:.1f} {corner[1]:.1f} {end[0]:.1f} {end[1]:.1f}")
    return "".join([*parts, f"L{points[-1][0]:.1f} {points[-1][1]:.1f}"])


def _distance(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _towards(a: Point, b: Point, length: float) -> Point:
    whole = _distance(a, b) or 1.0
    return a[0] + (b[0] - a[0]) * length / whole, a[1] + (b[1] - a[1]) * length / whole
