"""The key-value store of the training job, a `torch.distributed.TCPStore`, with a time limit on each operation."""

import os
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import timedelta
from typing import Protocol, Self

STORE_VARIABLE = "GPUENERGYD_STORE"
"""Variable with `host:port` of the TCPStore, for jobs whose store is not at MASTER_ADDR and MASTER_PORT."""


class Store(Protocol):
    """Operations of a store; each may block for any length of time, so only a store thread calls them."""

    @property
    def prefix(self) -> str: ...

    def within(self, folder: str) -> "Store":
        """Return a view of this store in which all keys begin with a folder."""
        ...

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None while it has none."""
        ...

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all these keys; None while one of them is missing."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, initially 0, and return its new value."""
        ...


class JobStore:
    """A client of the job's TCPStore."""

    def __init__(self, host: str, port: int, prefix: str, *, limit_s: float) -> None:
        """Connect.

        Raises:
            Exception: the store cannot be reached within the limit; torch raises several types.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415  public, not re-exported

        # No world size: the server must not count this client among the workers that it waits for.
        self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s), wait_for_workers=False)
        self.prefix = prefix
        """Prefix of all keys."""

    def within(self, folder: str) -> Self:
        """Return a view of this store in which all keys begin with a folder; it uses the same connection."""
        part = copy(self)
        part.prefix = f"{self.prefix}/{folder}"
        return part

    def set(self, key: str, value: str) -> None:
        self._store.set(f"{self.prefix}/{key}", value)

    def get(self, key: str) -> bytes | None:
        """Return the value of a key; None, without waiting, while it has none."""
        name = f"{self.prefix}/{key}"
        return bytes(self._store.get(name)) if self._store.check([name]) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all these keys in two requests; None while one of them is missing."""
        names = [f"{self.prefix}/{key}" for key in keys]
        if not names:
            return []
        return [bytes(value) for value in self._store.multi_get(names)] if self._store.check(names) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, initially 0, and return its new value."""
        return int(self._store.add(f"{self.prefix}/{key}", amount))


def find_store_address(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return host and port of the job's store from the launcher's environment variables; None if they are not set."""
    host, _, port = environ.get(STORE_VARIABLE, "").rpartition(":")
    if not host:
        host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65_536 else None
