"""EnvPipe's planner and policy: published rules, known figures, and protection against its known flaws."""

from dataclasses import replace

import pytest

from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import (
    InstructionClass,
    InstructionKind,
    dependency_graph,
    gpipe,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile, instruction_profile
from gpuenergyd.core.policy_api.policy import JobView, OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.testing import SimulatedJob, job_view
from gpuenergyd.errors import TargetError, UsageError
from gpuenergyd_other_policies.envelope import Envelope, plan_offline
from gpuenergyd_other_policies.envpipe import (
    EnvelopeMode,
    critical_walk,
    envelope_flags,
    extra_warm_up,
    latest_on_path,
    next_clock,
    plan_envelope,
    profiled_clocks,
    slowest_on_path,
    valleys,
)
from gpuenergyd_plan.profiles.profile_files import ProfileTable, read_pipeline_file
from gpuenergyd_policies.planning.offline_requests import unproven_plan
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks, rank_orders
from tests.support.measured_tables import DATA
from tests.support.thorough import thorough

F, B = InstructionKind.F, InstructionKind.B
CLOCKS_MHZ = tuple(range(1410, 540, -30))
PROFILES = DATA / "profiles"


def _time_s(rank: int, kind: InstructionKind, mhz: int) -> float:
    return (1.0, 0.9, 1.0, 1.1)[rank] * (1.0 if kind is F else 2.0) * 0.01 * (0.3 + 0.7 * 1410 / mhz)


def _power_w(mhz: int) -> float:
    return 120.0 + 280.0 * (mhz / 1410) ** 3


PROFILE = PipelineProfile(
    {
        InstructionClass(rank, kind): instruction_profile(
            (ClockOption(mhz, t := _time_s(rank, kind, mhz), t * _power_w(mhz)) for mhz in CLOCKS_MHZ), where="test"
        )
        for rank in range(4)
        for kind in (F, B)
    },
    blocking_power_w=80.0,
)
SCHEDULE = one_forward_one_backward(4, 8)
GRAPH = dependency_graph(SCHEDULE)
VALLEYS_MHZ = valleys(GRAPH, PROFILE, profiled_clocks(PROFILE))


@pytest.mark.parametrize("mode", [EnvelopeMode.BALANCED, EnvelopeMode.GREEDY])
def test_reconfiguration_saves_energy_in_full_speeds_time_and_only_raises_clocks(mode: EnvelopeMode) -> None:
    full_speed = baseline(GRAPH, PROFILE)
    envelope = plan_envelope(GRAPH, PROFILE, VALLEYS_MHZ, mode=EnvelopeMode.ENVELOPE)

    plan = plan_envelope(GRAPH, PROFILE, VALLEYS_MHZ, mode=mode)

    assert plan.evaluation.iteration_time_s <= full_speed.iteration_time_s * (1 + 1e-12)
    assert plan.evaluation.energy_j < full_speed.energy_j
    assert all(a >= b for a, b in zip(plan.evaluation.sm_clocks_mhz, envelope.evaluation.sm_clocks_mhz, strict=True))
    assert plan.num_steps > 0


def test_reconfiguration_also_ends_with_the_heaviest_stage_in_the_middle() -> None:
    slow_middle = PipelineProfile(
        {
            key: InstructionProfile(
                tuple(
                    ClockOption(o.sm_clock_mhz, o.time_s * (1.5 if key.pp_rank == 1 else 1.0), o.energy_j)
                    for o in profile.options
                )
            )
            for key, profile in PROFILE.classes.items()
        },
        80.0,
    )

    plan = plan_envelope(GRAPH, slow_middle, VALLEYS_MHZ)

    assert plan.evaluation.iteration_time_s <= baseline(GRAPH, slow_middle).iteration_time_s * (1 + 1e-12)


def test_extra_warm_up_fits_memory_and_never_deadlocks() -> None:
    for num_microbatches in (1, 4, 6, 8, 20):
        for caps in (None, [1, 1, 1, 1], [0, 5, 5, 5]):
            extra = extra_warm_up(PROFILE, VALLEYS_MHZ, num_microbatches=num_microbatches, caps=caps)

            dependency_graph(one_forward_one_backward(4, num_microbatches, extra))
            assert caps is None or all(k <= cap for k, cap in zip(extra, caps, strict=True))


REQUEST = OfflineRequest("test", PROFILE, SCHEDULE, GRAPH, PerformanceTarget())


def test_offline_envelope_plans_with_its_own_extra_microbatches() -> None:
    plain = plan_offline(REQUEST)
    extra = plan_offline(replace(REQUEST, extra_inflight="auto"))
    capped = plan_offline(replace(REQUEST, extra_inflight=1, options={"memory_limit_microbatches": "4"}))

    assert extra.energy_j < plain.energy_j < plain.baseline_energy_j
    assert extra.extra_inflight == extra_warm_up(PROFILE, VALLEYS_MHZ, num_microbatches=8)
    assert capped.extra_inflight[0] == 0
    assert max(capped.extra_inflight) <= 1


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (
            replace(REQUEST, options={"mode": "fast"}),
            UsageError,
            "unknown mode 'fast'; valid: uniform, envelope, balanced, greedy",
        ),
        (replace(REQUEST, options={"step_mhz": "-5"}), UsageError, "step_mhz '-5' must be"),
        (replace(REQUEST, options={"mode": "uniform"}), TargetError, "in mode uniform takes"),
        (
            replace(REQUEST, schedule=gpipe(4, 8), graph=dependency_graph(gpipe(4, 8)), extra_inflight="auto"),
            UsageError,
            "need schedule 1f1b",
        ),
    ],
)
def test_the_offline_envelope_policy_rejects_unsupported_requests(
    request_: OfflineRequest, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_offline(request_)


def _run(num_iterations: int, *, late_ratio: float = 0.0) -> SimulatedJob:
    """Return a job that has followed the policy, with tuned iterations longer than planned."""
    job = SimulatedJob(SCHEDULE, PROFILE)
    for _ in range(num_iterations):
        plan = Envelope().next_plan(job.view())
        job.run(plan, delay_ratio=late_ratio if plan.purpose is PlanPurpose.TUNED else 0.0)
    return job


def test_policy_profiles_each_clock_then_saves_energy_at_full_speeds_time() -> None:
    job = _run(40)

    purposes = [plan.purpose for plan in job.plans[1:]]
    assert purposes == [PlanPurpose.TRIAL] * (len(purposes) - 1) + [PlanPurpose.TUNED]
    last = job.observations[-1]
    assert last.iteration_time_s <= job.baseline.iteration_time_s * 1.001
    assert last.energy_j is not None
    assert job.baseline.energy_j is not None
    assert last.energy_j < 0.98 * job.baseline.energy_j


def test_clocks_rise_while_the_job_is_over_target() -> None:
    job = _run(60, late_ratio=0.02)

    tuned = [
        [mhz or 0 for rank in plan.ranks for mhz in rank.sm_clocks_mhz]
        for plan in job.plans
        if plan.purpose is PlanPurpose.TUNED
    ]
    assert len(tuned) > 1
    assert sum(tuned[-1]) > sum(tuned[0])


def _gpt3(name: str, blocking_power_w: float) -> PipelineProfile:
    table = read_pipeline_file(PROFILES / name)
    assert isinstance(table, ProfileTable)
    return PipelineProfile(table.classes, blocking_power_w)


@pytest.mark.skipif(not PROFILES.is_dir(), reason="the shared tables are not on this machine")
@pytest.mark.parametrize(
    ("name", "blocking_power_w", "saving_percent"),
    [("gpt3-175b_a100-sxm.csv", 83.64, 12.98), *thorough(("gpt3-175b_a40.csv", 70.38, 8.81))],
)
def test_published_emulation_of_envpipe_is_met_on_96_microbatches(
    name: str, blocking_power_w: float, saving_percent: float
) -> None:
    profile = _gpt3(name, blocking_power_w)
    graph = dependency_graph(one_forward_one_backward(8, 96))
    full_speed = baseline(graph, profile)

    plan = plan_envelope(graph, profile, valleys(graph, profile, profiled_clocks(profile, 15)), step_mhz=15)

    assert plan.evaluation.iteration_time_s <= full_speed.iteration_time_s * (1 + 1e-12)
    assert 100 * (1 - plan.evaluation.energy_j / full_speed.energy_j) == pytest.approx(saving_percent, abs=0.05)


@pytest.mark.thorough
@pytest.mark.skipif(not PROFILES.is_dir(), reason="the shared tables are not on this machine")
def test_known_figures_on_gpt3_are_reproduced() -> None:
    profile = _gpt3("gpt3-175b_a100-sxm.csv", 83.64)
    graph = dependency_graph(one_forward_one_backward(8, 32))
    full_speed = baseline(graph, profile)
    valleys_mhz = valleys(graph, profile, profiled_clocks(profile))
    extra = extra_warm_up(profile, valleys_mhz, num_microbatches=32)
    roomy = dependency_graph(one_forward_one_backward(8, 32, extra))

    figures = {
        name: plan_envelope(g, profile, valleys_mhz, mode=mode)
        for name, g, mode in (
            ("balanced", graph, EnvelopeMode.BALANCED),
            ("greedy", graph, EnvelopeMode.GREEDY),
            ("balanced + extra", roomy, EnvelopeMode.BALANCED),
        )
    }

    assert extra == (10, 8, 7, 5, 4, 2, 1, 0)
    savings = {name: 100 * (1 - p.evaluation.energy_j / full_speed.energy_j) for name, p in figures.items()}
    assert savings == pytest.approx({"balanced": 13.36, "greedy": 9.88, "balanced + extra": 19.59}, abs=0.01)
    assert [p.num_steps for p in figures.values()] == [43, 1153, 32]


def observed_at_full_speed() -> JobView:
    """Return the view of a job without measurements whose GPUs have three clocks."""
    return job_view(gpipe(2, 2), supported_sm_clocks_mhz=(1410, 1400, 1000), baseline_energy_j=None)


def test_policy_measures_other_clocks_where_none_is_a_multiple_of_90_mhz() -> None:
    view = observed_at_full_speed()
    tried: list[int | None] = []
    for _ in range(3):
        plan = Envelope().next_plan(view)
        if plan.purpose is not PlanPurpose.TRIAL:
            break
        tried.append(plan.ranks[0].sm_clocks_mhz[0])
        seen = tuple(
            IterationObservation(k, plan.plan_id, 1.0, (), tuple(RankEnergy(r, 1.0, None, ()) for r in range(2)))
            for k in range(2)
        )
        view = replace(view, issued_plans=(*view.issued_plans, plan), observations=(*view.observations, *seen))

    assert tried == [1410, 1400, 1000]
    assert "no clock of least energy is known" in Envelope().next_plan(view).reason


def test_policy_leaves_gpus_alone_that_share_no_clock() -> None:
    view = observed_at_full_speed()
    other = replace(view.gpus[1], supported_sm_clocks_mhz=(900,))

    assert "no clock in common" in Envelope().next_plan(replace(view, gpus=(view.gpus[0], other))).reason


def _profile(num_ranks: int, forward: tuple[ClockOption, ...], backward: tuple[ClockOption, ...]) -> PipelineProfile:
    tables = {F: InstructionProfile(forward), B: InstructionProfile(backward)}
    return PipelineProfile({InstructionClass(r, k): tables[k] for r in range(num_ranks) for k in (F, B)}, 10.0)


FORWARD = (ClockOption(900, 1.0, 90.0), ClockOption(720, 1.2, 84.0), ClockOption(540, 1.7, 102.0))
BACKWARD = (ClockOption(900, 2.0, 180.0), ClockOption(720, 2.4, 168.0), ClockOption(540, 3.4, 204.0))


def test_profiled_clocks_are_common_multiples_and_the_highest_common_clock() -> None:
    forward = tuple(ClockOption(mhz, 1.0, 1.0) for mhz in (1000, 950, 900, 720, 600))
    backward = tuple(ClockOption(mhz, 1.0, 1.0) for mhz in (950, 900, 810, 720, 600))
    profile = _profile(1, forward, backward)

    assert profiled_clocks(profile) == [720, 900, 950]
    assert profiled_clocks(profile, 300) == [600, 900, 950]
    assert profiled_clocks(_profile(1, forward[:1], backward[:1])) == []


def test_a_valley_is_the_clock_of_least_energy_with_waiting_and_the_lower_one_of_equals() -> None:
    """One microbatch on one rank: at 900 MHz 270 J, at 720 MHz 252 J, at 540 MHz 306 J, all of the time running."""
    graph = dependency_graph(gpipe(1, 1))
    flat = tuple(ClockOption(mhz, 1.0, 50.0) for mhz in (900, 720))

    assert valleys(graph, _profile(1, FORWARD, BACKWARD), [540, 720, 900]) == (720,)
    assert valleys(graph, _profile(1, FORWARD, BACKWARD), [540, 900]) == (900,)
    assert valleys(graph, _profile(1, flat, flat), [900, 720]) == (720,)


def test_waiting_ranks_are_charged_blocking_power() -> None:
    """Rank 1 gets cheaper by slowness, rank 0 only waits longer for it: 2 J saved per rank and 12 J waited."""
    tables = {
        InstructionClass(r, k): InstructionProfile((ClockOption(900, 1.0, 90.0), ClockOption(720, t, j)))
        for r, t, j in ((0, 1.0, 86.0), (1, 2.0, 70.0))
        for k in (F, B)
    }
    graph = dependency_graph(gpipe(2, 1))

    assert valleys(graph, PipelineProfile(tables, 10.0), [720, 900]) == (900, 720)
    assert valleys(graph, PipelineProfile(tables, 3.0), [720, 900]) == (720, 720)


@pytest.mark.parametrize(
    ("num_microbatches", "caps", "extra"),
    [
        (20, None, (6, 4, 2, 0)),  # two forwards fit into each backward behind
        (8, None, (4, 4, 2, 0)),  # rank 0 runs four ahead anyway
        (7, None, (3, 4, 2, 0)),  # all are in flight on rank 0: it may run ahead less
        (4, None, (0, 1, 2, 0)),
        (1, None, (0, 0, 0, 0)),
        (20, (2, 9, 9, 9), (2, 2, 2, 0)),  # else a rank runs ahead no further than the one before it
        (20, (9, 1, 9, 9), (6, 1, 1, 0)),
    ],
)
def test_extra_warm_up_is_the_number_of_forwards_that_fit_into_later_backwards(
    num_microbatches: int, caps: tuple[int, ...] | None, extra: tuple[int, ...]
) -> None:
    profile = _profile(4, FORWARD[:1], BACKWARD)

    assert extra_warm_up(profile, [900] * 4, num_microbatches=num_microbatches, caps=caps) == extra


def test_forwards_of_extra_warm_up_run_at_their_valley_and_backwards_at_full_speed() -> None:
    profile = _profile(3, FORWARD, BACKWARD)

    assert extra_warm_up(profile, [900] * 3, num_microbatches=20) == (4, 2, 0)
    assert extra_warm_up(profile, [540] * 3, num_microbatches=20) == (2, 1, 0)  # 2 s hold one forward of 1.7 s


def test_the_envelope_is_the_last_rank_and_the_first_forward_and_last_backward_of_the_others() -> None:
    graph = dependency_graph(one_forward_one_backward(3, 4))

    inside = {str(i) for i, is_on in zip(graph.instructions, envelope_flags(graph), strict=True) if not is_on}

    assert inside == {f"F{k}@{r}" for k in (1, 2, 3) for r in (0, 1)} | {f"B{k}@{r}" for k in (0, 1, 2) for r in (0, 1)}


def test_balanced_raises_all_of_the_slowest_on_the_path_and_greedy_the_latest_below_full_speed() -> None:
    clocks, top = [500, 600, 500, 900, 400], [900, 900, 900, 900, 900]

    assert slowest_on_path([3, 2, 1, 0], clocks, top) == [2, 0]
    assert slowest_on_path([3, 1], clocks, top) == [1]
    assert latest_on_path([3, 1, 2, 0], clocks, top) == [1]


def test_the_critical_path_stays_on_a_rank_that_did_not_wait() -> None:
    """Two ranks, two microbatches; forwards take 1 s and backwards 2: rank 0 waits for rank 1 before its backwards."""
    graph = dependency_graph(one_forward_one_backward(2, 2))
    durations_s = [2.0 if i.kind is B else 1.0 for i in graph.instructions]

    path = [str(graph.instructions[v]) for v in critical_walk(graph, durations_s)]

    assert path == ["B1@0", "B1@1", "F1@1", "B0@1", "F0@1", "F0@0"]


def test_the_next_clock_is_the_lowest_measured_one_not_below_or_the_highest() -> None:
    measured_mhz = [540, 720, 900]

    assert [next_clock(measured_mhz, mhz) for mhz in (500, 540, 541, 720, 721, 900, 901)] == [
        *(540, 540, 720, 720, 900, 900, 900)
    ]


def test_modes_without_reconfiguration_take_no_steps() -> None:
    graph, profile = dependency_graph(one_forward_one_backward(2, 3)), _profile(2, FORWARD, BACKWARD)

    uniform, envelope = (
        plan_envelope(graph, profile, [720, 540], mode=mode) for mode in (EnvelopeMode.UNIFORM, EnvelopeMode.ENVELOPE)
    )

    assert uniform.num_steps == envelope.num_steps == 0
    assert uniform.evaluation.sm_clocks_mhz == tuple(720 if i.pp_rank == 0 else 540 for i in graph.instructions)
    on_envelope = envelope_flags(graph)
    assert envelope.evaluation.sm_clocks_mhz == tuple(900 if is_on else 720 for is_on in on_envelope)


def test_the_energy_of_given_clocks_includes_waiting() -> None:
    """F0 1 s and B0 2.4 s on one rank, then two ranks: each waits while the other runs."""
    profile = _profile(2, FORWARD, BACKWARD)
    graph = dependency_graph(gpipe(2, 1))
    clocks = [900 if i.kind is F else 720 for i in graph.instructions]

    evaluated = evaluate_clocks(graph, profile, clocks)

    assert evaluated.iteration_time_s == pytest.approx(2 * 1.0 + 2 * 2.4)
    assert evaluated.energy_j == pytest.approx(2 * 90.0 + 2 * 168.0 + 10.0 * evaluated.iteration_time_s)
    assert baseline(graph, profile).sm_clocks_mhz == (900,) * 4
    assert [[str(i) for i in order] for order in rank_orders(graph)] == [["F0@0", "B0@0"], ["F0@1", "B0@1"]]
    request = OfflineRequest("test", profile, None, graph, PerformanceTarget())
    plan = unproven_plan(request, evaluated, solve_cpu_s=1.5)
    assert (plan.baseline_time_s, plan.iteration_time_s) == pytest.approx((6.0, 6.8))
    assert (plan.baseline_energy_j, plan.energy_j) == pytest.approx((600.0, evaluated.energy_j))
    assert (plan.solve_cpu_s, plan.lower_bound_j) == (1.5, None)
    assert list(plan.sm_clocks_mhz.values()) == clocks
