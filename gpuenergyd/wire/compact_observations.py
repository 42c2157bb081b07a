"""Observations of one stage as packed numbers: a tenth of their size as JSON, for the way between hosts.

A text holds any number of observations, each packed little-endian and encoded together in base 85 (RFC 1924, which JSON
need not escape). Times and energies are 32-bit floats, whose error of 6e-8 is far below that of any measurement; NaN is
a missing value. Instruction classes are positions in `StageFacts.classes`, plans in `StageReport.plan_ids`: a reader
with other facts would read other classes, so a report names the facts that it was packed with.
"""

import base64
import math
import struct
from collections.abc import Iterable, Mapping, Sequence

from gpuenergyd.core.measurement.observation import (
    CallSample,
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd.errors import ProtocolError

_HEAD = struct.Struct("<QHBfffffHHH")
"""Iteration, plan, flags; iteration time, turnaround, lead, window, energy; numbers of samples, times, calls."""
_SAMPLE = struct.Struct("<BHeB")
"""Class, count, calls, number of shares."""
_SHARE = struct.Struct("<Hf")
_TIME_AT = struct.Struct("<BHf")
_CALL = struct.Struct("<BHHfHf")
_IS_REGULAR = 1
_NO_PLAN = 0xFFFF
_WAITING = 0xFF
"""Instead of a class: the GPU waited."""
MAX_CLASSES = 0xFF
_MAX_COUNT = 0xFFFF


def pack(
    observations: Sequence[IterationObservation],
    classes: Sequence[InstructionClass],
    plan_ids: Sequence[str],
    *,
    is_detailed: Mapping[int, bool] | None = None,
) -> str:
    """Return the text of observations of one stage.

    Args:
        observations: iterations of one rank, or merged ones of tensor-parallel siblings.
        classes: instruction classes of the stage, at most 255.
        plan_ids: all plans of the observations.
        is_detailed: by iteration index, False for iterations of which only time and energy are needed.

    Raises:
        ProtocolError: a number is out of range, or a class or plan is not in its list.
    """
    of_class = {(str(key.kind), key.chunk_index): position for position, key in enumerate(classes)}
    of_plan = {plan_id: position for position, plan_id in enumerate(plan_ids)}
    detailed = is_detailed or {}
    try:
        packed = b"".join(
            _packed(o, of_class, of_plan, is_detailed=detailed.get(o.iteration_index, True)) for o in observations
        )
    except (struct.error, OverflowError, KeyError) as error:
        raise ProtocolError(f"iteration cannot be sent to the pipeline's leader: {error!r}") from None
    return base64.b85encode(packed).decode("ascii")


def unpack(text: str, classes: Sequence[InstructionClass], plan_ids: Sequence[str]) -> tuple[IterationObservation, ...]:
    """Return the observations of a text, of pipeline rank 0.

    Raises:
        ProtocolError: the text is cut, or names a class or a plan that does not exist.
    """
    try:
        data = memoryview(base64.b85decode(text))
        found = []
        at = 0
        while at < len(data):
            observation, at = _unpacked(data, at, classes, plan_ids)
            found.append(observation)
    except (struct.error, ValueError, IndexError) as error:
        raise ProtocolError(f"malformed observations: {error}") from None
    return tuple(found)


def _packed(
    o: IterationObservation,
    of_class: Mapping[tuple[str, int], int],
    of_plan: Mapping[str, int],
    *,
    is_detailed: bool,
) -> bytes:
    rank = o.ranks[0]
    samples, times_at, calls = (o.instruction_samples, rank.time_at, o.call_samples) if is_detailed else ((), (), ())
    parts = [
        _HEAD.pack(
            o.iteration_index,
            _NO_PLAN if o.plan_id is None else of_plan[o.plan_id],
            _IS_REGULAR * o.is_regular,
            o.iteration_time_s,
            _or_nan(o.turnarounds_s[0] if o.turnarounds_s else None),
            _or_nan(o.lead_s),
            rank.window_s,
            _or_nan(rank.energy_j),
            len(samples),
            len(times_at),
            len(calls),
        )
    ]
    for sample in samples:
        key = of_class[sample.kind, sample.chunk_index]
        parts.append(_SAMPLE.pack(key, min(sample.count, _MAX_COUNT), sample.num_calls, len(sample.shares)))
        parts += [_SHARE.pack(share.sm_clock_mhz, share.time_s) for share in sample.shares]
    for at in times_at:
        key = _WAITING if at.kind is None else of_class[at.kind, at.chunk_index]
        parts.append(_TIME_AT.pack(key, at.sm_clock_mhz, at.time_s))
    for call in calls:
        key = of_class[call.instruction_class.kind, call.instruction_class.chunk_index]
        before, after = call.before, call.after
        numbers = (before.sm_clock_mhz, before.time_s, after.sm_clock_mhz, after.time_s)
        parts.append(_CALL.pack(key, min(call.count, _MAX_COUNT), *numbers))
    return b"".join(parts)


def _unpacked(
    data: memoryview, at: int, classes: Sequence[InstructionClass], plan_ids: Sequence[str]
) -> tuple[IterationObservation, int]:
    head = _HEAD.unpack_from(data, at)
    index, plan, flags, time_s, turnaround_s, lead_s, window_s, energy_j, num_samples, num_times, num_calls = head
    at += _HEAD.size
    samples = []
    for _ in range(num_samples):
        key, count, calls, num_shares = _SAMPLE.unpack_from(data, at)
        at += _SAMPLE.size
        shares = tuple(ClockShare(*_SHARE.unpack_from(data, at + k * _SHARE.size)) for k in range(num_shares))
        at += num_shares * _SHARE.size
        own = classes[key]
        samples.append(InstructionSample(0, own.kind, shares, count, own.chunk_index, calls))
    times_at = []
    for _ in range(num_times):
        key, mhz, at_clock_s = _TIME_AT.unpack_from(data, at)
        at += _TIME_AT.size
        if key == _WAITING:
            times_at.append(TimeAtClock(None, mhz, at_clock_s))
        else:
            times_at.append(TimeAtClock(classes[key].kind, mhz, at_clock_s, classes[key].chunk_index))
    call_samples = []
    for _ in range(num_calls):
        key, count, before_mhz, before_s, after_mhz, after_s = _CALL.unpack_from(data, at)
        at += _CALL.size
        shares = ClockShare(before_mhz, before_s), ClockShare(after_mhz, after_s)
        call_samples.append(CallSample(classes[key], *shares, count))
    return (
        IterationObservation(
            iteration_index=index,
            plan_id=None if plan == _NO_PLAN else plan_ids[int(plan)],
            iteration_time_s=time_s,
            instruction_samples=tuple(samples),
            ranks=(RankEnergy(0, window_s, _or_none(energy_j), tuple(times_at)),),
            is_regular=bool(flags & _IS_REGULAR),
            turnarounds_s=(_or_none(turnaround_s),),
            lead_s=_or_none(lead_s),
            call_samples=tuple(call_samples),
        ),
        at,
    )


def plans_of(observations: Iterable[IterationObservation]) -> tuple[str, ...]:
    """Return the plans of observations, each once, as `pack` needs them."""
    return tuple(dict.fromkeys(o.plan_id for o in observations if o.plan_id is not None))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
