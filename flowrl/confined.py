"""What a sandbox's process does to itself before it runs a program: the script of `sandbox`.

From here on the process can start no other process, open no socket, signal nobody but itself, read little and write
only into its own folder. Nothing of this can be undone, nor needs a privilege: resource limits, Landlock (its first
version, Linux 5.13) and a seccomp filter. It knows the system calls of two architectures.

The standard library alone is imported, and little of it: a program waits for this.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import marshal
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

OUT_OF_MEMORY = 86
"""Exit code of a program that ended in a `MemoryError`."""
READY = b"ready\n"
OPEN_FILES = 64
EXIT_WITHOUT_LIMITS = 2

libc = ctypes.CDLL(None, use_errno=True)

# --- resources ------------------------------------------------------------------------------------------------------


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Bound time, memory and files; at `cpu_s` the kernel sends SIGXCPU, one second later SIGKILL."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22


def end_with(parent: int) -> None:
    """Die with the process that started this one, however that one dies."""
    _call("prctl(PDEATHSIG)", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(EXIT_WITHOUT_LIMITS)


def drop_privileges() -> None:
    """No capability, of root either, and no way to get one."""
    _call("prctl(NO_NEW_PRIVS)", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)  # version 3: twice effective, permitted, inheritable
    _call("capset", libc.capset(header, none))


# --- files: Landlock (the rights that Linux 5.13 knows) -------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1
EVERY_RIGHT = (1 << 13) - 1
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_REG = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def limit_files(folder: str, readable: Iterable[str]) -> None:
    """Read from some places, and keep files in one folder: no links, no folders, nothing that runs."""
    handled = struct.pack("Q", EVERY_RIGHT)
    ruleset = _call("landlock_create_ruleset", libc.syscall(CREATE_RULESET, handled, len(handled), 0))
    for place in readable:
        _allow(ruleset, place, READ_FILE | READ_DIR if os.path.isdir(place) else READ_FILE)
    for device in DEVICES:
        _allow(ruleset, device, READ_FILE | WRITE_FILE)
    _allow(ruleset, folder, READ_FILE | READ_DIR | WRITE_FILE | REMOVE_FILE | MAKE_REG)
    _call("landlock_restrict_self", libc.syscall(RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, place: str, rights: int) -> None:
    try:
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = struct.pack("=Qi", rights, descriptor)
    _call("landlock_add_rule", libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
    os.close(descriptor)


# --- system calls: a seccomp filter ---------------------------------------------------------------------------------

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The kernel's name of each, and its column in the tables of numbers."""
NEWEST = 462
"""Calls above it are unknown here, and answer ENOSYS; so do those of the x32 interface."""
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # starting what would outlive the program, or get out of its limits
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "unshare": (272, 97),
    "setns": (308, 268),
    # sockets, also by way of io_uring; a pair of them stays: it leads nowhere else
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes of the same user
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # what stays behind in the kernel
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semctl": (66, 191),
    "msgget": (68, 186), "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # what Landlock leaves to the owner of a file
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "truncate": (76, 45),
}  # fmt: skip
"""Calls that are refused whatever their arguments."""
CHECKED: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "prctl": (157, 167), "fcntl": (72, 25), "ioctl": (16, 29), "open": (2, None),
    "openat": (257, 56), "openat2": (437, 437),
}  # fmt: skip
"""Calls that are refused by their arguments, or that libraries do without when they are told ENOSYS."""
CLONE_THREAD = 0x10000
SET_OWNER, SET_OWNER_EX, SET_SIGNAL = 8, 15, 10  # fcntl: another process would be signalled
SET_SOCKET_OWNER, SET_SOCKET_GROUP = 0x8901, 0x8902  # ioctl: likewise
TRUNCATE, ACCESS = os.O_TRUNC, os.O_ACCMODE

LOAD, AND, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def limit_calls(*, network: bool) -> None:
    """Refuse what leads out of this process."""
    code = b"".join(struct.pack("HBBI", *each) for each in _filter(os.uname().machine, os.getpid(), network=network))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _call("seccomp", libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def _filter(machine: str, pid: int, *, network: bool) -> list[Instruction]:
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known")
    name, column = ARCHITECTURES[machine]
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, name), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    code += [(ABOVE, 0, 1, NEWEST), _refuse(errno.ENOSYS)]
    for call, numbers in NUMBERS.items():
        number = numbers[column]
        if number is not None and not (network and call == "socket"):
            code += [(EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    for call, checks in _checks(pid).items():
        number = CHECKED[call][column]
        if number is not None:
            code += [(EQUAL, 0, len(checks) + 1, number), *checks, (RETURN, 0, 0, ALLOW)]
    return [*code, (RETURN, 0, 0, ALLOW)]


def _checks(pid: int) -> dict[str, list[Instruction]]:
    """For each call of `CHECKED`, instructions that return when it is refused, and else run through."""
    own = [_argument(0), (EQUAL, 1, 0, pid), _refuse(errno.EPERM)]
    mine = [_argument(0), (EQUAL, 2, 0, 0), (EQUAL, 1, 0, pid), _refuse(errno.EPERM)]
    # SIGKILL is left to the outside: who gets it was ended by a limit, or by somebody else
    return {
        "clone": [_argument(0), (ANY_BIT, 1, 0, CLONE_THREAD), _refuse(errno.EPERM)],
        "clone3": [_refuse(errno.ENOSYS)],  # its flags lie in memory, which no filter reads; clone is tried next
        "kill": [*own, *_unless(1, signal.SIGKILL)],
        "tgkill": [*own, *_unless(2, signal.SIGKILL)],
        "prlimit64": mine,
        "sched_setparam": mine,
        "sched_setscheduler": mine,
        "sched_setattr": mine,
        "sched_setaffinity": mine,
        "prctl": _unless(0, PR_SET_PDEATHSIG),
        "fcntl": [*_unless(1, SET_OWNER), *_unless(1, SET_OWNER_EX), *_unless(1, SET_SIGNAL)],
        "ioctl": [*_unless(1, SET_SOCKET_OWNER), *_unless(1, SET_SOCKET_GROUP)],
        "open": _truncates_for_reading(1),
        "openat": _truncates_for_reading(2),
        "openat2": [_refuse(errno.ENOSYS)],
    }


def _argument(index: int) -> Instruction:
    """The lower half of an argument: all that the calls above look at."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * index)


def _refuse(error: int) -> Instruction:
    return (RETURN, 0, 0, REFUSE | error)


def _unless(index: int, value: int) -> list[Instruction]:
    """Refuse when an argument has a value."""
    return [_argument(index), (EQUAL, 0, 1, value), _refuse(errno.EPERM)]


def _truncates_for_reading(index: int) -> list[Instruction]:
    """The first Landlock sees no truncation in a file that is opened for reading."""
    return [_argument(index), (AND, 0, 0, TRUNCATE | ACCESS), (EQUAL, 0, 1, TRUNCATE), _refuse(errno.EPERM)]


def _call(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


# --- the program ----------------------------------------------------------------------------------------------------


def main(control: int) -> None:
    """Read the order from a socket, confine this process, say so, and run the program.

    An early exit of the program is not taken for its end: that is said with a word from the order, which a program does
    not know unless it searches this script's frames.
    """
    order = _read_order(control)
    try:
        end_with(order["parent"])
        limit_resources(order["cpu_s"], order["memory_bytes"], order["file_bytes"])
        drop_privileges()
        # not sys.path: a project that is installed for editing stands there, with its data
        limit_files(os.getcwd(), {*order["readable"], sys.prefix, sys.base_prefix, sys.exec_prefix})
        limit_calls(network=order["network"])
    except (OSError, ValueError) as error:
        os.write(control, str(error).encode())
        os._exit(EXIT_WITHOUT_LIMITS)
    word = order.pop("word")
    os.write(control, READY)
    run(order["programs"])
    os.write(control, word.encode())


def _read_order(control: int) -> dict[str, Any]:
    """Both ends are one interpreter, and a program waits for this: marshal needs no import of json."""
    with open(control, "rb", closefd=False) as file:
        order: dict[str, Any] = marshal.load(file)
    return order


def run(programs: Sequence[str]) -> None:
    """Run source files in one namespace; the only one as ``__main__``, the first of several as a module."""
    module = ModuleType("__main__" if len(programs) == 1 else "solution")
    module.__dict__.update(__file__=programs[0], __builtins__=builtins)
    sys.modules[module.__name__] = module
    sys.argv = [programs[0]]
    try:
        for path in programs:
            with open(path, encoding="utf-8") as file:
                exec(compile(file.read(), path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        shown = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # without this frame
        sys.excepthook(type(shown), shown, shown.__traceback__)
        if isinstance(error, MemoryError):
            sys.stderr.flush()
            os._exit(OUT_OF_MEMORY)
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
