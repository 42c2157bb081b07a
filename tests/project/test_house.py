"""The size of the code stays within its limits."""

import ast

import pytest

from tools.quality.house import figures, num_constants


def test_the_size_of_the_code_is_within_its_limits() -> None:
    assert [figure for figure in figures() if not figure.is_within_limit] == []


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("LIMIT = 0.75", 1),
        ("BOUNDS = (4, 7)", 1),
        ("@dataclass\nclass Tuning:\n    share: float = 0.3\n    name: str = ''", 1),
        ("def late(x):\n    return x > 1.7 * 12", 2),
        ("def plain(x):\n    return x[0] + 2 * 1000 + 0.5", 0),
    ],
)
def test_a_number_that_somebody_chose_counts_once(source: str, number: int) -> None:
    assert num_constants(ast.parse(source)) == number
