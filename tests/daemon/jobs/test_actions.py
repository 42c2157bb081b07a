"""Each command of a state machine has its action, in the runner of a job and in the leader of a pipeline."""

from typing import get_args

from gpuenergyd.core.job.messages import Command
from tests.support.job_stage import Stage, play
from tests.support.led_pipeline import LedPipeline


def test_every_command_of_a_job_has_an_action() -> None:
    async def scenario() -> None:
        stage = Stage()
        stage.join()
        (runner,) = stage.jobs

        assert runner.actions.keys() == set(get_args(Command))
        await stage.jobs.close("test over")

    play(scenario)


def test_every_command_of_a_pipeline_has_an_action() -> None:
    assert LedPipeline().leader.actions.keys() == set(get_args(Command))
