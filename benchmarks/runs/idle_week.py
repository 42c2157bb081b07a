"""Benchmark of the policy `idle`: a virtual week of a host whose programs hold GPUs without work.

Usage: python benchmarks/runs/idle_week.py [--seed S] [--days 7] [--json]

Eight GPUs, four as h200 and four as a100-sxm, each with one kind of program: notebooks, bursts of experiments,
services with requests every 1 to 100 s by day, polling programs, trainings with long evaluations, and trainings with
nothing between them. All lengths, rates and latencies are drawn from the seed. The decisions are those of the plugin;
around them is virtual time: readings of values up to 100 ms old, sent in batches, calls and raises of 20 to 400 ms.
Work runs slower at a lower clock in inverse proportion, which is the worst case.

The oracle lowers after `after_s` too, lifts when a reading shows work, and may lose as much time; it knows the length
of each idle span, and takes those that save most for the time they lose. `captured_ratio` compares the saved energy of
both. `lost_time_max_ratio` is the time lost beyond 2 s a day relative to the working time, of the worst GPU, and
`first_work_delay_p99_s` is of all begins of work on GPUs that were idle for `after_s`, lowered or not.
`estimate_error_ratio` compares what observe mode, on the same week, estimates with what control saves.
"""

import argparse
import heapq
import json
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd_idle.rules.control import IdleGpu, Order
from gpuenergyd_idle.rules.idle_spans import IdleSpans
from gpuenergyd_idle.rules.lost_time import DAY_S, PER_DAY_S, PER_WORKING_TIME_RATIO, LostTimeAccount
from gpuenergyd_idle.rules.saving import ModelSaving
from gpuenergyd_idle.rules.use import UseReading
from gpuenergyd_sim.driver.device_model import blocking_power_w
from gpuenergyd_sim.driver.device_parameters import MODELS, DeviceParameters

AFTER_S = 30.0
MODEL_KEYS = ("h200", "a100-sxm")
TICK_S, STEADY_S, NEAR_S = 0.1, 1.9, 2.0
"""Between readings: for `NEAR_S` after a change, and in steady time. The daemon reads every 0.1 s always; decisions in
steady time only wait for seconds to pass."""
READING_AGE_S = 0.1
WORK_W = 300.0
POWER_NOISE_W = 1.5
LEAST_CAPTURED_RATIO, MOST_DELAY_S, MOST_ESTIMATE_ERROR = 0.85, 0.5, 0.2


@dataclass(frozen=True, slots=True)
class Span:
    """Time of one kind: work, idle with a context, or without one (`has_context` is false)."""

    begin_s: float
    length_s: float
    is_work: bool
    has_context: bool = True


@dataclass(slots=True)
class Outcome:
    """What a week gave on one GPU."""

    saved_j: float = 0.0
    lost_s: float = 0.0
    working_s: float = 0.0
    num_lowerings: int = 0


# --- programs ---


def programs(rng: random.Random, days: float) -> list[tuple[str, list[Span]]]:
    """Return eight programs by their kinds."""
    kinds = (_notebook, _notebook, _bursts, _service, _slow_service, _poller, _evaluations, _trainings)
    return [(kind.__name__.strip("_"), list(_spans(kind(random.Random(rng.random())), days * DAY_S))) for kind in kinds]


def _spans(parts: Iterator[tuple[str, float]], until_s: float) -> Iterator[Span]:
    at_s = 0.0
    for kind, drawn_s in parts:
        length_s = min(max(drawn_s, 0.02), until_s - at_s)
        yield Span(at_s, length_s, kind == "work", kind != "empty")
        at_s += length_s
        if until_s - at_s < 0.02:
            return


def _notebook(rng: random.Random) -> Iterator[tuple[str, float]]:
    """Cells for some hours a day, pauses of minutes between them; the kernel often stays overnight."""
    while True:
        for _ in range(rng.randint(10, 60)):
            yield "work", rng.lognormvariate(1.5, 1.3)
            yield "idle", rng.lognormvariate(4.2, 1.3)
        yield ("idle" if rng.random() < 0.7 else "empty"), 3600 * rng.uniform(8, 18)


def _bursts(rng: random.Random) -> Iterator[tuple[str, float]]:
    """Experiments of minutes in bursts, an idle shell between them."""
    while True:
        for _ in range(rng.randint(3, 15)):
            yield "work", rng.lognormvariate(5.0, 1.0)
            yield "idle", rng.lognormvariate(3.0, 1.0)
        yield ("idle" if rng.random() < 0.6 else "empty"), rng.lognormvariate(8.5, 1.0)


def _service(rng: random.Random) -> Iterator[tuple[str, float]]:
    """Requests every few seconds by day, every few minutes at night."""
    day_mean_s, night_mean_s, at_s = rng.uniform(1, 10), rng.uniform(100, 600), 0.0
    while True:
        is_day = 8 * 3600 <= at_s % DAY_S < 20 * 3600
        work_s = rng.lognormvariate(-0.7, 0.6)
        idle_s = rng.expovariate(1 / (day_mean_s if is_day else night_mean_s))
        yield "work", work_s
        yield "idle", idle_s
        at_s += work_s + idle_s


def _slow_service(rng: random.Random) -> Iterator[tuple[str, float]]:
    """Requests every 20 to 100 s in hours of use, none for hours between them."""
    while True:
        mean_s = rng.uniform(20, 100)
        for _ in range(rng.randint(50, 400)):
            yield "work", rng.lognormvariate(0.5, 0.6)
            yield "idle", rng.expovariate(1 / mean_s)
        yield "idle", 3600 * rng.uniform(1, 10)


def _poller(rng: random.Random) -> Iterator[tuple[str, float]]:
    """A kernel every minute or so, without end; two or three stops in a day."""
    period_s = rng.uniform(40, 90)
    while True:
        for _ in range(rng.randint(200, 800)):
            yield "work", rng.uniform(0.05, 0.5)
            yield "idle", period_s * rng.uniform(0.95, 1.05)
        yield "idle", 3600 * rng.uniform(2, 8)


def _evaluations(rng: random.Random) -> Iterator[tuple[str, float]]:
    """Trainings that evaluate on the CPU, or wait for rollouts, between hours on the GPU."""
    while True:
        for _ in range(rng.randint(3, 12)):
            yield "work", 60 * rng.uniform(10, 60)
            yield "idle", 60 * rng.lognormvariate(2.0, 0.7)
        yield ("idle" if rng.random() < 0.3 else "empty"), 3600 * rng.uniform(1, 10)


def _trainings(rng: random.Random) -> Iterator[tuple[str, float]]:
    """Trainings of hours, nothing between them."""
    while True:
        yield "work", 3600 * rng.uniform(2, 20)
        yield "empty", 3600 * rng.uniform(0.2, 4)


# --- the driver's latencies ---


def way_s(rng: random.Random) -> float:
    """Draw the time from a reading to the raised clock: its batch, the call, and the card's latency."""
    return rng.uniform(0, 0.1) + rng.uniform(0.02, 0.4)


# --- one GPU ---


@dataclass
class VirtualGpu:
    """A GPU in virtual time under the decisions of the plugin."""

    model: DeviceParameters
    idle: IdleGpu
    rng: random.Random

    def __post_init__(self) -> None:
        self.shift_s = 0.0  # of all that follows, by delayed work
        clocks = self.model.supported_sm_clocks_mhz
        self.full_mhz, self.low_mhz = clocks[0], clocks[-1]
        self.slow_ratio = 1 - self.low_mhz / self.full_mhz
        self.full_w = blocking_power_w(self.model, self.full_mhz)
        self.low_w = blocking_power_w(self.model, self.low_mhz)

    def run(self, spans: list[Span]) -> tuple[Outcome, list[float]]:
        """Run through a week; return its outcome and the delays of first work."""
        outcome, delays = Outcome(), []
        is_low, idle_s = False, 0.0
        for span in spans:
            if span.is_work:
                outcome.working_s += span.length_s
                delay_s = self._work(span, is_low=is_low)
                is_low = False
                outcome.lost_s += delay_s
                if idle_s >= AFTER_S:
                    delays.append(delay_s)
                idle_s = 0.0
            else:
                is_low, low_s = self._rest(span, is_low=is_low)
                outcome.saved_j += low_s * (self.full_w - self.low_w)
                idle_s += span.length_s
        outcome.num_lowerings = self.idle.num_lowerings
        return outcome, delays

    def _work(self, span: Span, *, is_low: bool) -> float:
        """Return by how much work was delayed; the clock is high after it."""
        seen_s = self.rng.uniform(0, READING_AGE_S) + self.rng.uniform(0, TICK_S)
        raised_s = seen_s + way_s(self.rng)
        shown_raised_s = raised_s + self.rng.uniform(0, READING_AGE_S)
        delay_s = min(raised_s, span.length_s / (1 - self.slow_ratio)) * self.slow_ratio if is_low else 0.0
        end_s = span.length_s + delay_s
        self._read(
            span.begin_s + seen_s - TICK_S, self.low_mhz if is_low else self.full_mhz, self.idle_w(is_low=is_low)
        )
        at_s = seen_s  # a window of utilization shows work that has just ended, too
        while True:
            clock_mhz = self.low_mhz if is_low and at_s < shown_raised_s else self.full_mhz
            self._read(span.begin_s + at_s, clock_mhz, WORK_W, is_work=True)
            at_s += TICK_S if at_s < NEAR_S else STEADY_S
            if at_s >= end_s:
                break
        self.shift_s += max(delay_s, at_s - TICK_S - span.length_s)
        return delay_s

    def _rest(self, span: Span, *, is_low: bool) -> tuple[bool, float]:
        """Return whether the clock is low at the end, and how long it was low."""
        at_s, low_s, dense_until_s = self.rng.uniform(0.0, TICK_S), 0.0, NEAR_S
        while at_s < span.length_s - TICK_S:
            clock_mhz = self.low_mhz if is_low else self.full_mhz
            power_w = self.idle_w(is_low=is_low) if span.has_context else self.model.idle_power_w
            order = self._read(span.begin_s + at_s, clock_mhz, power_w, has_context=span.has_context)
            if order is not None:
                is_low, dense_until_s = order is Order.LOWER, at_s + NEAR_S
            step_s = TICK_S if at_s < dense_until_s else STEADY_S
            step_s = min(step_s, span.length_s - at_s)
            low_s += step_s if is_low and span.has_context else 0.0
            at_s += step_s
        return is_low, low_s

    def idle_w(self, *, is_low: bool) -> float:
        """Return the power with a context and without work."""
        return self.low_w if is_low else self.full_w

    def _read(
        self, at_s: float, clock_mhz: int, power_w: float, *, is_work: bool = False, has_context: bool = True
    ) -> Order | None:
        at_s += self.shift_s
        shown_w = power_w + self.rng.gauss(0, POWER_NOISE_W)
        order = self.idle.observe(UseReading(at_s, float(is_work), shown_w, clock_mhz, int(has_context or is_work)))
        return order if self.idle.acts else None


def decisions(model: DeviceParameters, saving: ModelSaving, *, acts: bool) -> IdleGpu:
    """Return the decisions for one GPU."""
    clocks = model.supported_sm_clocks_mhz
    account = LostTimeAccount(1 - clocks[-1] / clocks[0], 0.0)
    return IdleGpu(clocks[-1], account, IdleSpans(AFTER_S, 0.0), saving, acts=acts)


def oracle_saved_j(spans: list[Span], model: DeviceParameters, rng: random.Random, days: float) -> float:
    """Return what the oracle saves: idle spans in order of what they save, while their wakes can be paid."""
    clocks = model.supported_sm_clocks_mhz
    slow_ratio = 1 - clocks[-1] / clocks[0]
    saved_w = blocking_power_w(model, clocks[0]) - blocking_power_w(model, clocks[-1])
    allowed_s = PER_WORKING_TIME_RATIO * sum(s.length_s for s in spans if s.is_work) + PER_DAY_S * days
    saved_j = 0.0
    useful: list[tuple[float, float]] = []
    for index, span in enumerate(spans):
        if span.is_work or not span.has_context or span.length_s <= AFTER_S:
            continue
        is_woken = index + 1 < len(spans) and spans[index + 1].is_work
        cost_s = (rng.uniform(0, READING_AGE_S) + rng.uniform(0, TICK_S) + way_s(rng)) * slow_ratio if is_woken else 0.0
        heapq.heappush(useful, (-(span.length_s - AFTER_S), cost_s))
    while useful:
        low_s, cost_s = heapq.heappop(useful)
        if cost_s <= allowed_s:
            allowed_s -= cost_s
            saved_j -= low_s * saved_w
    return saved_j


def week(seed: int, days: float) -> dict[str, object]:
    """Return the figures of one week."""
    rng = random.Random(seed)
    traces = programs(rng, days)
    savings = {(key, acts): ModelSaving() for key in MODEL_KEYS for acts in (True, False)}
    gpus: list[dict[str, object]] = []
    delays_s: list[float] = []
    controls, observed_s, kinds = [], [], []
    for index, (kind, spans) in enumerate(traces):
        key = MODEL_KEYS[index % 2]
        model = MODELS[key]
        control = VirtualGpu(model, decisions(model, savings[key, True], acts=True), random.Random(rng.random()))
        outcome, delays = control.run(spans)
        observing = VirtualGpu(model, decisions(model, savings[key, False], acts=False), random.Random(rng.random()))
        observing.run(spans)
        oracle_j = oracle_saved_j(spans, model, random.Random(rng.random()), days)
        excess_s = max(0.0, outcome.lost_s - PER_DAY_S * days)
        gpus.append(
            {
                "program": kind,
                "model": key,
                "saved_kwh": round(outcome.saved_j / 3.6e6, 3),
                "oracle_kwh": round(oracle_j / 3.6e6, 3),
                "lowerings": outcome.num_lowerings,
                "working_h": round(outcome.working_s / 3600, 1),
                "lost_s": round(outcome.lost_s, 2),
                "charged_s": round(control.idle.account.lost_s, 2),
                "lost_time_ratio": round(excess_s / outcome.working_s, 6) if outcome.working_s else 0.0,
            }
        )
        delays_s += delays
        controls.append(outcome.saved_j)
        observed_s.append(observing.idle.lowered_s)
        kinds.append((key, oracle_j))
    estimates = {key: savings[key, False].estimate() for key in MODEL_KEYS}
    estimated_j = sum(
        low_s * own.mean_w for low_s, (key, _) in zip(observed_s, kinds, strict=True) if (own := estimates[key])
    )
    measured = {key: own.text() for key in MODEL_KEYS if (own := savings[key, True].measured) is not None}
    delays_s.sort()
    return {
        "seed": seed,
        "days": days,
        "captured_ratio": round(sum(controls) / sum(oracle_j for _, oracle_j in kinds), 4),
        "lost_time_max_ratio": max(float(str(own["lost_time_ratio"])) for own in gpus),
        "first_work_delay_p99_s": _p99(delays_s),
        "first_work_delay_of_lowered_p99_s": _p99([delay for delay in delays_s if delay > 0]),
        "estimate_error_ratio": round(abs(estimated_j / sum(controls) - 1), 4),
        "measured": measured,
        "estimated": {key: own.text() for key, own in estimates.items() if own is not None},
        "oracle": "knows the length of each idle span; lowers after after_s, lifts when work is seen, same lost time",
        "gpus": gpus,
    }


def _p99(values: list[float]) -> float:
    return round(values[int(0.99 * (len(values) - 1))], 3) if values else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = week(options.seed, options.days)
    if options.json:
        print(json.dumps(result))
    else:
        for own in result.pop("gpus"):  # type: ignore[attr-defined]
            print("  ".join(f"{name} {value}" for name, value in own.items()))
        for name, value in result.items():
            print(f"{name:<36}{value}")
    return 0 if is_met(result) else 1


def is_met(result: Mapping[str, Any]) -> bool:
    """Return whether all targets are met."""
    return bool(
        result["captured_ratio"] >= LEAST_CAPTURED_RATIO
        and result["lost_time_max_ratio"] <= PER_WORKING_TIME_RATIO
        and result["first_work_delay_p99_s"] <= MOST_DELAY_S
        and result["estimate_error_ratio"] <= MOST_ESTIMATE_ERROR
    )


if __name__ == "__main__":
    sys.exit(main())
