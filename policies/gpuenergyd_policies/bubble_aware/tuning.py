"""Constants of the bubble-aware policy, with their units and the reason for each value."""

from dataclasses import dataclass

from gpuenergyd_policies.planning.compiled import IS_COMPILED


@dataclass(frozen=True, slots=True)
class Tuning:
    """Constants of fitting, planning and correcting; a ratio refers to the quantity named in its description."""

    max_fitted_planned_iterations: int = 60
    """The newest iterations under plans."""

    max_segments: tuple[int, ...] = (4, 8, 12)
    """Clock segments per rank and iteration: limits to evaluate, in addition to a plan without a limit."""
    max_segments_of_priced_calls: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    """`max_segments` where each call stops the work of its GPU, or clocks may take effect far too late."""
    max_expected_late_ratio: float = 0.006
    """Time that rare long latencies of a plan's raises may cost on average, as a share of the iteration time."""
    price_of_lateness: float = 3.0
    """Price of that time, in units of the mean power of the iteration: a tenth of a percent of time for at least three
    of energy, about what a later deadline would save."""
    far_late_of_calls_ratio: float = 0.002
    """Time beyond the deadline that a plan's calls may take, as a share of it, where little is saved otherwise: less
    than a plan is soon corrected for, see `tighten_above_ratio`."""
    max_segments_of_many_calls: tuple[int, ...] = (1, 2, 3)
    """The limits of segments where the plans with more segments change clocks too often."""
    max_driver_busy_ratio: float = 0.25
    """Share of the time for which calls that set clocks may occupy the driver of a host: all its programs share it, and
    calls in a row would make the last one late."""
    min_dwell_ratio: float = 0.5
    """Least time for which a clock is requested, in its typical latencies. An assumption: how GPUs treat shorter
    requests was not measured."""
    merged_dwells: tuple[float, ...] = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
    """Least lengths of segments, in typical latencies, to which a plan with too many calls is merged."""
    segment_search_steps: int = 30_000 if IS_COMPILED else 800
    """Steps of the local search for segments; without numba, as many as fit into the same time."""
    soon_replaced_share: float = 0.2
    """Share of that search for plans that are learned from, of which each runs for a few iterations."""
    fewer_switches_ratio: float = 0.002
    """Extra energy accepted for fewer clock changes: each may be late, and changes on one host queue up."""

    least_saving_of_wait: float = 1e-4
    """Energy that a lowered wait must save, as a share of the iteration's: it takes two more calls."""
    least_saving_of_waits: float = 5e-4
    """Energy that all lowered waits of a plan must save, as a share of the iteration's."""

    flat_extra_ratio: float = 0.0015
    """Extra energy of a flatter plan, without the price of its clock changes: with it, less than what is accepted for
    fewer clock changes."""
    flat_search_steps: int = 24_000_000 if IS_COMPILED else 100_000
    """Steps of the search for a flatter plan in a running job: a quarter of a CPU second."""
    most_shown_waves: int = 512
    """Instructions of a pipeline up to which the swing of a plan is predicted: that takes some hundredths of a second.
    """

    learned_caution_of_large: float = 0.5
    """Standard deviations of its times that a plan learned from plans keeps as margin in a large pipeline, where trying
    several would take too long."""
    num_learning_plans: int = 7
    """Plans until learning from plans is over: on measured tables later ones hardly gain."""
    min_iterations_to_learn: int = 3
    """Iterations of a plan measured before the next one is learned from it."""
    far_late_ratio: float = 0.01
    """Lateness, as a share of the target, from which on a plan that learns is not waited for, since what it was made
    from was wrong, and beyond which no energy pays: the slowdown that the guard tolerates."""

    caution_of_noise: float = 0.5
    """Share of the standard deviation of one iteration time that a first plan keeps as margin."""
    max_caution_ratio: float = 0.2
    """Upper limit of caution, as a share of instruction time: beyond it, a plan hardly saves anything."""
    caution_gain: float = 1.5
    """Extra caution per missing share of the target; above 1, as only part of an iteration is below maximum clock."""
    outlier_ratio: float = 0.04
    """Beyond this share of the target, lateness comes from a passing disturbance or a wrong profile, which is measured
    again when the next plan is late too. A plan without slack never looks fast, so full caution would stay for good."""
    outlier_caution_ratio: float = 0.005
    """Extra caution after such an outlier."""

    settled_iterations: int = 8
    """Iterations of a plan before it may be judged fast, as only energy is lost meanwhile, before another order is
    considered, and before the curves are summarized once more for later jobs."""
    least_gain_of_order: float = 0.02
    """Further saving, as a share of the baseline's energy, for which a job changes its order."""
    extra_caution_of_orders: float = 0.004
    """Caution of a first plan in another order, beyond that of the plan before it: its instructions were only measured
    at full speed."""
    order_search_instructions: int = 12_000
    """Instructions of all orders that are compared for a running job; limits the policy's time."""
    order_finalists: int = 3
    """Orders that are solved on the observed graph, besides the split in place."""
    flat_order_finalists: int = 8
    """`order_finalists` if the flattest plan is wanted: of many orders of nearly equal energy, some swing less."""
    memory_margin_ratio: float = 0.05
    """Share of a GPU's memory that other orders leave free: allocators fragment, and programs vary."""
    order_retry_iterations: int = 64
    """Iterations in 1F1B before a second trial; each further one waits four times as long."""
    longest_without_order: int = 48
    """Iterations for which a rank may not run a plan's order, or a trial may be disturbed, before it is given up: plans
    begin late where links are slow, and blocks at full speed run in 1F1B."""
    slow_order_ratio: float = 0.02
    """Lateness of a single iteration, as a share of the target, beyond which its split backwards are looked at."""
    slow_split_ratio: float = 0.08
    """Excess of split backwards of one rank over their usual time that ends the order at once."""

    new_latency_ratio: float = 0.25
    """Relative change of a switch latency that needs a new plan: lead times are then too short or waste energy."""
    min_iterations_to_evaluate: int = 4
    """Iterations of a plan, or of a trial of split backwards, before what they measure counts."""
    tighten_above_ratio: float = 0.003
    """Lateness that is corrected, as a share of the target; see `settled_patience`."""
    loosen_below_ratio: float = 0.004
    """Earliness that is corrected, as a share of the target; see `settled_patience`."""
    settled_patience: int = 2
    """Factor on both thresholds once a plan has been corrected: the rest is drift and noise, and following them costs
    more than it saves."""
    min_iterations_to_keep_budget: int = 16
    """Iterations of a plan from which on lateness counts that is too small to be seen in a few."""
    late_after_long_ratio: float = 0.0005
    """Such lateness, as a share of the target, beyond its error: a permitted slowdown is kept. Calls that stop GPUs may
    make a plan as late as that."""
    certainty_of_budget_sigma: float = 2.0
    """Distance of such lateness from none, in its standard errors, before it counts."""


TUNING = Tuning()
