"""``flowrl doctor``: what this machine has, what it lacks, and what to type.

Every probe is a function that gives findings and raises nothing. Versions come from the packages' metadata: torch is
imported only by the deep probe, which also makes a context on every CUDA device.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from . import machine, registry
from .machine import Finding
from .versions import installed

PYTHON = ((3, 11), (3, 14))
"""The oldest version that flowrl runs on, and the first that it does not."""
REQUIRED = {
    "torch": "2.6", "transformers": "5.0", "networkx": "3.2", "msgpack": "1.1", "pyzmq": "26.2", "rich": "13.9",
    "tyro": "0.9", "numpy": "1.26", "PyYAML": "6.0",
}  # fmt: skip
"""What flowrl needs, and since when; the same as setup.cfg's install_requires."""
OPTIONAL = {
    "megatron-core": "pip install 'flowrl[megatron]'",
    "vllm": "pip install vllm",
    "datasets": "pip install 'flowrl[data]'",
    "pyarrow": "pip install 'flowrl[data]'",
    "cairosvg": "pip install cairosvg",
}
"""What flowrl can do more with, and the command that installs it."""


def probe(*, deep: bool = False) -> list[Finding]:
    """Look at this machine. Takes well under a second; `deep` imports torch and touches every CUDA device."""
    probes: list[Callable[[], Iterable[Finding]]] = [_python, _required, _optional, _backends, *machine.PROBES]
    if deep:
        probes.append(_deep)
    return [finding for each in probes for finding in each()]


def failed(findings: Iterable[Finding]) -> bool:
    """Whether something that flowrl cannot do without is missing: the exit code is then 1, else 0."""
    return any(finding.status == "fail" for finding in findings)


def print_findings(findings: Sequence[Finding], out: IO[str] | None = None) -> None:
    """One line for each finding, with its cause and the way out below where there is something to do."""
    out = out or sys.stdout
    colour = {"ok": "32", "warn": "33", "fail": "31"} if out.isatty() and not os.environ.get("NO_COLOR") else {}
    width = max((len(finding.what) for finding in findings), default=0)
    for finding in findings:
        status = f"{finding.status:<4}"
        if colour:
            status = f"\033[{colour[finding.status]}m{status}\033[0m"
        print(f"{status}  {finding.what:<{width}}  {finding.found}", file=out)
        for label, text in (("", finding.cause), ("fix: ", finding.fix)):
            if text:
                print(f"{'':<{width + 8}}{label}{text}", file=out)
    counts = {status: sum(finding.status == status for finding in findings) for status in ("ok", "warn", "fail")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()), file=out)


def _python() -> Iterable[Finding]:
    low, high = PYTHON
    right = low <= sys.version_info[:2] < high
    yield Finding(
        what="python",
        status="ok" if right else "fail",
        found=f"{platform.python_version()} ({sys.executable})",
        cause="" if right else f"flowrl runs on {low[0]}.{low[1]} up to, not including, {high[0]}.{high[1]}",
        fix="" if right else "python3.12 -m venv venv && venv/bin/pip install flowrl",
    )


def _required() -> Iterable[Finding]:
    yield Finding(what="flowrl", status="ok", found=str(installed("flowrl")))
    for package, least in REQUIRED.items():
        version = installed(package)
        if version is None or numbers(version) < numbers(least):
            yield Finding(
                what=package,
                status="fail",
                found=version or "not installed",
                cause=f"flowrl needs {least} or later",
                fix=f"pip install '{package}>={least}'",
            )
        elif package == "pyzmq":
            yield _zmq(version)
        else:
            yield Finding(what=package, status="ok", found=version)


def numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as (2, 13, 0): what comes before the first part that is no number."""
    parts: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _zmq(version: str) -> Finding:
    try:
        import zmq
    except ImportError as error:  # its C library does not load
        fix = "pip install --force-reinstall pyzmq"
        return Finding(what="pyzmq", status="fail", found=version, cause=f"cannot be imported: {error}", fix=fix)
    found = f"{version} with libzmq {zmq.zmq_version()}"
    if not zmq.has("ipc"):
        cause, fix = "built without ipc, which local workers use", "pip install --force-reinstall pyzmq"
        return Finding(what="pyzmq", status="fail", found=found, cause=cause, fix=fix)
    return Finding(what="pyzmq", status="ok", found=found)


def _optional() -> Iterable[Finding]:
    """Packages that nothing needs until it is asked for: to be without one is right."""
    for package, install in OPTIONAL.items():
        version = installed(package)
        yield Finding(what=package, status="ok", found=version or f"not installed (optional: {install})")


def _backends() -> Iterable[Finding]:
    for name, entry in registry.BACKENDS.items():
        missing = registry.missing_packages(name)
        if not registry.is_shipped(name):
            yield Finding(what=f"backend {name}", status="ok", found="not part of this flowrl")
        elif missing:
            install = f"pip install 'flowrl[{entry.extra}]'" if entry.extra else "pip install flowrl"
            cause = f'a model with backend="{name}" is refused'
            found = f"needs {', '.join(missing)}"
            yield Finding(what=f"backend {name}", status="warn", found=found, cause=cause, fix=install)
        else:
            yield Finding(what=f"backend {name}", status="ok", found="installed")


def _deep() -> Iterable[Finding]:
    """Import torch and use every device that it sees: the driver, the build and the memory are tried, not read."""
    try:
        import torch
    except Exception as error:  # a broken installation raises anything: OSError, RuntimeError, ImportError
        fix = "pip install --force-reinstall torch"
        yield Finding(what="import torch", status="fail", found=type(error).__name__, cause=str(error), fix=fix)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield Finding(what="import torch", status="ok", found=f"{torch.__version__}, built with {build}")
    for device in range(torch.cuda.device_count()):
        try:
            properties = torch.cuda.get_device_properties(device)
            free, total = torch.cuda.mem_get_info(device)
            torch.ones(1, device=f"cuda:{device}").add_(1).cpu()
        except Exception as error:  # the driver's errors are RuntimeErrors of many texts
            fix = "nvidia-smi shows the driver's version and who uses the device"
            yield Finding(what=f"cuda:{device}", status="fail", found=type(error).__name__, cause=str(error), fix=fix)
            continue
        found = f"{properties.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        cause = "" if free > total / 2 else "another process holds more than half of its memory"
        yield Finding(what=f"cuda:{device}", status="warn" if cause else "ok", found=found, cause=cause)
