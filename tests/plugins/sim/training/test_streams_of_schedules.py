"""What real torch schedules put on the streams of simulated GPUs: waits for other ranks lie between instructions."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from gpuenergyd.client.timing.recorder import HostRecorder
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.reorder import split_in_place
from gpuenergyd.wire.messages import OrderRow
from gpuenergyd_sim.driver.host import InstructionWork, SimulatedHost
from gpuenergyd_sim.driver.stream import SimulatedStream
from gpuenergyd_sim.training.gpt_pipeline import GptRank
from gpuenergyd_sim.training.simulated_stage import StageStream, simulate
from gpuenergyd_trainers.joining.ordered_rank import order_rows
from gpuenergyd_trainers.torch_pipelining import attach
from tests.client.fake_daemon import FakeDaemon, plan_slice
from tests.support.simulated_memory import SimulatedMemory
from tests.trainers.pipeline_processes import Pace, run_ranks

pytestmark = pytest.mark.torch
StreamOperation = tuple[str, str, int]
"""An operation of a stream: `begin`, `launch` and `end` with kind and microbatch; `wait` and `send` with a channel."""
Stream = Sequence[StreamOperation]
NUM_RANKS, NUM_MICROBATCHES = 4, 8
PLAIN = one_forward_one_backward(NUM_RANKS, NUM_MICROBATCHES)
SPLIT = split_in_place(PLAIN)
EXTRA_INFLIGHT = (2, 1, 1, 0)
SPLIT_FROM, NUM_STEPS = 4, 8


class TracedTimer(HostRecorder):
    """A timer that also appends the begins and ends of instructions to a trace."""

    def __init__(self, trace: list[StreamOperation]) -> None:
        super().__init__(8 * NUM_MICROBATCHES)
        self.trace = trace
        self._key_of: dict[int, OrderRow] = {}

    def begin(self, key: OrderRow) -> int:
        slot = super().begin(key)
        self._key_of[slot] = key
        self.trace.append(("begin", key[0], key[1]))
        return slot

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; the newest mark counts, as that after the loss."""
        super().end(slot)
        if slot < 0:
            return
        kind, index, _ = self._key_of[slot]
        mark = ("end", kind, index)
        if mark in self.trace:
            self.trace.remove(mark)
        self.trace.append(mark)


class TracedStream:
    """What the simulation puts on a stream."""

    def __init__(self, trace: list[StreamOperation]) -> None:
        self._trace = trace

    def launch(self, work: InstructionWork) -> None:
        """Put the begun instruction on the stream."""
        assert work.compute_time_s > 0.0
        begun = [operation for operation in self._trace if operation[0] == "begin"]
        if begun:
            self._trace.append(("launch", *begun[-1][1:]))

    def wait_for(self, _signals: object, channel: int) -> None:
        self._trace.append(("wait", "", channel))

    def send(self, _signals: object, channel: int) -> None:
        self._trace.append(("send", "", channel))


def traced(
    rank: int, world: str, socket_path: str, extra_inflight: Sequence[int] | None
) -> list[list[StreamOperation]]:
    """Train under plans of a scripted daemon; return what was put on the rank's stream in each step."""
    trace: list[StreamOperation] = []
    training = GptRank("1f1b", rank, NUM_RANKS, NUM_MICROBATCHES, extra_inflight=extra_inflight)
    (stage,) = training.stages
    works = dict.fromkeys("FBIW", InstructionWork(0.0, 0.001, 0.2))
    steps = []
    with ExitStack() as cleanup:
        host = SimulatedHost.open(Path(world))
        cleanup.callback(host.close)
        gpu_uuid = host.identities()[rank].gpu_uuid
        stream = StageStream(cast("SimulatedStream", TracedStream(trace)), cast("Any", SimpleNamespace()))
        cleanup.callback(simulate(stage, host, gpu_uuid, works, stage_stream=stream).detach)
        memory = SimulatedMemory(stage, capacity_bytes=10**9)
        handle = attach(
            training.schedule, job="traced", run_key="r", gpu_uuid=gpu_uuid, socket_path=socket_path,
            timer=TracedTimer(trace), memory=memory, allow_reorder=extra_inflight is None,
        )  # fmt: skip
        pace = Pace(handle, rank, socket_path)
        for step in range(NUM_STEPS):
            trace.clear()
            training.step(step)
            steps.append(list(trace))
            pace.keep()
        handle.detach()
        pace.finish()
    return steps


def streams_by_order(folder: Path, extra_inflight: Sequence[int] | None = None) -> dict[str, list[Stream]]:
    """Return what real torch puts on each rank's stream, in its own order and with backwards split."""
    world = folder / "world"
    SimulatedHost.create(world, ["a100-sxm"] * NUM_RANKS).close()
    with FakeDaemon(folder) as daemon:
        for rank in range(NUM_RANKS):
            there = {**plan_slice(1, SPLIT_FROM), "order": order_rows(SPLIT, rank) if extra_inflight is None else []}
            daemon.plans_by_pp_rank[rank] = [there]
        ranks = run_ranks(NUM_RANKS, folder, traced, str(world), daemon.socket_path, extra_inflight)
    return {"own": [steps[2] for steps in ranks], "split": [steps[-1] for steps in ranks]}


def waits_within_instructions(stream: Stream) -> list[StreamOperation]:
    """Return the waits between the begin and the end of an instruction."""
    found, begun = [], 0
    for operation in stream:
        begun += {"begin": 1, "end": -1}.get(operation[0], 0)
        if operation[0] == "wait" and begun:
            found.append(operation)
    return found


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Stream]]:
    return streams_by_order(tmp_path_factory.mktemp("streams"))


@pytest.mark.thorough
def test_streams_wait_for_receives_outside_of_instructions(streams: dict[str, list[Stream]], tmp_path: Path) -> None:
    for own in [*streams["own"], *streams["split"], *streams_by_order(tmp_path, EXTRA_INFLIGHT)["own"]]:
        assert not waits_within_instructions(own)
        num_received = sum(operation[0] == "wait" for operation in own)
        assert num_received in {NUM_MICROBATCHES, 2 * NUM_MICROBATCHES}


@pytest.mark.thorough
def test_a_stream_runs_weight_gradients_before_it_waits_for_what_was_posted_before_them(
    streams: dict[str, list[Stream]],
) -> None:
    for own in streams["split"]:
        for k, operation in enumerate(own):
            if operation[:2] == ("begin", "W"):
                before = [other for other in own[:k] if other[0] in {"wait", "begin"}]
                assert before[-1][1] in {"I", "W"}, "a wait lies between an input gradient and its weight gradient"
