"""The table of what the default policy does with a plan in force, from its ordered conditions and actions."""

import ast
import inspect

from docs.site.markdown import table
from gpuenergyd_policies.bubble_aware import correction

CONDITIONS = {
    "has_new_target": "the target has moved: another permitted slowdown, a straggler, a power budget",
    "is_learning and is_in_force and is_too_new_to_learn": (
        "it is in force as one of the first six, with fewer than three iterations measured, unless it is 1 % late"
    ),
    "is_learning and is_in_force": "it is in force as one of the first six",
    "is_too_new": "it is in force, with fewer than four iterations measured",
    "is_unmeasured": "the job is back at full speed, and no iteration of the plan was measured",
    "is_as_planned": "it is in force, and in time with clocks that change as fast as planned",
    "has_new_latency": "clocks change clearly faster or slower than planned",
    "must_change": "it is late, or the job is back at full speed",
    "is_fast": "it is early",
}
"""What each condition means, in terms of the newest plan; an iteration counts as measured from the plan's second on."""
ACTIONS = {
    "_keep": "keep it",
    "_replan_for_target": "plan for the new target",
    "_learn": "plan from the belief that its iterations have updated",
    "_resume": "plan again with the same caution",
    "_replan_for_latency": "plan again with new lead times and the same caution",
    "_adjust_caution": "plan with more caution, in proportion; beyond 4 %, a passing disturbance, with hardly more",
    "_loosen_if_beneficial": "plan with less caution, if that saves at least 0.1 %",
}


def corrections() -> str:
    """Return the table of conditions and what follows, in the order in which they are tried."""
    rows = [
        (f"{number}", CONDITIONS[condition], ACTIONS[action])
        for number, (condition, action) in enumerate(corrections_in_code(), start=1)
    ]
    return table(("", "if", "then"), rows)


def corrections_in_code() -> list[tuple[str, str]]:
    """Return the condition, as it is written, and the name of the action of each entry of `CORRECTIONS`."""
    tree = ast.parse(inspect.getsource(correction))
    annotated = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    assigned = next(node.value for node in annotated if ast.unparse(node.target) == "CORRECTIONS")
    assert isinstance(assigned, ast.Tuple)
    found = []
    for entry in assigned.elts:
        assert isinstance(entry, ast.Tuple)
        condition, action = entry.elts
        assert isinstance(condition, ast.Lambda)
        found.append((ast.unparse(condition.body).replace("outcome.", ""), ast.unparse(action)))
    return found
