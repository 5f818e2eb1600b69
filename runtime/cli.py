"""The command line: ``flowrl run | check | visualize | doctor | init``.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or a failed check, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from flowrl.backend import ModelFacts
from flowrl.check import check, notes
from flowrl.errors import ConfigError, FlowrlError, did_you_mean
from flowrl.graph import Graph
from flowrl.model import Model
from flowrl.rates import bound_texts, bounds
from flowrl.trace import GraphFunction

from .config import apply, resolve
from .graphfile import body_error, load_graph
from .parameter_help import help_text
from .registry import describe
from .signals import Terminated, sigterm_raises

RESERVED = frozenset({"config", "run_dir", "launcher", "resume", "save_every", "lease"})
"""Options of the command line, which no graph parameter may be called. (`steps` may: the option overrides it.)"""
OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
DEFAULT_STEPS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "check": _check,
        "visualize": _visualize,
        "doctor": _doctor,
        "init": _init,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(_HELP)
        return OK if words else USAGE
    if words[0] == "--version":
        import flowrl

        print(f"flowrl {flowrl.__version__}")
        return OK
    try:
        if words[0] not in commands:
            fix = did_you_mean(words[0], commands)
            raise ConfigError(f"there is no command '{words[0]}'", wanted=", ".join(commands), fix=fix)
        with sigterm_raises():
            return commands[words[0]](words[1:])
    except FlowrlError as error:
        print(f"flowrl {words[0]}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("flowrl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("flowrl: terminated", file=sys.stderr)
        return TERMINATED


_HELP = """\
usage: flowrl COMMAND ...

  flowrl run GRAPH.py[:name] [--steps N] [--run-dir DIR] [--launcher local|inline] [--resume]
             [--save-every N] [--config FILE.yaml] [graph parameters: --lr 3e-6 --train.dp 2]
  flowrl check GRAPH.py[:name]|FOLDER      check a graph, or all graphs of a folder; starts nothing
  flowrl visualize GRAPH.py[:name] [-o FILE.svg|.html|.mmd|.dot]   draw the graph, here without -o
  flowrl doctor                            what this machine has, and what it lacks
  flowrl init [DIR]                        a graph of your own to start from

  flowrl run GRAPH.py --help               the graph's own parameters
  flowrl --version                         the version that is installed\
"""


def _run(words: list[str]) -> int:
    from .console import open_console
    from .driver import RunOptions, run

    spec, known, rest = _split("run", words, _RunFlags)
    graph, overrides = _graph(spec, rest, known.config, known.steps)
    problems = _problems(graph)
    if problems:
        return _refuse(problems)
    steps = graph.parameters.get("steps", DEFAULT_STEPS) if known.steps is None else known.steps
    if known.resume and known.run_dir is None:
        raise ConfigError("--resume goes on with a run that was begun", found="no --run-dir", fix="--run-dir runs/NAME")
    options = RunOptions(
        num_steps=steps,
        launcher=known.launcher,
        run_dir=known.run_dir or _new_run_dir(graph.name),
        resume=known.resume,
        save_every=known.save_every,
        lease_s=known.lease,
        command=("flowrl", "run", *words),
        graph_spec=spec,
        overrides=overrides,
    )
    console = open_console()
    for note in notes(graph, cores=os.cpu_count() or 1):
        console.warn(note)
    run(graph, options, console)
    return OK


def _check(words: list[str]) -> int:
    spec, known, rest = _split("check", words, _CheckFlags)
    files = sorted(Path(spec).glob("[!_]*.py")) if Path(spec).is_dir() else [spec]
    wrong = 0
    for each in map(str, files):
        try:
            graph, _ = _graph(each, rest, known.config)
            problems = _problems(graph)
        except FlowrlError as error:
            problems = [error]
        if problems:
            wrong += 1
            _refuse(problems)
        else:
            print(f"{each}: graph '{graph.name}' is right: {_size(graph)}")
    return USAGE if wrong else OK


def _visualize(words: list[str]) -> int:
    from flowrl.visualize import render, to_text

    spec, known, rest = _split("visualize", words, _VisualizeFlags)
    graph, _ = _graph(spec, rest, known.config)
    texts = bound_texts(graph)
    if known.output is None:
        print(to_text(graph, bounds=texts))
    else:
        render(graph, known.output, bounds=texts)
        print(f"wrote {known.output}")
    return OK


def _doctor(words: list[str]) -> int:
    from .doctor import failed, print_findings, probe

    findings = probe(deep=tyro.cli(_DoctorFlags, args=words, prog="flowrl doctor").deep)
    print_findings(findings)
    return FAILED if failed(findings) else OK


def _init(words: list[str]) -> int:
    from .init import init, next_steps

    folder = tyro.cli(_InitFlags, args=words, prog="flowrl init").folder
    for path in init(folder):
        print(f"wrote {path}")
    print(next_steps(folder))
    return OK


# --- parts ----------------------------------------------------------------------------------------------------------


def _count(words: list[str]) -> int:
    if not words[0].isdecimal() or int(words[0]) < 1:
        raise ValueError(f"{words[0]!r} is no integer >= 1")
    return int(words[0])


Count = Annotated[
    int | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N",
        instance_from_str=_count,
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    ),
]
"""An option that counts something, from 1; None when it is not given."""


@dataclass(frozen=True)
class _Common:
    """Options of every command that takes a graph."""

    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE.yaml", help_behavior_hint="")] = None
    """Graph parameters as YAML."""


@dataclass(frozen=True)
class _RunFlags(_Common):
    """Check a graph, then run it. Everything that is no option here is a parameter of the graph."""

    steps: Annotated[Count, tyro.conf.arg(help_behavior_hint="")] = None
    """Steps to train, also as the graph's parameter `steps` if it has one; else that parameter, else 100."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Where the run writes (default: runs/NAME-DATE-TIME)."""
    launcher: Literal["local", "inline"] = "local"
    """A process a rank, or all in this one."""
    resume: bool = False
    """Go on from the newest checkpoint in --run-dir."""
    save_every: Annotated[Count, tyro.conf.arg(help_behavior_hint="")] = None
    """Steps between two checkpoints. The last step is always saved; without this, no other is."""
    lease: float = 600.0
    """Seconds that a worker with work may give no sign of progress."""


@dataclass(frozen=True)
class _CheckFlags(_Common):
    """Check a graph, or all graphs of a folder; starts nothing."""


@dataclass(frozen=True)
class _VisualizeFlags(_Common):
    """Draw a graph."""

    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")] = None
    """A .svg, .html, .mmd, .dot, .txt or .png file; the terminal when left out."""


@dataclass(frozen=True)
class _DoctorFlags:
    """What this machine has, and what it lacks."""

    deep: bool = False
    """Also import torch and open each CUDA device."""


@dataclass(frozen=True)
class _InitFlags:
    """Write a graph of your own to start from."""

    folder: tyro.conf.Positional[Path] = Path()
    """Where; the working directory when left out."""


Flags = TypeVar("Flags", bound=_Common)


def _split(command: str, words: list[str], kind: type[Flags]) -> tuple[str, Flags, list[str]]:
    """The graph's file, the command's own options, and the rest: the graph's parameters."""
    usage = f"flowrl {command} GRAPH.py[:name]"
    if not words or words[0].startswith("-"):
        if "-h" in words or "--help" in words:
            tyro.cli(kind, args=["--help"], prog=usage)
        raise ConfigError(f"'flowrl {command}' needs a graph", wanted=usage, fix=f"flowrl {command} my_graph.py")
    if "-h" in words or "--help" in words:
        loaded = load_graph(words[0])
        if isinstance(loaded, GraphFunction):
            print(f"{help_text(loaded)}\n")
        tyro.cli(kind, args=["--help"], prog=usage)
    flags, rest = tyro.cli(kind, args=words[1:], prog=usage, return_unknown_args=True)
    return words[0], flags, rest


def _graph(
    spec: str, rest: Sequence[str], config: Path | None, steps: int | None = None
) -> tuple[Graph, dict[str, Any]]:
    """Load and trace a graph with its parameters; `steps` of the command line is its parameter `steps` too."""
    loaded = load_graph(spec)
    if isinstance(loaded, Graph):
        if rest or config:
            raise ConfigError(f"graph '{loaded.name}' has no parameters", found=" ".join(rest) or str(config))
        return loaded, {}
    if taken := sorted(RESERVED & loaded.parameters.keys()):
        raise ConfigError(
            f"graph '{loaded.name}' has a parameter '{taken[0]}', which is an option of `flowrl run`",
            at=loaded.at,
            wanted=f"none of {', '.join(sorted(RESERVED))}",
            fix="give the parameter another name",
        )
    if steps is not None and "steps" in loaded.parameters:
        rest = [*rest, "--steps", str(steps)]
    overrides = resolve(loaded, rest, config)
    values = apply(loaded, overrides)
    try:
        return loaded(**values), overrides
    except Exception as error:
        raise body_error(error, loaded) from error.__cause__


def _problems(graph: Graph) -> list[FlowrlError]:
    def facts(model: Model) -> ModelFacts:
        return describe(model.backend, model.source)

    return check(graph, describe=facts)


def _refuse(problems: Sequence[FlowrlError]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return USAGE


def _size(graph: Graph) -> str:
    queues = len(bounds(graph).edges)
    models = "1 model" if len(graph.models) == 1 else f"{len(graph.models)} models"
    return f"{len(graph.nodes)} nodes, {models}, {queues} bounded queues that cannot deadlock"


def _new_run_dir(name: str) -> Path:
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
