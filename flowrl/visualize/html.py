"""A page that stands alone: the picture, and for the node under the pointer its edges, its line and its settings.

The page loads nothing and sends nothing (its content policy forbids both). Names and settings reach the script as JSON
and the page as text nodes, never as markup.
"""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from typing import Any

from .fold import fold
from .scene import Scene
from .svg import to_svg

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def to_html(scene: Scene) -> str:
    """The whole page."""
    scene = fold(scene)
    page = resources.files(__package__)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(scene.title)} · flowrl</title>",
            f"<style>{page.joinpath('page.css').read_text(encoding='utf-8')}</style></head><body>",
            f'<main id="canvas">{to_svg(scene)}</main>',
            '<nav><button id="in" title="zoom in">+</button><button id="out" title="zoom out">−</button>'
            '<button id="fit" title="show all">fit</button></nav>',
            '<aside id="panel" aria-live="polite"></aside>',
            f'<script type="application/json" id="data">{_data(scene)}</script>',
            f"<script>{page.joinpath('page.js').read_text(encoding='utf-8')}</script>",
            "</body></html>\n",
        ]
    )


def _data(scene: Scene) -> str:
    """What the panel shows. ``<`` is escaped, so that no string can end the script element."""
    clusters = {cluster.key: f"{cluster.title}: {cluster.shape}" for cluster in scene.clusters}
    nodes: dict[str, dict[str, Any]] = {
        box.name: {
            "title": box.title,
            "kind": box.kind,
            "at": box.at,
            "mesh": clusters.get(box.cluster, ""),
            "details": _flat(box.details),
        }
        for box in scene.boxes
    }
    text = json.dumps({"title": scene.title, "doc": scene.subtitle, "nodes": nodes}, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _flat(details: Any, prefix: str = "") -> list[list[str]]:
    """Nested settings as rows of name and value; what is unset is left out."""
    rows: list[list[str]] = []
    for name, value in details.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            rows.append([f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)])
    return rows
