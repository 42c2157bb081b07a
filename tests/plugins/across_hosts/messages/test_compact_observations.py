"""Observations packed for the way between hosts: nothing but digits is lost, and broken texts are refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import (
    CallSample,
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.errors import ProtocolError
from gpuenergyd_across_hosts.messages.compact_observations import pack, plans_of, unpack

F, B = InstructionKind.F, InstructionKind.B
CLASSES = (InstructionClass(0, F), InstructionClass(0, B, 1))
# Numbers that floats of 24 bits hold exactly.
SAMPLES = (
    InstructionSample(0, F, (ClockShare(1410, 0.25),), 3),
    InstructionSample(0, B, (ClockShare(1110, 0.5), ClockShare(1410, 0.125)), 512, 1, 0.5),
)
TIMES = (TimeAtClock(F, 1410, 0.75), TimeAtClock(None, 1110, 0.25), TimeAtClock(B, 1110, 8.0, 1))
OBSERVATION = IterationObservation(
    2**40,
    "gpt-whole.1",
    1.5,
    SAMPLES,
    (RankEnergy(0, 1.5, 400.0, TIMES),),
    turnarounds_s=(0.0625,),
    lead_s=0.5,
    call_samples=(CallSample(CLASSES[1], ClockShare(1410, 0.25), ClockShare(1110, 0.5), 7),),
)


def test_nothing_is_packed_into_nothing() -> None:
    assert pack([], CLASSES, ()) == ""
    assert unpack("", CLASSES, ()) == ()


def test_observations_are_restored() -> None:
    other = replace(
        OBSERVATION, iteration_index=1, plan_id=None, ranks=(RankEnergy(0, 1.5, None, ()),), turnarounds_s=(None,),
        lead_s=None, is_regular=False, call_samples=(),
    )  # fmt: skip
    both = (OBSERVATION, other)

    assert unpack(pack(both, CLASSES, plans_of(both)), CLASSES, plans_of(both)) == both


@given(
    st.lists(
        st.tuples(st.sampled_from(CLASSES), st.integers(0, 3_000), st.floats(1e-6, 1e6), st.integers(0, 600)),
        max_size=40,
    ),
    st.sampled_from((0.0, 0.5)),
)
def test_times_of_instructions_keep_their_first_five_digits(
    rows: list[tuple[InstructionClass, int, float, int]], num_calls: float
) -> None:
    samples = tuple(
        InstructionSample(0, own.kind, (ClockShare(mhz, time_s),), count, own.chunk_index, num_calls)
        for own, mhz, time_s, count in rows
    )
    times = (*(TimeAtClock(own.kind, mhz, time_s, own.chunk_index) for own, mhz, time_s, _ in rows), TIMES[1])
    whole = replace(OBSERVATION, instruction_samples=samples, ranks=(RankEnergy(0, 1.5, 400.0, times),))

    (found,) = unpack(pack([whole], CLASSES, ("gpt-whole.1",)), CLASSES, ("gpt-whole.1",))

    assert [replace(s, shares=()) for s in found.instruction_samples] == [replace(s, shares=()) for s in samples]
    assert [s.shares[0].sm_clock_mhz for s in found.instruction_samples] == [mhz for _, mhz, _, _ in rows]
    assert [s.time_s for s in found.instruction_samples] == pytest.approx([row[2] for row in rows], rel=2e-5)
    assert [replace(at, time_s=0.0) for at in found.ranks[0].time_at] == [replace(at, time_s=0.0) for at in times]
    assert [at.time_s for at in found.ranks[0].time_at] == pytest.approx([at.time_s for at in times], rel=2e-5)


def test_a_clock_of_a_class_takes_at_most_twelve_characters() -> None:
    def size(num_clocks: int) -> int:
        clocks = range(600, 600 + num_clocks)
        samples = tuple(InstructionSample(0, F, (ClockShare(mhz, mhz**-0.5),), mhz % 97) for mhz in clocks)
        times = tuple(TimeAtClock(F, mhz, mhz**0.7) for mhz in clocks)
        whole = replace(OBSERVATION, instruction_samples=samples, ranks=(RankEnergy(0, 1.5, 400.0, times),))
        return len(pack([whole], CLASSES, ("gpt-whole.1",)))

    assert size(60) - size(20) <= 40 * 12


def test_an_iteration_without_details_holds_time_and_energy() -> None:
    text = pack([OBSERVATION], CLASSES, plans_of([OBSERVATION]), is_detailed={2**40: False})

    (found,) = unpack(text, CLASSES, ("gpt-whole.1",))

    assert (found.iteration_time_s, found.energy_j, found.plan_id) == (1.5, 400.0, "gpt-whole.1")
    assert (found.instruction_samples, found.ranks[0].time_at, found.call_samples) == ((), (), ())
    assert len(text) < 64


def test_a_number_out_of_range_is_refused() -> None:
    sample = replace(SAMPLES[0], shares=(ClockShare(70_000, 0.25),))

    with pytest.raises(ProtocolError, match="iteration cannot be sent"):
        pack([replace(OBSERVATION, instruction_samples=(sample,))], CLASSES, ("gpt-whole.1",))
    with pytest.raises(ProtocolError, match="iteration cannot be sent"):
        pack([OBSERVATION], CLASSES[:1], ("gpt-whole.1",))


def test_a_broken_text_is_refused() -> None:
    text = pack([OBSERVATION], CLASSES, ("gpt-whole.1",))

    for broken in (text[:-5], text + "00000", '"', "\N{SNOWMAN}"):
        with pytest.raises(ProtocolError, match="malformed observations"):
            unpack(broken, CLASSES, ("gpt-whole.1",))
    with pytest.raises(ProtocolError, match="malformed observations"):
        unpack(text, CLASSES[:1], ("gpt-whole.1",))
    with pytest.raises(ProtocolError, match="malformed observations"):
        unpack(text, CLASSES, ())
