"""Writes the fitted profile of a running job for `gpuenergyd plan`, and plans for Zeus's pipeline optimizer."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.profile import WORD_OF_KIND
from gpuenergyd.core.policy_api.policy import OfflinePlan, OfflinePlanner, OfflineRequest
from gpuenergyd.errors import UsageError
from gpuenergyd_plan.profiles.instance_json import PlannerInstance
from gpuenergyd_plan.profiles.profile_csv import PROFILE_COLUMNS
from gpuenergyd_plan.running_job import RunningJobInput


def export_profile(job: RunningJobInput, path: Path) -> str:
    """Write a CSV profile, or a JSON instance if the path ends in .json; return the command that plans from the file.

    Raises:
        UsageError: the file exists or cannot be written, or a CSV cannot hold this pipeline.
    """
    is_json = path.suffix.lower() == ".json"
    _write(path, json.dumps(_instance(job.content)) + "\n" if is_json else _csv_text(job.content))
    fitted = job.fit.fitted
    command = f"gpuenergyd plan {path} --target-s {fitted.deadline_s!r}"
    if is_json:
        return command
    schedule = job.content.schedule
    return (
        f"{command} --schedule {schedule.name} --microbatches {schedule.num_microbatches}"
        f" --blocking-power-w {fitted.blocking_power_w:.6g}"
        f" --communication-latency-s {fitted.communication_latency_s:.6g}"
    )


def export_frequencies(path: Path, request: OfflineRequest, planned: OfflinePlan, planner: OfflinePlanner) -> None:
    """Write a plan's clocks to a frequency file, or those of each point of its frontier to a new folder, slowest first.

    Raises:
        UsageError: the path exists or cannot be written, a folder is given without --frontier, or the format has no
            word for an instruction.
    """
    if path.suffix == ".py":
        _write(path, _frequency_text(request, planned))
        return
    if not planned.frontier:
        raise UsageError(
            f"--frequency-files {path}: give a file *.py for one plan, or --frontier for a folder of plans"
        )
    try:
        path.mkdir()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    for index, point in enumerate(sorted(planned.frontier, key=lambda point: -point.iteration_time_s)):
        target = replace(request.target, max_slowdown_ratio=0.0, permitted_time_s=point.iteration_time_s)
        at_point = planner(replace(request, target=target, want_frontier=False))
        _write(path / f"freqs_pipeline_{index:05d}.py", _frequency_text(request, at_point))


def _frequency_text(request: OfflineRequest, planned: OfflinePlan) -> str:
    """Return a frequency file; Zeus's "cost" is the energy beyond what waiting would need all the time."""
    if missing := {instruction.kind for order in planned.orders for instruction in order} - WORD_OF_KIND.keys():
        raise UsageError(f"frequency files have no word for instructions {min(missing)}")
    rows = ([(WORD_OF_KIND[i.kind], planned.sm_clocks_mhz[i]) for i in order] for order in planned.orders)
    waiting_j = len(planned.orders) * request.profile.blocking_power_w * planned.iteration_time_s
    return (
        "[\n" + "".join(f"{row},\n" for row in rows) + f"]\n# iteration time: {planned.iteration_time_s}\n"
        f"# total cost: {planned.energy_j - waiting_j}\n# total cost with P2P: {planned.energy_j}\n"
    )


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _csv_text(content: PlannerInstance) -> str:
    kinds = {key.kind for key in content.profile.classes}
    if content.schedule.num_chunks > 1 or not {InstructionKind.F, InstructionKind.B} <= kinds <= WORD_OF_KIND.keys():
        raise UsageError(
            "a CSV holds one stage per GPU with forwards and backwards; export to a file that ends in .json"
        )
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PROFILE_COLUMNS)
    for key, curve in sorted(content.profile.classes.items()):
        for option in curve.options:
            writer.writerow(
                (key.pp_rank, WORD_OF_KIND[key.kind], option.sm_clock_mhz, repr(option.time_s), repr(option.energy_j))
            )
    return text.getvalue()


def _instance(content: PlannerInstance) -> dict[str, Any]:
    """Return a pipeline in the JSON form of planner instances."""
    graph, schedule = content.graph, content.schedule
    is_chunked = schedule.num_chunks > 1
    splits_backward = any(i.kind is InstructionKind.W for i in graph.instructions)

    def name(kind: InstructionKind, chunk_index: int) -> str:
        if kind is InstructionKind.I and splits_backward:
            return f"B{chunk_index}" if is_chunked else "B"
        if kind not in WORD_OF_KIND or (splits_backward and kind is InstructionKind.B):
            raise UsageError(f"a pipeline with instructions {kind} cannot be exported")
        return f"{kind}{chunk_index}" if is_chunked else str(kind)

    edges = [(u, v, latency_s) for v, before in enumerate(graph.predecessors) for u, latency_s in before]
    return {
        "name": content.name,
        "schedule": schedule.name,
        "stages": graph.num_ranks,
        "microbatches": schedule.num_microbatches,
        "p_block_w": content.profile.blocking_power_w,
        "ops": [
            {"id": at, "stage": i.pp_rank, "op": name(i.kind, i.chunk_index), "microbatch": i.microbatch_index}
            for at, i in enumerate(graph.instructions)
        ],
        "edges": [[u, v] for u, v, _ in edges],
        "edge_latency_s": [latency_s for *_, latency_s in edges],
        "profiles": {
            f"{key.pp_rank}/{name(key.kind, key.chunk_index)}": {
                "freq_mhz": [option.sm_clock_mhz for option in curve.options],
                "time_s": [option.time_s for option in curve.options],
                "energy_j": [option.energy_j for option in curve.options],
            }
            for key, curve in sorted(content.profile.classes.items())
        },
    }
