"""A thread for periodic exchanges through the job's store, which may hang without blocking training."""

import threading
from collections.abc import Callable

from gpuenergyd.client.environment import without_restarts
from gpuenergyd.log_lines import safe_logger
from gpuenergyd_across_hosts.ranks.job_store import JobStore, Store

logger = safe_logger("gpuenergyd.trainers")

PERIOD_S = 0.1
"""Pause between two exchanges; a message to another rank takes at most two of them, message and reply four."""
STORE_LIMIT_S = 10.0
"""Time limit of one store operation."""
_RETRY_S = 1.0
_STOP_LIMIT_S = 0.5


class StoreThread:
    """Connects to a store and calls a function periodically; retries after failures, and logs the first one."""

    def __init__(
        self,
        act: Callable[[Store], None],
        connect: Callable[[], Store],
        *,
        name: str,
        consequence: str,
        period_s: float = PERIOD_S,
        at_end: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
            act: the function to call; after an exception, the thread connects again.
            connect: returns a connected store.
            name: the caller's name in log messages.
            consequence: what it means for the training if the store cannot be used, for log messages.
            period_s: pause between two calls.
            at_end: called by the thread when it ends.
        """
        self._act = act
        self._connect = connect
        self._name = name
        self._consequence = consequence
        self.period_s = period_s
        """Pause between two calls; `act` may change it."""
        self._at_end = at_end
        self._store: Store | None = None
        self._is_connected: bool | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuenergyd-store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; waits briefly for a call in progress."""
        self._is_stopping.set()
        self._thread.join(_STOP_LIMIT_S)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_stopping.wait(pause_s):
            pause_s = self.period_s
            try:
                if self._store is None:
                    self._store = self._connect()
                self._act(self._store)
            except Exception as error:  # noqa: BLE001  no exception may end a thread inside a training process
                self._store = None
                pause_s = _RETRY_S
                if self._is_connected is not False:
                    logger.warning(
                        "gpuenergyd: %s cannot use the job's store (%r); %s", self._name, error, self._consequence
                    )
                self._is_connected = False
            else:
                if not self._is_connected:
                    logger.info("gpuenergyd: %s is connected to the job's store", self._name)
                self._is_connected = True
        self._at_end()


def connection_to(address: tuple[str, int], run_key: str) -> Callable[[], Store]:
    """Return a function that connects to the job's store at an address and prefixes keys with the key of this run."""
    (host, port), prefix = address, f"gpuenergyd/{without_restarts(run_key)}"

    def connect() -> Store:
        return JobStore(host, port, prefix, limit_s=STORE_LIMIT_S)

    return connect
