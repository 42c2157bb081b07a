"""`GET /v1/metrics`: the status in Prometheus' text format, in base units; what is not known is left out."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_HERTZ_PER_MHZ = 1e6

_OF_GPU = (
    ("sm_clock_mhz", "sm_clock_hertz", "SM clock as last read.", _HERTZ_PER_MHZ),
    ("requested_sm_clock_mhz", "requested_sm_clock_hertz", "SM clock asked for; absent at full speed.", _HERTZ_PER_MHZ),
    ("power_w", "power_watts", "Power as last read.", 1.0),
    ("temperature_celsius", "temperature_celsius", "Temperature as last read.", 1.0),
    ("reading_age_s", "reading_age_seconds", "Time since the last reading.", 1.0),
)
_LATENCY_PERCENTILES = (("10", "low_s"), ("50", "median_s"), ("90", "high_s"))
_OF_JOB = (
    ("baseline_time_s", "baseline_iteration_seconds", "Median iteration time at full speed."),
    ("baseline_energy_j", "baseline_iteration_joules", "Median energy of an iteration at full speed."),
    ("iteration_time_s", "tuned_iteration_seconds", "Median iteration time under tuned plans."),
    ("energy_j", "tuned_iteration_joules", "Median energy of an iteration under tuned plans."),
    ("saving_ratio", "plan_saving_ratio", "Energy saved against full speed, measured."),
    ("slowdown_ratio", "plan_slowdown_ratio", "Time lost against full speed, measured."),
    ("own_time_s", "own_iteration_seconds", "What an iteration takes at full speed without waiting for replicas."),
    ("straggler_time_s", "straggler_iteration_seconds", "Iteration time that a slower replica imposes; else absent."),
    ("extrinsic_saving_ratio", "extrinsic_saving_ratio", "Energy saved by not waiting for that replica, measured."),
    ("max_slowdown_ratio", "max_slowdown_ratio", "Time that may be lost."),
    (
        "predicted_saving_ratio",
        "predicted_saving_ratio",
        "Energy that would be saved if clocks could be set; predicted.",
    ),
    ("last_report_age_s", "last_report_age_seconds", "Time since any rank reported."),
)

_OF_CARBON = (
    ("saved_by_plan_g", "saved_by_plan_grams", "Grams saved by the fastest plan against un-tuned clocks."),
    ("saved_by_frontier_g", "saved_by_frontier_grams", "Grams saved by running slower at any hour."),
    ("saved_by_timing_g", "saved_by_timing_grams", "Grams saved by choosing the hours; may be negative."),
    ("unpriced_j", "unpriced_joules", "Energy in hours whose intensity nobody knows."),
)


class StatusCollector(Collector):
    """The families of one status."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        status = self._status
        yield GaugeMetricFamily("gpuenergyd_uptime_seconds", "Time since the daemon started.", status["uptime_s"])
        yield GaugeMetricFamily("gpuenergyd_degraded", "1 when something is wrong.", float(status["is_degraded"]))
        yield GaugeMetricFamily("gpuenergyd_worker_up", "1 while a GPU worker runs.", status["worker"]["is_alive"])
        for child in ("worker", "policy_host"):
            restarts = status[child]["num_restarts"]
            yield CounterMetricFamily(f"gpuenergyd_{child}_restarts", "Times it was replaced.", value=restarts)
        store = status["store"]
        yield CounterMetricFamily("gpuenergyd_store_rows_written", "Rows written.", value=store["num_rows_written"])
        yield CounterMetricFamily("gpuenergyd_store_rows_dropped", "Rows shed.", value=store["num_rows_dropped"])
        records = CounterMetricFamily("gpuenergyd_clock_records_refused", "Clock records.", labels=["why"])
        records.add_metric(["stale"], status["clock_records"]["num_stale"])
        records.add_metric(["hostile"], status["clock_records"]["num_hostile"])
        yield records
        yield from self._gpus()
        yield from self._jobs()
        yield from self._grid()

    def _gpus(self) -> Iterator[Metric]:
        labels = ["gpu_uuid", "index", "model_name"]
        gpus = [(g, [g["gpu_uuid"], str(g["index"]), g["model_name"]]) for g in self._status["gpus"]]
        energy = CounterMetricFamily("gpuenergyd_gpu_energy_joules", "The driver's energy counter.", labels=labels)
        for gpu, values in gpus:
            if gpu["total_energy_j"] is not None:
                energy.add_metric(values, gpu["total_energy_j"])
        yield energy
        for key, name, text, factor in _OF_GPU:
            gauge = GaugeMetricFamily(f"gpuenergyd_gpu_{name}", text, labels=labels)
            for gpu, values in gpus:
                if gpu[key] is not None:
                    gauge.add_metric(values, gpu[key] * factor)
            yield gauge
        state = GaugeMetricFamily("gpuenergyd_gpu_state", "1 for the state a GPU is in.", labels=[*labels, "state"])
        for gpu, values in gpus:
            state.add_metric([*values, gpu["state"]], 1.0)
        yield state
        planned = GaugeMetricFamily(
            "gpuenergyd_gpu_planned_switch_latency_seconds",
            "What plans allow a clock change until it is effective, by where that comes from.",
            labels=[*labels, "direction", "basis"],
        )
        seen = GaugeMetricFamily(
            "gpuenergyd_gpu_switch_latency_seconds",
            "Time from asking for a clock until it was effective, waits for other GPUs left out.",
            labels=[*labels, "direction", "percentile"],
        )
        switches = CounterMetricFamily(
            "gpuenergyd_gpu_switches", "Clock changes followed to their effect, or given up.", labels=[*labels, "seen"]
        )
        for gpu, values in gpus:
            switching = gpu["switching"]
            for direction in ("raise", "lower"):
                planned.add_metric([*values, direction, switching["basis"]], switching[f"{direction}_s"])
            for estimate in switching["seen"]:
                for percentile, key in _LATENCY_PERCENTILES:
                    if estimate["from_region"] is None and estimate[key] is not None:
                        seen.add_metric([*values, estimate["direction"], percentile], estimate[key])
            switches.add_metric([*values, "true"], switching["num_seen"])
            switches.add_metric([*values, "false"], switching["num_unseen"])
        yield planned
        yield seen
        yield switches

    def _jobs(self) -> Iterator[Metric]:
        labels = ["job_id", "job_name", "policy"]
        jobs = [(j, [j["job_id"], j["job_name"], j["policy"]]) for j in self._status["jobs"]]
        iterations = CounterMetricFamily("gpuenergyd_job_iterations", "Iterations so far.", labels=labels)
        phase = GaugeMetricFamily("gpuenergyd_job_phase", "1 for the phase a job is in.", labels=[*labels, "phase"])
        for job, values in jobs:
            iterations.add_metric(values, job["num_iterations"])
            phase.add_metric([*values, job["phase"]], 1.0)
        yield iterations
        yield phase
        carbon = CounterMetricFamily(
            "gpuenergyd_job_carbon_grams",
            "Carbon of tuned iterations whose hour's intensity is known; a revised intensity may take some back.",
            labels=labels,
        )
        for job, values in jobs:
            grams = (job.get("carbon") or {}).get("carbon_g")
            if grams is not None:
                carbon.add_metric(values, grams)
        yield carbon
        for key, name, text in _OF_JOB:
            gauge = GaugeMetricFamily(f"gpuenergyd_job_{name}", text, labels=labels)
            for job, values in jobs:
                if job.get(key) is not None:
                    gauge.add_metric(values, job[key])
            yield gauge
        for key, name, text in _OF_CARBON:
            gauge = GaugeMetricFamily(f"gpuenergyd_job_{name}", text, labels=labels)
            for job, values in jobs:
                if (figure := (job.get("carbon") or {}).get(key)) is not None:
                    gauge.add_metric(values, figure)
            yield gauge
        slowdown = GaugeMetricFamily(
            "gpuenergyd_job_slowdown_so_far_ratio", "Slowdown of the whole job so far.", labels=labels
        )
        for job, values in jobs:
            if job.get("target") is not None and job["target"]["slowdown_so_far_ratio"] is not None:
                slowdown.add_metric(values, job["target"]["slowdown_so_far_ratio"])
        yield slowdown

    def _grid(self) -> Iterator[Metric]:
        grid = self._status.get("carbon")
        if grid is None:
            return
        labels = ["zone", "unit"]
        values = [grid["zone"], grid["unit"]]
        for key, name, text in (
            ("value", "signal", "The signal that stands for now."),
            ("age_s", "signal_age_seconds", "Time since the newest known hour ended."),
        ):
            gauge = GaugeMetricFamily(f"gpuenergyd_grid_{name}", text, labels=labels)
            if grid[key] is not None:
                gauge.add_metric(values, grid[key])
            yield gauge
        basis = GaugeMetricFamily("gpuenergyd_grid_basis", "1 for the basis of that signal.", labels=[*labels, "basis"])
        basis.add_metric([*values, grid["basis"]], 1.0)
        yield basis
        skill = GaugeMetricFamily(
            "gpuenergyd_grid_forecast_skill_ratio",
            "How much smaller the error of issued forecasts is than the best naive one's.",
            labels=[*labels, "horizon"],
        )
        for horizon, key in (("1h", "1h"), ("6h", "6h"), ("24h mean", "24h_mean")):
            if grid["live_skill"] is not None:
                skill.add_metric([*values, horizon], grid["live_skill"][f"skill_{key}_ratio"])
        yield skill


def metrics_text(status: Mapping[str, Any]) -> bytes:
    """Return a status as Prometheus reads it.

    The library's own writer checks every name and label anew; these are known to be good, and clients wait meanwhile.
    """
    lines: list[str] = []
    for family in StatusCollector(status).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            lines.append(sample.name + _label_text(tuple(sample.labels.items())))
            number = floatToGoString(sample.value)  # type: ignore[no-untyped-call]  # the library left it untyped
            lines.append(f" {number}\n")
    return "".join(lines).encode()


@lru_cache(maxsize=4096)
def _label_text(labels: tuple[tuple[str, str], ...]) -> str:
    """Return labels in braces; the same ones come with every scrape."""
    text = ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(labels))
    return f"{{{text}}}" if text else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
