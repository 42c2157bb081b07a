"""What a user may ask of the daemon: clocks for a job or not, so many connections, so many requests a second."""

import grp
import os
import pwd
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.daemon.peers import Peer, is_host_root
from gpuenergyd.errors import AccessError, UsageError

_FORGET_AFTER_S = 60.0
_MAX_KNOWN_USERS = 1024


@dataclass(frozen=True, slots=True)
class ControlRule:
    """Who may have clocks changed for their jobs; without any name, everyone who can connect."""

    groups: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    def check_names(self) -> None:
        """Check that the names exist on this host.

        Raises:
            UsageError: one does not.
        """
        for group in self.groups:
            if _gid(group) is None:
                raise UsageError(f"control_groups: no group {group!r}; `groupadd --system {group}` makes it")
        for user in self.users:
            if _uid(user) is None:
                raise UsageError(f"control_users: no user {user!r} on this host")

    def require(self, peer: Peer) -> None:
        """Check that a peer may have clocks changed.

        Raises:
            AccessError: it may not; the message says who may and how to become one.
        """
        if not (self.groups or self.users) or is_host_root(peer):
            return
        if any(_uid(user) == peer.uid for user in self.users):
            return
        if any(_gid(group) in {peer.gid, *peer.groups} for group in self.groups):
            return
        allowed = [f"group {group}" for group in self.groups] + [f"user {user}" for user in self.users]
        remedy = f"; `usermod -aG {self.groups[0]} {_name(peer.uid)}` adds you" if self.groups else ""
        raise AccessError(f"{peer} may not have clocks changed; root, {', '.join(allowed)} may{remedy}")


def require_administrator(peer: Peer) -> None:
    """Check that a peer may change GPUs outside any job: root of this host, or the user who runs this daemon.

    Raises:
        AccessError: it may not; the message says who may.
    """
    daemon_uid = os.geteuid()
    if is_host_root(peer) or (peer.uid == daemon_uid and daemon_uid != 0):
        return
    owner = "" if daemon_uid == 0 else f" and user {_name(daemon_uid)}, who runs this daemon,"
    raise AccessError(f"{peer} may not lock clocks or limit power outside a job; root of this host{owner} may")


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at_s: float


@dataclass(slots=True)
class RequestRates:
    """A token bucket per uid; a bucket holds one second's worth, so a burst of that size passes."""

    rate_per_s: float
    monotonic_s: Callable[[], float] = time.monotonic
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    def wait_s(self, uid: int) -> float:
        """Take one request of a user; return 0, or how long to wait before it would be taken."""
        now_s = self.monotonic_s()
        if len(self._buckets) > _MAX_KNOWN_USERS:
            self._buckets = {u: b for u, b in self._buckets.items() if now_s - b.filled_at_s < _FORGET_AFTER_S}
        capacity = max(1.0, self.rate_per_s)
        bucket = self._buckets.setdefault(uid, _Bucket(capacity, now_s))
        bucket.tokens = min(capacity, bucket.tokens + (now_s - bucket.filled_at_s) * self.rate_per_s)
        bucket.filled_at_s = now_s
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return 0.0
        return (1.0 - bucket.tokens) / self.rate_per_s


@dataclass(slots=True)
class ConnectionCounts:
    """How many connections each uid has open, and how many it may."""

    max_per_user: int
    _open: Counter[int] = field(default_factory=Counter)

    def take(self, uid: int) -> bool:
        """Count one more; return whether that is allowed (else it is not counted)."""
        if self._open[uid] >= self.max_per_user:
            return False
        self._open[uid] += 1
        return True

    def give_back(self, uid: int) -> None:
        """Count one less."""
        self._open[uid] -= 1
        if self._open[uid] <= 0:
            del self._open[uid]


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


def _uid(user: str) -> int | None:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
