"""A proof's claim and the rules of its evaluation, which are registered before the first block that counts."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd_prove.errors import ProofError
from gpuenergyd_prove.proof.plain_values import read_as

FORMAT = 1
BASELINE_ARM = "full-speed"
"""Name of the arm with which the others are compared."""
CONFIDENCE = 0.999
"""Confidence of every interval. Of 2,000 proofs of policies that save nothing, one is expected to conclude `saves`."""
LEAST_ROUNDS = 8
_MAX_ROUNDS, _MAX_ITERATIONS, _MAX_ARMS = 10_000, 1_000_000, 16
"""Limits of a proof to check, so that checking does not take longer than running it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run the training: a name and the policy that plans its clocks."""

    name: str
    policy: str


@dataclass(frozen=True, slots=True)
class ExclusionRules:
    """Which iterations are left out; the same for every arm, and applied to the raw data again by every check."""

    settling_iterations: int = 2
    """Number of a block's first iterations that are left out, because the clocks have just changed."""
    outlier_ratio: float = 0.25
    """Iterations longer than their block's median by more than this ratio are treated as disturbed from outside."""
    max_excluded_ratio: float = 0.25
    """A block with a larger share of disturbed iterations is void, and so is its round."""
    min_measured_ratio: float = 0.5
    """A block with a smaller share of iterations with measured energy is void; slow counters do not cover every one."""
    max_void_ratio: float = 0.2
    """Largest share of void rounds with which there is a verdict."""
    repeats_void_rounds: bool = True
    """Whether void rounds are repeated at the end, to reach the registered number of sound rounds."""


@dataclass(frozen=True, slots=True)
class MeterFacts:
    """An external meter: its kind, what it covers, and its error according to its data sheet."""

    kind: str
    covers: str
    """`node`, `node-and-network`, or `components` such as CPU packages and memory."""
    accuracy_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class ProofDesign:
    """Numbers from the power calculation; ratios are relative to full speed."""

    num_rounds: int
    block_iterations: int
    smallest_saving_ratio: float
    """The smallest saving that the proof distinguishes from zero with 90 % probability."""
    round_sigma_ratio: float
    """Spread of the saving between rounds, as the pilot's upper 80 % bound."""
    pilot_rounds: int


@dataclass(frozen=True, slots=True)
class Registration:
    """Everything about a proof that is fixed before its first block."""

    registered_at_s: float
    """UTC, in seconds since 1970."""
    public_key: str
    """Hexadecimal Ed25519 public key; the private key is lost when the proof ends."""
    hypothesis: str
    command: tuple[str, ...]
    arms: tuple[Arm, ...]
    """Full speed first, then the arm that the claim is about; further arms are for comparison."""
    design: ProofDesign
    rules: ExclusionRules
    order_seed: int
    max_slowdown_ratio: float
    """Largest slowdown of iterations according to the claim."""
    meters: tuple[MeterFacts, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    pilot_sha256: str = ""
    is_simulated: bool = False

    @property
    def claimed(self) -> Arm:
        return self.arms[1]

    @property
    def most_rounds(self) -> int:
        """How many rounds may run, including repetitions of void ones."""
        num_spare = int(self.rules.max_void_ratio * self.design.num_rounds) if self.rules.repeats_void_rounds else 0
        return self.design.num_rounds + num_spare

    def order(self) -> tuple[str, ...]:
        """Return the arm of each block that may run, round by round; the last rounds only replace void ones."""
        return block_order([arm.name for arm in self.arms], self.most_rounds, self.order_seed)

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self), "versions": dict(self.versions)}


def hypothesis_text(arm: Arm, max_slowdown_ratio: float) -> str:
    return (
        f"arm {arm.name!r} (policy {arm.policy}) uses less GPU energy per iteration than arm {BASELINE_ARM!r}, and its"
        f" iterations take at most {100 * max_slowdown_ratio:.1f} % longer, each at {100 * CONFIDENCE:.1f} % confidence"
    )


def block_order(names: Sequence[str], num_rounds: int, seed: int) -> tuple[str, ...]:
    """Return the arm of each block: rounds in random order, every second round the reverse of the previous one.

    So each arm has the same mean position in each pair of rounds, which cancels steady drift.
    """
    draw = random.Random(seed)  # noqa: S311  reproducible, not secret
    order: list[str] = []
    shuffled = list(names)
    for number in range(num_rounds):
        if number % 2:
            shuffled.reverse()
        else:
            draw.shuffle(shuffled)
        order += shuffled
    return tuple(order)


def registration_of(values: Mapping[str, Any]) -> Registration:
    """Return a registration from plain values.

    Raises:
        ProofError: a field is missing or unknown, or a value contradicts another.
    """
    if values.get("format") != FORMAT:
        raise ProofError(f"registration has format {values.get('format')!r}; this version reads {FORMAT}")
    fields = {name: value for name, value in values.items() if name != "format"}
    versions, rules = fields.get("versions", {}), fields.get("rules")
    if isinstance(versions, Mapping):
        fields["versions"] = [[name, versions[name]] for name in sorted(versions)]
    if isinstance(rules, Mapping):
        fields["rules"] = {"repeats_void_rounds": False, **rules}
    found = read_as(Registration, fields, "registration")
    names = [arm.name for arm in found.arms]
    if len(names) < 2 or len(set(names)) < len(names) or names[0] != BASELINE_ARM:
        raise ProofError(
            f"registration has arms {', '.join(names) or 'none'}; {BASELINE_ARM!r} must be the first of several"
        )
    if len(names) > _MAX_ARMS:
        raise ProofError(f"registration has {count_text(len(names), 'arm')}; at most {_MAX_ARMS} can be checked")
    own, rules_read = found.design, found.rules
    for name, number, least, most in (
        ("rounds", own.num_rounds, LEAST_ROUNDS, _MAX_ROUNDS),
        ("pilot rounds", own.pilot_rounds, 0, _MAX_ROUNDS),
        ("iterations per block", own.block_iterations, 1, _MAX_ITERATIONS),
        ("settling iterations", rules_read.settling_iterations, 0, _MAX_ITERATIONS),
    ):
        if not least <= number <= most:
            raise ProofError(f"registration has {number} {name}; from {least} to {most} can be checked")
    for name in ("max_excluded_ratio", "min_measured_ratio", "max_void_ratio"):
        if not 0 <= getattr(rules_read, name) <= 1:
            raise ProofError(f"registration has {name} {getattr(rules_read, name)}; a ratio from 0 to 1 is valid")
    return found
