"""Observations of one stage as packed numbers, a tenth of their size as JSON, for sending between hosts.

A text holds any number of observations, each packed little-endian, deflated together (RFC 1951) and encoded in base 85
(RFC 1924, which JSON need not escape). Rows of equal form are stored by columns, which deflate better. Times and
energies of iterations are 32-bit floats; those of instructions are stored without the lowest 8 bits. The errors of 6e-8
and 2e-5 are far below those of any measurement. NaN is a missing value. A time at a clock refers to the sample of the
same class and clock if there is one. Instruction classes are positions in the stage's list of classes, plans positions
in `StageReport.plan_ids`. A reader with other facts would read other classes, so a report names its facts.
"""

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
_SAMPLE = struct.Struct("<BHH3s")
"""Class; count, with `_IS_SIMPLE` set if there are no calls and one share; clock and time of the first share."""
_MORE_OF_SAMPLE = struct.Struct("<eB")
"""Layout of a sample's number of calls and number of shares."""
_SHARE = struct.Struct("<H3s")
_TIME_AT = struct.Struct("<B3s")
"""The sample of the same class and clock, or `_NO_SAMPLE`; the time."""
_CLASS_AT = struct.Struct("<BH")
_CALL = struct.Struct("<BHH3sH3s")
_IS_SIMPLE = 0x8000
_FLOAT = struct.Struct("<f")
_BITS = struct.Struct("<I")
_IS_REGULAR = 1
_NO_PLAN = 0xFFFF
_WAITING = 0xFF
"""Stands in place of a class if the GPU waited."""
_NO_SAMPLE = 0xFF
"""Stands in place of the sample of a time at a clock; class and clock follow."""
MAX_CLASSES = 0xFF
_MAX_COUNT = 0x7FFF
_MAX_BYTES = 2**24
"""Limit of the inflated observations, far more than any stage has."""


def pack(
    observations: Sequence[IterationObservation],
    classes: Sequence[InstructionClass],
    plan_ids: Sequence[str],
    *,
    is_detailed: Mapping[int, bool] | None = None,
) -> str:
    """Return one stage's observations as text.

    Args:
        observations: iterations of one rank, or merged from tensor-parallel siblings.
        classes: instruction classes of the stage, at most 255.
        plan_ids: all plans of the observations.
        is_detailed: by iteration index, False if only the iteration's time and energy are needed.

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
    deflated = zlib.compress(packed, 9, wbits=-zlib.MAX_WBITS) if packed else b""
    return base64.b85encode(deflated).decode("ascii")


def unpack(text: str, classes: Sequence[InstructionClass], plan_ids: Sequence[str]) -> tuple[IterationObservation, ...]:
    """Return the observations in a text, as those of pipeline rank 0.

    Raises:
        ProtocolError: the text is cut off, or refers to a class or plan that does not exist.
    """
    try:
        data = memoryview(_inflated(base64.b85decode(text)))
        found = []
        at = 0
        while at < len(data):
            observation, at = _unpacked(data, at, classes, plan_ids)
            found.append(observation)
    except (struct.error, ValueError, IndexError, zlib.error) as error:
        raise ProtocolError(f"malformed observations: {error}") from None
    return tuple(found)


def _packed(
    o: IterationObservation, of_class: Mapping[tuple[str, int], int], of_plan: Mapping[str, int], *, is_detailed: bool
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
    sample_rows, time_rows, more = [], [], []
    numbers: dict[tuple[int, int], int] = {}
    for number, sample in enumerate(samples):
        key, count = of_class[sample.kind, sample.chunk_index], min(sample.count, _MAX_COUNT)
        if len(sample.shares) == 1 and not sample.num_calls:
            count |= _IS_SIMPLE
            if number < _NO_SAMPLE:
                numbers.setdefault((key, sample.shares[0].sm_clock_mhz), number)
        else:
            more.append(_MORE_OF_SAMPLE.pack(sample.num_calls, len(sample.shares)))
            more += [_SHARE.pack(*_share_numbers(share)) for share in sample.shares[1:]]
        first = _share_numbers(sample.shares[0]) if sample.shares else (0, _packed_float(0.0))
        sample_rows.append(_SAMPLE.pack(key, count, *first))
    for at in times_at:
        key = _WAITING if at.kind is None else of_class[at.kind, at.chunk_index]
        found = numbers.get((key, at.sm_clock_mhz), _NO_SAMPLE)
        time_rows.append(_TIME_AT.pack(found, _packed_float(at.time_s)))
        if found == _NO_SAMPLE:
            more.append(_CLASS_AT.pack(key, at.sm_clock_mhz))
    for call in calls:
        key = of_class[call.instruction_class.kind, call.instruction_class.chunk_index]
        shares = *_share_numbers(call.before), *_share_numbers(call.after)
        more.append(_CALL.pack(key, min(call.count, _MAX_COUNT), *shares))
    by_column = [_by_column(rows, layout.size) for rows, layout in ((sample_rows, _SAMPLE), (time_rows, _TIME_AT))]
    return b"".join([*parts, *by_column, *more])


def _unpacked(
    data: memoryview, at: int, classes: Sequence[InstructionClass], plan_ids: Sequence[str]
) -> tuple[IterationObservation, int]:
    head = _HEAD.unpack_from(data, at)
    index, plan, flags, time_s, turnaround_s, lead_s, window_s, energy_j, num_samples, num_times, num_calls = head
    at += _HEAD.size
    reader = _Reader(data, at)
    sample_rows, time_rows = reader.columns(_SAMPLE, num_samples), reader.columns(_TIME_AT, num_times)
    samples = [_unpacked_sample(reader, row, classes) for row in sample_rows]
    times_at = [_unpacked_time(reader, row, classes, samples) for row in time_rows]
    call_samples = []
    for _ in range(num_calls):
        key, count, before_mhz, before_s, after_mhz, after_s = reader.read(_CALL)
        before, after = ClockShare(before_mhz, _float(before_s)), ClockShare(after_mhz, _float(after_s))
        call_samples.append(CallSample(classes[key], before, after, count))
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
        reader.at,
    )


@dataclass(slots=True)
class _Reader:
    """Reads packed numbers one after the other."""

    data: memoryview
    at: int

    def read(self, numbers: struct.Struct) -> tuple[Any, ...]:
        found = numbers.unpack_from(self.data, self.at)
        self.at += numbers.size
        return found

    def columns(self, numbers: struct.Struct, num_rows: int) -> list[tuple[Any, ...]]:
        """Return the next rows, which are stored by columns."""
        size = num_rows * numbers.size
        stored = bytes(self.data[self.at : self.at + size])
        if len(stored) < size:
            raise ValueError("cut off")
        self.at += size
        return [numbers.unpack(stored[row :: max(1, num_rows)]) for row in range(num_rows)]


def _unpacked_sample(
    reader: _Reader, row: tuple[int, int, int, bytes], classes: Sequence[InstructionClass]
) -> InstructionSample:
    key, count, clock_mhz, time_s = row
    own = classes[key]
    calls, num_shares = (0.0, 1) if count & _IS_SIMPLE else reader.read(_MORE_OF_SAMPLE)
    rows = [(clock_mhz, time_s), *(reader.read(_SHARE) for _ in range(num_shares - 1))][:num_shares]
    shares = tuple(ClockShare(mhz, _float(of_share)) for mhz, of_share in rows)
    return InstructionSample(0, own.kind, shares, count & _MAX_COUNT, own.chunk_index, calls)


def _unpacked_time(
    reader: _Reader, row: tuple[int, bytes], classes: Sequence[InstructionClass], samples: Sequence[InstructionSample]
) -> TimeAtClock:
    number, time_s = row
    if number != _NO_SAMPLE:
        sample = samples[number]
        return TimeAtClock(sample.kind, sample.shares[0].sm_clock_mhz, _float(time_s), sample.chunk_index)
    key, clock_mhz = reader.read(_CLASS_AT)
    if key == _WAITING:
        return TimeAtClock(None, clock_mhz, _float(time_s))
    return TimeAtClock(classes[key].kind, clock_mhz, _float(time_s), classes[key].chunk_index)


def _by_column(rows: Sequence[bytes], size: int) -> bytes:
    """Return the first bytes of all rows, then the second ones, and so on."""
    together = b"".join(rows)
    return b"".join(together[column::size] for column in range(size))


def _inflated(deflated: bytes) -> bytes:
    if not deflated:
        return b""
    inflater = zlib.decompressobj(wbits=-zlib.MAX_WBITS)
    found = inflater.decompress(deflated, _MAX_BYTES)
    if not inflater.eof or inflater.unused_data:
        raise ValueError("cut off, or more than one text")
    return found


def _share_numbers(share: ClockShare) -> tuple[int, bytes]:
    return share.sm_clock_mhz, _packed_float(share.time_s)


def _packed_float(value: float) -> bytes:
    """Return the upper 24 bits of a 32-bit float, rounded."""
    (bits,) = _BITS.unpack(_FLOAT.pack(value))
    return _BITS.pack(bits + 0x80)[1:]


def plans_of(observations: Iterable[IterationObservation]) -> tuple[str, ...]:
    """Return the plan ids of observations without duplicates, for `pack`."""
    return tuple(dict.fromkeys(o.plan_id for o in observations if o.plan_id is not None))


def _float(upper: bytes) -> float:
    """Return the 32-bit float with these upper 24 bits."""
    (found,) = _FLOAT.unpack(b"\0" + upper)
    return float(found)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
