"""`GET /v1/metrics`: the daemon's status in Prometheus' text format, in base units; unknown values are omitted."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from socket import gethostname
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

_HERTZ_PER_MHZ = 1e6
_GO_EXPONENT_FROM = 1e6

_Row = tuple[Mapping[str, Any], list[str]]
"""Status fields of one object, and its label values."""

_DCGM_LABELS = ("gpu", "UUID", "modelName", "hostname", "Hostname")
"""What dcgm-exporter calls a GPU's index, UUID, model and host; `Hostname` until its pull request 655 (May 2026)."""

_DAEMON_GAUGES = (
    ("uptime_s", "uptime_seconds", "Time since the daemon started."),
    ("is_degraded", "degraded", "1 if the status has degraded reasons."),
    ("is_alive", "worker_up", "1 while a GPU worker runs."),
    ("pue", "pue_ratio", "Power usage effectiveness included in jobs' emissions."),
    ("watts_saved_w", "saved_power_watts", "Power saved now by jobs with a significant saving."),
)
_STORE_COUNTERS = (
    ("num_rows_written", "rows_written", "Rows written to the database."),
    ("num_rows_dropped", "rows_dropped", "Rows dropped before they were written."),
)
_GPU_COUNTERS = (("total_energy_j", "energy_joules", "Energy counter of the driver."),)
_GPU_GAUGES = (
    ("power_w", "power_watts", "Last power reading."),
    ("temperature_celsius", "temperature_celsius", "Last temperature reading."),
    ("reading_age_s", "reading_age_seconds", "Time since the last reading."),
    ("power_limit_w", "power_limit_watts", "Requested power limit."),
    ("enforced_power_limit_w", "enforced_power_limit_watts", "Power limit in force, whichever limiter set it."),
    ("default_power_limit_w", "default_power_limit_watts", "Power limit without any request."),
    ("power_floor_w", "power_floor_watts", "Power floor that power smoothing maintains."),
    ("is_power_smoothing_on", "power_smoothing_on", "1 if power smoothing is on."),
    ("is_persistent", "persistence_mode", "1 if the driver stays loaded without clients."),
    ("is_mig_enabled", "mig_enabled", "1 if the GPU is divided into instances."),
)
_GPU_CLOCKS = (
    ("sm_clock_mhz", "sm_clock_hertz", "Last SM clock reading."),
    ("requested_sm_clock_mhz", "requested_sm_clock_hertz", "Requested SM clock; absent at full speed."),
    ("foreign_sm_clock_mhz", "foreign_sm_clock_hertz", "SM clock at which another program has locked the GPU."),
    ("application_sm_clock_mhz", "application_sm_clock_hertz", "SM clock of the driver's application clocks setting."),
    ("application_memory_clock_mhz", "application_memory_clock_hertz", "Memory clock of the application clocks."),
    ("memory_clock_mhz", "memory_clock_hertz", "Memory clock, last read at full performance."),
    ("max_memory_clock_mhz", "max_memory_clock_hertz", "Highest memory clock."),
)
_LATENCY_PERCENTILES = (("10", "low_s"), ("50", "median_s"), ("90", "high_s"))
_JOB_GAUGES = (
    ("baseline_time_s", "baseline_iteration_seconds", "Median iteration time of the baseline."),
    ("baseline_energy_j", "baseline_iteration_joules", "Median energy per iteration of the baseline."),
    ("iteration_time_s", "tuned_iteration_seconds", "Median iteration time under tuned plans."),
    ("energy_j", "tuned_iteration_joules", "Median energy per iteration under tuned plans."),
    ("saving_ratio", "plan_saving_ratio", "Measured energy saving against the baseline."),
    ("slowdown_ratio", "plan_slowdown_ratio", "Measured slowdown against the baseline."),
    ("watts_saved", "saved_power_watts", "Power saved now; absent unless a tuned plan is in force."),
    ("own_time_s", "own_iteration_seconds", "Iteration time at full speed, without waiting for other replicas."),
    ("straggler_time_s", "straggler_iteration_seconds", "Iteration time of a slower replica; absent without one."),
    ("extrinsic_saving_ratio", "extrinsic_saving_ratio", "Measured energy saving from following a slower replica."),
    ("tokens_per_j", "tokens_per_joule", "Tokens per joule so far; absent if the program does not report them."),
    ("max_slowdown_ratio", "max_slowdown_ratio", "Permitted slowdown against the baseline."),
    ("predicted_saving_ratio", "predicted_saving_ratio", "Predicted energy saving in observe mode."),
    ("predicted_peak_w", "predicted_peak_power_watts", "Highest predicted power of the job's GPUs in an iteration."),
    ("predicted_trough_w", "predicted_trough_power_watts", "Lowest predicted power of the job's GPUs in an iteration."),
    ("predicted_ramp_w_per_s", "predicted_ramp_watts_per_second", "Largest predicted change from second to second."),
    ("predicted_swing_rms_w", "predicted_swing_rms_watts", "Predicted RMS of the GPUs' power from 0.1 to 20 Hz."),
    ("last_report_age_s", "last_report_age_seconds", "Time since the last report of any rank."),
)
_JOB_COUNTERS = (
    ("num_iterations", "iterations", "Iterations of the job."),
    ("total_energy_j", "energy_joules", "Energy of the job's measured iterations."),
    ("num_tokens", "tokens", "Tokens of measured iterations; absent if the program does not report them."),
)
_JOB_CARBON_GAUGES = (
    # No counter: a revised intensity changes the emissions of the past.
    ("carbon_g", "carbon_grams", "Location-based emissions of the job's energy in hours of known intensity."),
    ("tuned_carbon_g", "tuned_carbon_grams", "Emissions of tuned iterations in hours of known intensity."),
    ("unpriced_j", "unpriced_joules", "Energy of the job in hours of unknown carbon intensity."),
)
_JOB_SAVED_CARBON_GAUGES = (
    ("saved_by_plan_g", "saved_by_plan_grams", "Emissions saved by the fastest plan against the baseline."),
    ("saved_by_frontier_g", "saved_by_frontier_grams", "Emissions saved by a constant slowdown."),
    ("saved_by_timing_g", "saved_by_timing_grams", "Emissions saved by choosing the hours; may be negative."),
)
"""Absent while the saving of the job is not significant."""
_IDLE_GAUGES = (
    ("is_lowered", "idle_lowered", "1 while its clock is lowered because only contexts are held."),
    ("lost_s", "idle_lost_seconds", "Time that work lost because it began at a lowered clock."),
)
_USE_COUNTERS = (
    ("time_s", "use_seconds", "Time by use since the daemon started."),
    ("energy_j", "use_joules", "Energy by use since the daemon started."),
    ("could_lower_s", "idle_could_lower_seconds", "Time in which an observing daemon would have lowered the clock."),
)
_GRID_GAUGES = (
    ("value", "signal", "Present value of the signal that targets follow."),
    ("age_s", "signal_age_seconds", "Time since the end of the newest known hour."),
)


_POWER_GAUGES = (
    ("power_budget_w", "budget_watts", "Power budget of this host; absent without one."),
    ("measured_w", "measured_watts", "Power that counts against the budget; absent without a budget."),
    ("predicted_w", "predicted_watts", "Power predicted for the plans in force; absent without a budget."),
)
_SWING_GAUGES = (
    ("peak_w", "peak_watts", "Highest power of all GPUs in the last minute, as sampled."),
    ("trough_w", "trough_watts", "Lowest power of all GPUs in the last minute, as sampled."),
    ("ramp_w_per_s", "ramp_watts_per_second", "Largest change of mean power from one second to the next."),
    ("swing_rms_w", "swing_rms_watts", "RMS of the power of all GPUs from 0.1 Hz to half the sampling rate."),
)
_POWER_COUNTERS = (
    ("num_cuts", "cuts", "Immediate clock reductions because of measured power."),
    ("over_s", "over_budget_seconds", "Time above the power budget."),
)


class _Labels(dict[str, str]):
    """Labels that all samples of an object share."""

    @cached_property
    def text(self) -> str:
        return _label_text(tuple(self.items()))


class StatusCollector(Collector):
    """Converts a status to Prometheus metric families."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        status, requests = self._status, self._status["clock_requests"]
        yield from _families("", _DAEMON_GAUGES, [], [({**status["worker"], **status}, [])])
        for child in ("worker", "policy_host"):
            restarts = (("num_restarts", "restarts", "Restarts of the process."),)
            yield from _families(f"{child}_", restarts, [], [(status[child], [])], CounterMetricFamily)
        yield from _families("store_", _STORE_COUNTERS, [], [(status["store"], [])], CounterMetricFamily)
        refused = CounterMetricFamily(
            "gpuenergyd_clock_requests_refused", "Refused clock requests by reason.", labels=["reason"]
        )
        refused.add_metric(["stale"], requests["num_stale"])
        refused.add_metric(["hostile"], requests["num_hostile"])
        yield refused
        yield from self._gpus()
        yield from self._jobs()
        yield from self._grid()
        yield from self._power()
        yield from self._idle()

    def _gpus(self) -> Iterator[Metric]:
        labels = ["gpu_uuid", "index", "model_name"]
        gpus = [(g, [g["gpu_uuid"], str(g["index"]), g["model_name"]]) for g in self._status["gpus"]]
        text = "1; joins with dcgm-exporter. energy_scope: whether energy and power are the GPU's or its module's."
        info = GaugeMetricFamily("gpuenergyd_gpu_info", text, labels=[*labels, *_DCGM_LABELS, "energy_scope"])
        host_name = gethostname()
        for gpu, (uuid, index, model_name) in gpus:
            scope = gpu.get("energy_scope", "unknown")
            info.add_metric([uuid, index, model_name, index, uuid, model_name, host_name, host_name, scope], 1.0)
        yield info
        yield from _families("gpu_", _GPU_COUNTERS, labels, gpus, CounterMetricFamily)
        yield _refused_readings(labels, gpus)
        yield from _families("gpu_", _GPU_CLOCKS, labels, gpus, factor=_HERTZ_PER_MHZ)
        yield from _families("gpu_", _GPU_GAUGES, labels, gpus)
        yield _power_profiles(labels, gpus)
        yield _state_gauge("gpu", "state", labels, gpus)
        yield from _switch_latencies(labels, gpus)

    def _jobs(self) -> Iterator[Metric]:
        labels = ["job_id", "job_name", "policy"]
        jobs = [(j, [j["job_id"], j["job_name"], j["policy"]]) for j in self._status["jobs"]]
        emissions: list[_Row] = [(job.get("carbon") or {}, values) for job, values in jobs]
        targets: list[_Row] = [(job.get("target") or {}, values) for job, values in jobs]
        yield from _families("job_", _JOB_COUNTERS, labels, jobs, CounterMetricFamily)
        yield _state_gauge("job", "phase", labels, jobs)
        yield from _families("job_", _JOB_GAUGES, labels, jobs)
        yield from _families("job_", _JOB_CARBON_GAUGES, labels, emissions)
        saved = [row for row, (job, _) in zip(emissions, jobs, strict=True) if job.get("is_saving_significant")]
        yield from _families("job_", _JOB_SAVED_CARBON_GAUGES, labels, saved)
        slowdown = ("slowdown_so_far_ratio", "slowdown_so_far_ratio", "Slowdown of the whole job so far.")
        yield from _families("job_", (slowdown,), labels, targets)

    def _power(self) -> Iterator[Metric]:
        if (power := self._status.get("power")) is not None:
            yield from _families("power_", _POWER_GAUGES, [], [(power, [])])
            yield from _families("power_", _POWER_COUNTERS, [], [(power, [])], CounterMetricFamily)
        yield from _families("power_", _SWING_GAUGES, [], [(self._status.get("swing") or {}, [])])

    def _idle(self) -> Iterator[Metric]:
        labels = ["gpu_uuid", "index", "model_name"]
        gpus = (self._status.get("idle") or {"gpus": ()})["gpus"]
        rows: list[_Row] = [(gpu, [gpu["gpu_uuid"], str(gpu["index"]), gpu["model_name"]]) for gpu in gpus]
        yield from _families("gpu_", _IDLE_GAUGES, labels, rows)
        for key, name, text in _USE_COUNTERS:
            family = CounterMetricFamily(f"gpuenergyd_gpu_{name}", text, labels=[*labels, "use"])
            for gpu, values in rows:
                for total in gpu["by_use"]:
                    family.add_metric([*values, total["use"]], total[key])
            yield family

    def _grid(self) -> Iterator[Metric]:
        grid = self._status.get("carbon")
        if grid is None:
            return
        labels, values = ["zone", "unit"], [grid["zone"], grid["unit"]]
        yield from _families("grid_", _GRID_GAUGES, labels, [(grid, values)])
        yield _state_gauge("grid", "basis", labels, [(grid, values)])
        skill = GaugeMetricFamily(
            "gpuenergyd_grid_forecast_skill_ratio",
            "Reduction of the forecast error against the best naive forecast.",
            labels=[*labels, "horizon"],
        )
        for horizon, key in (("1h", "1h"), ("6h", "6h"), ("24h mean", "24h_mean")):
            if grid["live_skill"] is not None:
                skill.add_metric([*values, horizon], grid["live_skill"][f"skill_{key}_ratio"])
        yield skill


def _families(
    prefix: str,
    metrics: Iterable[tuple[str, str, str]],
    labels: list[str],
    rows: Iterable[_Row],
    family_of: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily,
    *,
    factor: float = 1.0,
) -> Iterator[Metric]:
    """Yield one family per (status key, metric name, help text); unknown values are omitted."""
    shared = [(fields, _Labels(zip(labels, values, strict=True))) for fields, values in rows]
    for key, name, text in metrics:
        family = family_of(f"gpuenergyd_{prefix}{name}", text, labels=labels)
        sample_name = f"{family.name}_total" if family.type == "counter" else family.name
        family.samples = [
            Sample(sample_name, row, value * factor) for fields, row in shared if (value := fields.get(key)) is not None
        ]
        yield family


def _refused_readings(labels: Iterable[str], gpus: Iterable[_Row]) -> Metric:
    family = CounterMetricFamily(
        "gpuenergyd_gpu_refused_readings",
        "Implausible values from the driver, treated as unknown, by kind.",
        labels=[*labels, "value"],
    )
    for gpu, values in gpus:
        for refused in gpu.get("refused_readings") or ():
            family.add_metric([*values, refused["name"]], refused["num"])
    return family


def _power_profiles(labels: Iterable[str], gpus: Iterable[_Row]) -> Metric:
    family = GaugeMetricFamily(
        "gpuenergyd_gpu_power_profile",
        "1 for each workload power profile that is requested, enforced, or requested by gpuenergyd (ours).",
        labels=[*labels, "profile", "state"],
    )
    for gpu, values in gpus:
        for state in ("requested", "enforced"):
            for number in gpu.get(f"{state}_power_profiles") or ():
                family.add_metric([*values, str(number), state], 1.0)
        if gpu.get("our_power_profile") is not None:
            family.add_metric([*values, str(gpu["our_power_profile"]), "ours"], 1.0)
    return family


def _state_gauge(kind: str, key: str, labels: list[str], rows: Iterable[_Row]) -> Metric:
    """Return a gauge that is 1 for the present value of a closed set of states."""
    gauge = GaugeMetricFamily(f"gpuenergyd_{kind}_{key}", f"1 for the present {key}.", labels=[*labels, key])
    for fields, values in rows:
        gauge.add_metric([*values, fields[key]], 1.0)
    return gauge


def _switch_latencies(labels: list[str], gpus: Iterable[_Row]) -> Iterator[Metric]:
    planned = GaugeMetricFamily(
        "gpuenergyd_gpu_planned_switch_latency_seconds",
        "Latency of a clock change that plans use, by its basis.",
        labels=[*labels, "direction", "basis"],
    )
    measured = GaugeMetricFamily(
        "gpuenergyd_gpu_switch_latency_seconds",
        "Measured time from the request of a clock to its effect, without waiting for other GPUs.",
        labels=[*labels, "direction", "percentile"],
    )
    switches = CounterMetricFamily(
        "gpuenergyd_gpu_switches", "Clock changes, by whether their effect was observed.", labels=[*labels, "seen"]
    )
    for gpu, values in gpus:
        switching = gpu["switching"]
        for direction in ("raise", "lower"):
            planned.add_metric([*values, direction, switching["basis"]], switching[f"{direction}_s"])
        for estimate in switching["seen"]:
            for percentile, key in _LATENCY_PERCENTILES:
                if estimate["from_region"] is None and estimate[key] is not None:
                    measured.add_metric([*values, estimate["direction"], percentile], estimate[key])
        switches.add_metric([*values, "true"], switching["num_seen"])
        switches.add_metric([*values, "false"], switching["num_unseen"])
    yield planned
    yield measured
    yield switches


def metrics_text(status: Mapping[str, Any]) -> bytes:
    """Return a status in Prometheus' text format.

    The library's own writer validates every name and label on each call, which takes several times longer.
    """
    lines: list[str] = []
    for family in StatusCollector(status).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        lines.append(f"# HELP {name} {family.documentation}\n# TYPE {name} {family.type}\n")
        for sample in family.samples:
            labels = sample.labels
            text = labels.text if isinstance(labels, _Labels) else _label_text(tuple(labels.items()))
            lines.append(f"{sample.name}{text} {_number_text(sample.value)}\n")
    return "".join(lines).encode()


def _number_text(value: float) -> str:
    """Return a number as Go formats it, which below a million is as Python does."""
    if -_GO_EXPONENT_FROM < value < _GO_EXPONENT_FROM:
        return repr(float(value))
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]  # the library left it untyped


@lru_cache(maxsize=4096)
def _label_text(labels: tuple[tuple[str, str], ...]) -> str:
    """Return labels in braces; cached, since they are the same at every scrape."""
    text = ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(labels))
    return f"{{{text}}}" if text else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
