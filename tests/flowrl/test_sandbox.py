"""Programs that nobody has read: what they can do, and that nothing else is left of them. With real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl import confined, sandbox
from flowrl.errors import SandboxError, WrongType
from flowrl.sandbox import run_python


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sandboxes stand in a folder of their own; each test ends without a file or a process more than it had."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = _children()
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("flowrl-sandbox-")] == []
    assert _children() <= before


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


# --- what a program is given, and what it gives ----------------------------------------------------------------------


def test_a_program_reads_its_input_and_its_output_comes_back() -> None:
    result = run_python("print(sum(map(int, input().split())))\nimport sys; print('é', file=sys.stderr)", stdin="1 2 3")
    assert (result.stdout, result.stderr, result.exit_code, result.ok, result.finished) == ("6\n", "é\n", 0, True, True)
    assert (result.signal, result.limit) == (None, None)
    assert 0 < result.cpu_s < 5


def test_a_program_without_input_gets_none() -> None:
    assert "EOFError" in run_python("input()").stderr


def test_a_program_is_main_and_may_use_numpy_and_threads() -> None:
    source = """
        import sys, threading
        import numpy

        sys.setrecursionlimit(10**6)
        threading.stack_size(2**27)  # the usual way to recurse deeply
        thread = threading.Thread(target=lambda: print(__name__, int(numpy.arange(5).sum())))
        thread.start()
        thread.join()
    """
    assert run_python(textwrap.dedent(source)).stdout == "__main__ 10\n"


def test_an_error_shows_the_lines_of_the_program_alone() -> None:
    result = run_python("def f():\n    return 1 / 0\n\n\nf()\n")
    assert (result.ok, result.exit_code, result.finished) == (False, 1, False)
    assert result.reason == "exit code 1: ZeroDivisionError: division by zero"
    assert "return 1 / 0" in result.stderr
    assert "confined" not in result.stderr


@pytest.mark.parametrize("source", ["def", "x = '\ud83d'", "a\0b", "return 1"])
def test_text_that_is_no_program_is_a_wrong_program(source: str) -> None:
    assert (run_python(source).ok, run_python(source).exit_code) == (False, 1)


@pytest.mark.parametrize(
    ("source", "code", "ok"),
    [
        ("import sys; sys.exit(0)", 0, True),
        ("import sys; sys.exit(3)", 3, False),
        ("import os; os._exit(0)", 0, True),
        ("exit('no')", 1, False),
    ],
)
def test_a_program_that_exits_has_not_come_to_its_last_line(source: str, code: int, ok: bool) -> None:
    result = run_python(source + "\nprint('never')")
    assert (result.exit_code, result.ok, result.finished, result.stdout) == (code, ok, False, "")


def test_tests_run_in_the_namespace_of_a_program_which_is_no_main_then() -> None:
    program = "import sys\ndef double(x):\n    return 2 * x\nif __name__ == '__main__':\n    sys.exit(0)\n"
    assert run_python(program, then="assert double(2) == 4").finished
    wrong = run_python(program, then="assert double(2) == 5")
    assert (wrong.ok, wrong.finished, _last_line(wrong.stderr)) == (False, False, "AssertionError")


@pytest.mark.parametrize("exit_now", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_a_program_that_ends_before_its_tests_has_not_passed_them(exit_now: str) -> None:
    result = run_python(exit_now, then="assert False")
    assert (result.exit_code, result.finished) == (0, False)


def test_hashes_are_the_same_in_every_run() -> None:
    source = "print({'a', 'b', 'c', 'd', 'e', 'f'}, hash('flowrl'))"
    assert run_python(source).stdout == run_python(source).stdout


# --- what it cannot use up -------------------------------------------------------------------------------------------


def test_processor_time_ends_an_endless_loop() -> None:
    result = run_python("while True: pass", cpu_s=1)
    assert (result.limit, result.ok, result.exit_code, result.signal) == ("time", False, None, None)
    assert result.cpu_s > 0.9
    assert result.reason == "too much time"


def test_a_loop_that_hears_no_signal_is_killed() -> None:
    source = "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert run_python(source, cpu_s=1).limit == "time"


def test_the_clock_ends_a_program_that_waits() -> None:
    begun = time.monotonic()
    assert run_python("import time; time.sleep(1000)", wall_s=0.3).limit == "time"
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("source", ["bytearray(10 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"])
def test_memory_has_a_limit(source: str) -> None:
    result = run_python(source, memory_bytes=256 << 20)
    assert (result.limit, result.exit_code, result.reason) == ("memory", None, "too much memory")


def test_output_without_end_is_cut_at_its_limit() -> None:
    result = run_python("while True: print('x' * 100)", output_bytes=10_000)
    assert (result.limit, result.ok) == ("output", False)
    assert len(result.stdout) == 10_000


def test_output_that_fits_is_kept_to_the_last_byte() -> None:
    assert run_python("print('x' * 9999, end='')", output_bytes=10_000).stdout == "x" * 9999


def test_the_disk_is_not_filled_by_many_files() -> None:
    source = "i = 0\nwhile True:\n    open(str(i), 'w').write('x' * 1000)\n    i += 1"
    assert run_python(source).limit == "files"


def test_the_disk_is_not_filled_by_one_file() -> None:
    result = run_python("open('a', 'w').write('x' * 1000_000)", output_bytes=10_000)
    assert _last_line(result.stderr) == "OSError: [Errno 27] File too large"


def test_threads_have_a_limit() -> None:
    source = """
        import threading, time
        threading.stack_size(1 << 16)
        while True:
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    """
    assert run_python(textwrap.dedent(source)).limit == "threads"


# --- what it cannot reach --------------------------------------------------------------------------------------------


TRY = """
import ctypes, fcntl, os, resource, signal, socket, struct, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def attempt(harm):
    try:
        print(harm, 'gave', eval(harm), flush=True)
    except OSError as error:
        assert error.errno in (1, 13, 18), (harm, error)  # EPERM, EACCES, and EXDEV for a link out of the folder
for harm in HARMS:
    attempt(harm)
print('tried all')
"""
"""Prints nothing of the expressions in HARMS that are refused."""


def _refused(*harms: str, **settings: Any) -> None:
    result = run_python(f"HARMS = {harms!r}\n{TRY}", **settings)
    assert (result.stdout, result.stderr) == ("tried all\n", "")


def test_a_program_starts_no_process() -> None:
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    _refused(
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['true'])",
        f"checked(libc.syscall({clone}, 17, 0, 0, 0, 0))",
    )
    assert run_python("import os; print(os.system('true') != 0)").stdout == "True\n"


def test_a_fork_bomb_and_a_child_that_would_stay_behind_never_begin() -> None:
    detach = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\nos._exit(0)"
    )
    for source in ("import os\nwhile True: os.fork()", detach):
        assert "PermissionError" in run_python(source).reason


@pytest.mark.parametrize(
    "connect",
    [
        "socket.create_connection(('127.0.0.1', {port}), timeout=5)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
        "socket.socket(socket.AF_UNIX).connect('\\0flowrl')",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    ],
)
def test_a_program_has_no_network_unless_it_is_asked_for(connect: str) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        source = "import socket\n" + connect.format(port=server.getsockname()[1]) + "\nprint('out')"
        result = run_python(source)
        assert (result.ok, result.stdout, _last_line(result.stderr)) == (
            False,
            "",
            "PermissionError: [Errno 1] Operation not permitted",
        )
        if "create_connection" in connect:
            assert run_python(source, network=True).stdout == "out\n"


def test_asyncio_works_without_network() -> None:
    source = "import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    print('done')\nasyncio.run(f())"
    assert run_python(source).stdout == "done\n"


def test_a_program_writes_into_its_own_empty_folder_and_nowhere_else(folder: Path) -> None:
    precious = folder / "precious"
    precious.write_text("kept")
    inside = "import os\nassert os.listdir() == []\nopen('a', 'w').write('b')\nprint(open('a').read(), os.listdir())"
    assert run_python(inside).stdout == "b ['a']\n"
    there, new = str(precious), str(folder / "new")
    _refused(
        f"open({there!r}, 'w')",
        f"open({there!r}, 'a')",
        f"os.open({there!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.truncate({there!r}, 0)",
        f"os.remove({there!r})",
        f"os.rename({there!r}, 'mine')",
        f"os.link({there!r}, 'mine')",
        f"os.chmod({there!r}, 0)",
        f"os.utime({there!r})",
        f"os.setxattr({there!r}, 'user.x', b'1')",
        f"open({new!r}, 'w')",
        f"os.mkdir({new!r})",
        f"os.symlink('/', {new!r})",
        "open('../program.py', 'w')",
        "open('/dev/shm/flowrl-sandbox-test', 'w')",
        readable=[precious],
    )
    assert precious.read_text() == "kept"
    assert sorted(path.name for path in folder.iterdir()) == ["precious"]


def test_a_program_reads_what_its_packages_need_and_no_file_of_the_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "1")
    answers = folder / "answers.jsonl"
    answers.write_text("{}")
    assert "PermissionError" in run_python(f"open({str(answers)!r})").reason
    assert run_python(f"print(open({str(answers)!r}).read())", readable=[answers]).stdout == "{}\n"
    assert "PermissionError" in run_python("open('/proc/self/environ')").reason
    assert run_python("import os; print('SECRET' in os.environ, os.environ['HOME'] == os.getcwd())").stdout == (
        "False True\n"
    )


def test_a_program_harms_no_other_process() -> None:
    _refused(
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, signal.SIGKILL)",
        "os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_AS, (0, 0))",
        "os.sched_setaffinity(os.getppid(), {0})",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', os.getppid()))",
        "checked(libc.prctl(1, 0, 0, 0, 0))",  # it would outlive the process that runs it
        "checked(libc.shmget(0, 4096, 0o1600))",  # a segment would stay behind
    )


def test_a_program_may_signal_itself() -> None:
    result = run_python("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (result.signal, result.exit_code, result.reason) == (signal.SIGTERM, None, "ended by SIGTERM")
    crash = run_python("import ctypes; ctypes.string_at(0)")
    assert (crash.signal, crash.ok) == (signal.SIGSEGV, False)


# --- when there is no result -----------------------------------------------------------------------------------------


def test_a_program_ends_with_the_process_that_runs_it_and_its_folder_is_removed_later(folder: Path) -> None:
    script = "from flowrl.sandbox import run_python; run_python('while True: pass', cpu_s=100)"
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "TMPDIR": str(folder)}
    worker = subprocess.Popen([sys.executable, "-c", script], env=environment)
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
    try:
        program = _wait_for(lambda: int(children.read_text() or 0))
        _wait_for(lambda: "Seccomp:\t2" in Path(f"/proc/{program}/status").read_text())
    finally:
        worker.kill()
        worker.wait()
    _wait_for(lambda: not _runs(program))
    [left] = folder.glob("flowrl-sandbox-*")
    (held := folder / "flowrl-sandbox-held").mkdir()
    with sandbox._held(str(held)):
        for age, remains in ((0, [held, left]), (3600, [held])):  # old ones that nobody holds are nobody's
            for path in (held, left):
                os.utime(path, (time.time() - age,) * 2)
            sandbox._remove_abandoned.cache_clear()
            assert run_python("").ok
            assert sorted(folder.glob("flowrl-sandbox-*")) == sorted(remains)
    held.rmdir()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_for(condition):
    deadline = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_an_interruption_ends_the_program() -> None:
    class Alarm(BaseException):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Alarm):
            run_python("while True: pass", cpu_s=100)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_program_that_somebody_else_kills_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = sandbox._Child.watch

    def kill(child: sandbox._Child, wall_s: float) -> sandbox.Limit | None:
        os.kill(child._process.pid, signal.SIGKILL)
        return watch(child, wall_s)

    monkeypatch.setattr(sandbox._Child, "watch", kill)
    with pytest.raises(SandboxError, match="killed from outside"):
        run_python("while True: pass")


REFUSING = """
import sys
sys.path.append({folder!r})
import confined
numbers, checks = confined.NUMBERS, confined._checks
confined.drop_privileges()
confined.NUMBERS, confined._checks = {numbers}, lambda pid: {checks}
confined.limit_calls(network=False)
confined.NUMBERS, confined._checks = numbers, checks
confined.main(int(sys.argv[1]))
"""
"""A child in a container, say, whose own filter refuses some calls."""


@pytest.mark.parametrize(
    ("numbers", "checks", "says"),
    [
        ("{'landlock_create_ruleset': (444, 444)}", "{}", "landlock_create_ruleset: Operation not permitted"),
        ("{}", "{'prctl': confined._unless(0, confined.PR_SET_SECCOMP)}", "seccomp: Operation not permitted"),
    ],
)
def test_a_kernel_that_refuses_is_an_error_and_no_result(
    numbers: str, checks: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = folder / "refusing.py"
    child.write_text(REFUSING.format(folder=str(Path(confined.__file__).parent), numbers=numbers, checks=checks))
    monkeypatch.setattr(sandbox, "CHILD", child)
    for network in (False, True):
        with pytest.raises(SandboxError, match=says):
            run_python("print(1)", network=network)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(OSError, match="the system calls of riscv64 are not known"):
        confined._filter("riscv64", 1, network=False)


def test_both_architectures_have_a_filter_that_a_kernel_can_load() -> None:
    for machine in confined.ARCHITECTURES:
        code = confined._filter(machine, 1, network=False)
        assert len(code) < 4096
        for at, (operation, if_true, if_false, _) in enumerate(code):
            assert operation == confined.RETURN or at + 1 + max(if_true, if_false) < len(code)
    assert len(confined._filter("x86_64", 1, network=False)) == len(confined._filter("x86_64", 1, network=True)) + 2


def test_a_full_disk_is_an_error_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(SandboxError, match="No such file or directory: '/proc/flowrl-sandbox-"):
        run_python("print(1)")


@pytest.mark.parametrize(
    "setting", [{"cpu_s": 0}, {"memory_bytes": 1 << 20}, {"wall_s": float("nan")}, {"output_bytes": 0}]
)
def test_limits_leave_room_for_a_program(setting: dict[str, float]) -> None:
    with pytest.raises(WrongType, match=f"a sandbox has too little {next(iter(setting))}"):
        run_python("print(1)", **setting)  # type: ignore[arg-type]
