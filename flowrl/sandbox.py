"""Run a Python program that nobody has read: what a model wrote. It ends in time, and nothing of it stays behind.

The program is one process (see `confined`). It may start threads, and no process; it has no network, none of this
process's environment, and no signal for others. It reads the interpreter's own folders, not those of the user, and
keeps files in an empty folder that is removed after it. Time, memory, output, files and threads have limits. So a fork
bomb, an endless loop or a full disk is a result like any other.

A *result* is what came of the program, and may be scored. That no program could be run is a `SandboxError`, and no
score: the kernel refuses Landlock or seccomp, the machine has no memory left, somebody has killed the process.

This holds the machine against what models write by mistake, or to get a reward; it is no wall against a known fault of
the kernel. That a program has finished (`Result.finished`) holds against one that exits early or prints what success
looks like. Tests run in the program's own process: one that goes looking there for what judges it can deceive it. Where
that matters, give tests of input and output, which are compared here.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import marshal
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, TypedDict

from .confined import OUT_OF_MEMORY, READY
from .errors import SandboxError, WrongType

Limit = Literal["time", "memory", "output", "files", "threads"]

LOOK_S = 0.05
"""Between two looks at what no limit of the kernel bounds: the number of files and of threads."""
MAX_FILES = 256
"""Files in the program's folder."""
MAX_THREADS = 128
LEAST_MEMORY = 64 << 20
"""Twice what the interpreter takes for itself."""
GRACE_S = 60.0
"""For an interpreter to start on a machine that is busy; a program's own time begins after it."""
READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/nix/store")
"""Shared libraries and time zones."""
FOR_NETWORK = ("/etc", "/run/systemd/resolve")
"""Names of hosts, and certificates."""
PREFIX = "flowrl-sandbox-"
"""Of the folders of programs, among the temporary files."""
ABANDONED_S = 60.0
"""A folder that is older and that no process holds is nobody's; a younger one may be about to be held."""
CHILD = Path(__file__).with_name("confined.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of a program."""

    exit_code: int | None
    """None when a signal or a limit ended it."""
    signal: int | None
    """That ended it, such as SIGSEGV; None when it was a limit's."""
    limit: Limit | None
    """What it used too much of."""
    finished: bool
    """Whether it ran to its last line: one that calls ``sys.exit(0)`` before that is `ok` and did not finish."""
    stdout: str
    """Its beginning, up to the limit; bytes that are no UTF-8 become U+FFFD."""
    stderr: str
    cpu_s: float
    """Processor time, its start included."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and without an error."""
        return self.exit_code == 0 and self.limit is None

    @property
    def reason(self) -> str:
        """Why it is not `ok`, in a line."""
        if self.limit:
            return f"too much {self.limit}" if self.limit not in ("files", "threads") else f"too many {self.limit}"
        if self.signal is not None:
            return f"ended by {signal.Signals(self.signal).name}"
        last = self.stderr.rstrip().rpartition("\n")[2]
        return f"exit code {self.exit_code}" + (f": {last}" if last else "")


def run_python(
    source: str,
    *,
    then: str | None = None,
    stdin: str = "",
    cpu_s: float = 5.0,
    wall_s: float | None = None,
    memory_bytes: int = 1 << 30,
    output_bytes: int = 1 << 20,
    network: bool = False,
    readable: Sequence[str | Path] = (),
) -> Result:
    """Run a program by this interpreter, with its packages, apart from everything else.

    Hashes of text are the same in every run, so that sets have one order.

    Args:
        source: of the program.
        then: more source, such as tests, that runs in the same namespace once the program has ended. The program then
            is a module and no ``__main__``; `Result.finished` says whether both came to their end.
        stdin: what it can read.
        cpu_s: processor time of all its threads, rounded up to whole seconds.
        wall_s: time on the clock; None is ten times `cpu_s` and 30 seconds: the verdict on a slow program is then
            that of its own time, which does not depend on what else the machine does.
        memory_bytes: address space, the interpreter's own 30 MiB or so included.
        output_bytes: of standard output, of standard error, and of each file.
        network: let it open sockets, and read what names of hosts and certificates need.
        readable: more files and folders that it may read.

    Raises:
        SandboxError: it could not be run.
        WrongType: a limit leaves no room for any program.
    """
    wall = 10 * cpu_s + 30 if wall_s is None else wall_s
    _expect(memory_bytes=memory_bytes, least=LEAST_MEMORY)
    _expect(cpu_s=cpu_s, wall_s=wall, output_bytes=output_bytes)
    try:
        _remove_abandoned(tempfile.gettempdir())
        with tempfile.TemporaryDirectory(prefix=PREFIX) as name, _held(name):
            folder = Path(name).resolve()
            programs = [_write(folder / "program.py", source)]
            programs += [] if then is None else [_write(folder / "tests.py", then)]
            _write(folder / "stdin", stdin)
            places = [*READABLE, *(FOR_NETWORK if network else ()), *map(str, readable), *programs]
            order = _Order(
                parent=os.getpid(),
                cpu_s=math.ceil(cpu_s),
                memory_bytes=memory_bytes,
                file_bytes=output_bytes,
                network=network,
                readable=places,
                programs=programs,
                word=secrets.token_hex(16),
            )
            with _Child(folder, order) as child:
                child.await_ready()
                return child.result(child.watch(wall))
    except OSError as error:
        raise _not_run(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _held(folder: str) -> Iterator[None]:
    """Lock a folder until it is left, or until this process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@functools.cache  # once a process
def _remove_abandoned(temporary: str) -> None:
    """Remove the folders of processes that were killed before they could."""
    for folder in Path(temporary).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or removed by another process now
            if time.time() - folder.stat().st_mtime < ABANDONED_S:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def check_sandbox() -> None:
    """Find out whether programs can be run here.

    Raises:
        SandboxError: they cannot.
    """
    run_python("")


def _expect(*, least: float = 1e-3, **settings: float) -> None:
    for name, value in settings.items():
        if not least <= value < math.inf:
            raise WrongType(f"a sandbox has too little {name}", found=repr(value), wanted=f"at least {least:g}")


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return str(path)


class _Order(TypedDict):
    """What `confined` is told."""

    parent: int
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    network: bool
    readable: list[str]
    programs: list[str]
    word: str
    """Said after the programs, and by them only if they mean to cheat."""


class _Child:
    """The process of one program. Leaving the context ends it, whatever happened."""

    def __init__(self, folder: Path, order: _Order) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.order = order
        self._said = b""

    def __enter__(self) -> _Child:
        self.work.mkdir()
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(GRACE_S)
        command = [sys.executable, "-P", "-s", "-B", "-X", "utf8", str(CHILD), str(theirs.fileno())]
        with (
            theirs,
            open(self.folder / "stdin", "rb") as stdin,
            open(self.folder / "stdout", "wb") as stdout,
            open(self.folder / "stderr", "wb") as stderr,
        ):
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=self.work,
                env=_environment(self.work),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ours.close()
        self._process.kill()
        self._process.wait()

    def await_ready(self) -> None:
        """Hand over the order, and wait until the process is confined.

        Raises:
            SandboxError: it is not.
        """
        with contextlib.suppress(BrokenPipeError):  # what it has to say comes next
            self._ours.sendall(marshal.dumps(dict(self.order)))
        while not self._said.startswith(READY):
            try:
                heard = self._ours.recv(1 << 12)
            except TimeoutError:
                raise _not_run(f"no sign of its process within {GRACE_S:g} s") from None
            if not heard:
                why = self._said.decode() or self._text("stderr").strip().rpartition("\n")[2]
                raise _not_run(why or "its process ended before it was confined")
            self._said += heard

    def watch(self, wall_s: float) -> Limit | None:
        """Wait for the program's end; a limit that nobody but this process holds it to."""
        deadline = time.monotonic() + wall_s
        handle = os.pidfd_open(self._process.pid)
        try:
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            while (left := deadline - time.monotonic()) > 0:
                if poller.poll(1000 * min(left, LOOK_S)):
                    return None
                if len(os.listdir(self.work)) > MAX_FILES:
                    return "files"
                if len(os.listdir(f"/proc/{self._process.pid}/task")) > MAX_THREADS:
                    return "threads"
            return "time"
        finally:
            os.close(handle)

    def result(self, limit: Limit | None) -> Result:
        """End what is left, and sum up.

        Raises:
            SandboxError: somebody else has killed it.
        """
        os.kill(self._process.pid, signal.SIGKILL)  # not by Popen, which would take the status that is wanted here
        _, status, usage = os.wait4(self._process.pid, 0)
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        cpu_s = usage.ru_utime + usage.ru_stime
        limit = limit or self._limit(code, cpu_s)
        if limit is None and code == -signal.SIGKILL:  # a program cannot send it to itself
            raise _not_run("its process was killed from outside, as happens where a machine has no memory left")
        return Result(
            exit_code=code if limit is None and code >= 0 else None,
            signal=-code if limit is None and code < 0 else None,
            limit=limit,
            finished=limit is None and self._heard() == READY + self.order["word"].encode(),
            stdout=self._text("stdout"),
            stderr=self._text("stderr"),
            cpu_s=cpu_s,
        )

    def _limit(self, code: int, cpu_s: float) -> Limit | None:
        """The limit of the kernel that ended the program."""
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= self.order["cpu_s"]):
            return "time"
        if code == OUT_OF_MEMORY:
            return "memory"
        sizes = [(self.folder / name).stat().st_size for name in ("stdout", "stderr")]
        return "output" if max(sizes) >= self.order["file_bytes"] else None

    def _heard(self) -> bytes:
        while heard := self._ours.recv(1 << 12):
            self._said += heard
        return self._said

    def _text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8", errors="replace")


def _environment(work: Path) -> dict[str, str]:
    """Nothing of this process's but what its interpreter may need to start."""
    own = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    home = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(work), "TMPDIR": str(work)}
    return {**own, **threads, **home, "PYTHONHASHSEED": "0"}


def _not_run(why: str) -> SandboxError:
    return SandboxError(
        "a program could not be run in a sandbox",
        found=why,
        wanted="a Linux kernel with Landlock and seccomp (5.13 or newer, x86_64 or aarch64), and room in the temporary "
        "folder",
        fix="'flowrl check' tells before a run; TMPDIR= names another temporary folder",
    )
