"""The GPUs of one pipeline stage as the single GPU that a policy plans for."""

from collections.abc import Sequence
from dataclasses import replace

from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import JobError


def stage_gpu(pp_rank: int, gpus: Sequence[GpuView]) -> GpuView:
    """Return the GPUs of a stage as one: common clocks, limits and profiles, the slowest clock changes, summed powers.

    The merge of merged GPUs is that of all. UUID and model name are those of the first.

    Raises:
        JobError: the GPUs are on several hosts, or have no clock in common.
    """
    first = gpus[0]
    if len(gpus) == 1:
        return first
    hosts = sorted({gpu.host for gpu in gpus})
    if len(hosts) > 1:
        raise JobError(
            f"the ranks of pipeline stage {pp_rank} are on {count_text(len(hosts), 'host')}: all tensor-, context- and"
            " expert-parallel ranks of a stage must be on one host"
        )
    common_mhz = set(first.supported_sm_clocks_mhz).intersection(*(gpu.supported_sm_clocks_mhz for gpu in gpus))
    if not common_mhz:
        raise JobError(f"the GPUs of pipeline rank {pp_rank} have no clock in common")
    slowest = max(gpus, key=lambda gpu: gpu.switch_latency_s)
    ranges_w = [gpu.power_limit_range_w for gpu in gpus if gpu.power_limit_range_w is not None]
    common_w = (max(low for low, _ in ranges_w), min(high for _, high in ranges_w)) if ranges_w else None
    powers_w = [gpu.blocking_power_w for gpu in gpus if gpu.blocking_power_w is not None]
    return replace(
        first,
        supported_sm_clocks_mhz=tuple(sorted(common_mhz, reverse=True)),
        switch_latency_s=slowest.switch_latency_s,
        switching=slowest.switching,
        blocking_power_w=sum(powers_w) if len(powers_w) == len(gpus) else None,
        num_gpus=sum(gpu.num_gpus for gpu in gpus),
        num_host_gpus=max(gpu.num_host_gpus for gpu in gpus),
        power_limit_range_w=common_w if len(ranges_w) == len(gpus) and common_w and common_w[0] < common_w[1] else None,
        power_profiles=tuple(sorted(set(first.power_profiles).intersection(*(gpu.power_profiles for gpu in gpus)))),
        foreign_power_profiles=tuple(sorted({number for gpu in gpus for number in gpu.foreign_power_profiles})),
    )
