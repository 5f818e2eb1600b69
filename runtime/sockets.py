"""ZeroMQ sockets as every queue here wants them, and addresses that only this machine can reach.

High-water marks are 0, for a socket must neither drop nor block by itself: credits bound what is in flight, exactly.
Linger is 0, for a message to a dead peer must not keep a process alive (`Endpoint.close` allows last words 0.2 s):
draining is the protocol's affair. A context belongs to one process, and a forked child that used its parent's would
hang: processes are spawned, and each use asserts the process id.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from uuid import uuid4

import zmq

from flowrl.errors import WireError

_LONGEST_IPC_PATH = 107
"""Bytes of ``sockaddr_un.sun_path`` less its final zero."""

_RECONNECT_MS = 20
_LONGEST_RECONNECT_MS = 500
_HEARTBEAT_MS = 1_000
_HEARTBEAT_TIMEOUT_MS = 3_000


Context = zmq.Context[zmq.Socket[bytes]]


def socket(context: Context, kind: int, *, heartbeat: bool = False) -> zmq.Socket[bytes]:
    """A socket that never lingers, drops or blocks by itself.

    Args:
        heartbeat: close the connection to a peer that is silent for 3 s. Only for queues that deliver again after a
            reconnect; on others it would lose messages.
    """
    made = context.socket(kind)
    made.linger = 0
    made.sndhwm = made.rcvhwm = 0
    made.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    made.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MS)
    if kind == zmq.ROUTER:
        made.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if heartbeat:
        made.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    return made


def bind(made: zmq.Socket[bytes], folder: Path | None = None, *, address: str | None = None) -> str:
    """Bind to a fresh address and return it.

    Args:
        folder: where to put a Unix socket; it belongs to this user alone (mode 0700). None: a free loopback port.
        address: bind here instead.

    Raises:
        WireError: an address that other machines reach, one that is in use, or a folder that others can enter.
    """
    wanted = address or (_ipc_address(folder) if folder else "tcp://127.0.0.1:*")
    check_local(wanted)
    try:
        made.bind(wanted)
    except zmq.ZMQError as error:
        raise WireError(f"cannot listen at {wanted}: {error.strerror}", fix="leave the address to flowrl") from None
    return made.getsockopt_string(zmq.LAST_ENDPOINT)


def unlink(address: str) -> None:
    """Remove the file of an ``ipc://`` address; libzmq leaves it when the context goes first."""
    if address.startswith("ipc://"):
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def check_local(address: str) -> None:
    """Refuse an address that other machines can reach.

    Raises:
        WireError: traffic is neither encrypted nor authenticated, so it stays on this machine.
    """
    if address.startswith(("ipc://", "tcp://127.", "tcp://[::1]:", "tcp://localhost:")):
        return
    raise WireError(
        f"address {address!r} can be reached from other machines, and flowrl's traffic is not encrypted",
        found=address,
        wanted="ipc:// or a loopback address such as tcp://127.0.0.1:*",
        fix="keep the run on one machine",
    )


def _ipc_address(folder: Path) -> str:
    state = folder.stat()
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
        raise WireError(
            f"folder {folder} for sockets can be entered by other users",
            found=f"mode {stat.S_IMODE(state.st_mode):o}, owner {state.st_uid}",
            wanted=f"mode 700, owner {os.getuid()}",
            fix=f"chmod 700 {folder}",
        )
    # A second bind to one path succeeds and steals the first one's clients, so each name is used once.
    path = folder.absolute() / f"{uuid4().hex[:12]}.sock"
    if len(os.fsencode(path)) > _LONGEST_IPC_PATH:
        raise WireError(
            f"folder {folder} is too long for a Unix socket",
            found=f"{len(os.fsencode(path))} bytes",
            wanted=f"<= {_LONGEST_IPC_PATH}",
            fix="use a folder made by tempfile.mkdtemp()",
        )
    return f"ipc://{path}"
