"""`gpuenergyd plan FILE`: computes a clock for every instruction from measured tables, with a proven lower bound."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gpuenergyd.cli.option_checks import warn_of_large_slowdown
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.core.pipeline.graph import Schedule
from gpuenergyd.core.pipeline.power_swing import PlannedSwing, SwingFigures
from gpuenergyd.core.policy_api.policy import OfflinePlan, PowerFigures, SwitchingFigures, WaitingFigures
from gpuenergyd.errors import UsageError
from gpuenergyd_plan import options
from gpuenergyd_plan.inputs import PlanInput, load_planner, plan_input
from gpuenergyd_plan.tables import PlanOptions, named


def plan(  # noqa: PLR0913  each option is a parameter
    file: options.FileArgument = None,
    *,
    job: options.JobOption = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --job: write the fitted profile as CSV, or as JSON for *.json."),
    ] = None,
    frequency_files: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write the clocks for Zeus: FILE.py, or with --frontier a folder of plans."),
    ] = None,
    socket: SocketOption = None,
    schedule: options.ScheduleOption = None,
    order: options.OrderOption = None,
    microbatches: options.MicrobatchesOption = None,
    chunks: options.ChunksOption = None,
    extra_inflight: options.ExtraInflightOption = None,
    memory_limit_microbatches: options.MemoryLimitOption = None,
    free_memory_bytes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Memory left on each stage by the plain schedule.")
    ] = None,
    activation_bytes: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="Memory that one extra microbatch needs.")
    ] = None,
    slowdown: options.SlowdownOption = None,
    target_s: options.TargetOption = None,
    straggler_time_s: Annotated[
        float | None, typer.Option(metavar="S", help="Iteration time of a straggler that the job waits for.")
    ] = None,
    max_switches: Annotated[
        int | None, typer.Option(metavar="K", help="Maximum number of clock segments per stage and iteration.")
    ] = None,
    switch_latency_s: Annotated[
        float, typer.Option(metavar="S", help="Switch latency of clock changes in seconds.")
    ] = 0.0,
    blocking_power_w: options.BlockingPowerOption = None,
    waiting_power: options.WaitingPowerOption = None,
    power_cap_w: options.PowerCapOption = None,
    window_s: options.WindowOption = None,
    flattest: options.FlattestOption = False,
    communication_latency_s: options.LatencyOption = None,
    input_gradient_share: options.InputShareOption = None,
    split_overhead: options.SplitOverheadOption = None,
    overlap_saving: options.OverlapSavingOption = None,
    policy: options.PolicyOption = options.DEFAULT_POLICY,
    set_option: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Option of the policy; may be repeated.")
    ] = None,
    frontier: Annotated[bool, typer.Option("--frontier", help="Add the time-energy frontier.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Plan a pipeline's clocks from measured tables.

    Finds the plan with the least energy whose iteration time meets the target, and a proven lower bound on that energy.
    Needs neither a daemon nor a GPU. With --job it plans from what the daemon has fitted to a running job, for its
    target, and compares that with the plan in force; nothing changes in the job.

    Examples:
        gpuenergyd plan profile.csv --microbatches 8
        gpuenergyd plan profile.csv --microbatches 8 --max-slowdown 0.05 --json
        gpuenergyd plan profile.csv --microbatches 32 --schedule auto --memory-limit-microbatches 8
        gpuenergyd plan profile.csv --order order.csv
        gpuenergyd plan profile.csv --microbatches 8 --power-cap-w 2000
        gpuenergyd plan profile.csv --microbatches 8 --flattest
        gpuenergyd plan instance.json --frontier
        gpuenergyd plan profile.csv --microbatches 8 --frontier --frequency-files plans
        gpuenergyd plan profile.csv --microbatches 8 --policy frequency-file --set path=freqs_pipeline_00010.py
        gpuenergyd plan --job gpt --max-slowdown 0.05
        gpuenergyd plan --job gpt --export profile.csv
    """
    warn_of_large_slowdown(slowdown)
    planner = load_planner(policy)
    own = PlanOptions(
        schedule=schedule,
        order=order,
        microbatches=microbatches,
        chunks=chunks,
        extra_inflight=extra_inflight,
        memory_limit_microbatches=memory_limit_microbatches,
        free_memory_bytes=free_memory_bytes,
        activation_bytes=activation_bytes,
        slowdown=slowdown,
        target_s=target_s,
        straggler_time_s=straggler_time_s,
        max_switches=max_switches,
        switch_latency_s=switch_latency_s,
        blocking_power_w=blocking_power_w,
        waiting_power=waiting_power,
        power_cap_w=power_cap_w,
        window_s=window_s,
        is_flattest=flattest,
        communication_latency_s=communication_latency_s,
        input_gradient_share=input_gradient_share,
        split_overhead=split_overhead,
        overlap_saving=overlap_saving,
        want_frontier=frontier,
        policy_options=tuple(set_option or ()),
    )
    path = options.file_or_job(file, job)
    if job is None or path is not None:
        if export is not None:
            raise UsageError("--export: only together with --job")
        assert path is not None
        given = plan_input(path, own)
        planned = planner(given.request)
        figures = plan_figures(given, planned)
    else:
        from gpuenergyd_plan.export import export_profile  # noqa: PLC0415  start fast
        from gpuenergyd_plan.running_job import running_job_input  # noqa: PLC0415

        running = running_job_input(job, socket, own)
        command = None if export is None else export_profile(running, export)
        given = running.given
        planned = planner(given.request)
        figures = {**plan_figures(given, planned), "job": running.figures(), "plan_command": command}
    if frequency_files is not None:
        from gpuenergyd_plan.export import export_frequencies  # noqa: PLC0415  start fast

        export_frequencies(frequency_files, given.request, planned, planner)
    if as_json:
        print_json(figures)
    else:
        from gpuenergyd_plan.printing import print_plan  # noqa: PLC0415  Rich, JSON does not need it

        print_plan(given, figures)
    return 0


def plan_figures(given: PlanInput, planned: OfflinePlan) -> dict[str, Any]:
    """Return the JSON document of the command; with a straggler, energies include waiting for it."""
    num_ranks = len(planned.orders)
    charged_until_s = given.request.target.straggler_time_s

    def charged(energy_j: float, iteration_time_s: float) -> float:
        waited_s = max(0.0, (charged_until_s or 0.0) - iteration_time_s)
        return energy_j + given.request.profile.blocking_power_w * num_ranks * waited_s

    baseline_j = charged(planned.baseline_energy_j, planned.baseline_time_s)
    energy_j = charged(planned.energy_j, planned.iteration_time_s)
    bound_j = planned.lower_bound_j
    own_j, any_order_j = planned.own_order_energy_j, planned.any_order_bound_j
    if own_j is not None and planned.own_order_time_s is not None:
        own_j = charged(own_j, planned.own_order_time_s)
    figures: dict[str, Any] = {
        "schedule": given.schedule_name,
        "num_stages": num_ranks,
        "num_microbatches": given.schedule.num_microbatches,
        "extra_inflight": list(planned.extra_inflight),
        "baseline_time_s": planned.baseline_time_s,
        "baseline_energy_j": baseline_j,
        "iteration_time_s": planned.iteration_time_s,
        "energy_j": energy_j,
        "lower_bound_j": None if bound_j is None else charged(bound_j, planned.iteration_time_s),
        "saving_ratio": 1.0 - energy_j / baseline_j if baseline_j else 0.0,
        "slowdown_ratio": planned.iteration_time_s / planned.baseline_time_s - 1.0,
        "own_order_time_s": planned.own_order_time_s,
        "own_order_energy_j": own_j,
        "own_order_saving_ratio": None if own_j is None else 1.0 - energy_j / own_j if own_j else 0.0,
        "any_order_bound_ratio": 1.0 - any_order_j / baseline_j if any_order_j is not None and baseline_j else None,
        "held_microbatches": held_microbatches(planned, given.schedule.num_chunks),
        "solve_cpu_s": planned.solve_cpu_s,
        "compile_cpu_s": planned.compile_cpu_s,
        "order": {
            str(pp_rank): [[i.kind, i.microbatch_index, i.chunk_index] for i in order]
            for pp_rank, order in enumerate(planned.orders)
        },
        "clocks": [{**named(i), "sm_clock_mhz": planned.sm_clocks_mhz[i]} for order in planned.orders for i in order],
        "frontier": list(planned.frontier),
        "throttling": [
            {"stage": key.pp_rank, "instruction": key.kind, "chunk": key.chunk_index, "sm_clock_mhz": clock}
            for key, profile in sorted(given.request.profile.classes.items())
            if (clock := profile.throttling_clock_mhz) is not None
        ],
    }
    if planned.stage_of_chunk:
        figures["stage_of_chunk"] = [list(stages) for stages in planned.stage_of_chunk]
    if planned.waiting is not None:
        figures["waiting"] = _waiting_figures(planned.waiting, baseline_j)
    if planned.power is not None:
        figures |= _power_figures(planned.power, planned.baseline_time_s)
    if planned.swing is not None:
        figures["swing"] = swing_figures(planned.swing)
    if planned.switching is not None:
        figures["switching"] = _switching_figures(planned.switching, charged, baseline_j, planned.baseline_time_s)
    return figures


def held_microbatches(planned: OfflinePlan, num_chunks: int) -> list[float]:
    """Return the most microbatches that each stage holds at once; a chunk counts as a fraction of one."""
    held = Schedule("planned", 0, planned.orders)
    counts = [held.peak_inflight(rank) for rank in range(held.num_ranks)]
    return [count if num_chunks == 1 else count / num_chunks for count in counts]


def _waiting_figures(waiting: WaitingFigures, baseline_j: float) -> dict[str, Any]:
    return {
        "is_assumed": waiting.is_assumed,
        "at_highest_clock_w": waiting.at_highest_clock_w,
        "least_w": waiting.least_w,
        "mean_w": waiting.mean_w,
        "kept_clock_saving_ratio": 1.0 - waiting.kept_energy_j / baseline_j if baseline_j else 0.0,
        "lowered": [
            {
                **named(wait.instruction),
                "sm_clock_mhz": wait.sm_clock_mhz,
                "wait_s": wait.wait_s,
                "raised_s": wait.raised_s,
            }
            for wait in waiting.lowered
        ],
    }


def _power_figures(power: PowerFigures, baseline_time_s: float) -> dict[str, Any]:
    def slowdown(time_s: float | None) -> float | None:
        return None if time_s is None else time_s / baseline_time_s - 1.0

    return {
        "power_cap_w": power.cap.power_w,
        "window_s": power.cap.window_s,
        "peak_power_w": power.peak_w,
        "mean_power_w": power.mean_w,
        "full_speed_peak_power_w": power.full_speed_peak_w,
        "time_bound_s": power.time_bound_s,
        "single_clock_slowdown_ratio": slowdown(power.single_clock_time_s),
        "equal_limits_slowdown_ratio": slowdown(power.equal_limits_time_s),
    }


def _switching_figures(
    switching: SwitchingFigures, charged: Callable[[float, float], float], baseline_j: float, baseline_time_s: float
) -> dict[str, Any]:
    def outcome(iteration_time_s: float, energy_j: float) -> dict[str, float]:
        energy_j = charged(energy_j, iteration_time_s)
        return {
            "iteration_time_s": iteration_time_s,
            "energy_j": energy_j,
            "saving_ratio": 1.0 - energy_j / baseline_j if baseline_j else 0.0,
            "slowdown_ratio": iteration_time_s / baseline_time_s - 1.0,
        }

    return {
        "switch_latency_s": switching.switch_latency_s,
        "num_segments": list(switching.num_segments),
        "planned": outcome(switching.iteration_time_s, switching.energy_j),
        "free_with_lead": outcome(switching.free_lead_time_s, switching.free_lead_energy_j),
        "free_naive": outcome(switching.free_naive_time_s, switching.free_naive_energy_j),
        "changes": [
            {**named(change.instruction), "offset_s": change.offset_s, "sm_clock_mhz": change.sm_clock_mhz}
            for rank_changes in switching.changes
            for change in rank_changes
        ],
    }


def swing_figures(swing: PlannedSwing) -> dict[str, Any]:
    """Return the part of the JSON document about swings."""
    return {
        "planned": _figures(swing.planned),
        "full_speed": _figures(swing.full_speed),
        "least_energy": _figures(swing.least_energy),
        "band_energy_against_least_energy_ratio": _change(swing.planned, swing.least_energy),
        "band_energy_against_full_speed_ratio": _change(swing.planned, swing.full_speed),
    }


def _figures(figures: SwingFigures) -> dict[str, float]:
    return {**asdict(figures), "band_rms_w": figures.band_rms_w}


def _change(planned: SwingFigures, other: SwingFigures) -> float | None:
    return planned.band_energy_w2 / other.band_energy_w2 - 1.0 if other.band_energy_w2 else None
