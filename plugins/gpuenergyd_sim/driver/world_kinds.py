"""Kinds of simulated worlds: ideal GPUs, and GPUs whose driver costs time, stalls training and reports inexactly.

The comment of a number begins with one of two words, as in `device_parameters`. read: stated in a source. assumed: an
estimate, because no figure was found; its basis is given.
"""

from dataclasses import replace
from enum import StrEnum

from gpuenergyd_sim.driver.device_parameters import DeviceParameters


class WorldKind(StrEnum):
    """Behaviour of the simulated driver: ideal, or with the costs and inaccuracies of real ones."""

    KIND = "kind"
    """Reads and set calls do not delay training; clocks are reported when they take effect; counters are exact."""
    UNKIND = "unkind"
    """Reads take time, set calls stall training, clocks take effect late and with tails, power is sampled."""


def parameters_in(kind: WorldKind, model: DeviceParameters) -> DeviceParameters:
    match kind:
        case WorldKind.KIND:
            return model
        case WorldKind.UNKIND:
            return _unkind(model)


def _unkind(model: DeviceParameters) -> DeviceParameters:
    has_gsp = model.key != "v100-sxm2"  # from Ampere on, the driver asks a processor on the GPU
    is_hopper = model.key in {"h100-sxm", "h200"}
    return replace(
        model,
        read_s=0.0007 if has_gsp else 0.0002,  # read: NVIDIA/DCGM issue 144, 0.5-0.7 ms; without a GSP assumed
        process_list_s=0.0045,  # read: flightlessmango/MangoHud issue 2104, 4-5 ms
        set_stall_s=0.001,  # assumed: NVIDIA/nccl issue 1551 reports delayed operators and gives no duration
        reported_early_s=0.003,  # assumed: LATEST (arXiv 2502.20075) times kernels, because reports are early
        settle_mean_s=0.02 if is_hopper else model.settle_mean_s,  # assumed: in LATEST, tens of ms on Hopper
        settle_target_spread=0.5,  # assumed: in LATEST, the target clock dominates the latency
        settle_tail_ratio=0.01,  # assumed: the share of tails
        settle_tail_min_s=0.2 if is_hopper else 0.03,  # read for Hopper: 200-400 ms on some targets of a GH200 (LATEST)
        settle_tail_max_s=0.4 if is_hopper else 0.06,  # as above; assumed for others
        energy_sampled_ratio=0.25 if has_gsp else 1.0,  # assumed: power is sampled so (arXiv 2312.02741), energy may be
    )
