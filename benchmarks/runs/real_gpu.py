"""Readings of a real GPU's driver: values, cost and accuracy. Read-only: changes no clock, limit or mode.

    python benchmarks/runs/real_gpu.py [--gpu 0] [--seconds 10] [--json]

Reports supported clocks and limits, update periods of the energy counter and of three power readings, the cost of each
reading, idle power and clock. If torch with CUDA is installed, it reports the same under a steady matrix product, with
the energy of that loop by the counter compared with the integral of power. Its own matrix product is the only load.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pynvml

FIELD_AVERAGE_POWER = 185
FIELD_INSTANT_POWER = 186


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of each observation")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(options.gpu)
    except pynvml.NVMLError as error:
        print(f"cannot read GPU {options.gpu}: {error}", file=sys.stderr)
        return 1
    result: dict[str, Any] = {"facts": facts(gpu), "idle": observe(gpu, options.seconds)}
    load = MatrixProducts.start(options.gpu)
    if load is None:
        result["loaded"] = None
        result["note"] = "torch with CUDA is not installed: nothing measured under load"
    else:
        time.sleep(2.0)
        products_before = load.num_done
        result["loaded"] = observe(gpu, options.seconds)
        result["loaded"]["matrix_products_per_s"] = (load.num_done - products_before) / options.seconds
        load.stop()
    pynvml.nvmlShutdown()
    print(json.dumps(result) if options.json else json.dumps(result, indent=2))
    return 0


def asked(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return a call's result, or the driver's error message."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        return f"{type(error).__name__}"


def facts(gpu: Any) -> dict[str, Any]:
    """Return the GPU's constant properties."""
    memory_clocks = asked(pynvml.nvmlDeviceGetSupportedMemoryClocks, gpu)
    clocks = None
    if isinstance(memory_clocks, list) and memory_clocks:
        clocks = asked(pynvml.nvmlDeviceGetSupportedGraphicsClocks, gpu, max(memory_clocks))
    described: Any = clocks
    if isinstance(clocks, list) and clocks:
        steps = sorted({a - b for a, b in pairwise(clocks)})
        described = {"count": len(clocks), "min_mhz": min(clocks), "max_mhz": max(clocks), "steps_mhz": steps}
    return {
        "name": asked(pynvml.nvmlDeviceGetName, gpu),
        "driver": asked(pynvml.nvmlSystemGetDriverVersion),
        "supported_sm_clocks": described,
        "supported_memory_clocks_mhz": memory_clocks,
        "power_limit_range_mw": asked(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, gpu),
        "default_power_limit_mw": asked(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu),
        "enforced_power_limit_mw": asked(pynvml.nvmlDeviceGetEnforcedPowerLimit, gpu),
        "persistence_mode": asked(pynvml.nvmlDeviceGetPersistenceMode, gpu),
        "mig_mode": asked(pynvml.nvmlDeviceGetMigMode, gpu),
    }


def field(gpu: Any, field_id: int) -> int | None:
    """Return the value of one field, None if the driver does not support it."""
    (value,) = pynvml.nvmlDeviceGetFieldValues(gpu, [field_id])
    return int(value.value.uiVal) if value.nvmlReturn == 0 else None


def readings(gpu: Any) -> dict[str, Callable[[], Any]]:
    """Return every reading that the daemon uses, by name."""
    return {
        "total_energy": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu),
        "power_usage": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu),
        "instant_power": lambda: field(gpu, FIELD_INSTANT_POWER),
        "average_power": lambda: field(gpu, FIELD_AVERAGE_POWER),
        "two_fields_at_once": lambda: pynvml.nvmlDeviceGetFieldValues(gpu, [FIELD_INSTANT_POWER, 83]),
        "sm_clock": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "memory_clock": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "event_reasons": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
        "temperature": lambda: pynvml.nvmlDeviceGetTemperatureV(gpu, 0),
    }


def observe(gpu: Any, seconds: float) -> dict[str, Any]:
    """Return costs, update periods and the current state of the GPU."""
    names = readings(gpu)
    costs = {name: cost_us(read) for name, read in names.items()}
    periods = {
        name: update_period_ms(names[name], seconds / 2)
        for name in ("total_energy", "power_usage", "instant_power", "average_power")
        if costs[name] is not None
    }
    return {
        "cost_us": costs,
        "update_period_ms": periods,
        "state": asked_all(
            {name: names[name] for name in ("sm_clock", "memory_clock", "event_reasons", "temperature")}
        ),
        "energy": energy_by_counter_and_integral(names, seconds),
    }


def asked_all(calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: asked(call) for name, call in calls.items()}


def cost_us(read: Callable[[], Any], repeats: int = 400) -> dict[str, float] | None:
    """Return the median and the 99th percentile of a reading's duration."""
    durations = []
    for _ in range(repeats):
        begun_ns = time.perf_counter_ns()
        try:
            read()
        except pynvml.NVMLError:
            return None
        durations.append((time.perf_counter_ns() - begun_ns) / 1000.0)
    durations.sort()
    return {"p50": round(durations[repeats // 2], 1), "p99": round(durations[int(0.99 * repeats)], 1)}


def update_period_ms(read: Callable[[], Any], seconds: float) -> dict[str, float] | None:
    """Return the spread of the times between two changes of a reading, polled every half millisecond."""
    changes_ns: list[int] = []
    last = read()
    until_ns = time.monotonic_ns() + round(seconds * 1e9)
    while (now_ns := time.monotonic_ns()) < until_ns:
        value = read()
        if value != last:
            changes_ns.append(now_ns)
            last = value
        time.sleep(0.0005)
    gaps = sorted((b - a) / 1e6 for a, b in pairwise(changes_ns))
    if not gaps:
        return None
    return {
        "median": round(statistics.median(gaps), 2),
        "p05": round(gaps[int(0.05 * len(gaps))], 2),
        "p95": round(gaps[int(0.95 * len(gaps))], 2),
        "changes": len(changes_ns),
    }


def energy_by_counter_and_integral(names: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Any]:
    """Return the energy between two updates of the counter, and the integrals of power over the same time."""
    powers: dict[str, list[tuple[int, float]]] = {"power_usage": [], "instant_power": [], "average_power": []}
    edges: list[tuple[int, int]] = []
    try:
        last = names["total_energy"]()
    except pynvml.NVMLError:
        return {"counter_j": None}
    until_ns = time.monotonic_ns() + round(seconds * 1e9)
    while (now_ns := time.monotonic_ns()) < until_ns:
        value = names["total_energy"]()
        if value != last:
            edges.append((now_ns, value))
            last = value
        for name, series in powers.items():
            with suppress(pynvml.NVMLError):
                milliwatts = names[name]()
                if milliwatts is not None:
                    series.append((now_ns, milliwatts / 1000.0))
        time.sleep(0.002)
    if len(edges) < 2:
        return {"counter_j": None}
    (begin_ns, begin_mj), (end_ns, end_mj) = edges[0], edges[-1]
    counter_j = (end_mj - begin_mj) / 1000.0
    result: dict[str, Any] = {
        "window_s": round((end_ns - begin_ns) / 1e9, 3),
        "counter_j": round(counter_j, 3),
        "mean_power_w": round(counter_j / ((end_ns - begin_ns) / 1e9), 2),
    }
    for name, series in powers.items():
        integral_j = integral(series, begin_ns, end_ns)
        if integral_j is not None:
            result[f"{name}_integral_j"] = round(integral_j, 3)
            result[f"{name}_against_counter_ratio"] = round(integral_j / counter_j, 4) if counter_j else None
    return result


def integral(series: Sequence[tuple[int, float]], begin_ns: int, end_ns: int) -> float | None:
    """Return the integral of the readings that lie in a window, each holding until the next."""
    inside = [(t, w) for t, w in series if begin_ns <= t <= end_ns]
    if len(inside) < 2:
        return None
    held = [*inside, (end_ns, inside[-1][1])]
    return sum(w * (b - a) / 1e9 for (a, w), (b, _) in pairwise(held))


class MatrixProducts:
    """A thread that multiplies matrices on the GPU until it is stopped."""

    def __init__(self, torch: Any, index: int) -> None:
        self.num_done = 0
        self._torch = torch
        self._device = torch.device("cuda", index)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @classmethod
    def start(cls, index: int) -> "MatrixProducts | None":
        """Start, or return None without torch and CUDA."""
        try:
            import torch  # noqa: PLC0415 - optional, and slow to load
        except ImportError:
            return None
        if not torch.cuda.is_available():
            return None
        load = cls(torch, index)
        load._thread.start()
        return load

    def stop(self) -> None:
        """Finish the queued products and stop."""
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        torch = self._torch
        a, b = (torch.randn(8192, 8192, device=self._device, dtype=torch.bfloat16) for _ in range(2))
        while not self._is_stopping:
            for _ in range(20):
                torch.matmul(a, b)
            torch.cuda.synchronize(self._device)
            self.num_done += 20


if __name__ == "__main__":
    sys.exit(main())
