"""Instructions on a simulated stream: their recorded times hold work alone, not the wait for data of another rank."""

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import RecordedIteration
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.training.gpt_pipeline import GptRank, RunAhead
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.trainers.pipeline_processes import run_ranks

pytestmark = pytest.mark.torch
NUM_RANKS, NUM_MICROBATCHES, NUM_ITERATIONS = 2, 4, 9


def recorded_durations_ns(rank: int, world: str, socket_path: str, signals_path: str) -> list[dict[str, list[int]]]:
    """Train at full speed; return the recorded durations of each iteration by kind of instruction."""
    host = SimulatedHost.open(Path(world))
    gpu_uuid = host.identities()[rank].gpu_uuid
    training = GptRank("1f1b", rank, NUM_RANKS, NUM_MICROBATCHES)
    found: list[dict[str, list[int]]] = []
    with ExitStack() as cleanup:
        cleanup.callback(host.close)
        run_ahead = RunAhead(2.0, Path(signals_path))
        cleanup.enter_context(training.simulate_on(host, gpu_uuid, duration_scale=0.4, run_ahead=run_ahead))
        timer = training.timer
        assert isinstance(timer, DeviceRecorder)
        call_when_known = timer.call_when_known

        def keep(recorded: RecordedIteration, act: Any) -> None:
            def keep_and_act() -> None:
                durations: dict[str, list[int]] = {}
                for kind, _, _, begin_ns, end_ns in recorded.times().instructions:
                    durations.setdefault(kind, []).append(end_ns - begin_ns)
                found.append(durations)
                act()

            call_when_known(recorded, keep_and_act)

        timer.call_when_known = keep  # type: ignore[method-assign]
        handle = attach(
            training.schedule, job="waits", run_key="r", gpu_uuid=gpu_uuid, socket_path=socket_path, timer=timer
        )
        cleanup.callback(handle.detach)
        for iteration_index in range(NUM_ITERATIONS):
            training.step(iteration_index)
        training.synchronize()
    return found


def test_the_wait_for_another_rank_is_no_part_of_an_instruction(tmp_path: Path) -> None:
    with running_daemon(tmp_path / "daemon", kind=WorldKind.KIND, baseline_iterations=50) as daemon:
        ranks = run_ranks(
            NUM_RANKS, tmp_path, recorded_durations_ns,
            str(daemon.world_path), str(daemon.socket_path), str(tmp_path / "signals"),
        )  # fmt: skip

    for iterations in ranks:
        settled = iterations[2:]  # before, the program is not ahead yet: a stream without work waits in an instruction
        assert len(settled) >= 3
        for kind in "FB":
            by_microbatch = [statistics.median(own) for own in zip(*(own[kind] for own in settled), strict=True)]
            assert len(by_microbatch) == NUM_MICROBATCHES
            # Equal work at one clock; the wait for the other rank would be about as long as the work.
            assert max(by_microbatch) <= 1.25 * min(by_microbatch)
