"""Incremental views: the decoded view is complete, whatever the job drops, repeats or changes."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import baseline_plan
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.processes.view_delta import ViewDifference, ViewReceiver, ViewSender
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.daemon_codec import decode, encode
from tests.support.past_jobs import past_job

START = JobView(
    job_id="j",
    schedule=one_forward_one_backward(2, 4),
    gpus=(GpuView("GPU-0", "A100", (1410, 900), 0.01), GpuView("GPU-1", "A100", (1410, 900), 0.01, 80.0)),
    target=PerformanceTarget(),
    baseline=BaselineView(1.0, 100.0, 10),
    observations=(),
    issued_plans=(),
)


def observation(index: int) -> IterationObservation:
    return IterationObservation(
        index,
        None if index % 3 else "p",
        1.0 + index / 7,
        (InstructionSample(0, InstructionKind.F, (ClockShare(1410, 0.1 * index),), 4),),
        (RankEnergy(0, 1.0, None if index % 2 else 5.0, (TimeAtClock(None, 1410, 1.0),)),),
        is_regular=bool(index % 5),
    )


def travelled(difference: ViewDifference) -> ViewDifference:
    """Encode and decode a difference."""
    return decode(encode(difference), ViewDifference, max_bytes=2**20)


@given(st.integers(0, 2**32 - 1))
def test_the_decoded_view_equals_the_sent_view(seed: int) -> None:
    rng = random.Random(seed)
    sender, receiver, view = ViewSender(), ViewReceiver(), START
    for step in range(12):
        observations = [o for o in view.observations if rng.random() < 0.9]
        observations += [observation(rng.randrange(9)) for _ in range(rng.randrange(3))]
        plans = view.issued_plans + tuple(rng.sample([*view.issued_plans, baseline_plan(f"p{step}")], 1))
        view = replace(view, observations=tuple(observations), issued_plans=plans)
        if rng.random() < 0.2:
            view = replace(view, gpus=(replace(view.gpus[0], switch_latency_s=rng.random()), *view.gpus[1:]))
        if rng.random() < 0.1:
            view = replace(view, schedule=one_forward_one_backward(2, rng.randrange(1, 5)))
        if rng.random() < 0.1:
            view = replace(view, past_jobs=tuple(past_job(f"job-{k}") for k in range(rng.randrange(3))))

        arrived = receiver.view(travelled(sender.difference(view)))

        assert arrived == view


def test_only_new_items_are_sent() -> None:
    sender = ViewSender()
    many = tuple(observation(i) for i in range(100))
    sender.difference(replace(START, observations=many))

    again = sender.difference(replace(START, observations=(*many[1:], observation(100))))

    assert len(again.reduced.observations) == 1
    assert not again.has_schedule
    assert not again.has_gpus
    assert len(encode(again)) < 2000


def test_a_difference_with_unknown_items_is_refused() -> None:
    sender = ViewSender()
    sender.difference(replace(START, observations=(observation(1),)))
    later = sender.difference(replace(START, observations=sender_view(sender)))

    with pytest.raises(ProtocolError, match="none was received before"):
        ViewReceiver().view(later)


def sender_view(sender: ViewSender) -> tuple[IterationObservation, ...]:
    """Return the items that a sender has sent."""
    return tuple(entry[0] for entry in sender._observations.known.values())
