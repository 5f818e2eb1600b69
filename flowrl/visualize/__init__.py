"""Pictures of a graph: SVG, a web page, Mermaid, DOT, and characters for the terminal. No ``dot`` binary is needed.

A graph of more nodes than a picture can hold is drawn in groups (`flowrl.visualize.fold`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import BackendError, ConfigError, did_you_mean

from . import dot, html, mermaid, svg, text
from .scene import Bounds, Scene, scene_of

if TYPE_CHECKING:
    from flowrl.graph import Graph

__all__ = ["SUFFIXES", "render", "to_string", "to_text"]

_FORMATS: Mapping[str, Callable[[Scene], str]] = {
    ".svg": svg.to_svg,
    ".html": html.to_html,
    ".mmd": mermaid.to_mermaid,
    ".dot": dot.to_dot,
    ".txt": lambda scene: text.to_text(scene, ascii_only=False),
}
SUFFIXES = (*_FORMATS, ".png")
"""What a picture's file may end with."""


def render(graph: Graph, path: Path | str, *, bounds: Bounds | None = None) -> Path:
    """Draw a graph into a file, in the format that its suffix names.

    Args:
        graph: what is drawn; it need not have passed the checks.
        path: ends with one of `SUFFIXES`.
        bounds: the bound of each queue, as text, by its writer and reader.

    Returns:
        The path.

    Raises:
        ConfigError: the suffix names no format, or the file cannot be written.
        BackendError: a .png, without the package that makes them.
    """
    path = Path(path)
    if path.suffix == ".png":
        content = _png(to_string(graph, ".svg", bounds=bounds))
    else:
        content = to_string(graph, path.suffix, bounds=bounds).encode("utf-8", "replace")
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"the picture '{path}' cannot be written", found=error.strerror) from error
    return path


def to_string(graph: Graph, suffix: str, *, bounds: Bounds | None = None) -> str:
    """A picture in the format that `suffix` names, as `render` writes it."""
    if suffix not in _FORMATS:
        raise ConfigError(
            "a picture's file name ends with no format that flowrl draws",
            found=suffix or "no suffix",
            wanted=" | ".join(SUFFIXES),
            fix=did_you_mean(suffix, SUFFIXES) or "-o graph.svg",
        )
    return _FORMATS[suffix](scene_of(graph, bounds))


def to_text(graph: Graph, width: int = 80, *, bounds: Bounds | None = None, ascii_only: bool | None = None) -> str:
    """A drawing for a terminal of `width` columns; plain ASCII where standard output cannot show more."""
    return text.to_text(scene_of(graph, bounds), width, ascii_only=ascii_only)


def _png(picture: str) -> bytes:
    try:
        cairosvg: Any = importlib.import_module("cairosvg")
    except (ImportError, OSError) as error:  # OSError: the package is there, its C library is not
        raise BackendError(
            "a .png picture needs the cairosvg package",
            found=str(error),
            wanted="cairosvg, or one of " + " | ".join(_FORMATS),
            fix="pip install cairosvg, or -o graph.svg",
        ) from error
    content: bytes = cairosvg.svg2png(bytestring=picture.encode(), scale=2)
    return content
