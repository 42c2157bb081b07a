"""Figures in written pages: tables and sentences rendered from benchmarks/results and from the planner.

A written page contains `<!-- generated: NAME -->` and `<!-- end -->`; the text between them is one of `parts()`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any

from benchmarks.report.results import read_result
from docs.site.carbon_rivals import carbon_rivals
from docs.site.decisions import decisions
from docs.site.expected_savings import SLOWDOWNS, WORKLOADS, Workload, saving_ratio
from docs.site.job_states import phases_and_transitions
from docs.site.learning_rivals import learning_rivals
from docs.site.markdown import table

_PART = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WITH_EXTRA = "1f1b+inflight"
_UNEQUAL_PIPELINES, _EQUAL_PIPELINES, _ONE_GPU, _EXPERTS = WORKLOADS[:2], WORKLOADS[2:4], *WORKLOADS[4:]
_SIMULATED = "[real torch training](docs/reference/benchmarks.md#pipeline-schedules) on simulated A100 GPUs"
_LOOPS = "[real torch training](docs/reference/benchmarks.md#plain-loops) on simulated A100 GPUs"
_GAIN_GPUS, _GAIN_POWER_W, _GAIN_PRICE, _HOURS_OF_YEAR = 8, 350.0, 0.20, 8760
"""Assumptions of the gain in a year; the power is that of the demo's four GPUs at full speed, 2,330 J in 1.66 s."""
_PLANNED = "[planned](docs/explanation/expected-savings.md), from the tables of a simulated A100"


def with_current_parts(text: str) -> str:
    """Return a page with every generated part replaced by its current text."""

    def current(match: re.Match[str]) -> str:
        return match[1] + parts()[match[2]]().rstrip("\n") + "\n" + match[3]

    return _PART.sub(current, text)


def parts() -> Mapping[str, Callable[[], str]]:
    """Return the functions that render the generated parts, by name."""
    return {
        "claim": _claim,
        "gain": _gain,
        "evidence": _evidence,
        "results": _results,
        "expected savings": _expected_savings,
        "savings by workload": _savings_by_workload,
        "phases and transitions": phases_and_transitions,
        "learning and rivals": learning_rivals,
        "carbon forecasts": carbon_rivals,
        "decisions": decisions,
    }


def _claim() -> str:
    plain = [row["saving_ratio"] for row in _schedules() if row["schedule"] != _WITH_EXTRA]
    extra = _schedule(_WITH_EXTRA)["saving_ratio"]
    slowest = max(row["slowdown_ratio"] for row in _schedules())
    return (
        f"**gpuenergyd cuts the energy of pipeline-parallel training by {math.floor(100 * min(plain))} to"
        f" {math.floor(100 * max(plain))} % at the same speed**, and by up to {math.floor(100 * extra)} % with"
        f" memory to spare.\nThese figures are from real training of unequal stages on **simulated** A100 GPUs"
        f" whose reads, clock changes and counters are as slow and uneven as real ones are reported to be"
        f" ({_date('schedules')}; iterations took at most {_percent(slowest, 1)} % longer). A saving on real GPUs has"
        f" {_real_gpus_short()}."
    )


def _gain() -> str:
    """Return what the first row of the table would be in a year, with its assumptions."""
    ratio = _schedule("1f1b")["saving_ratio"]
    saved_kwh = ratio * _GAIN_GPUS * _GAIN_POWER_W * _HOURS_OF_YEAR / 1000
    return (
        f"For a host of eight such GPUs that trains all year, {_percent(ratio, 1)} % is about"
        f" **{round(saved_kwh, -2):,.0f} kWh and ${round(saved_kwh * _GAIN_PRICE, -1):,.0f} a year**. Assumed:"
        f" {_GAIN_POWER_W:.0f} W a GPU at full speed, as in the demo, {_HOURS_OF_YEAR:,} hours,"
        f" ${_GAIN_PRICE:.2f} a kWh, cooling not counted."
    )


def _evidence() -> str:
    plain, extra = _schedule("1f1b"), _schedule(_WITH_EXTRA)
    balanced = [saving_ratio(workload) for workload in _EQUAL_PIPELINES]
    rows = [
        ("pipeline of four unequal stages, 1F1B", _less(plain["saving_ratio"]), _change(plain), _SIMULATED),
        ("the same, with extra microbatches in flight", _less(extra["saving_ratio"]), _change(extra), _SIMULATED),
        ("pipeline of four equal stages, 32 to 8 microbatches", _less(min(balanced), max(balanced)), "0 %", _PLANNED),
        *_loops(),
        ("one GPU that computes all the time", _less(saving_ratio(_ONE_GPU)), "0 %", _PLANNED),
        ("any of these on real GPUs", _real_gpus_short().replace("been ", ""), "", ""),
    ]
    return table(("workload", "energy", "time", "evidence"), rows)


def _loops() -> list[tuple[str, str, str, str]]:
    """Return the rows on plain loops, which wait for data and gradients in a third of their time."""
    found, rows = _figures("plain-loops"), []
    names = {
        0: "DDP, FSDP2, Hugging Face, Lightning, a third of the time waiting",
        2: "the same, if 2 % slowdown is allowed",
    }
    for percent, name in names.items():
        savings = found[f"saving_at_{percent}_percent_ratio_by_loop"].values()
        times = found[f"slowdown_at_{percent}_percent_ratio_by_loop"].values()
        times_text = f"{_signed(min(times))} to {_signed(max(times))} %"
        rows.append((name, _less(min(savings), max(savings)), times_text, _LOOPS))
    return rows


def _demo_agreement() -> list[tuple[str, str, str, str]]:
    """Return the row on demos on a busy host, no row before it was measured."""
    found = _figures("demo-agreement")
    if found is None:
        return []
    return [
        (
            "demo, status, live page and reports show the same saving",
            f"in {found['agreements']} of {found['demos']} demos on a busy host",
            "demo-agreement",
            "real training, simulated GPUs",
        )
    ]


def _learned(
    name: str, world: str, own: Mapping[str, Any], num_until_plan: int, covered_ratio: float, num_covered: int
) -> list[tuple[str, str, str, str]]:
    """Return the rows on plans of random pipelines in one world."""
    mark = f"simulated training, {world}"
    above = f"{_percent(own['regret_mean_ratio'], 2)} % on average (p95 {_percent(own['regret_p95_ratio'], 2)} %)"
    return [
        ("iterations until the first plan, 95th percentile", f"{num_until_plan}", name, mark),
        ("energy above that of a plan from the true costs", above, name, mark),
        ("95 % intervals that contain the true saving", f"{_percent(covered_ratio, 0)} % of {num_covered}", name, mark),
    ]


def _proofs() -> list[tuple[str, str, str, str]]:
    """Return the row on proofs, no row before it was measured."""
    found = _figures("proofs")
    if found is None:
        return []
    saving, null = found["saving"], found["null"]
    false = sum(number for name, number in null["conclusions"].items() if name.startswith("saves"))
    return [
        (
            "proofs whose interval contains the true saving; proofs of policies that save nothing that claim one",
            f"{saving['covered']} of {saving['verdicts']} verdicts; {false} of {found['runs']}",
            "proofs",
            "made-up trainings in virtual time",
        )
    ]


def _forecasts() -> list[tuple[str, str, str, str]]:
    inside = [zone["interval_coverage_ratio"] for zone in _figures("carbon")["skill"]]
    differences = [zone["difference"].values() for zone in _figures("carbon-first-day")["zones"]]
    points = [mean for zone in differences for mean, _, _ in zone]
    data = "measured grid data of 2024"
    return [
        (
            "hours of the next day inside the 95 % interval of carbon forecasts, by zone",
            f"{_range(inside, 1)} %",
            "carbon",
            data,
        ),
        (
            "skill of carbon forecasts on a first day with fetched history, less that of a warm forecaster, by zone",
            f"{_signed(min(points))} to {_signed(max(points))} percentage points",
            "carbon-first-day",
            data,
        ),
    ]


def _results() -> str:
    plain, extra = _schedule("1f1b"), _schedule(_WITH_EXTRA)
    emulated = [case for case in _figures("emulation")["cases"] if case["gpu"] == "a100-sxm"]
    above = [case["plain_ratio"] - case["perseus_published_ratio"] for case in emulated]
    profiling, kills = _figures("profiling"), _figures("kill-matrix")
    unkind, interval = _figures("everything-unkind"), profiling["saving_interval"]
    captured = [
        median(zone["captured_ratio"]["forecast"] for zone in zones)
        for zones in _figures("carbon")["captured"].values()
    ]
    restored_s = max(_figures("two-hosts")["restored_after_s"].values())
    overhead, slowest_s = _figures("overhead"), kills["daemon_restore_max_s"]
    rows = [
        (
            "energy of a pipeline of four unequal stages (1F1B)",
            f"{_less(plain['saving_ratio'])}, 95 % interval {_interval(plain, 'saving')} %; time {_change(plain)}",
            "schedules",
            "real training, simulated GPUs",
        ),
        (
            "the same with extra microbatches in flight",
            f"{_less(extra['saving_ratio'])}, 95 % interval {_interval(extra, 'saving')} %; time {_change(extra)}",
            "schedules",
            "real training, simulated GPUs",
        ),
        (
            "losses, order of instructions",
            "bit-identical to training without gpuenergyd"
            if all(row["are_losses_equal"] and row["is_order_as_registered"] for row in _schedules())
            else "**not identical**",
            "schedules",
            "real training, simulated GPUs",
        ),
        (
            "GPT-3 175B on A100, against Perseus as published",
            f"{_signed(min(above))} to {_signed(max(above))} percentage points",
            "emulation",
            "emulated from measured tables",
        ),
        *_learned(
            "everything-unkind",
            "unkind world",
            unkind,
            unkind["iterations_p95"],
            unkind["covered_ratio"],
            unkind["num_jobs"],
        ),
        *_learned(
            "profiling",
            "kind world",
            profiling["ours"],
            profiling["ours"]["first_iterations_p95"],
            interval["covered_ratio"],
            interval["runs"],
        ),
        (
            "step time with the client / without",
            f"{overhead['median_ratio']:.4f} (95 %: {overhead['low']:.4f} to {overhead['high']:.4f})",
            "overhead",
            "real training, simulated GPUs",
        ),
        (
            "GPUs left slow after killing processes",
            f"{kills['left_lowered']} in {kills['trials']} trials; restored within {_milliseconds(slowest_s)} ms",
            "kill-matrix",
            "real processes, simulated GPUs",
        ),
        (
            "the same with two hosts and a cut link",
            f"{_figures('two-hosts')['num_left_lowered']}; restored within {restored_s:.1f} s",
            "two-hosts",
            "network namespaces, simulated GPUs",
        ),
        (
            "gain of perfect carbon timing that forecasts capture",
            f"{_range(captured, 0)} % (median of zones)",
            "carbon",
            "measured grid data of 2024",
        ),
        *_forecasts(),
        (
            "power and energy of the simulated A100, against measured tables",
            f"mean error {_model_error()} %",
            "device-model",
            "published measurements",
        ),
        *_demo_agreement(),
        *_proofs(),
        (
            "savings of published trainings on real GPUs, predicted from their clocks",
            f"within {_figures('replay-insitu')['saving_error_mean_points']:.2f} points of the measured on average",
            "replay-insitu",
            "published measurements",
        ),
        ("a saving on real GPUs", _real_gpus_short().replace("been ", ""), "gpu-pipeline", "-"),
    ]
    return table(
        ("question", "result", "evidence", "date"),
        (
            (question, result, f"{mark} (`{name}`)", _date(name))
            for question, result, name, mark in rows
        ),
    )  # fmt: skip


def _expected_savings() -> str:
    titles = ("workload", "same speed", *(f"{100 * s:.0f} % slower" for s in SLOWDOWNS[1:]), "same speed, extra memory")
    rows = [
        (
            workload.name,
            *(f"{_percent(saving_ratio(workload, slowdown=slowdown), 1)} %" for slowdown in SLOWDOWNS),
            "-"
            if workload in {_ONE_GPU, _EXPERTS}
            else f"{_percent(saving_ratio(workload, extra_inflight='auto'), 1)} %",
        )
        for workload in WORKLOADS
    ]
    return table(titles, rows)


def _savings_by_workload() -> str:
    def span(workloads: Sequence[Workload], *, slowdown: float = 0.0, extra_inflight: str | None = None) -> str:
        savings = [saving_ratio(each, slowdown=slowdown, extra_inflight=extra_inflight) for each in workloads]
        return f"{_range(savings, 0)} %"

    rows = [
        ("pipeline with unequal stages", span(_UNEQUAL_PIPELINES), span(_UNEQUAL_PIPELINES, slowdown=0.05)),
        ("pipeline with equal stages", span(_EQUAL_PIPELINES), span(_EQUAL_PIPELINES, slowdown=0.05)),
        (
            "1F1B pipeline with memory for extra microbatches in flight",
            span(WORKLOADS[:4], extra_inflight="auto"),
            span(WORKLOADS[:4], slowdown=0.05, extra_inflight="auto"),
        ),
        (
            "one GPU",
            f"about {_percent(saving_ratio(_ONE_GPU), 0)} %: no GPU waits",
            f"{_percent(saving_ratio(_ONE_GPU, slowdown=0.05), 0)} %",
        ),
        ("DDP, FSDP", "about a tenth of the share of time spent waiting", "as one GPU, and that"),
        (
            "FSDP with expert parallelism, no pipeline, a third of the time communicating",
            f"about {_percent(saving_ratio(_EXPERTS), 0)} % for communication inside forward and backward",
            f"{_percent(saving_ratio(_EXPERTS, slowdown=0.05), 0)} %",
        ),
    ]
    return table(("your program", "at the same speed", "if 5 % slowdown is permitted"), rows)


def _model_error() -> str:
    errors = [row["mape_ratio"] for row in _figures("device-model") if row["table"].startswith("A100")]
    return _range(errors, 1)


@cache
def _figures(name: str) -> Any:
    return read_result(name).figures


def _date(name: str) -> str:
    given = read_result(name).circumstances
    return given.measured_at[:10] if given is not None else "-"


def _schedules() -> Sequence[Mapping[str, Any]]:
    """Return the schedules that had a plan for long enough to be compared."""
    rows: Sequence[Mapping[str, Any]] = _figures("schedules")["schedules"]
    return [row for row in rows if row["saving_ratio"] is not None]


def _schedule(name: str) -> Mapping[str, Any]:
    return next(row for row in _schedules() if row["schedule"] == name)


def _real_gpus_short() -> str:
    return "**not been measured yet**" if _figures("gpu-pipeline") is None else "been measured, see the benchmarks"


def _percent(ratio: float, digits: int) -> str:
    return f"{100 * ratio:.{digits}f}"


def _range(ratios: Iterable[float], digits: int) -> str:
    """Return the range of ratios in per cent; one figure where both ends round to it."""
    found = sorted(ratios)
    low, high = _percent(found[0], digits), _percent(found[-1], digits)
    return low if low == high else f"{low} to {high}"


def _milliseconds(time_s: float) -> str:
    return f"{1e3 * time_s:.0f}"


def _signed(ratio: float) -> str:
    return f"{100 * ratio:+.1f}"


def _less(ratio: float, high: float | None = None) -> str:
    if high is not None:
        return f"{_range((ratio, high), 1)} % less"
    return f"{_percent(ratio, 1)} % less" if ratio >= 0.0005 else "no saving"


def _interval(row: Mapping[str, Any], name: str) -> str:
    return f"{_percent(row[f'{name}_low'], 1)} to {_percent(row[f'{name}_high'], 1)}"


def _change(row: Mapping[str, Any]) -> str:
    return f"{_signed(row['slowdown_ratio'])} %"
