"""What `doctor` asks the machine: devices, cores, memory, limits, sockets. Nothing here imports torch."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .versions import installed

Status = Literal["ok", "warn", "fail"]
GIB = 2**30
SHM_BYTES = GIB
"""NCCL passes tensors between the ranks of one host through /dev/shm; a container's default of 64 MiB is too small."""
OPEN_FILES = 4096
"""A worker has a few sockets and blocks; the scheduler has some for every worker."""
LONGEST_SOCKET_PATH = 107
"""Bytes that the kernel allows (sun_path without its end)."""
SOCKET_NAME = 60
"""Bytes that flowrl puts behind the temporary folder: a folder of its own and a file name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    status: Status
    found: str
    cause: str = ""
    """What follows from it; empty when it is as it should be."""
    fix: str = ""
    """The way out."""


def devices(environment: Mapping[str, str] = os.environ) -> Iterable[Finding]:
    """The CUDA devices of this machine and what ``CUDA_VISIBLE_DEVICES`` leaves of them."""
    present = list_devices()
    if not present:
        asked = environment.get("CUDA_VISIBLE_DEVICES")
        cause = "CUDA_VISIBLE_DEVICES names devices that are not there" if asked else ""
        found = "none; models run on the CPU"
        yield Finding(what="CUDA devices", status="warn" if cause else "ok", found=found, cause=cause)
        return
    yield visible(environment.get("CUDA_VISIBLE_DEVICES"), present)
    torch = installed("torch") or ""
    if torch.endswith("+cpu"):
        yield Finding(
            what="torch build",
            status="warn",
            found=torch,
            cause="this torch was built without CUDA, and uses none of the devices",
            fix="https://pytorch.org/get-started names the build for this machine's driver",
        )


def list_devices() -> list[str]:
    """``GPU-uuid name`` of each device, as the driver's own tool lists them; empty without driver or devices."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [f"device {i}" for i, _ in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*")))]
    query = [tool, "--query-gpu=uuid,name", "--format=csv,noheader"]
    # Without the variable: the tool itself ignores it, a wrapper may not.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    return [line.replace(",", "", 1).strip() for line in done.stdout.splitlines() if line.strip()]


def visible(setting: str | None, present: list[str]) -> Finding:
    """What a value of ``CUDA_VISIBLE_DEVICES`` does.

    CUDA reads it up to the first entry that names no device, and says nothing of the rest; an entry that stands twice
    hides every device. An entry is a number, or the beginning of a UUID that fits one device.

    Args:
        setting: the value; None when it is not set.
        present: of each device its UUID and name.
    """
    names = f"{len(present)}: {'; '.join(dict.fromkeys(_name(one) for one in present))}"
    if setting is None:
        found = f"{names}; CUDA_VISIBLE_DEVICES is not set: all are used"
        return Finding(what="CUDA devices", status="ok", found=found)
    shown = f"{names}; CUDA_VISIBLE_DEVICES={setting!r}"
    fix = "unset CUDA_VISIBLE_DEVICES, or list devices by number: CUDA_VISIBLE_DEVICES=0,1"
    entries = [entry.strip() for entry in setting.split(",")]
    chosen: list[str] = []
    for entry in entries:
        device = _device(entry, present)
        if device is None:
            break
        chosen.append(device)
    if len(set(chosen)) < len(chosen):
        cause = "a device stands twice, which makes CUDA see none"
    elif not chosen:
        cause = "it hides every device" if setting in ("", "-1") else f"'{entries[0]}' names no device: it hides all"
    elif len(chosen) < len(entries):
        cause = f"'{entries[len(chosen)]}' names no device: it and all after it are ignored, {len(chosen)} remain"
    else:
        order = ", ".join(f"cuda:{i} is {device}" for i, device in enumerate(chosen))
        return Finding(what="CUDA devices", status="ok", found=f"{shown}: {order}")
    return Finding(what="CUDA devices", status="warn", found=shown, cause=cause, fix=fix)


def _name(device: str) -> str:
    uuid, _, name = device.partition(" ")
    return name if uuid.startswith("GPU-") else device


def _device(entry: str, present: list[str]) -> str | None:
    """What an entry names: ``device 3`` for a number and for a UUID alike."""
    if entry.isdigit():
        return f"device {int(entry)}" if int(entry) < len(present) else None
    if entry.startswith("MIG-"):  # a slice of a device, which nvidia-smi's query does not list
        return entry
    fits = [i for i, one in enumerate(present) if entry.startswith("GPU-") and one.startswith(entry)]
    return f"device {fits[0]}" if len(fits) == 1 else None


def processor() -> Iterable[Finding]:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    cores, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    quota = _quota(Path("/sys/fs/cgroup/cpu.max"))
    usable = min(allowed, quota) if quota else float(allowed)
    found = f"{usable:g} of {cores}" if usable < cores else str(cores)
    cause = "" if usable >= 2 else "model, rewards and scheduler share one core"
    yield Finding(what="cores", status="warn" if cause else "ok", found=found, cause=cause)


def _quota(file: Path) -> float | None:
    """Cores that a control group allows, or None for no limit."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def memory() -> Iterable[Finding]:
    """Memory that is free, by the smaller of the machine's and the container's limit."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        yield Finding(what="memory", status="warn", found="unknown", cause="/proc/meminfo cannot be read")
        return
    limit = _bytes(Path("/sys/fs/cgroup/memory.max"))
    if limit is not None and limit < total:
        used = _bytes(Path("/sys/fs/cgroup/memory.current")) or 0
        total, free = limit, min(free, limit - used)
    cause = "" if free >= 2 * GIB else "torch alone takes several hundred MiB in every process"
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield Finding(what="memory", status="warn" if cause else "ok", found=found, cause=cause)


def _bytes(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
        return None if text == "max" else int(text)
    except (OSError, ValueError):
        return None


def shared_memory(folder: Path = Path("/dev/shm")) -> Iterable[Finding]:
    """Room for what the ranks of one mesh pass to each other on one host."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        cause = f"{folder}: {error.strerror}; ranks on several CUDA devices may fail to start"
        yield Finding(what="/dev/shm", status="warn", found="none", cause=cause, fix="mount -t tmpfs tmpfs /dev/shm")
        return
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    small = free < SHM_BYTES
    yield Finding(
        what="/dev/shm",
        status="warn" if small else "ok",
        found=f"{free / GIB:.2f} of {total / GIB:.2f} GiB free",
        cause="ranks on several CUDA devices pass tensors through it, and may fail to start" if small else "",
        fix="docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm" if small else "",
    )


def open_files() -> Iterable[Finding]:
    """Sockets and blocks count as open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    small = soft != unlimited and soft < OPEN_FILES
    raised = "ulimit -n 65536" if hard == unlimited or hard >= 65536 else f"ulimit -n {hard}"
    yield Finding(
        what="open files",
        status="warn" if small else "ok",
        found="unlimited" if soft == unlimited else f"{soft:,}",
        cause=f"a run with many workers needs up to {OPEN_FILES:,}" if small else "",
        fix=raised if small else "",
    )


def loopback() -> Iterable[Finding]:
    """Whether a process can reach another of this host: a bind, a connect, a byte."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as client:
                peer, _ = server.accept()
                with peer:
                    client.sendall(b"x")
                    peer.settimeout(2)
                    assert peer.recv(1) == b"x"
    except OSError as error:
        cause = f"127.0.0.1 cannot be used: {error}"
        yield Finding(what="loopback", status="fail", found="refused", cause=cause, fix="ip link set lo up")
        return
    yield Finding(what="loopback", status="ok", found="127.0.0.1 answers")


def socket_folder(folder: str | None = None) -> Iterable[Finding]:
    """The temporary folder holds Unix sockets, whose paths have a short limit."""
    folder = folder or tempfile.gettempdir()
    length = len(os.fsencode(os.path.abspath(folder)))
    long = length + SOCKET_NAME > LONGEST_SOCKET_PATH
    writable = os.access(folder, os.W_OK | os.X_OK)
    cause = f"a socket's path may have {LONGEST_SOCKET_PATH} bytes, and flowrl adds up to {SOCKET_NAME}" if long else ""
    cause = cause if writable else "it cannot be written to"
    yield Finding(
        what="temporary folder",
        status="fail" if cause else "ok",
        found=f"{folder}: a path of {length} bytes" if long else folder,
        cause=cause,
        fix="export TMPDIR=/tmp" if cause else "",
    )


PROBES: tuple[Callable[[], Iterable[Finding]], ...] = (
    devices, processor, memory, shared_memory, open_files, loopback, socket_folder
)  # fmt: skip
