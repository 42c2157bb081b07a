"""Access rules: the right to have clocks changed for a job, and the right to change GPUs outside jobs.

Group and user names are resolved once, when the daemon starts: a lookup in a directory service can take seconds and
would block the event loop. Each refusal names those who have the right and the command that grants it.
"""

import grp
import os
import pwd
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, is_host_root, is_in_our_namespaces, is_unmapped
from gpuenergyd.errors import AccessError, UsageError

MANUAL_CHANGES = "lock clocks or limit power outside a job"


@dataclass(frozen=True, slots=True)
class NamedIds:
    """Groups or users from a setting: their names and their numeric ids."""

    names: tuple[str, ...] = ()
    ids: frozenset[int] = frozenset()

    @classmethod
    def of_groups(cls, key: str, groups: Collection[str]) -> Self:
        """Resolve group names listed in the setting `key`; raise UsageError if one does not exist."""
        ids = set()
        for group in groups:
            try:
                ids.add(grp.getgrnam(group).gr_gid)
            except KeyError:
                raise UsageError(
                    f"{key}: group {group!r} does not exist; create it with `groupadd --system {group}`"
                ) from None
        return cls(tuple(groups), frozenset(ids))

    @classmethod
    def of_users(cls, key: str, users: Collection[str]) -> Self:
        """Resolve user names listed in the setting `key`; raise UsageError if one does not exist."""
        ids = set()
        for user in users:
            try:
                ids.add(pwd.getpwnam(user).pw_uid)
            except KeyError:
                raise UsageError(f"{key}: user {user!r} does not exist on this host") from None
        return cls(tuple(users), frozenset(ids))


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The daemon's access rules; without any control group or user, everyone who can connect may control."""

    control_groups: NamedIds = NamedIds()
    control_users: NamedIds = NamedIds()
    admin_groups: NamedIds = NamedIds()
    requires_gpu_use: bool = True
    """Whether a process may have a GPU changed only while its job runs on it; administrators are exempt."""

    @classmethod
    def from_names(
        cls,
        *,
        control_groups: Collection[str] = (),
        control_users: Collection[str] = (),
        admin_groups: Collection[str] = (),
        requires_gpu_use: bool = True,
    ) -> Self:
        """Resolve the names in the settings, or raise UsageError if a name does not exist on this host."""
        return cls(
            NamedIds.of_groups("control_groups", control_groups),
            NamedIds.of_users("control_users", control_users),
            NamedIds.of_groups("admin_groups", admin_groups),
            requires_gpu_use,
        )

    def is_administrator(self, peer: PeerCredentials) -> bool:
        """Return whether a peer may change any GPU: host root, this daemon's own user, or an administrators' group."""
        daemon_uid = os.geteuid()
        if is_host_root(peer) or (peer.uid == daemon_uid and daemon_uid != 0):
            return True
        # Root of a container can join any group, so group rights apply only to processes outside containers.
        return not self.admin_groups.ids.isdisjoint({peer.gid, *peer.groups}) and is_in_our_namespaces(peer)

    def require_control(self, peer: PeerCredentials) -> None:
        """Check that a peer may have clocks changed for its job.

        Raises:
            AccessError: it may not; the message names those who may and how to gain the right.
        """
        if is_unmapped(peer):
            raise AccessError(
                f"{peer} may not have GPUs changed: this uid stands for every user outside the daemon's user namespace;"
                " run the daemon in the host's user namespace"
            )
        if not (self.control_groups.names or self.control_users.names) or self.is_administrator(peer):
            return
        is_container_root = peer.uid == 0
        if not is_container_root and (
            peer.uid in self.control_users.ids or not self.control_groups.ids.isdisjoint({peer.gid, *peer.groups})
        ):
            return
        groups = self.control_groups.names
        remedy = f"; to join: `usermod -aG {groups[0]} $(id -nu {peer.uid})`" if groups else ""
        if is_container_root:
            remedy = "; root of a container is not root of this host: run the container as one of these users"
        raise AccessError(f"{peer} may not have clocks changed; allowed: {self._controllers_text()}{remedy}")

    def require_administrator(self, peer: PeerCredentials, what: str = MANUAL_CHANGES) -> None:
        """Check that a peer may do what only administrators may.

        Raises:
            AccessError: it may not; the message names those who may and how to gain the right.
        """
        if self.is_administrator(peer):
            return
        groups = self.admin_groups.names
        remedy = f"; to join: `usermod -aG {groups[0]} $(id -nu {peer.uid})`" if groups else ""
        raise AccessError(f"{peer} may not {what}; allowed: {self.administrators_text()}{remedy}")

    def administrators_text(self) -> str:
        """Return a phrase that lists the administrators."""
        daemon_uid = os.geteuid()
        own = [] if daemon_uid == 0 else [f"uid {daemon_uid} (the daemon's own user)"]
        return _joined(["root of this host", *own, *(f"group {group}" for group in self.admin_groups.names)])

    def _controllers_text(self) -> str:
        return _joined(
            [
                self.administrators_text(),
                *(f"group {group}" for group in self.control_groups.names),
                *(f"user {user}" for user in self.control_users.names),
            ]
        )


def _joined(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
