"""Reads profile tables (CSV), orders (CSV) and planner instances (JSON) from files."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.pipeline.profile import KIND_OF_WORD, WORD_OF_KIND
from gpuenergyd.core.pipeline.waiting import WaitingPower, waiting_power
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProfileError
from gpuenergyd_plan.profiles.instance_json import PlannerInstance, parse_instance
from gpuenergyd_plan.profiles.profile_csv import ProfileTable, parse_profile_table
from gpuenergyd_plan.profiles.values import MAX_STAGES, csv_rows, number, short, whole

__all__ = ["PlannerInstance", "ProfileTable", "read_order_file", "read_pipeline_file", "read_waiting_power_file"]


def read_pipeline_file(path: Path) -> ProfileTable | PlannerInstance:
    """Return the profile table or planner instance in a file; the format is detected from its first character.

    Raises:
        ProfileError: the file cannot be read or is invalid; the message names the place and the value.
    """
    text = _read_text(path)
    if not text.strip():
        raise ProfileError(f"{path}: the file is empty; expected a profile CSV or an instance JSON")
    if text.lstrip()[0] in "{[" or path.suffix.lower() == ".json":
        return parse_instance(path, text)
    return parse_profile_table(path, text)


def read_order_file(path: Path, num_stages: int) -> Schedule:
    """Return the order of instructions in a CSV file, for a pipeline with `num_stages` stages.

    Raises:
        ProfileError: the file cannot be read or is invalid; the message names the place and the value.
    """
    return parse_order(path, _read_text(path, "an order CSV"), num_stages)


def read_waiting_power_file(path: Path) -> WaitingPower:
    """Return the power of a waiting GPU by clock from CSV rows `frequency,power`, in MHz and W.

    Raises:
        ProfileError: the file cannot be read or is invalid; the message names the place and the value.
    """
    rows = csv_rows(path, _read_text(path, "a CSV of frequency,power"), ("frequency", "power"))
    points = ((whole(at, "frequency", row["frequency"]), number(at, "power", row["power"])) for at, row in rows)
    return waiting_power(points, where=str(path))


def _read_text(path: Path, expected: str = "a profile CSV or an instance JSON") -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ProfileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ProfileError(f"{path}: is a directory; expected {expected}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ProfileError(f"{path}: cannot be read: {reason}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not UTF-8 text (byte {error.start})") from None


ORDER_COLUMNS = ("rank", "position", "instruction", "microbatch")
MAX_MICROBATCHES = 1_000_000


def parse_order(path: Path, text: str, num_stages: int) -> Schedule:
    """Parse a CSV text as the order of a pipeline with `num_stages` stages; `path` names the file in errors.

    Raises:
        ProfileError: a column is missing, a value is invalid, or the instructions are not those of one iteration.
    """
    places: dict[int, dict[int, tuple[str, int, InstructionKind, int]]] = defaultdict(dict)
    for where, cells in csv_rows(path, text, ORDER_COLUMNS, ("stage",)):
        rank = _index(where, "rank", cells["rank"], MAX_STAGES)
        position = _index(where, "position", cells["position"], None)
        kind = KIND_OF_WORD.get(cells["instruction"].lower())
        if kind is None:
            raise ProfileError(
                f"{where}: instruction {short(cells['instruction'])}: must be forward, backward, input or weight"
            )
        microbatch = _index(where, "microbatch", cells["microbatch"], MAX_MICROBATCHES)
        stage = _index(where, "stage", cells.get("stage", str(rank)), num_stages)
        if position in places[rank]:
            raise ProfileError(f"{where}: position {position} of rank {rank} is given twice")
        places[rank][position] = (where, stage, kind, microbatch)
    if not places:
        raise ProfileError(f"{path}: no instructions below the header")
    for rank in range(max(places) + 1):
        positions = places.get(rank, {})
        missing = next(at for at in range(len(positions) + 1) if at not in positions)
        if not positions or missing < len(positions):
            raise ProfileError(f"{path}: rank {rank} has no position {missing}; positions count from 0 without gaps")
    stages_of = _stages_of(path, places, num_stages)
    num_microbatches = 1 + max(m for cells in places.values() for _, _, _, m in cells.values())
    orders = []
    for rank in range(len(places)):
        chunk_of = {stage: chunk for chunk, stage in enumerate(stages_of[rank])}
        rows = [places[rank][at] for at in range(len(places[rank]))]
        _check_complete(path, rank, rows, num_microbatches)
        orders.append(tuple(Instruction(rank, kind, m, chunk_of[stage]) for _, stage, kind, m in rows))
    return Schedule(
        name=path.name,
        num_microbatches=num_microbatches,
        orders=tuple(orders),
        num_chunks=len(stages_of[0]),
        stage_of_chunk=stages_of if len(stages_of[0]) > 1 else (),
    )


def _index(where: str, name: str, cell: str, end: int | None) -> int:
    value = whole(where, name, cell)
    if value < 0 or (end is not None and value >= end):
        most = "at least 0" if end is None else f"0 to {end - 1}"
        raise ProfileError(f"{where}: {name} {short(cell)}: must be {most}")
    return value


def _stages_of(
    path: Path, places: Mapping[int, Mapping[int, tuple[str, int, InstructionKind, int]]], num_stages: int
) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank in ascending order, after checking that each stage runs on one rank."""
    stages_of = tuple(tuple(sorted({stage for _, stage, _, _ in places[rank].values()})) for rank in range(len(places)))
    rank_of: dict[int, int] = {}
    for rank, stages in enumerate(stages_of):
        for stage in stages:
            if stage in rank_of:
                raise ProfileError(f"{path}: stage {stage} runs on rank {rank_of[stage]} and on rank {rank}")
            rank_of[stage] = rank
    absent = next((stage for stage in range(num_stages) if stage not in rank_of), None)
    if absent is not None:
        raise ProfileError(f"{path}: no rank runs stage {absent}; the profile has stages 0 to {num_stages - 1}")
    counts = {len(stages) for stages in stages_of}
    if len(counts) > 1:
        raise ProfileError(
            f"{path}: rank 0 runs {count_text(len(stages_of[0]), 'stage')}, another rank"
            f" {max(counts - {len(stages_of[0])})};"
            " all ranks must run equally many"
        )
    if counts == {1} and any(stages != (rank,) for rank, stages in enumerate(stages_of)):
        raise ProfileError(f"{path}: with one stage per rank, each stage must run on the rank of its own number")
    return stages_of


def _check_complete(
    path: Path, rank: int, rows: list[tuple[str, int, InstructionKind, int]], num_microbatches: int
) -> None:
    """Raise ProfileError unless each microbatch runs forward once and backward once, whole or split."""
    kinds_of: dict[tuple[int, int], dict[InstructionKind, int]] = defaultdict(dict)
    for at, (where, stage, kind, microbatch) in enumerate(rows):
        known = kinds_of[stage, microbatch]
        if kind in known:
            raise ProfileError(f"{where}: {_name(kind, microbatch)} of stage {stage} is given twice")
        needed = InstructionKind.I if kind is InstructionKind.W else InstructionKind.F
        if kind is not InstructionKind.F and needed not in known:
            raise ProfileError(
                f"{where}: {_name(kind, microbatch)} of stage {stage} comes before its"
                f" {_name(needed, microbatch)} on rank {rank}"
            )
        if kind in {InstructionKind.B, InstructionKind.I} and {InstructionKind.B, InstructionKind.I} & set(known):
            raise ProfileError(f"{where}: the backward of microbatch {microbatch} is both whole and split")
        known[kind] = at
    for stage in sorted({stage for stage, _ in kinds_of}):
        for microbatch in range(num_microbatches):
            known = kinds_of.get((stage, microbatch), {})
            for kind in (InstructionKind.F, InstructionKind.W if InstructionKind.I in known else InstructionKind.B):
                if kind not in known:
                    raise ProfileError(f"{path}: rank {rank} has no {_name(kind, microbatch)} of stage {stage}")


def _name(kind: InstructionKind, microbatch: int) -> str:
    return f"{WORD_OF_KIND[kind]} of microbatch {microbatch}"
