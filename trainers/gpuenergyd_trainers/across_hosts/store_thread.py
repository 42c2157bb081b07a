"""A thread that does something with the job's store again and again: the store may hang, and the training must not."""

import logging
import threading
from collections.abc import Callable

from gpuenergyd_trainers.across_hosts.job_store import Store

logger = logging.getLogger("gpuenergyd.trainers")

PERIOD_S = 0.1
"""How often the store is asked; a word from one rank to another takes two of these at most, an answer four."""
STORE_LIMIT_S = 10.0
_RETRY_S = 1.0
_STOP_LIMIT_S = 0.5


class StoreThread:
    """Connects to a store and acts on it every so often; what fails is said once, and tried again."""

    def __init__(
        self,
        act: Callable[[Store], None],
        connect: Callable[[], Store],
        *,
        who: str,
        without_it: str,
        period_s: float = PERIOD_S,
        at_end: Callable[[], None],
    ) -> None:
        """Start the thread.

        Args:
            act: what is done; whatever it raises leads to a new connection.
            connect: makes a connection.
            who: what the log calls the one that acts.
            without_it: what the log says is missing while the store cannot be used.
            period_s: how long to pause between two acts.
            at_end: called by the thread when it ends.
        """
        self._act = act
        self._connect = connect
        self._who = who
        self._without_it = without_it
        self._period_s = period_s
        self._at_end = at_end
        self._store: Store | None = None
        self._is_in_touch: bool | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuenergyd-store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Act no more; waits a moment for an act that is under way."""
        self._is_stopping.set()
        self._thread.join(_STOP_LIMIT_S)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_stopping.wait(pause_s):
            pause_s = self._period_s
            try:
                if self._store is None:
                    self._store = self._connect()
                self._act(self._store)
            except Exception as error:  # noqa: BLE001  the last line of defence of a thread inside a training process
                self._store = None
                pause_s = _RETRY_S
                if self._is_in_touch is not False:
                    logger.warning(
                        "gpuenergyd: %s: no use of the job's store (%r); training goes on, %s",
                        self._who,
                        error,
                        self._without_it,
                    )
                self._is_in_touch = False
            else:
                if not self._is_in_touch:
                    logger.info("gpuenergyd: %s is in touch through the job's store", self._who)
                self._is_in_touch = True
        self._at_end()
