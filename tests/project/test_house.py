"""The size of the code stays within its limits."""

import ast

import pytest

from tools.quality.house import Figure, figures, num_constants


@pytest.mark.parametrize("figure", [one for one in figures() if one.limit is not None], ids=lambda figure: figure.name)
def test_the_size_of_the_code_is_within_its_limits(figure: Figure) -> None:
    assert figure.is_within_limit, (figure.value, figure.limit, figure.details)


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
