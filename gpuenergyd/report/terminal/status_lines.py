"""Lines of text on parts of the daemon's status: health, grid, leases, switch latency, and details of a job."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.core.job.operator_orders import SOURCE_TEXTS
from gpuenergyd.core.job.result_text import NOT_SIGNIFICANT, cost_text, predicted_saving_text
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.timetable import ONE_CLOCK, TIMETABLE
from gpuenergyd.count_text import count_text
from gpuenergyd.report.formatting import (
    MISSING,
    MODULE_NOTE,
    age_text,
    energy_text,
    fit_error_text,
    grams_text,
    ratio_text,
    replica_name_of,
    skill_text,
    time_text,
)

Status = Mapping[str, Any]
"""The response body of GET /v1/status."""

_DRIVERS = {"simulated": "simulated GPUs", "nvml": "NVML", "command": "NVML and commands"}

CAPTURED_TEXTS = {
    TIMETABLE: "captured: a timetable of clock changes for each replay",
    ONE_CLOCK: "captured: one clock for each replay",
}

_BASIS_TEXTS = {"measured_earlier": "measured by an earlier daemon"}


def health_line(status: Status) -> Text:
    """Return the problems, if any, and the daemon's version, process ID, uptime and mode."""
    line = Text()
    if status["is_degraded"]:
        reasons = "; ".join(status["degraded_reasons"])
        line.append(f"degraded: {reasons}\n", style="bold red")
    if note := status.get("mode_note"):
        line.append(f"{note}\n", style="yellow")
    driver = _DRIVERS.get(status["driver"], str(status["driver"]))
    missing = status.get("worker", {}).get("missing_capabilities", ())
    if missing and status["driver"] != "simulated":
        driver += f" (without {', '.join(missing)})"
    mode = "controls clocks" if status["mode"] == "control" else "observes only, does not set clocks"
    line.append(
        f"gpuenergyd {status['version']}, pid {status['pid']}, up {age_text(status['uptime_s'])}: {driver}, {mode}"
    )
    return line


def grid_lines(grid: Mapping[str, Any] | None) -> list[Text]:
    """Return the carbon intensity with its basis, the forecast skill and the value of carbon timing."""
    if grid is None:
        return []
    value = "unknown" if grid["value"] is None else f"{grid['value']:.4g} {grid['unit']}"
    age = "" if grid["age_s"] is None else f", {age_text(grid['age_s'])} old"
    line = f"zone {grid['zone']}: {value} ({grid['basis']}{age})"
    if grid["replayed_hour_s"] is not None:
        line += f"; replayed trace, one hour in {grid['replayed_hour_s']:g} s"
    lines = [Text(line)]
    if grid["forecast_model"] is not None:
        skill = grid["live_skill"]
        quality = "skill unknown: too few past forecasts"
        if skill is not None:
            quality = (
                skill_text(skill["skill_1h_ratio"], skill["skill_6h_ratio"], skill["skill_24h_mean_ratio"])
                + f" ({count_text(skill['num_origins'], 'forecast')})"
            )
        lines.append(Text(f"forecast: {grid['forecast_model']}; {quality}"))
    if grid["timing_value"] is not None:
        lines.append(Text(timing_value_text(grid["timing_value"])))
    return lines


def timing_value_text(value: Mapping[str, Any]) -> str:
    """Return the recent upper bound of the gain from carbon timing, in one sentence."""
    curve = "an assumed frontier" if value["is_frontier_assumed"] else "the job's frontier"
    return (
        f"carbon timing: up to {100 * value['timing_gain_ratio']:.2f} percentage points on top of the"
        f" {100 * value['constant_saving_ratio']:.2f} % saved by a constant slowdown of"
        f" {100 * value['max_slowdown_ratio']:.1f} %"
        f" (perfect forecast, last {count_text(value['num_days'], 'day')}, {value['job_hours']:.0f} h jobs, {curve})"
    )


def usual_states(status: Status) -> frozenset[str]:
    """Return the GPU states that are not a problem; a daemon in mode observe may change no GPU."""
    return frozenset({"ok", "observe_only"} if status["mode"] == "observe" else {"ok"})


def job_names(status: Status) -> Mapping[str, str]:
    return {job["job_id"]: replica_name_of(job) for job in status["jobs"]}


def owner_text(gpu: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return the job or manual lease to which a GPU belongs; empty for an idle one."""
    if gpu.get("administrator_lease"):
        return "administrator lease"
    if gpu.get("zeusd_client_lease"):
        return "zeusd client"
    if gpu.get("calibration_lease"):
        return "calibration"
    job_id = gpu.get("job_id")
    return names.get(job_id, job_id) if job_id else ""


def refused_lines(status: Status) -> list[Text]:
    """Return one line per kind of implausible values reported by the driver of a GPU."""
    return [
        Text(f"GPU {gpu['index']}: {refused['num']} x {refused['name']} refused, last: {refused['reason']}")
        for gpu in status["gpus"]
        for refused in gpu.get("refused_readings") or ()
    ]


def lease_lines(status: Status) -> list[Text]:
    """Return one line per lease outside jobs: its GPU, holder, clock lock, power limit and remaining time."""
    return [
        Text(f"GPU {gpu['index']}: {_lease_text(name.replace('_', ' '), lease)}")
        for gpu in status["gpus"]
        for name in ("administrator", "zeusd_client", "calibration")
        if (lease := gpu.get(f"{name}_lease")) is not None
    ]


def service_lines(status: Status) -> list[Text]:
    """Return what services of plugins say in `lines` of their fields, such as why a clock is low."""
    services = (service for service in status.values() if isinstance(service, Mapping))
    return [Text(line) for service in services for line in service.get("lines") or ()]


def _lease_text(kind: str, lease: Mapping[str, Any]) -> str:
    holder = f"uid {lease['uid']}" + (f", pid {lease['pid']}" if lease["pid"] is not None else "")
    settings = [f"clock locked at {lease['sm_clock_mhz']} MHz"] if lease.get("sm_clock_mhz") is not None else []
    if lease.get("power_limit_w") is not None:
        settings.append(f"power limited to {lease['power_limit_w']:g} W")
    remaining = lease.get("remaining_s")
    until = "until released" if remaining is None else f"for {age_text(remaining)} more"
    return f"{kind} lease ({holder}): {', '.join(settings) or 'nothing set yet'}, {until}"


def model_lines(status: Status) -> list[Text]:
    """Return the number of GPUs and their model; if models differ, one line for each with its GPU indices."""
    indexes: dict[str, list[int]] = {}
    for gpu in status["gpus"]:
        model = gpu["model_name"].removeprefix("NVIDIA ").removesuffix(" (simulated)")
        model += MODULE_NOTE if gpu.get("energy_scope") == EnergyScope.MODULE else ""
        indexes.setdefault(model, []).append(gpu["index"])
    which = {model: f" ({', '.join(map(str, gpus))})" if len(indexes) > 1 else "" for model, gpus in indexes.items()}
    return [Text(f"{count_text(len(gpus), 'GPU')}: {model}{which[model]}") for model, gpus in indexes.items()]


def switching_lines(status: Status) -> list[Text]:
    """Return one line on the switch latency of all GPUs, and for how many of them it was measured."""
    known = [gpu["switching"] for gpu in status["gpus"]]
    if not known:
        return []
    raises, lowers = (_span_text([each[key] for each in known]) for key in ("raise_s", "lower_s"))
    bases = Counter(_BASIS_TEXTS.get(each["basis"], each["basis"]) for each in known)
    basis = ", ".join(
        f"{basis} on {count} of {count_text(len(known), 'GPU')}" for basis, count in sorted(bases.items())
    )
    age_s = max(gpu.get("clock_age_s") or 0.0 for gpu in status["gpus"])
    late = f"; clocks are read up to {time_text(age_s)} late" if age_s else ""
    return [Text(f"switch latency: raise {raises}, lower {lowers} ({basis}){late}")]


def _span_text(times_s: Sequence[float]) -> str:
    low, high = time_text(min(times_s)), time_text(max(times_s))
    return low if low == high else f"{low} to {high}"


def figure_lines(job: Status) -> list[Text]:
    """Return time, energy and number of iterations, at full speed and tuned, and those of the plan in force."""
    rows = [
        ("", "time", "energy", "iterations"),
        _figures(job, "baseline", "baseline_time_s", "baseline_energy_j", "num_baseline_iterations"),
        _figures(job, "tuned", "iteration_time_s", "energy_j", "num_tuned_iterations"),
    ]
    predicted_j, full_speed_j = job["predicted_energy_j"], job["baseline_energy_j"]
    if predicted_j is not None:
        if job["num_iterations_of_plan"] and job["plan_purpose"] == PlanPurpose.TUNED:
            in_force = ("plan_iteration_time_s", "plan_energy_j", "num_iterations_of_plan")
            rows.append(_figures(job, "plan in force", *in_force))
        if full_speed_j is None or predicted_j < full_speed_j:  # other predictions are not shown
            predicted_time = time_text(job["predicted_iteration_time_s"])
            rows.append(("  predicted (fit)", predicted_time, energy_text(predicted_j), ""))
            if job["lower_bound_j"] is not None:
                rows.append(("  lower bound (fit)", "", energy_text(job["lower_bound_j"]), ""))
    return [Text(f"{name:<19}{time:>10}{energy:>11}{count:>12}".rstrip()) for name, time, energy, count in rows]


def _figures(job: Status, name: str, time_s: str, energy_j: str, count: str) -> tuple[str, str, str, str]:
    return name, time_text(job.get(time_s)), energy_text(job.get(energy_j)), _count(job[count])


def option_lines(job: Status) -> list[Text]:
    """Return ID, policy and shape of a job, the sources of its options, and the reason of its phase."""
    shape = (
        f"{job['job_id']}: policy {job['policy']}, {job['schedule'] or 'schedule unknown'},"
        f" {count_text(job['num_ranks'], 'rank')} x {count_text(job['num_microbatches'], 'microbatch')},"
        f" plan {job['plan_id'] or MISSING}"
    )
    retry = job.get("retry_in_iterations")
    next_attempt = "" if retry is None else f"; next attempt in {count_text(retry, 'iteration')}"
    next_attempt = "; no further attempts" if job.get("is_given_up") else next_attempt
    phase = [Text(f"{job['phase']}: {job['phase_reason']}{next_attempt}")] if job.get("phase_reason") else []
    return [Text(shape), *_expectation(job), *phase]


def detail_lines(job: Status) -> list[Text]:
    """Return details that apply to some jobs only: notice, straggler pace, target, prediction, why nothing is saved."""
    return [
        *_captured(job),
        *_fit_error(job),
        *_order_advice(job),
        *_notice(job),
        *_straggler_pace(job),
        *_target(job),
        *_predicted_saving(job),
        *_outcome(job),
        *_tokens(job),
        *_cost(job),
        *_slowdown_advice(job),
    ]


def _captured(job: Mapping[str, Any]) -> list[Text]:
    """Return how clocks are set for a job whose iterations are replays of a captured CUDA graph."""
    return [Text(CAPTURED_TEXTS[job["captured"]])] if job.get("captured") in CAPTURED_TEXTS else []


def _fit_error(job: Mapping[str, Any]) -> list[Text]:
    """Return by how much measured energy is below the lower bound of the plan in force, due to an error of the fit."""
    text = fit_error_text(job.get("plan_energy_j"), job["lower_bound_j"])
    return [Text(f"plan in force: {text}")] if text else []


def _expectation(job: Mapping[str, Any]) -> list[Text]:
    """Return the sources of policy and permitted slowdown, and what to expect of this kind of job."""
    if job.get("expectation") is None:
        return []
    policy, slowdown = (SOURCE_TEXTS[job[name]] for name in ("policy_source", "max_slowdown_source"))
    return [
        Text(
            f"policy {policy}; permitted slowdown {100 * job['max_slowdown_ratio']:.3g} %, {slowdown}:"
            f" {job['expectation']}"
        )
    ]


def _outcome(job: Mapping[str, Any]) -> list[Text]:
    """Return why a job has saved nothing yet."""
    return [Text(f"no saving so far: {job['outcome_reason']}")] if job.get("outcome", "saved") != "saved" else []


def _tokens(job: Mapping[str, Any]) -> list[Text]:
    return [Text(f"tokens: {job['tokens_per_j']:.4g} per joule")] if job.get("tokens_per_j") else []


def _cost(job: Mapping[str, Any]) -> list[Text]:
    """Return the time that the daemon has cost the job's training."""
    if (cost_s := job.get("cost_s")) is None:
        return []
    client = ", the client's own not measured" if job.get("client_cost_s") is None else ""
    experiments = count_text(job["num_experiments"], "experiment")
    spent = f"{cost_text(cost_s, job.get('cost_ratio'))} of {job['account_income_s']:.1f} s that may be spent"
    return [Text(f"cost so far: {spent}, with {experiments}{client}")]


def _slowdown_advice(job: Mapping[str, Any]) -> list[Text]:
    """Return what a larger permitted slowdown would save."""
    return [Text(f"with more slowdown: {job['advice_text']}")] if job.get("advice_text") else []


def ended_job_lines(status: Status) -> list[Text]:
    """Return one line per recently ended job: what it saved, or why it saved nothing."""
    lines: list[Text] = []
    for job in status.get("ended_jobs", ()):
        outcome = job["summary"].removeprefix("ended ")
        lines.append(
            Text(f"{replica_name_of(job)} ({job['job_id']}) ended {age_text(job['ended_age_s'])} ago: {outcome}")
        )
    return lines


def _predicted_saving(job: Mapping[str, Any]) -> list[Text]:
    """Return the predicted saving of a job whose clocks are only observed."""
    if not job.get("is_observing") or job["predicted_saving_basis"] is None:
        return []
    basis = job["predicted_saving_basis"]
    if job["predicted_saving_ratio"] is None:
        return [Text(f"predicted saving: unknown; {basis}")]
    interval = job["predicted_saving_low_ratio"], job["predicted_saving_high_ratio"]
    return [Text(f"predicted saving: {predicted_saving_text(job['predicted_saving_ratio'], interval)}; {basis}")]


def _order_advice(job: Mapping[str, Any]) -> list[Text]:
    """Return the predicted saving of another instruction order, if the policy has computed it."""
    planned = job.get("pipeline") or job  # for a pipeline across hosts, the whole one, in the job of its leading rank
    if not planned.get("order_advice"):
        return []
    in_force = f" (in use: {planned['order']})" if planned.get("order") else ""
    return [Text(f"order of instructions{in_force}: {planned['order_advice']}")]


def _notice(job: Mapping[str, Any]) -> list[Text]:
    """Return the last notice of a job, e.g. a change of its pace."""
    if not job.get("last_notice"):
        return []
    return [Text(f"{count_text(job['last_notice_iterations_ago'], 'iteration')} ago: {job['last_notice']}")]


def _straggler_pace(job: Mapping[str, Any]) -> list[Text]:
    """Return the straggler pace of a job and its saving, if the job runs at such a pace."""
    if job.get("straggler_time_s") is None:
        return []
    since = age_text(job["straggler_since_s"])
    saved = job.get("extrinsic_saving_ratio")
    saves = f", saving {100 * saved:.1f} % compared with waiting" if saved is not None else ""
    why = job["straggler_reason"] or MISSING
    return [Text(f"at straggler pace {time_text(job['straggler_time_s'])} for {since}{saves}: {why}")]


def _target(job: Status) -> list[Text]:
    """Return the iteration time target of a job and its carbon savings, if it has a target policy."""
    target, carbon = job.get("target"), job.get("carbon")
    if target is None:
        return []
    target_time = "full speed" if target["permitted_time_s"] is None else time_text(target["permitted_time_s"])
    budget = (
        f"slowdown so far {ratio_text(target['slowdown_so_far_ratio'])}, budget {ratio_text(target['budget_ratio'])}"
    )
    lines = [Text(f"target ({target['policy']}): {target_time}; {budget}; {target['reason']}")]
    if target["length_basis"] is not None:
        lines.append(Text(f"length of the job: {target['length_basis']}"))
    if carbon is None:
        return lines
    if carbon["carbon_g"] is not None:
        pue = f", PUE {carbon['pue']:g}" if carbon.get("pue", 1.0) != 1.0 else ""
        lines.append(Text(f"carbon emissions so far: {grams_text(carbon['carbon_g'])}, location-based{pue}"))
    tuned_g = carbon.get("tuned_carbon_g")
    if tuned_g is not None and job["is_saving_significant"] is False:
        lines.append(Text(f"emissions of tuned iterations: {grams_text(tuned_g)}; {NOT_SIGNIFICANT}"))
    elif tuned_g is not None:
        by_plan, by_frontier, by_timing = (
            grams_text(carbon[f"saved_by_{what}_g"]) for what in ("plan", "frontier", "timing")
        )
        lines.append(
            Text(
                f"emissions of tuned iterations: {grams_text(tuned_g)}; saved {by_plan} without slowdown,"
                f" {by_frontier} by running slower, {by_timing} by timing"
            )
        )
    return lines


def _count(number: int | None) -> str:
    return MISSING if number is None else str(number)
