"""The GPUs of a stage as one: common clocks, the slowest clock changes, and the sum of what they draw."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.description import stage_gpu
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.errors import JobError

FIRST = GpuView("GPU-0", "A100", (1410, 1200, 900), 0.01, 80.0)
SECOND = GpuView("GPU-1", "A100", (1410, 900, 600), 0.02, 84.0)


def test_a_stage_has_common_clocks_the_slowest_changes_and_the_sum_of_powers() -> None:
    assert stage_gpu(0, [FIRST, SECOND]) == GpuView("GPU-0", "A100", (1410, 900), 0.02, 164.0, num_gpus=2)


def test_the_merge_of_merged_gpus_is_that_of_all() -> None:
    four = [FIRST, SECOND, replace(FIRST, switch_latency_s=0.03), SECOND]

    assert stage_gpu(0, [stage_gpu(0, four[:2]), stage_gpu(0, four[2:])]) == stage_gpu(0, four)


def test_gpus_without_a_common_clock_are_refused() -> None:
    with pytest.raises(JobError, match="the GPUs of pipeline rank 0 have no clock in common"):
        stage_gpu(0, [FIRST, replace(SECOND, supported_sm_clocks_mhz=(1000,))])
