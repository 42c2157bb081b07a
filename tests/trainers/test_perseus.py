"""Zeus's pipeline optimizer (Perseus) and lowtime read our files, and we read theirs; requires both packages."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lowtime")
pytest.importorskip("zeus")

from lowtime.cost_model import ExponentialModel
from lowtime.operation import CandidateExecutionOptions, ExecutionOption, OperationSpec
from lowtime.perseus.instruction import Backward, Forward
from lowtime.perseus.schedule import Synchronous1F1B
from zeus.optimizer.pipeline_frequency import common
from zeus.optimizer.pipeline_frequency.server.scheduler import PointSolution

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import WORD_OF_KIND, ClockOption
from gpuenergyd_plan.profiles.profile_files import ProfileTable, read_pipeline_file
from tests.plugins.plan.invocation import plan_figures, write_table

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
COMMON = ("--microbatches", "6", "--blocking-power-w", "60")


def served(file: Path, num_ranks: int) -> list[Any]:
    """Return what Zeus's server sends to each rank for a file."""
    job = common.JobInfo(pp_degree=num_ranks, dp_degree=1, tp_degree=1, world_size=num_ranks)
    ranks = [
        common.RankInfo(rank=k, dp_rank=0, pp_rank=k, tp_rank=0, available_frequencies=[1400]) for k in range(num_ranks)
    ]
    schedules: list[Any] = PointSolution(job, ranks, common.PFOServerSettings.construct(), str(file)).next_schedule()
    return schedules


def test_zeus_serves_our_plan_and_we_read_what_it_stores(tmp_path: Path) -> None:
    table, file = write_table(tmp_path, clock_step_mhz=200), tmp_path / "freqs_pipeline_00000.py"
    planned = plan_figures(table, *COMMON, "--frequency-files", file)

    schedules = served(file, 4)
    asyncio.run(common.save_sched(schedules, str(tmp_path), 0))
    stored = tmp_path / "0.sched.json"
    read = plan_figures(table, *COMMON, "--policy", "frequency-file", "--set", f"path={stored}")

    ours = [[] for _ in range(4)]  # type: list[list[tuple[str, int]]]
    for clock in planned["clocks"]:
        ours[clock["stage"]].append((WORD_OF_KIND[InstructionKind(clock["instruction"])], clock["sm_clock_mhz"]))
    assert [schedule.frequencies for schedule in schedules] == ours
    assert json.loads(stored.read_text())[0]["rank"] == 0
    assert read["clocks"] == planned["clocks"]
    assert read["energy_j"] == planned["energy_j"]


def test_the_profile_of_all_ranks_that_zeus_writes_is_read_by_stage(tmp_path: Path) -> None:
    result = common.InstructionProfilingResult(
        __root__=[
            common.OfflineProfilingResult(
                rank=2 * stage + tp_rank,
                dp_rank=0,
                pp_rank=stage,
                tp_rank=tp_rank,
                forward_time={1400: 0.1 + 0.01 * tp_rank, 1200: 0.2},
                forward_energy={1400: 30.0 + 10 * tp_rank, 1200: 25.0},
                backward_time={1400: 0.3},
                backward_energy={1400: 60.0},
            )
            for stage in range(2)
            for tp_rank in range(2)
        ]
    )
    result.to_csv(str(tmp_path / "profile.csv"))

    table = read_pipeline_file(tmp_path / "profile.csv")

    assert isinstance(table, ProfileTable)
    assert table.num_stages == 2
    forward = table.classes[InstructionClass(1, InstructionKind.F)]
    assert forward.options == (ClockOption(1400, 0.11, 35.0), ClockOption(1200, 0.2, 25.0))


def test_lowtime_orders_1f1b_as_we_do() -> None:
    options: Any = CandidateExecutionOptions(
        options=[
            ExecutionOption(real_time=time_s, unit_time=0.01, cost=cost, knob=mhz)
            for time_s, cost, mhz in ((0.1, 9.0, 1400), (0.2, 5.0, 1000), (0.3, 4.0, 800), (0.4, 3.5, 700))
        ]
    )
    spec: Any = OperationSpec(options=options, cost_model=ExponentialModel(options, search_strategy="best"))

    for stage, order in enumerate(one_forward_one_backward(4, 6).orders):
        theirs = Synchronous1F1B(4, 6, stage, {Forward: spec, Backward: spec})

        assert [(type(i).__name__.lower(), i.micro_batch_id) for i in theirs] == [
            (WORD_OF_KIND[i.kind], i.microbatch_index) for i in order
        ]
