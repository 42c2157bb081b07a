"""The training job's own key-value store, torch.distributed.TCPStore: found, joined and used with time limits."""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Protocol

STORE_VARIABLE = "GPUENERGYD_STORE"
"""`host:port` of a TCPStore to use, where MASTER_ADDR and MASTER_PORT are not those of the job's."""


class Store(Protocol):
    """What is needed of a store; each call may wait for as long as the store likes, so only our thread calls it."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return a key's value; None while there is none."""
        ...

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all these keys; None while one of them is missing."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0, and return it."""
        ...


class JobStore:
    """One more client of the job's TCPStore; keys get a prefix that no other run of the job has."""

    def __init__(self, host: str, port: int, prefix: str, *, limit_s: float) -> None:
        """Connect.

        Raises:
            Exception: whatever torch raises where nobody answers within the limit.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  public, not re-exported

        # Not a worker that the server waits for: no world size, and nothing is counted.
        self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s), wait_for_workers=False)
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        """Return a key's value; None while there is none: asked for without waiting until there is."""
        name = f"{self._prefix}/{key}"
        return bytes(self._store.get(name)) if self._store.check([name]) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all these keys, in two questions however many; None while one of them is missing."""
        names = [f"{self._prefix}/{key}" for key in keys]
        if not names:
            return []
        return [bytes(value) for value in self._store.multi_get(names)] if self._store.check(names) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that begins at 0, and return it."""
        return int(self._store.add(f"{self._prefix}/{key}", amount))


def find_store_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return host and port of the job's store, as the launcher exports them; None where it does not."""
    host, _, port = environ.get(STORE_VARIABLE, "").rpartition(":")
    if not host:
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65_536 else None
