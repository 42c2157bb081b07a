"""Who may have GPUs changed, and who may change them outside a job; what is refused says who may and how to become one.

Names of groups and users are looked up once, when the daemon starts: asking a directory server could take seconds, and
every other client would wait.
"""

import grp
import os
import pwd
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, is_host_root, is_in_our_namespaces, is_unmapped
from gpuenergyd.errors import AccessError, UsageError


@dataclass(frozen=True, slots=True)
class Names:
    """Groups or users of this host, as they are called and as the kernel knows them."""

    words: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()

    @classmethod
    def of_groups(cls, key: str, groups: Collection[str]) -> Self:
        """Look groups up; `key` is the setting that names them.

        Raises:
            UsageError: one does not exist.
        """
        ids = set()
        for group in groups:
            try:
                ids.add(grp.getgrnam(group).gr_gid)
            except KeyError:
                raise UsageError(f"{key}: no group {group!r}; `groupadd --system {group}` makes it") from None
        return cls(tuple(groups), frozenset(ids))

    @classmethod
    def of_users(cls, key: str, users: Collection[str]) -> Self:
        """Look users up; `key` is the setting that names them.

        Raises:
            UsageError: one does not exist.
        """
        ids = set()
        for user in users:
            try:
                ids.add(pwd.getpwnam(user).pw_uid)
            except KeyError:
                raise UsageError(f"{key}: no user {user!r} on this host") from None
        return cls(tuple(users), frozenset(ids))


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The rules of this daemon; without any name in the control rule everyone who can connect may control."""

    control_groups: Names = Names()
    control_users: Names = Names()
    admin_groups: Names = Names()
    requires_gpu_use: bool = True
    """A GPU is changed only for a process whose job runs there; administrators are exempt."""

    @classmethod
    def named(
        cls,
        *,
        control_groups: Collection[str] = (),
        control_users: Collection[str] = (),
        admin_groups: Collection[str] = (),
        requires_gpu_use: bool = True,
    ) -> Self:
        """Look the names of the settings up.

        Raises:
            UsageError: one does not exist on this host.
        """
        return cls(
            Names.of_groups("control_groups", control_groups),
            Names.of_users("control_users", control_users),
            Names.of_groups("admin_groups", admin_groups),
            requires_gpu_use,
        )

    def is_administrator(self, peer: PeerCredentials) -> bool:
        """Return whether a peer may change any GPU: host root, this daemon's own user, or an administrators' group."""
        daemon_uid = os.geteuid()
        if is_host_root(peer) or (peer.uid == daemon_uid and daemon_uid != 0):
            return True
        # Root of a container can give itself any group, so groups count only where the peer lives beside us.
        return not self.admin_groups.ids.isdisjoint({peer.gid, *peer.groups}) and is_in_our_namespaces(peer)

    def require_control(self, peer: PeerCredentials) -> None:
        """Check that a peer may have clocks changed for what it runs.

        Raises:
            AccessError: it may not; the message says who may and how to become one.
        """
        if is_unmapped(peer):
            raise AccessError(
                f"{peer} may not have GPUs changed: every user that this daemon's user namespace does not map looks"
                " like that one; run the daemon outside of it"
            )
        if not (self.control_groups.words or self.control_users.words) or self.is_administrator(peer):
            return
        is_container_root = peer.uid == 0
        if not is_container_root and (
            peer.uid in self.control_users.ids or not self.control_groups.ids.isdisjoint({peer.gid, *peer.groups})
        ):
            return
        groups = self.control_groups.words
        remedy = f"; `usermod -aG {groups[0]} $(id -nu {peer.uid})` adds you" if groups else ""
        if is_container_root:
            remedy = "; root of a container is not root of this host: run the container as such a user"
        raise AccessError(f"{peer} may not have clocks changed; {self._those_who_control()} may{remedy}")

    def require_administrator(self, peer: PeerCredentials) -> None:
        """Check that a peer may change GPUs outside any job.

        Raises:
            AccessError: it may not; the message says who may and how to become one.
        """
        if self.is_administrator(peer):
            return
        groups = self.admin_groups.words
        remedy = f"; `usermod -aG {groups[0]} $(id -nu {peer.uid})` adds you" if groups else ""
        raise AccessError(
            f"{peer} may not lock clocks or limit power outside a job; {self.administrators_text()} may{remedy}"
        )

    def administrators_text(self) -> str:
        """Return the administrators in words."""
        daemon_uid = os.geteuid()
        own = [] if daemon_uid == 0 else [f"uid {daemon_uid}, who runs this daemon"]
        return _listed(["root of this host", *own, *(f"group {group}" for group in self.admin_groups.words)])

    def _those_who_control(self) -> str:
        return _listed(
            [
                self.administrators_text(),
                *(f"group {group}" for group in self.control_groups.words),
                *(f"user {user}" for user in self.control_users.words),
            ]
        )


def _listed(who: list[str]) -> str:
    return who[0] if len(who) == 1 else f"{', '.join(who[:-1])} and {who[-1]}"
