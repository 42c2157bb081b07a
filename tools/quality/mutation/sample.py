"""A seeded sample of mutants and the confidence interval of its score."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small wrong change."""

    path: str
    kind: str
    operator: str
    occurrence: int
    """Index among the positions that cosmic-ray's operator finds in the file."""
    start: tuple[int, int]
    end: tuple[int, int]
    first_line: int
    """First line of the statement; 0 if it runs on import."""
    last_line: int


def shuffled_places(mutants: Sequence[Mutant], seed: int) -> Iterator[Mutant]:
    """Yield one random mutant per place, in random order.

    A place is an expression and a kind of change. Otherwise one comparison, which can be changed in six ways, would
    count six times.
    """
    rng = random.Random(seed)  # noqa: S311  a sample, not a secret
    of_place: dict[tuple[str, tuple[int, int], tuple[int, int], str], list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        of_place[mutant.path, mutant.start, mutant.end, mutant.kind].append(mutant)
    places = sorted(of_place)
    rng.shuffle(places)
    for place in places:
        yield rng.choice(sorted(of_place[place], key=lambda mutant: (mutant.operator, mutant.occurrence)))


def interval(num_detected: int, num_tested: int) -> tuple[float, float]:
    """Return the Wilson 95 % confidence interval of a proportion; (0, 1) for an empty sample."""
    if num_tested == 0:
        return 0.0, 1.0
    share, z2 = num_detected / num_tested, Z_95**2
    centre = share + z2 / (2 * num_tested)
    spread = Z_95 * math.sqrt(share * (1 - share) / num_tested + z2 / (4 * num_tested**2))
    whole = 1 + z2 / num_tested
    return (centre - spread) / whole, (centre + spread) / whole
