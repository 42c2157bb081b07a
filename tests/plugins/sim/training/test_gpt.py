"""The demo's training program: equal losses with and without a daemon; all ranks stop together and none is left."""

import multiprocessing
import os
import select
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_sim.training import gpt as gpt_demo
from gpuenergyd_sim.training.gpt_model import layers_per_stage, simulated_works
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.support.processes import child_pids
from tests.support.thorough import thorough

pytestmark = pytest.mark.torch

NUM_RANKS = 4
RUN_LIMIT_S = 400.0


@pytest.fixture
def world(tmp_path: Path) -> Path:
    path = tmp_path / "world"
    SimulatedHost.create(path, ["a100-sxm"] * NUM_RANKS, seed=3, kind=WorldKind.UNKIND).close()
    return path


@pytest.fixture
def started() -> Iterator[list[Any]]:
    processes: list[Any] = []
    yield processes
    for process in processes:
        process.kill()
        process.join()


def start(started: list[Any], *arguments: str) -> Any:
    """Start the demo's launcher in a forked process, in which torch is loaded already."""
    process = multiprocessing.get_context("fork").Process(target=_main, args=(arguments,))
    process.start()
    started.append(process)
    return process


def _main(arguments: tuple[str, ...]) -> None:
    raise SystemExit(gpt_demo.main([*arguments, "--duration-scale", "0.03", "--microbatches", "4"]))


@pytest.mark.parametrize("schedule_name", ["1f1b", *thorough("gpipe")])
def test_losses_are_bit_for_bit_the_same_with_and_without_a_daemon(
    tmp_path: Path, world: Path, started: list[Any], schedule_name: str
) -> None:
    common = ["--world", str(world), "--iterations", "5", "--schedule", schedule_name]
    with FakeDaemon(tmp_path) as daemon:
        variants = {
            "without": ["--no-daemon"],
            "absent": ["--socket", str(tmp_path / "nobody.sock")],
            "joined": ["--socket", daemon.socket_path],
        }
        for name, variant in variants.items():
            process = start(started, *common, *variant, "--losses-out", str(tmp_path / name))
            process.join(RUN_LIMIT_S)
            assert process.exitcode == 0

        num_registered = daemon.registrations.qsize()
    texts = {name: (tmp_path / name).read_text(encoding="ascii") for name in variants}
    losses = [float.fromhex(line) for line in texts["without"].split()]
    assert texts["without"] == texts["absent"] == texts["joined"]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert num_registered == NUM_RANKS


def test_termination_lets_the_ranks_finish_their_iteration(tmp_path: Path, world: Path, started: list[Any]) -> None:
    with FakeDaemon(tmp_path) as daemon:
        process = start(started, "--world", str(world), "--socket", daemon.socket_path)
        daemon.reports.get(timeout=RUN_LIMIT_S)
        process.terminate()
        process.join(RUN_LIMIT_S)

        assert process.exitcode == 0
        for _ in range(NUM_RANKS):
            daemon.releases.get(timeout=WAIT_LIMIT_S)


def test_ranks_end_with_their_parent_and_leave_no_files(
    tmp_path: Path, world: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with FakeDaemon(tmp_path) as daemon:
        process = start(started, "--world", str(world), "--socket", daemon.socket_path)
        daemon.reports.get(timeout=RUN_LIMIT_S)
        ranks = [os.pidfd_open(pid) for pid in child_pids(process.pid)]
        os.kill(process.pid, signal.SIGKILL)
        gone = [bool(select.select([rank], [], [], WAIT_LIMIT_S)[0]) for rank in ranks]
        for rank in ranks:
            os.close(rank)

    assert gone == [True] * NUM_RANKS
    assert list((tmp_path / "temporary").iterdir()) == []


def test_one_dead_rank_ends_the_others(tmp_path: Path, world: Path, started: list[Any]) -> None:
    with FakeDaemon(tmp_path) as daemon:
        process = start(started, "--world", str(world), "--socket", daemon.socket_path)
        daemon.reports.get(timeout=RUN_LIMIT_S)
        os.kill(child_pids(process.pid)[1], signal.SIGKILL)
        process.join(RUN_LIMIT_S)

    assert process.exitcode == 1


def test_stages_are_as_even_as_whole_layers_and_the_head_allow() -> None:
    cut = layers_per_stage(4)
    works = [simulated_works(stage, 4)["F"] for stage in range(4)]
    times_s = [work.memory_time_s + work.compute_time_s for work in works]

    assert [int(layers) for layers in cut] == [6, 7, 6, 7]
    assert max(times_s) / min(times_s) == pytest.approx(1.174, abs=0.001)
    assert sum(times_s) / 4 == pytest.approx(0.05016)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stages", "0"), "must be >= 1"),
        (("--schedule", "nope"), "invalid choice: 'nope'"),
        (("--run-ahead", "9"), "must be above 0 and at most 8"),
        (("--stages", str(NUM_RANKS + 1), "--schedule", "gpipe"), f"has {NUM_RANKS} GPUs"),
        (("--microbatches", str(NUM_RANKS - 1)), f"needs at least --stages {NUM_RANKS}"),
    ],
)
def test_options_that_cannot_be_trained_are_refused_before_any_rank_starts(
    world: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpt_demo.main(["--world", str(world), "--no-daemon", "--iterations", "1", *arguments])

    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
