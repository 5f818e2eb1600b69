"""A reward for programs that do what their tests ask."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial as with_settings
from typing import Any

from flowrl.errors import WrongType
from flowrl.functions import reward
from flowrl.sandbox import Result, check_sandbox, run_python

_FENCED = re.compile(r"^[ \t]*```([^\n`]*)\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("", "py", "python", "python3")
_INPUT, _OUTPUT = ("stdin", "input"), ("stdout", "output")
_TESTS_NOTHING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)

Test = Callable[[Callable[..., Result], str], bool]
"""Whether a program passes, by a function that runs it."""


def extract_code(response: str) -> str | None:
    """The program of a response: its last block of Python between fences, or all of a response without any fence.

    None when all blocks are in other languages. A block that a cut response leaves open goes to the end.
    """
    blocks = _FENCED.findall(response)
    programs = [body for language, body in blocks if language.strip().lower() in _PYTHON]
    if programs:
        return textwrap.dedent(programs[-1])
    return None if blocks else response


def _check_limits(bound: Sequence[str], **limits: Any) -> None:
    known = {name: limits[name] for name in ("cpu_s", "memory_bytes") if name in limits}
    for name, value in known.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            what = "a limit of the sandbox leaves no room for any program"
            raise WrongType(what, found=f"{name}={value!r}", wanted=f"{name} > 0", fix="leave it out for the default")


@reward(timeout=None, check=_check_limits, needs=check_sandbox)  # each program has limits of its own
def runs_code(
    response: str,
    tests: Any,
    *,
    partial: bool = False,
    cpu_s: float = 5.0,
    memory_bytes: int = 1 << 30,
    network: bool = False,
) -> float:
    """1 if the program in a response passes all its tests in a sandbox, else 0.

    A wrong program, one that never ends and one that asks for too much are all worth 0. That no program could be run
    (`flowrl.errors.SandboxError`) is a failure, as is a row whose tests cannot be read.

    Args:
        response: see `extract_code`.
        tests: one of

            * Python source, such as ``assert add(1, 2) == 3``, that runs in the namespace of the program,
            * a list of such,
            * a list of ``{"input": text, "output": text}`` (or ``stdin`` and ``stdout``): what the program reads and
              has to print, white space at the ends of lines and at the end aside,
            * ``{"inputs": [text, ...], "outputs": [text, ...]}``, the same in columns,

            or JSON of the last three. Several tests of the first two kinds run in one process, unless `partial`.
        partial: give the share of tests passed.
        cpu_s: processor time of each run.
        memory_bytes: of each run.
        network: whether programs may open sockets.

    Raises:
        ValueError: `tests` is none of these.
        SandboxError: no program can be run here.
    """
    run = with_settings(run_python, cpu_s=cpu_s, memory_bytes=memory_bytes, network=network)
    each = _read(tests, together=not partial)
    program = extract_code(response)
    if program is None:
        return 0.0
    if not partial:
        return float(all(test(run, program) for test in each))
    return sum(test(run, program) for test in each) / len(each)


def _read(tests: Any, *, together: bool) -> list[Test]:
    if isinstance(tests, str):
        parsed = _json(tests)
        return _read(parsed, together=together) if parsed is not None else [_source(tests)]
    if isinstance(tests, Mapping):
        return [_prints(given, wanted) for given, wanted in _columns(tests)]
    if isinstance(tests, Sequence) and tests and all(isinstance(test, Mapping) for test in tests):
        return [_prints(_first(test, _INPUT), _first(test, _OUTPUT)) for test in tests]
    if isinstance(tests, Sequence) and tests and all(isinstance(test, str) for test in tests):
        return [_source("\n".join(tests))] if together else [_source(test) for test in tests]
    raise ValueError(f"tests are neither Python source nor inputs and outputs: {_shown(tests)}")


def _source(tests: str) -> Test:
    """Source that has to run to its end behind the program."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"tests are no Python source ({error}): {_shown(tests)}") from error
    if all(isinstance(line, _TESTS_NOTHING) for line in tree.body):
        raise ValueError(f"tests call nothing, so that every program would pass: {_shown(tests)}")
    return lambda run, program: run(program, then=tests).finished


def _prints(given: Any, wanted: Any) -> Test:
    """Text that the program has to print for what it reads."""
    stdin, stdout = _text(given), _text(wanted)

    def passes(run: Callable[..., Result], program: str) -> bool:
        result = run(program, stdin=stdin)
        return result.ok and _lines(result.stdout) == _lines(stdout)

    return passes


def _columns(tests: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs) > 0):
        raise ValueError(f"tests are no inputs and as many outputs: {_shown(tests)}")
    if tests.get("fn_name"):
        raise ValueError(f"tests call function {tests['fn_name']!r}: write them as Python source")
    return zip(inputs, outputs, strict=True)


def _first(test: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in test:
            return test[name]
    raise ValueError(f"a test has neither {' nor '.join(map(repr, names))}: {_shown(test)}")


def _text(value: Any) -> str:
    """Text, or lines of it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"what a program reads or prints is no text: {_shown(value)}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _json(text: str) -> Any:
    try:
        parsed = json.loads(text)
    except ValueError:
        return None
    return parsed if isinstance(parsed, list | dict) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
