"""`gpuenergyd plan`: its JSON is a plan that can be verified, and every error is one line."""

import re
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, dependency_graph
from gpuenergyd.core.pipeline.schedules import SCHEDULES
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, timeline
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflineRequest
from gpuenergyd.errors import GpuEnergyError, ProfileError, UsageError
from gpuenergyd_plan.command import plan
from gpuenergyd_plan.inputs import load_planner
from gpuenergyd_plan.profiles.profile_files import PlannerInstance, ProfileTable, read_pipeline_file
from tests.plugins.plan.invocation import output_of, plan_figures, write_table
from tests.support.measured_tables import DATA

needs_shared = pytest.mark.skipif(not DATA.is_dir(), reason="the shared tables are not on this machine")

KEYS = [
    "schedule", "num_stages", "num_microbatches", "extra_inflight", "baseline_time_s", "baseline_energy_j",
    "iteration_time_s", "energy_j", "lower_bound_j", "saving_ratio", "slowdown_ratio", "own_order_time_s",
    "own_order_energy_j", "own_order_saving_ratio", "any_order_bound_ratio", "held_microbatches", "solve_cpu_s",
    "compile_cpu_s", "order", "clocks", "frontier", "throttling",
]  # fmt: skip


def _run(*arguments: str | Path) -> str:
    return output_of(plan, *arguments)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a profile of four unequal stages."""
    return write_table(tmp_path, clock_step_mhz=100)


def _evaluated(figures: dict[str, Any], table: Path, blocking_power_w: float) -> tuple[float, float]:
    """Return time and energy of the printed order and clocks, computed again from the table."""
    profile = read_pipeline_file(table)
    assert isinstance(profile, ProfileTable)
    orders = tuple(
        tuple(Instruction(int(stage), InstructionKind(kind), m, chunk) for kind, m, chunk in order)
        for stage, order in figures["order"].items()
    )
    graph = dependency_graph(Schedule("printed", figures["num_microbatches"], orders))
    clocks = {(c["stage"], c["instruction"], c["microbatch"]): c["sm_clock_mhz"] for c in figures["clocks"]}
    options = [
        profile.classes[i.instruction_class].at_clock(clocks[i.pp_rank, i.kind, i.microbatch_index])
        for i in graph.instructions
    ]
    durations_s = [o.time_s for o in options]
    iteration_time_s = timeline(graph, durations_s).iteration_time_s
    return iteration_time_s, iteration_energy_j(
        energies_j=[o.energy_j for o in options],
        durations_s=durations_s,
        iteration_time_s=iteration_time_s,
        num_ranks=figures["num_stages"],
        blocking_power_w=blocking_power_w,
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("policy", ["full-speed", "uniform", "envelope", "bubble-aware"])
def test_time_and_energy_of_the_printed_plan_are_correct(table: Path, schedule: str, policy: str) -> None:
    figures = plan_figures(
        table, "--schedule", schedule, "--microbatches", "6", "--blocking-power-w", "60", "--policy", policy
    )

    assert list(figures) == [*KEYS, *(["swing"] if policy == "bubble-aware" else [])]
    assert figures["throttling"] == []
    assert (figures["schedule"], figures["num_stages"], figures["num_microbatches"]) == (schedule, 4, 6)
    iteration_time_s, energy_j = _evaluated(figures, table, 60.0)
    assert figures["iteration_time_s"] == pytest.approx(iteration_time_s, rel=1e-9)
    assert figures["energy_j"] == pytest.approx(energy_j, rel=1e-9)
    assert figures["iteration_time_s"] <= figures["baseline_time_s"]
    assert figures["saving_ratio"] == pytest.approx(1 - energy_j / figures["baseline_energy_j"])


def test_default_planner_saves_energy_above_its_proven_bound(table: Path) -> None:
    figures = plan_figures(table, "--microbatches", "6", "--blocking-power-w", "60")

    assert figures["saving_ratio"] > 0.02
    assert figures["lower_bound_j"] <= figures["energy_j"] <= 1.01 * figures["lower_bound_j"]


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in {"gpipe", "1f1b"}])
def test_every_schedule_can_be_planned_from_a_table(table: Path, schedule: str) -> None:
    figures = plan_figures(table, "--schedule", schedule, "--microbatches", "8", "--blocking-power-w", "60")

    assert figures["num_stages"] == (4 if schedule == "zb-h1" else 2)
    assert len(figures["clocks"]) == sum(len(order) for order in figures["order"].values())
    assert figures["iteration_time_s"] <= figures["baseline_time_s"]
    assert figures["lower_bound_j"] <= figures["energy_j"] < figures["baseline_energy_j"]


def test_pairs_wait_for_each_others_data_and_combined_steps_are_one_instruction(table: Path) -> None:
    common = (table, "--microbatches", "8", "--blocking-power-w", "60", "--communication-latency-s", "0.002")
    plain, paired, combined = (
        plan_figures(*common, "--schedule", schedule)
        for schedule in ("interleaved", "interleaved-paired", "combined-1f1b")
    )

    assert paired["order"] == plain["order"]
    assert paired["own_order_time_s"] > plain["own_order_time_s"]
    pairs = [entry for entry in combined["clocks"] if entry["instruction"] == "FB"]
    assert {entry["chunk"] for entry in pairs} == {64 * forward + backward for forward in (0, 1) for backward in (0, 1)}
    assert sum(entry["instruction"] == "F" for entry in combined["clocks"]) + len(pairs) == 2 * 2 * 8


def test_what_running_together_saves_is_assumed_to_be_nothing_unless_it_is_given(table: Path) -> None:
    common = (table, "--microbatches", "8", "--schedule", "combined-1f1b", "--blocking-power-w", "60")
    sooner = ("--overlap-saving", "0.2")

    assert plan_figures(*common, *sooner)["own_order_time_s"] < plan_figures(*common)["own_order_time_s"]
    assert "take as long as one after the other" in " ".join(_run(*common).split())
    assert "take 20 % less time than one after the other, with the same energy" in " ".join(
        _run(*common, *sooner).split()
    )


def test_a_forward_and_a_backward_without_a_common_clock_cannot_be_combined(table: Path, tmp_path: Path) -> None:
    rows = [row for row in table.read_text().splitlines() if not ("1,forward" in row and int(row.split(",")[2]) < 1000)]
    apart = tmp_path / "apart.csv"
    apart.write_text("\n".join(row for row in rows if not ("1,backward" in row and int(row.split(",")[2]) >= 1000)))

    with pytest.raises(ProfileError, match=r"stage 1 .* were measured at no common clock"):
        _run(apart, "--microbatches", "8", "--schedule", "combined-1f1b")


@pytest.mark.thorough
def test_a_chosen_order_fits_in_memory_and_is_compared_with_1f1b_its_own_speed_and_any_order(table: Path) -> None:
    common = (table, "--microbatches", "12", "--blocking-power-w", "60")
    plain = plan_figures(*common)

    figures = plan_figures(*common, "--schedule", "auto", "--memory-limit-microbatches", "4,4,3,2")

    assert figures["schedule"] == "auto"
    assert figures["baseline_time_s"] == plain["baseline_time_s"]
    assert figures["iteration_time_s"] <= plain["baseline_time_s"]
    assert all(held <= limit for held, limit in zip(figures["held_microbatches"], (4, 4, 3, 2), strict=True))
    assert plain["saving_ratio"] < figures["saving_ratio"] <= figures["any_order_bound_ratio"]
    own = figures["own_order_energy_j"]
    assert figures["own_order_saving_ratio"] == pytest.approx(1 - figures["energy_j"] / own)
    printed = _run(*common, "--schedule", "auto", "--memory-limit-microbatches", "4,4,3,2")
    assert "against 1F1B at full speed" in printed
    assert "no order within this memory saves more than" in " ".join(printed.split())
    assert "microbatches held per stage:" in printed


def test_a_named_schedule_is_compared_with_1f1b_and_with_its_own_full_speed(table: Path) -> None:
    plain = plan_figures(table, "--microbatches", "12", "--blocking-power-w", "60")

    figures = plan_figures(table, "--microbatches", "12", "--blocking-power-w", "60", "--schedule", "zb-h1")

    assert figures["baseline_time_s"] == plain["baseline_time_s"]
    assert figures["own_order_time_s"] < plain["baseline_time_s"]
    assert figures["saving_ratio"] != pytest.approx(figures["own_order_saving_ratio"], abs=1e-3)
    assert plain["own_order_saving_ratio"] == plain["saving_ratio"]


def test_input_and_weight_rows_replace_the_assumption(table: Path, tmp_path: Path) -> None:
    rows = table.read_text().splitlines()
    for row in rows[1:]:
        stage, word, mhz, time_s, energy_j = row.split(",")
        if word == "backward":
            rows.append(f"{stage},input,{mhz},{0.6 * float(time_s)!r},{0.6 * float(energy_j)!r}")
            rows.append(f"{stage},weight,{mhz},{0.5 * float(time_s)!r},{0.5 * float(energy_j)!r}")
    measured = tmp_path / "measured.csv"
    measured.write_text("\n".join(rows) + "\n")
    common = ("--microbatches", "8", "--schedule", "zb-h1", "--blocking-power-w", "60")

    figures = plan_figures(measured, *common)

    share = ("--input-gradient-share", repr(0.6 / 1.1), "--split-overhead", repr(0.1))
    assumed = plan_figures(table, *common, *share)
    assert figures["own_order_time_s"] == pytest.approx(assumed["own_order_time_s"])
    assert figures["own_order_time_s"] > plan_figures(table, *common)["own_order_time_s"]
    assert "assumed to take" not in " ".join(_run(measured, *common).split())
    assert "54.5455 % of the measured backward" in " ".join(_run(table, *common, *share).split())
    assert "cost 10 % more" in " ".join(_run(table, *common, *share).split())


def test_permitted_slowdown_is_never_exceeded_and_saves_more(table: Path) -> None:
    strict = plan_figures(table, "--microbatches", "6", "--blocking-power-w", "60")
    relaxed = plan_figures(table, "--microbatches", "6", "--blocking-power-w", "60", "--slowdown", "0.1")

    assert relaxed["slowdown_ratio"] <= 0.1
    assert relaxed["energy_j"] < strict["energy_j"]


def test_extra_microbatches_stay_within_memory_in_bytes_and_save_more(table: Path) -> None:
    plain = plan_figures(table, "--microbatches", "12", "--blocking-power-w", "60")

    roomy = plan_figures(
        table,
        *("--microbatches", "12", "--blocking-power-w", "60", "--extra-inflight", "auto"),
        *("--free-memory-bytes", "5000,2500,1999,0", "--activation-bytes", "1000"),
    )

    assert any(roomy["extra_inflight"])
    assert all(k <= room for k, room in zip(roomy["extra_inflight"], (5, 2, 1, 0), strict=True))
    assert roomy["energy_j"] < plain["energy_j"]
    assert roomy["baseline_energy_j"] == plain["baseline_energy_j"]
    assert (roomy["iteration_time_s"], roomy["energy_j"]) == pytest.approx(_evaluated(roomy, table, 60.0))


def test_absolute_target_is_kept(table: Path) -> None:
    baseline_time_s = plan_figures(table, "--microbatches", "6")["baseline_time_s"]

    figures = plan_figures(table, "--microbatches", "6", "--target-s", repr(1.05 * baseline_time_s))

    assert figures["iteration_time_s"] <= 1.05 * baseline_time_s


def test_with_a_straggler_both_energies_include_waiting_for_it(table: Path) -> None:
    options = (table, "--microbatches", "6", "--blocking-power-w", "60")
    plain = plan_figures(*options, "--policy", "full-speed")
    straggler_s = 1.5 * plain["baseline_time_s"]

    waiting = plan_figures(*options, "--policy", "full-speed", "--straggler-time-s", repr(straggler_s))
    planned = plan_figures(*options, "--straggler-time-s", repr(straggler_s))

    waited_j = 60.0 * 4 * (straggler_s - plain["baseline_time_s"])
    assert waiting["baseline_energy_j"] == pytest.approx(plain["baseline_energy_j"] + waited_j)
    assert waiting["saving_ratio"] == pytest.approx(0.0)
    assert planned["saving_ratio"] > plan_figures(*options)["saving_ratio"]
    assert planned["iteration_time_s"] <= straggler_s


def test_frontier_is_convexly_falling_and_above_its_bounds(table: Path) -> None:
    figures = plan_figures(table, "--microbatches", "6", "--blocking-power-w", "60", "--frontier")

    assert len(figures["frontier"]) > 5
    for point in figures["frontier"]:
        assert point["lower_bound_j"] <= point["energy_j"] * (1 + 1e-9)
    for fast, slow in pairwise(figures["frontier"]):
        assert fast["iteration_time_s"] < slow["iteration_time_s"]


def test_a_limit_on_switches_is_kept_and_their_latency_evaluated(table: Path) -> None:
    figures = plan_figures(
        table,
        *("--microbatches", "8", "--blocking-power-w", "60", "--max-switches", "3", "--switch-latency-s", "0.002"),
    )

    switching = figures["switching"]
    segments = {
        stage: len(list(groupby(clocks, key=lambda c: c["sm_clock_mhz"])))
        for stage, clocks in groupby(figures["clocks"], key=lambda c: c["stage"])
    }
    assert list(segments.values()) == switching["num_segments"]
    assert max(switching["num_segments"]) <= 3
    assert figures["iteration_time_s"] == switching["planned"]["iteration_time_s"] <= figures["baseline_time_s"]
    assert figures["lower_bound_j"] <= figures["energy_j"] < figures["baseline_energy_j"]
    assert switching["free_with_lead"]["slowdown_ratio"] <= 1e-12 < switching["free_naive"]["slowdown_ratio"]


def test_tables_have_at_most_80_columns_and_no_colour(table: Path) -> None:
    printed = _run(table, "--microbatches", "6", "--blocking-power-w", "60")

    assert "energy" in printed
    assert "lower bound" in printed
    assert "\x1b" not in printed
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_the_time_for_compiling_the_planner_is_printed_apart_from_planning(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = load_planner("uniform")

    def compiling(request: OfflineRequest) -> OfflinePlan:
        return replace(planner(request), solve_cpu_s=0.02, compile_cpu_s=17.34)

    monkeypatch.setattr("gpuenergyd_plan.command.load_planner", lambda _policy: compiling)
    first = _run(table, "--microbatches", "2")
    monkeypatch.setattr("gpuenergyd_plan.command.load_planner", lambda _policy: planner)
    second = _run(table, "--microbatches", "2")

    of_first, of_second = (
        re.search(r"took (\d+\.\d\d) s since the command was started, of which (.*) CPU s to solve(.*?)( note|$)", text)
        for text in (" ".join(first.split()), " ".join(second.split()))
    )
    assert of_first is not None
    assert of_second is not None
    assert float(of_first[1]) > 0.02
    assert (of_first[2], of_first[3]) == ("0.02", " and 17.3 CPU s to compile the planner (once)")
    assert of_second[3] == ""


def test_assumptions_are_printed_as_notes(table: Path) -> None:
    printed = _run(table, "--microbatches", "8", "--schedule", "zb-h1")

    assert "assumed to draw 0 W" in printed
    assert "half of the measured backward" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs --microbatches M"),
        ("--microbatches 0", "0 microbatches: must be >= 1"),
        ("--microbatches 999999999", "more than the maximum of 1000000 instructions"),
        ("--microbatches 8 --schedule 2f2b", "no schedule '2f2b'; known: gpipe, 1f1b"),
        ("--microbatches 8 --schedule interleaved --chunks 3", "has 4 stages, which 3 does not divide"),
        ("--microbatches 8 --slowdown -0.1", "slowdown -0.1"),
        ("--microbatches 8 --slowdown nan", "slowdown nan"),
        ("--microbatches 8 --target-s 0.001", "T_min|0.001"),
        ("--microbatches 8 --slowdown 0.1 --target-s 9", "give only one of them"),
        ("--microbatches 8 --straggler-time-s -1", "straggler time -1.0 s"),
        ("--microbatches 8 --blocking-power-w -1", "--blocking-power-w -1.0: must be"),
        ("--microbatches 8 --switch-latency-s inf", "--switch-latency-s inf: must be"),
        ("--microbatches 8 --max-switches 0", "--max-switches 0: must be at least 1"),
        ("--microbatches 8 --extra-inflight some", "--extra-inflight some: must be"),
        ("--microbatches 8 --extra-inflight 2 --schedule gpipe", "needs schedule 1f1b"),
        ("--microbatches 8 --memory-limit-microbatches 3", "needs 4 microbatches in flight on stage 0, but only 3"),
        ("--microbatches 8 --memory-limit-microbatches 4,x", "4,x: must be one whole number"),
        ("--microbatches 8 --free-memory-bytes 100", "give both or neither"),
        (
            "--microbatches 8 --free-memory-bytes 100 --activation-bytes 0",
            "--activation-bytes 0: must be one whole number >= 1",
        ),
        (
            "--microbatches 8 --extra-inflight 2 --memory-limit-microbatches 5",
            "--extra-inflight 2: stage 0 has memory for 1 more than the 4 microbatches",
        ),
        (
            "--microbatches=8 --extra-inflight=2 --free-memory-bytes=20,20,10,0 --activation-bytes=10",
            "--extra-inflight 2: stage 2 has memory for 1 more than the 2 microbatches",
        ),
        ("--microbatches 8 --overlap-saving 0.1", "needs schedule combined-1f1b, not 1f1b"),
        (
            "--microbatches 8 --schedule combined-1f1b --overlap-saving 1.0",
            "--overlap-saving 1.0: must be a ratio of at least 0 and below 1",
        ),
        ("--microbatches 8 --set mode", "--set mode: must be NAME=VALUE"),
        ("--microbatches 8 --policy nope", "policy 'nope' has no offline planner; policies with one: .*bubble-aware"),
    ],
)
def test_bad_options_are_refused_in_one_line(table: Path, options: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        _run(table, *options.split())

    assert "\n" not in str(caught.value)


def test_bad_file_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(GpuEnergyError, match="no such file"):
        _run(tmp_path / "absent.csv", "--microbatches", "8")


@needs_shared
@pytest.mark.parametrize("name", ["s4m8_1f1b_a100", "s4m8_zbh1_h200", "s4m32_1f1b_a40noisy"])
def test_an_instance_is_planned_unchanged_and_contradicting_options_are_refused(name: str) -> None:
    path = DATA / "instances" / f"{name}.json"
    instance = read_pipeline_file(path)
    assert isinstance(instance, PlannerInstance)

    figures = plan_figures(path)

    assert figures["num_microbatches"] == instance.schedule.num_microbatches
    assert figures["iteration_time_s"] <= figures["baseline_time_s"]
    assert len(figures["clocks"]) == len(instance.graph.instructions)
    with pytest.raises(UsageError, match=r"--microbatches 3: .* has"):
        _run(path, "--microbatches", "3")
    with pytest.raises(UsageError, match=r"--schedule gpipe: .* has"):
        _run(path, "--schedule", "gpipe")
    with pytest.raises(UsageError, match="only for a profile CSV"):
        _run(path, "--extra-inflight", "auto")
