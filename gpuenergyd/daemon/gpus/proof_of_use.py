"""Proof of use: a process may have a GPU changed only while it, or another process of its job, runs on that GPU.

Two processes belong to the same job if they run as the same user in the same namespaces and share a session or a
control group (other than the root's and this daemon's), or one descends from the other. This covers a launcher and its
workers, a step of a batch job, and a container. Processes of two containers never share a job, even if one user started
both from one shell: a container with a pid namespace is identified by its process 1, because the namespaces of other
users' processes cannot be read. At each check, the GPU worker asks the driver which processes are on the GPU.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.daemon.gpus.access import AccessRules
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, namespaces_of
from gpuenergyd.errors import AccessError, GpuError, JobError

_MAX_ANCESTORS = 64
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Process:
    """The attributes of a process that identify its job."""

    uid: int
    parent_pid: int
    session_id: int
    cgroup: str
    """Empty for the root group and the daemon's own, which unrelated processes share."""
    namespaces: tuple[bytes, int]

    @property
    def is_in_container(self) -> bool:
        """Whether it is in a pid namespace nested in the daemon's."""
        return self.namespaces[1] > 1


@dataclass(frozen=True, slots=True)
class ProofOfUse:
    """Checks that a client's job runs on a GPU; `users_of` returns the host pids of the processes on one."""

    rules: AccessRules
    users_of: Callable[[str], Awaitable[Sequence[int]]]

    async def require(self, peer: PeerCredentials, gpu_uuid: str) -> None:
        """Check that a peer's job runs on a GPU; administrators are exempt.

        Raises:
            AccessError: it does not; the message lists the processes there and the exempt users.
            GpuError: the driver cannot list the processes on the GPU, or no worker runs.
        """
        if not self.rules.requires_gpu_use or self.rules.is_administrator(peer):
            return
        pids = await self.users_of(gpu_uuid)
        if any(is_of_same_job(peer, pid) for pid in pids):
            return
        found = ", ".join(str(pid) for pid in pids[:_MAX_NAMED]) or "none"
        raise AccessError(
            f"{peer} may not have {gpu_uuid} changed: no process of its job runs on it (processes on it: {found});"
            f" use the GPU first, then retry; exempt: {self.rules.administrators_text()}"
        )

    async def find_gpu(self, peer: PeerCredentials, gpu_uuids: Iterable[str]) -> str:
        """Return the GPU on which the driver lists the peer's own process; this works in every container.

        Raises:
            AccessError: it runs on none.
            JobError: it runs on several.
            GpuError: it is found on none, and the driver cannot list the processes on a GPU, or no worker runs.
        """
        used: list[str] = []
        failure: GpuError | None = None
        for gpu_uuid in gpu_uuids:
            try:
                used += [gpu_uuid] if peer.pid in await self.users_of(gpu_uuid) else []
            except GpuError as error:  # other GPUs may still answer
                failure = error
        if failure is not None and not used:
            raise failure
        if not used:
            raise AccessError(f"{peer} names no GPU and runs on none; use the GPU first, then retry")
        if len(used) > 1:
            raise JobError(
                f"{peer} names no GPU and runs on {len(used)}: set GPUENERGYD_GPU_UUID to {' or '.join(used)}"
            )
        return used[0]


def is_of_same_job(peer: PeerCredentials, pid: int) -> bool:
    """Return whether a process is the peer or belongs to the peer's job."""
    if pid == peer.pid:
        return True
    own, other = _process(peer.pid), _process(pid)
    if own is None or other is None or own.namespaces != other.namespaces or {own.uid, other.uid} != {peer.uid}:
        return False
    if own.is_in_container:
        first, second = _first_process(peer.pid), _first_process(pid)
        if first is None or second is None:  # a process entered its container from outside
            return own.cgroup == other.cgroup != ""
        if first != second:
            return False
    return (
        (own.session_id == other.session_id and own.session_id > 0)
        or (own.cgroup == other.cgroup != "")
        or pid in _ancestors(peer.pid, peer.uid)
        or peer.pid in _ancestors(pid, peer.uid)
    )


def _ancestors(pid: int, uid: int) -> Iterator[int]:
    """Yield the pids of a process's ancestors up to the first one of another user."""
    for _ in range(_MAX_ANCESTORS):
        process = _process(pid)
        if process is None or process.uid != uid:
            return
        pid = process.parent_pid
        if pid <= 1:
            return
        parent = _process(pid)
        if parent is None or parent.uid != uid:
            return
        yield pid


def _first_process(pid: int) -> int | None:
    """Return the daemon's pid for process 1 of a process's pid namespace; None if that is not an ancestor."""
    depth = 0
    for _ in range(_MAX_ANCESTORS):
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        pids = status.partition("\nNSpid:")[2].partition("\n")[0].split()
        depth = depth or len(pids)
        if len(pids) != depth:
            return None
        if pids[-1] == "1":
            return pid
        pid = int(status.partition("\nPPid:")[2].split()[0])
    return None


def _process(pid: int) -> _Process | None:
    folder = Path(f"/proc/{pid}")
    namespaces = namespaces_of(pid)
    try:
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
        cgroup = (folder / "cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if namespaces is None:
        return None
    _, parent_pid, _, session_id = stat.rpartition(")")[2].split()[:4]
    is_shared = cgroup == _own_cgroup() or all(line.endswith(":/") for line in cgroup.splitlines())
    return _Process(
        uid=int(status.partition("\nUid:")[2].split()[0]),
        parent_pid=int(parent_pid),
        session_id=int(session_id),
        cgroup="" if is_shared else cgroup,
        namespaces=namespaces,
    )


@functools.cache
def _own_cgroup() -> str:
    return Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
