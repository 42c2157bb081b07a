"""Training steps that a program captures in a graph and replays: each replay counts as the step that was captured.

While a step is captured, the starts and ends of its instructions become event nodes of the graph; we add nothing else
to it. A replay runs no Python code, so the times of these nodes replace the marks of the adapters, and one timetable
per replay replaces the clock requests.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from gpuenergyd.client.rank import RankClient
from gpuenergyd.client.timing.captured_graphs import Replay
from gpuenergyd.client.timing.replays import CapturedInstructions
from gpuenergyd.log_lines import safe_logger

logger = safe_logger("gpuenergyd.trainers")


class SteppedRank(Protocol):
    """A rank that runs training steps."""

    is_active: bool

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and has not ended."""
        ...

    def begin_step(self) -> None: ...

    def end_step(self) -> None: ...

    def fail_step(self) -> None:
        """End a step that raised."""
        ...


class CapturedSteps:
    """Follows captures and replays of one rank's steps."""

    def __init__(self, rank: SteppedRank, client: RankClient, log_name: str) -> None:
        self._rank = rank
        self._client = client
        self._graphs = client.graphs
        self._log_name = log_name
        self.is_capturing = False
        """Whether the present step is being captured."""

    @property
    def num_captures(self) -> int:
        """How many graphs this process has begun to capture."""
        return self._graphs.num_captures if self._graphs is not None else 0

    def begin(self) -> bool:
        """Begin to capture the present step; return False if the program captures no graph."""
        is_announced = self._graphs is not None and self._graphs.gate.is_capturing
        self.is_capturing = is_announced and self._client.begin_capture()
        return self.is_capturing

    def abandon(self) -> None:
        """Forget a step that raised while it was being captured."""
        self.is_capturing = False
        self._client.end_capture()

    def end(self) -> None:
        """End the capture of a step; replays of its graph are followed from now on."""
        self.is_capturing = False
        captured, graphs = self._client.end_capture(), self._graphs
        graph = graphs.being_captured if graphs is not None else None
        if captured is None or graphs is None or graph is None:
            return
        if graphs.is_followed(graph):
            self._warn("a graph holds more than one training step: capture each step in a graph of its own")
            graphs.follow(graph, _replay_alone, until_next_capture=True)
        elif not captured.is_complete:
            self._warn(
                "the instructions of a captured step cannot be timed: this version of torch has no external events, or"
                " the step ran an unknown number of instructions. gpuenergyd_trainers.cuda_graphs.attach(graph) sets"
                " one clock per replay"
            )
        else:
            graphs.follow(graph, partial(self._replay, captured), until_next_capture=True)
            self._client.refuse_orders("steps are replays of a captured graph")
            logger.info("gpuenergyd: %s: replays of a captured step are followed by timetable", self._log_name)

    def _replay(self, captured: CapturedInstructions, replay: Replay) -> Any:
        rank = self._rank
        if not rank.is_active or rank.is_in_step:
            return replay()
        _shielded(rank.begin_step)
        self._client.follow_replay(captured)
        try:
            result = replay()
        except BaseException:
            _shielded(rank.fail_step)
            raise
        _shielded(rank.end_step)
        return result

    def _warn(self, what: str) -> None:
        logger.warning("gpuenergyd: %s: %s; replays run at full speed", self._log_name, what)


def _replay_alone(replay: Replay) -> Any:
    return replay()


def _shielded(act: Callable[[], None]) -> None:
    with suppress(Exception):  # must not reach training
        act()
