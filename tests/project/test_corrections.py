"""The documented table of corrections names every condition and action of the policy, and no other."""

from docs.site.corrections import ACTIONS, CONDITIONS, corrections_in_code
from gpuenergyd_policies.bubble_aware.correction import CORRECTIONS


def test_every_condition_and_action_of_the_policy_is_described_and_no_other() -> None:
    found = corrections_in_code()

    assert [condition for condition, _ in found] == list(CONDITIONS), "describe them in docs/site/corrections.py"
    assert {action for _, action in found} == set(ACTIONS)
    assert [action for _, action in found] == [act.__name__ for _, act in CORRECTIONS]
