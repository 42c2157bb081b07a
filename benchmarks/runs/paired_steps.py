"""Steps of one training with its adapter switched on and off in alternating blocks; a part of overhead benchmarks."""

import random
import statistics
from collections.abc import Callable
from time import perf_counter, thread_time, thread_time_ns
from typing import Any

from gpuenergyd.client.rank import RankClient
from gpuenergyd_trainers.joining.handle import Handle, WrappedAttribute

ATTACHED, TIMED, PLAIN, NULL = "attached", "timed", "plain", "null"
ARMS = (ATTACHED, TIMED, PLAIN, NULL)
"""The adapter on; on, with its calls of the client timed; off; off again, the null arm."""
SETTLING_STEPS = 2
"""Steps left out at the start of a block: the first after a change is no iteration, the second reports none."""
FIRST_STEPS = 8
"""Attached steps before the first block."""
NUM_RESAMPLES = 4_000
US_PER_S = 1e6
NS_PER_US = 1_000


class Switch:
    """Removes an attachment's wrappers and adds them again; the rank stays in its job."""

    def __init__(
        self, handle: Handle, *, others: tuple[tuple[object, str], ...] = (), makes_pauses: bool = True
    ) -> None:
        """`others` are further attributes that the attachment has replaced: target and name.

        Without pauses, the iterations with the adapter follow each other for the rank as if there were no others.
        """
        self._handle = handle
        self._makes_pauses = makes_pauses
        self._wrapped: list[WrappedAttribute] = []
        self._others = [(target, name, getattr(target, name)) for target, name in others]
        self._is_on = True

    def turn(self, *, is_on: bool) -> None:
        """Run the program with or without the wrappers."""
        if is_on and not self._is_on:
            for wrapped in self._wrapped:
                wrapped.put_in()
            for target, name, attached in self._others:
                setattr(target, name, attached)
        elif self._is_on and not is_on:
            if self._makes_pauses and self._handle._rank is not None:  # noqa: SLF001  as above
                self._handle._rank.pause()  # noqa: SLF001  as above
            for target, name, _ in self._others:
                setattr(target, name, None)
            attributes = [w for w in self._handle._wrapped if isinstance(w, WrappedAttribute)]  # noqa: SLF001  as above
            self._wrapped = [wrapped for wrapped in attributes if wrapped.is_in]
            for wrapped in reversed(self._wrapped):
                assert wrapped.undo()
        self._is_on = is_on


class CallTimes:
    """CPU time of the training thread in the client's methods; to be made before anything is attached."""

    def __init__(self) -> None:
        self.is_on = False
        self.total_ns = 0
        for name in ("begin_iteration", "end_iteration", "begin_instruction", "end_instruction"):
            setattr(RankClient, name, self._timed(getattr(RankClient, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            if not self.is_on:
                return method(*args)
            began_ns = thread_time_ns()
            result = method(*args)
            self.total_ns += thread_time_ns() - began_ns
            return result

        return timed


class PairedBlocks:
    """Measures every step of a training, and switches its adapter between blocks of steps.

    All ranks of a training switch at the same steps. The training calls `before_step` at the begin of each step, and
    once after the last one.
    """

    def __init__(self, *, num_pairs: int, num_steps: int) -> None:
        self.calls = CallTimes()
        self.turn: Callable[[bool], None] = lambda _: None
        """Switches the adapter on or off."""
        shuffled = random.Random(1)  # all ranks draw the same order
        self._labels = [(-1, ATTACHED, False)] * FIRST_STEPS
        for pair in range(num_pairs):
            for arm in shuffled.sample(ARMS, len(ARMS)):
                self._labels += [(pair, arm, False)] * SETTLING_STEPS + [(pair, arm, True)] * num_steps
        self.pairs: list[dict[str, list[tuple[float, float, float]]]] = [
            {arm: [] for arm in ARMS} for _ in range(num_pairs)
        ]
        self._at = -1
        self._arm = ATTACHED
        self._began = (0.0, 0.0)

    @property
    def num_steps(self) -> int:
        """Steps of the whole training."""
        return len(self._labels)

    def before_step(self) -> None:
        """Measure the step that has ended, and switch the adapter if another block begins."""
        wall_s, cpu_s = perf_counter() - self._began[0], thread_time() - self._began[1]
        if 0 <= self._at < len(self._labels):
            pair, arm, is_measured = self._labels[self._at]
            if is_measured:
                self.pairs[pair][arm].append((wall_s, cpu_s, self.calls.total_ns / NS_PER_US))
        self._at += 1
        arm = self._labels[self._at][1] if self._at < len(self._labels) else ATTACHED
        if arm != self._arm:
            self.calls.is_on = arm == TIMED
            self.turn(arm in {ATTACHED, TIMED})
            self._arm = arm
        self.calls.total_ns = 0
        self._began = perf_counter(), thread_time()

    def figures(self) -> dict[str, Any]:
        """Return wall time and CPU time of this thread, attached against plain, and plain against plain."""
        walls_s, cpus_s = (
            [
                {arm: statistics.median(step[which] for step in steps) for arm, steps in pair.items()}
                for pair in self.pairs
            ]
            for which in (0, 1)
        )
        step_s = statistics.median(pair[PLAIN] for pair in walls_s)
        calls_us = [step[2] for pair in self.pairs for step in pair[TIMED]]
        cpu_us = [US_PER_S * (pair[ATTACHED] - pair[PLAIN]) for pair in cpus_s]
        shares = [own_us / US_PER_S / step_s for own_us in cpu_us]
        return {
            "pairs": len(self.pairs),
            "steps_per_block": len(self.pairs[0][PLAIN]),
            "step_s": round(step_s, 6),
            "wall": reported([pair[ATTACHED] / pair[PLAIN] for pair in walls_s], "ratio"),
            "wall_null": reported([pair[NULL] / pair[PLAIN] for pair in walls_s], "ratio"),
            "thread_cpu_us": reported(cpu_us, "us"),
            "thread_cpu_null_us": reported([US_PER_S * (pair[NULL] - pair[PLAIN]) for pair in cpus_s], "us"),
            "thread_cpu_share": reported(shares, "ratio"),
            "calls_us": reported(calls_us, "us"),
            "calls_share": reported([own_us / US_PER_S / step_s for own_us in calls_us], "ratio"),
        }


def reported(values: list[float], what: str) -> dict[str, float]:
    """Return the median, its bootstrap 95 % interval, and the 5th and 95th percentile."""
    resampled = random.Random(2)
    medians = sorted(statistics.median(resampled.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    low, high = medians[round(0.025 * NUM_RESAMPLES)], medians[round(0.975 * NUM_RESAMPLES) - 1]
    digits, ranked = 6 if what == "ratio" else 1, sorted(values)
    return {
        f"median_{what}": round(statistics.median(values), digits),
        "low": round(low, digits),
        "high": round(high, digits),
        "p5": round(ranked[len(ranked) // 20], digits),
        "p95": round(ranked[-1 - len(ranked) // 20], digits),
    }
