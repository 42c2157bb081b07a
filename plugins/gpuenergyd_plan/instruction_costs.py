"""Profiles of a schedule's instructions from a profile table, with assumptions for instructions that it lacks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass, InstructionKind, Schedule
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile
from gpuenergyd.errors import ProfileError
from gpuenergyd_plan.profiles.profile_files import ProfileTable

INPUT_GRADIENT_SHARE = 0.5
"""Part of a backward's time and energy assumed for its input gradient, if the table has no separate rows for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAssumptions:
    """What is assumed about instructions that the table does not measure."""

    input_gradient_share: float = INPUT_GRADIENT_SHARE
    """Part of a backward's time and energy that its input gradient takes."""
    split_overhead: float = 0.0
    """Time and energy that splitting a backward adds to it, as a ratio."""
    overlap_saving: float = 0.0
    """Part of the time of a forward and a backward that is saved by running them together; their energies are added."""


def instruction_profiles(
    schedule: Schedule, keys: Iterable[InstructionClass], table: ProfileTable, assumed: CostAssumptions
) -> Mapping[InstructionClass, InstructionProfile]:
    """Return the profile of every instruction class, from the table's rows for the model stage of its chunk.

    Raises:
        ProfileError: a forward and a backward that run together were measured at no common clock.
    """
    longer = 1.0 + assumed.split_overhead
    share_of = {
        InstructionKind.I: assumed.input_gradient_share * longer,
        InstructionKind.W: (1.0 - assumed.input_gradient_share) * longer,
    }
    classes = {}
    for key in keys:
        if key.kind is InstructionKind.FB:
            classes[key] = _combined(schedule, key, table, assumed.overlap_saving)
            continue
        stage = schedule.stage_index(key.pp_rank, key.chunk_index)
        measured = table.classes.get(InstructionClass(stage, key.kind))
        if measured is None:
            whole, share = table.classes[InstructionClass(stage, InstructionKind.B)], share_of[key.kind]
            options = (ClockOption(o.sm_clock_mhz, o.time_s * share, o.energy_j * share) for o in whole.options)
            measured = InstructionProfile(tuple(options))
        classes[key] = measured
    return classes


def cost_notes(keys: Iterable[InstructionClass], table: ProfileTable, assumed: CostAssumptions) -> list[str]:
    """Return one line for the user about each assumption made for these instructions."""
    kinds = {key.kind for key in keys}
    notes = []
    if InstructionKind.I in kinds and not table.has_split_backward:
        share = assumed.input_gradient_share
        if share == INPUT_GRADIENT_SHARE:
            what = "input and weight gradient are each assumed to take half of the measured backward"
        else:
            what = f"the input gradient is assumed to take {100 * share:g} % of the measured backward"
        more = f"{100 * assumed.split_overhead:g} % more" if assumed.split_overhead else "nothing"
        notes.append(f"{what}, and splitting it to cost {more}; measured input and weight rows replace this")
    if InstructionKind.FB in kinds:
        saved = assumed.overlap_saving
        less = f"{100 * saved:g} % less time than" if saved else "as long as"
        notes.append(
            f"a forward and a backward that run together are assumed to take {less} one after the other, with the same"
            " energy" + ("" if saved else ": set --overlap-saving")
        )
    return notes


def _combined(
    schedule: Schedule, key: InstructionClass, table: ProfileTable, overlap_saving: float
) -> InstructionProfile:
    """Return the profile of a forward and a backward that run as one instruction, at the clocks measured for both."""
    pair = Instruction(key.pp_rank, key.kind, 0, key.chunk_index)
    forward_stage = schedule.stage_index(key.pp_rank, pair.forward_chunk_index)
    backward_stage = schedule.stage_index(key.pp_rank, pair.backward_chunk_index)
    forward = table.classes[InstructionClass(forward_stage, InstructionKind.F)]
    backward = table.classes[InstructionClass(backward_stage, InstructionKind.B)]
    backward_at = {option.sm_clock_mhz: option for option in backward.options}
    options = tuple(
        ClockOption(f.sm_clock_mhz, (f.time_s + b.time_s) * (1.0 - overlap_saving), f.energy_j + b.energy_j)
        for f in forward.options
        if (b := backward_at.get(f.sm_clock_mhz)) is not None
    )
    if not options:
        raise ProfileError(
            f"{table.name}: the forward of stage {forward_stage} and the backward of stage {backward_stage}, which run"
            f" together in schedule {schedule.name!r}, were measured at no common clock"
        )
    return InstructionProfile(options)
