"""Parameters of the simulated GPU models, each with its source.

The comment of a number begins with one of three words. measured: fitted to a published data set (gridpilot:
denisa-c/gridpilot, CC-BY-4.0; kernel_tuner: KernelTuner/kernel_tuner_tutorial; Perseus: the training profiles of
ml-energy/zeus). read: stated in a source. assumed: an estimate, because no figure was found; its basis is given.
A number that a model does not list is assumed to equal that of the model from which it is derived.
"""

import math
from dataclasses import dataclass, replace

from gpuenergyd.errors import GpuNotFoundError

MAX_P, MAX_Q = 0, 1
"""Numbers of two workload power profiles in NVML."""


@dataclass(frozen=True, slots=True)
class DeviceParameters:
    """Parameters of one GPU model; see `device_model` for the formulas.

    The order of the fields is the layout of the world file: numbers first, stored as doubles.
    """

    min_sm_clock_mhz: float
    max_sm_clock_mhz: float
    sm_clock_step_mhz: float
    memory_clock_mhz: float
    knee_sm_clock_mhz: float
    max_voltage_ratio: float
    static_power_w: float
    uncore_w_per_mhz: float
    typical_w_per_mhz: float
    idle_power_w: float
    idle_sm_clock_mhz: float
    blocking_power_w: float
    min_power_limit_w: float
    max_power_limit_w: float
    default_power_limit_w: float
    cap_settles_at_ratio: float
    leakage_w_per_k: float
    warm_celsius: float
    ambient_celsius: float
    thermal_k_per_w: float
    thermal_tau_s: float
    energy_update_s: float
    power_update_s: float
    power_noise_ratio: float
    call_median_s: float
    call_sigma: float
    call_outlier_ratio: float
    call_outlier_min_s: float
    call_outlier_max_s: float
    settle_mean_s: float
    time_noise_ratio: float
    read_s: float
    process_list_s: float
    set_stall_s: float
    reported_early_s: float
    settle_target_spread: float
    settle_tail_ratio: float
    settle_tail_min_s: float
    settle_tail_max_s: float
    energy_sampled_ratio: float
    max_q_clock_ratio: float
    max_q_static_ratio: float
    key: str
    model_name: str
    is_blocking_power_published: bool

    @property
    def power_profiles(self) -> tuple[int, ...]:
        """The workload power profiles that the GPU offers: Max-P, which changes nothing, and Max-Q."""
        return (MAX_P, MAX_Q) if self.max_q_clock_ratio < 1.0 else ()

    @property
    def supported_sm_clocks_mhz(self) -> tuple[int, ...]:
        """The clocks that a lock accepts, highest first; half steps are truncated, as the driver does."""
        num_steps = round((self.max_sm_clock_mhz - self.min_sm_clock_mhz) / self.sm_clock_step_mhz)
        clocks = (math.floor(self.min_sm_clock_mhz + k * self.sm_clock_step_mhz) for k in range(num_steps, -1, -1))
        return tuple(clocks)


def device_parameters(key: str) -> DeviceParameters:
    """Return the parameters of a model by its key, e.g. `a100-sxm`.

    Raises:
        GpuNotFoundError: unknown model key.
    """
    try:
        return MODELS[key]
    except KeyError:
        raise GpuNotFoundError(f"unknown simulated GPU model {key!r}; available: {', '.join(sorted(MODELS))}") from None


V100_SXM2 = DeviceParameters(
    key="v100-sxm2",
    model_name="V100-SXM2-32GB (simulated)",
    min_sm_clock_mhz=135,  # measured, gridpilot
    max_sm_clock_mhz=1530,  # measured, gridpilot
    sm_clock_step_mhz=7.5,  # measured, gridpilot; shown truncated
    memory_clock_mhz=877,  # measured, gridpilot
    knee_sm_clock_mhz=1072,  # measured: fit to gridpilot, power MAPE 1.1 %, max 2.7 % over 27 points
    max_voltage_ratio=1.295,  # measured, same fit
    static_power_w=42.2,  # measured, same fit
    uncore_w_per_mhz=0.0107,  # measured, same fit: a context without a kernel
    typical_w_per_mhz=0.069,  # measured, same fit: matrix product (0.092 for convolution inference)
    idle_power_w=42.2,  # assumed: the static power, since no figure without a context was found
    idle_sm_clock_mhz=135,  # assumed: lowest supported clock
    blocking_power_w=87.4,  # assumed: collective spinning at a tenth of the activity of a matrix product
    is_blocking_power_published=False,
    min_power_limit_w=150,  # measured, gridpilot
    max_power_limit_w=300,  # measured, gridpilot
    default_power_limit_w=300,  # measured, gridpilot
    cap_settles_at_ratio=0.98,  # measured, gridpilot: 146.7 W under a 150 W cap, 196 W under 200 W
    leakage_w_per_k=0.39,  # measured, gridpilot, at 205 W (0.3-0.6)
    warm_celsius=45,  # measured: the temperature the power fit refers to
    ambient_celsius=35,  # measured: 0.104 K/W below the 56 degrees seen at 205 W
    thermal_k_per_w=0.104,  # measured, gridpilot, over 30 s
    thermal_tau_s=20,  # measured, gridpilot (17-28)
    energy_update_s=0.02,  # assumed: equal to the measured power update
    power_update_s=0.0202,  # measured, gridpilot
    power_noise_ratio=0.042,  # measured, gridpilot: detrended, at 20 ms
    call_median_s=0.0045,  # read: one team's A800 note; Hopper figures elsewhere reach from 10 to 500 ms
    call_sigma=0.456,  # assumed: fits that note's median, mean and p99
    call_outlier_ratio=0.03,  # assumed, as above
    call_outlier_min_s=0.02,  # assumed, as above
    call_outlier_max_s=0.03,  # assumed, as above
    settle_mean_s=0.0009,  # read: the same A800 note, both directions; its distribution is assumed
    time_noise_ratio=0.002,  # assumed: 0.2-0.3 % per instruction
    # The kind world: reading and setting take no time; see `unkind_world` for the behavior of real GPUs.
    read_s=0.0,
    process_list_s=0.0,
    set_stall_s=0.0,
    reported_early_s=0.0,
    settle_target_spread=0.0,
    settle_tail_ratio=0.0,
    settle_tail_min_s=0.0,
    settle_tail_max_s=0.0,
    energy_sampled_ratio=1.0,
    # No workload power profiles before Blackwell.
    max_q_clock_ratio=1.0,
    max_q_static_ratio=1.0,
)

A100_PCIE = replace(
    V100_SXM2,
    key="a100-pcie",
    model_name="A100-PCIE-40GB (simulated)",
    min_sm_clock_mhz=210,  # measured, kernel_tuner
    max_sm_clock_mhz=1410,  # measured, kernel_tuner
    sm_clock_step_mhz=15,  # measured, kernel_tuner
    memory_clock_mhz=1215,  # measured, kernel_tuner
    knee_sm_clock_mhz=1073,  # measured: fit to kernel_tuner, power MAPE 0.70 %, max 1.4 % over 10 points
    max_voltage_ratio=1.378,  # measured, same fit
    static_power_w=32.2,  # measured, same fit
    uncore_w_per_mhz=0.0,  # not identifiable in that fit: included in typical_w_per_mhz
    typical_w_per_mhz=0.0449,  # measured: FP32 multiply-add; tensor work of 0.081 and more reaches the cap (assumed)
    idle_power_w=32,  # read
    idle_sm_clock_mhz=210,  # assumed: lowest supported clock
    blocking_power_w=83.64,  # read: Perseus, A100
    is_blocking_power_published=True,
    min_power_limit_w=150,  # assumed
    max_power_limit_w=250,  # measured, kernel_tuner
    default_power_limit_w=250,  # measured, kernel_tuner
    leakage_w_per_k=0.3,  # assumed: V100's ratio to the static power
    warm_celsius=55,  # assumed: training temperature at this power
    energy_update_s=0.1,  # read: A100
    power_update_s=0.02,  # assumed: as V100
)

A100_SXM = replace(
    A100_PCIE,
    key="a100-sxm",
    model_name="A100-SXM4-80GB (simulated)",
    min_sm_clock_mhz=210,  # read
    max_sm_clock_mhz=1410,  # measured, Perseus
    sm_clock_step_mhz=15,  # measured, Perseus
    memory_clock_mhz=1593,  # read: 1215 on the 40 GB board
    knee_sm_clock_mhz=1104,  # measured: fit to Perseus GPT-3, energy MAPE 0.74 %, max 2.6 %
    max_voltage_ratio=1.213,  # measured, same fit
    static_power_w=34.6,  # measured, same fit
    typical_w_per_mhz=0.26,  # measured: 0.25 forward, 0.27 backward
    idle_power_w=52,  # assumed: between the PCIe board's 32 W and a context's
    min_power_limit_w=100,  # assumed
    max_power_limit_w=480,  # assumed: 475-480 W were drawn at 1410 MHz; the formula gives 500
    default_power_limit_w=480,  # assumed: as above
    cap_settles_at_ratio=1.0,  # assumed: 480 W is the power drawn, not a reported cap
    leakage_w_per_k=0.32,  # assumed: V100's ratio to the static power
    warm_celsius=65,  # assumed: training temperature at this power
    ambient_celsius=30,  # assumed
)

A40 = replace(
    A100_SXM,
    key="a40",
    model_name="A40-48GB (simulated)",
    min_sm_clock_mhz=210,  # read
    max_sm_clock_mhz=1740,  # measured, Perseus
    sm_clock_step_mhz=15,  # measured, Perseus
    memory_clock_mhz=7251,  # assumed
    knee_sm_clock_mhz=954,  # measured: fit to Perseus GPT-3, energy MAPE 2.6 %, max 9 %: that run was capped
    max_voltage_ratio=1.295,  # measured, same fit
    static_power_w=63,  # measured, same fit; other jobs suggest 80
    typical_w_per_mhz=0.118,  # assumed: not identifiable; gives 300 W at 1440 MHz, where the measured run was capped
    idle_power_w=35,  # assumed: L40S deep idle
    blocking_power_w=70.38,  # read: Perseus, A40
    min_power_limit_w=100,  # measured, zeus sweeps
    max_power_limit_w=300,  # measured, zeus sweeps
    default_power_limit_w=300,  # measured, zeus sweeps
    cap_settles_at_ratio=1.0,  # measured, Perseus: near 300 W above about 1425-1450 MHz
    leakage_w_per_k=0.58,  # assumed: V100's ratio to the static power
    warm_celsius=60,  # assumed: training temperature at this power
)

H100_SXM = replace(
    A100_PCIE,
    key="h100-sxm",
    model_name="H100-SXM5-80GB (simulated)",
    min_sm_clock_mhz=345,  # assumed: as H100 NVL, where it was read
    max_sm_clock_mhz=1980,  # assumed
    sm_clock_step_mhz=15,  # assumed: as H100 NVL
    memory_clock_mhz=2619,  # read: H100 NVL
    knee_sm_clock_mhz=1300,  # assumed: no published training curve
    max_voltage_ratio=1.40,  # assumed
    static_power_w=95,  # assumed: loaded
    typical_w_per_mhz=0.17,  # assumed
    idle_power_w=70,  # assumed
    idle_sm_clock_mhz=345,  # assumed: as seen on one idle H200
    blocking_power_w=161,  # assumed: a tenth of a matrix product's activity
    is_blocking_power_published=False,
    min_power_limit_w=200,  # assumed
    max_power_limit_w=700,  # assumed
    default_power_limit_w=700,  # assumed
    leakage_w_per_k=0.88,  # assumed: V100's ratio to the static power
    warm_celsius=65,  # assumed
    ambient_celsius=25,  # assumed
    thermal_k_per_w=0.07,  # assumed: 700 W at 74 degrees
)

# Measured on one 700 W H200, driver 580.159; power by clock below the cap is assumed, since no clock was set.
H200 = replace(
    H100_SXM,
    key="h200",
    model_name="H200-SXM-141GB (simulated)",
    min_sm_clock_mhz=345,  # read
    max_sm_clock_mhz=1980,  # read
    memory_clock_mhz=3201,  # read
    static_power_w=73,  # measured: 78 W at the lowest clock, less what the clock adds
    typical_w_per_mhz=0.161,  # measured: a GPT step draws 698 W at 1980 MHz, small products 671 W
    idle_power_w=80,  # measured: 78 to 82 W without a context
    idle_sm_clock_mhz=345,  # read: 345 to 840 MHz without a context
    blocking_power_w=126,  # measured: an idle context and a kernel that spins in one block, at 1980 MHz
    min_power_limit_w=200,  # read
    max_power_limit_w=700,  # read
    default_power_limit_w=700,  # read
    cap_settles_at_ratio=0.99,  # measured: 690 to 700 W
    leakage_w_per_k=0.67,  # assumed: V100's ratio to the static power
    time_noise_ratio=0.02,  # measured: GPU-bound iterations of two instructions scatter by 1.3 to 1.7 %
)

B200 = replace(
    H200,
    key="b200",
    model_name="B200-SXM-180GB (simulated)",
    min_sm_clock_mhz=120,  # assumed
    max_sm_clock_mhz=1965,  # assumed
    memory_clock_mhz=3996,  # assumed
    static_power_w=150,  # assumed: H200's ratio to the power limit
    typical_w_per_mhz=0.24,  # assumed: H100's ratio to the power limit
    idle_power_w=140,  # assumed
    idle_sm_clock_mhz=120,  # assumed: lowest supported clock
    blocking_power_w=240,  # assumed: a tenth of a matrix product's activity
    max_power_limit_w=1000,  # read
    default_power_limit_w=1000,  # read
    cap_settles_at_ratio=0.98,  # assumed: as measured on V100
    time_noise_ratio=0.002,  # assumed: as V100
    thermal_k_per_w=0.05,  # assumed: 1000 W at 75 degrees
    leakage_w_per_k=1.4,  # assumed: V100's ratio to the static power
    max_q_clock_ratio=1770
    / 1965,  # assumed: with the next line at most about 15 % less energy, as NVIDIA states for B200
    max_q_static_ratio=0.85,  # assumed: power states of links and cache
)

MODELS = {model.key: model for model in (V100_SXM2, A100_PCIE, A100_SXM, A40, H100_SXM, H200, B200)}
