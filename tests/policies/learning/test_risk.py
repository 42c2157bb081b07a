"""Plans within a limit of risk: the less is known, the more cautious; what was measured makes them bolder."""

from collections.abc import Sequence

import numpy as np

from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward
from gpuenergyd_policies.learning.risk import CAUTION_SIGMAS, MAX_LATE_RATIO, Caution, caution_within_risk
from gpuenergyd_policies.planning.plan_evaluation import baseline
from tests.policies.learning.test_job_curves import fitted

GRAPH = dependency_graph(one_forward_one_backward(3, 6))


def deadline_s() -> float:
    return baseline(GRAPH, fitted(0.8, 1.5, []).profile()).iteration_time_s


def test_a_caution_within_risk_is_late_in_few_draws_and_gets_bolder_with_evidence() -> None:
    unknown = caution_within_risk(GRAPH, fitted(0.8, 1.5, []), deadline_s=deadline_s(), random=np.random.default_rng(1))
    known = caution_within_risk(
        GRAPH, fitted(0.8, 1.5, [1320, 1185, 1050, 915]), deadline_s=deadline_s(), random=np.random.default_rng(1)
    )

    assert unknown.late_ratio <= MAX_LATE_RATIO
    assert known.late_ratio <= MAX_LATE_RATIO
    assert known.sigmas <= unknown.sigmas


def test_the_caution_lies_between_one_that_is_too_little_and_one_that_is_enough() -> None:
    belief = fitted(0.8, 1.5, [1320, 1185, 1050, 915])

    def found_with(caution_sigmas: Sequence[float]) -> Caution:
        random = np.random.default_rng(1)
        return caution_within_risk(
            GRAPH, belief, deadline_s=deadline_s(), random=random, caution_sigmas=caution_sigmas, max_late_ratio=0.001
        )

    found = found_with(CAUTION_SIGMAS)
    enough = next(sigmas for sigmas in CAUTION_SIGMAS if found_with([sigmas]).late_ratio <= 0.001)

    assert found.late_ratio <= 0.001
    assert enough > CAUTION_SIGMAS[0]
    assert CAUTION_SIGMAS[CAUTION_SIGMAS.index(enough) - 1] < found.sigmas < enough


def test_the_last_caution_is_taken_if_none_is_within_the_limit() -> None:
    found = caution_within_risk(
        GRAPH, fitted(0.8, 1.5, []), deadline_s=0.9 * deadline_s(), random=np.random.default_rng(1)
    )

    assert found.sigmas == CAUTION_SIGMAS[-1]
    assert found.late_ratio > MAX_LATE_RATIO
