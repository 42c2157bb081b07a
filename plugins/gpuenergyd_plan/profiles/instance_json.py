"""Planner instances: a whole pipeline as JSON, with operations, edges, profiles and blocking power."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuenergyd.core.pipeline.graph import (
    DependencyGraph,
    Instruction,
    InstructionClass,
    InstructionKind,
    Schedule,
    graph_from_edges,
)
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProfileError, ScheduleError
from gpuenergyd_plan.profiles.values import MAX_STAGES, number, short, whole

_KEYS = ("stages", "microbatches", "p_block_w", "ops", "edges", "profiles")
MAX_MICROBATCHES = 1_000_000
_OP_NAME = re.compile(r"([FBIW])(\d{0,3})")
_SCHEDULE_OF_INSTANCE = {"zbh1": "zb-h1"}
"""Names of schedules in instances, where they differ from ours."""


@dataclass(frozen=True, slots=True)
class PlannerInstance:
    """A pipeline with its own order, edges, profiles and blocking power."""

    name: str
    schedule: Schedule
    graph: DependencyGraph
    profile: PipelineProfile


def parse_instance(path: Path, text: str) -> PlannerInstance:
    """Parse a JSON text; `path` names the file in errors.

    Raises:
        ProfileError: the text is not JSON, a key is missing, or a value is invalid.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: not usable JSON: {short(str(error))}") from None
    if not isinstance(data, dict):
        raise ProfileError(f"{path}: an instance must be a JSON object, found {short(data)}")
    num_ranks = _count(path, data, "stages", MAX_STAGES)
    num_microbatches = _count(path, data, "microbatches", MAX_MICROBATCHES)
    blocking_power_w = number(str(path), "p_block_w", _key(path, data, "p_block_w"))
    if blocking_power_w < 0:
        raise ProfileError(f"{path}: p_block_w {blocking_power_w}: must be >= 0 W")
    ops = _list(path, data, "ops")
    instructions = _instructions(path, ops, num_ranks=num_ranks, num_microbatches=num_microbatches)
    # Nodes are ordered by rank and program order, independent of the numbering in the file.
    node_order = sorted(range(len(instructions)), key=lambda i: (instructions[i].pp_rank, i))
    node_of = {i: node for node, i in enumerate(node_order)}
    ordered = [instructions[i] for i in node_order]
    edges = [(node_of[u], node_of[v], latency_s) for u, v, latency_s in _edges(path, data, len(ops))]
    try:
        graph = graph_from_edges(ordered, edges, num_ranks=num_ranks)
    except ScheduleError as error:
        raise ProfileError(f"{path}: edges: {error}") from None
    name = str(data.get("schedule", "custom"))
    return PlannerInstance(
        name=str(data.get("name", path.stem)),
        schedule=Schedule(
            name=_SCHEDULE_OF_INSTANCE.get(name, name),
            num_microbatches=num_microbatches,
            orders=tuple(tuple(i for i in ordered if i.pp_rank == r) for r in range(num_ranks)),
            num_chunks=max(i.chunk_index for i in ordered) + 1,
        ),
        graph=graph,
        profile=PipelineProfile(_instance_classes(path, data, ordered), blocking_power_w),
    )


def _key(path: Path, data: Mapping[str, Any], key: str) -> object:
    if key not in data:
        raise ProfileError(f"{path}: missing key {key!r}; required: {', '.join(_KEYS)}")
    value: object = data[key]
    return value


def _count(path: Path, data: Mapping[str, Any], key: str, most: int) -> int:
    value = _key(path, data, key)
    count = whole(str(path), key, value)
    if isinstance(value, str) or not 1 <= count <= most:
        raise ProfileError(f"{path}: {key} {short(value)}: must be a whole number from 1 to {most}")
    return count


def _list(path: Path, data: Mapping[str, Any], key: str) -> list[Any]:
    value = _key(path, data, key)
    if not isinstance(value, list):
        raise ProfileError(f"{path}: {key} {short(value)}: must be a list")
    return value


def _instructions(path: Path, ops: list[Any], *, num_ranks: int, num_microbatches: int) -> list[Instruction]:
    parsed: list[tuple[int, str, int, int]] = []
    for at, op in enumerate(ops):
        where = f"{path}: ops[{at}]"
        if not isinstance(op, dict) or not {"stage", "op", "microbatch"} <= op.keys():
            raise ProfileError(f"{where}: {short(op)}: must be an object with id, stage, op, microbatch")
        if "id" in op and op["id"] != at:
            raise ProfileError(f"{where}: id {short(op['id'])}: must be its position in the list, {at}")
        stage = whole(where, "stage", op["stage"])
        if not 0 <= stage < num_ranks:
            raise ProfileError(f"{where}: stage {stage}: must be 0 to {num_ranks - 1}")
        microbatch = whole(where, "microbatch", op["microbatch"])
        if not 0 <= microbatch < num_microbatches:
            raise ProfileError(f"{where}: microbatch {microbatch}: must be 0 to {num_microbatches - 1}")
        letter, chunk = _op_name(where, op["op"])
        parsed.append((stage, letter, microbatch, chunk))
    if not parsed:
        raise ProfileError(f"{path}: ops: the list is empty")
    missing = sorted(set(range(num_ranks)) - {stage for stage, *_ in parsed})
    if missing:
        raise ProfileError(
            f"{path}: ops: no op of stage {missing[0]}; the file declares {count_text(num_ranks, 'stage')}"
        )
    # In an instance with weight gradients, "B" is the input gradient.
    splits_backward = any(letter == "W" for _, letter, *_ in parsed)
    instructions = []
    seen: set[Instruction] = set()
    for at, (stage, letter, microbatch, chunk) in enumerate(parsed):
        kind = InstructionKind("I" if splits_backward and letter == "B" else letter)
        instruction = Instruction(stage, kind, microbatch, chunk)
        if instruction in seen:
            raise ProfileError(f"{path}: ops[{at}]: {instruction} is given twice")
        seen.add(instruction)
        instructions.append(instruction)
    return instructions


def _op_name(where: str, name: object) -> tuple[str, int]:
    match = _OP_NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise ProfileError(
            f"{where}: op {short(name)}: must be F, B, I or W, with a chunk number where chunked (F0, B1)"
        )
    return match[1], int(match[2] or 0)


def _edges(path: Path, data: Mapping[str, Any], num_ops: int) -> list[tuple[int, int, float]]:
    edges = _list(path, data, "edges")
    latencies = _list(path, data, "edge_latency_s") if "edge_latency_s" in data else [0.0] * len(edges)
    if len(latencies) != len(edges):
        raise ProfileError(
            f"{path}: edge_latency_s: {count_text(len(latencies), 'value')} for {count_text(len(edges), 'edge')}"
        )
    result = []
    for at, (edge, latency) in enumerate(zip(edges, latencies, strict=True)):
        where = f"{path}: edges[{at}]"
        if not isinstance(edge, list) or len(edge) != 2:
            raise ProfileError(f"{where}: {short(edge)}: must be a pair [u, v] of op ids")
        u, v = (whole(where, "op id", end) for end in edge)
        if not (0 <= u < num_ops and 0 <= v < num_ops):
            raise ProfileError(f"{where}: {short(edge)}: op ids are 0 to {num_ops - 1}")
        latency_s = number(f"{path}: edge_latency_s[{at}]", "latency", latency)
        if latency_s < 0:
            raise ProfileError(f"{path}: edge_latency_s[{at}]: {latency_s}: must be >= 0 s")
        result.append((u, v, latency_s))
    return result


def _instance_classes(
    path: Path, data: Mapping[str, Any], instructions: list[Instruction]
) -> dict[InstructionClass, InstructionProfile]:
    tables = _key(path, data, "profiles")
    if not isinstance(tables, dict):
        raise ProfileError(f"{path}: profiles {short(tables)}: must be an object of 'stage/op' tables")
    classes: dict[InstructionClass, InstructionProfile] = {}
    chunked = any(i.chunk_index for i in instructions)
    for key in sorted({i.instruction_class for i in instructions}):
        chunk = str(key.chunk_index) if chunked else ""
        letters = ("I", "B") if key.kind is InstructionKind.I else (str(key.kind),)
        names = [f"{key.pp_rank}/{letter}{number}" for letter in letters for number in dict.fromkeys((chunk, ""))]
        found = next((name for name in names if name in tables), None)
        if found is None:
            raise ProfileError(f"{path}: profiles: no table {names[-1]!r}; given: {short(', '.join(map(str, tables)))}")
        classes[key] = _instance_table(f"{path}: profiles[{found!r}]", tables[found])
    return classes


def _instance_table(where: str, table: object) -> InstructionProfile:
    columns = ("freq_mhz", "time_s", "energy_j")
    if not isinstance(table, dict) or not all(isinstance(table.get(column), list) for column in columns):
        raise ProfileError(f"{where}: must be an object with the lists freq_mhz, time_s, energy_j")
    lengths = [len(table[column]) for column in columns]
    if len(set(lengths)) != 1:
        raise ProfileError(
            f"{where}: {count_text(lengths[0], 'clock')}, {count_text(lengths[1], 'time')}, "
            f"{count_text(lengths[2], 'energy')}: lists must have equal lengths"
        )
    return instruction_profile(
        (
            ClockOption(
                whole(where, "freq_mhz", mhz), number(where, "time_s", time_s), number(where, "energy_j", energy_j)
            )
            for mhz, time_s, energy_j in zip(*(table[column] for column in columns), strict=True)
        ),
        where=where,
    )
