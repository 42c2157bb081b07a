"""Snapshots: fresh at low request rates, reused within their lifetime under load."""

from dataclasses import dataclass, field

from gpuenergyd.daemon.api.snapshots import BURST_S, CPU_SHARE, LIFETIME_S, Snapshot, SnapshotText


@dataclass
class Counted:
    """A snapshot whose value is its number and whose build takes a given CPU time."""

    cost_s: float
    now_s: float = 0.0
    spent_s: float = 0.0
    built_at_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshot = Snapshot(self._build, monotonic_s=lambda: self.now_s, cpu_s=lambda: self.spent_s)

    def _build(self) -> int:
        self.spent_s += self.cost_s
        self.built_at_s.append(self.now_s)
        return len(self.built_at_s) - 1


def test_infrequent_requests_get_a_fresh_response() -> None:
    counted = Counted(cost_s=0.002)

    for _ in range(100):
        counted.now_s += 1.1 * counted.cost_s / CPU_SHARE
        counted.snapshot.value()

    assert len(counted.built_at_s) == 100


def test_a_cheap_response_is_fresh_at_hundreds_of_requests_per_second() -> None:
    counted = Counted(cost_s=0.0001)

    for _ in range(1000):
        counted.now_s += 0.0025
        counted.snapshot.value()

    assert len(counted.built_at_s) == 1000


def test_a_flood_reuses_recent_responses_within_the_cpu_share() -> None:
    counted = Counted(cost_s=0.002)

    for _ in range(100_000):
        counted.now_s += 0.0001
        answer = counted.snapshot.value()
        assert counted.now_s - counted.built_at_s[answer] < LIFETIME_S

    assert counted.spent_s <= BURST_S + CPU_SHARE * counted.now_s + counted.cost_s


def test_an_expensive_response_is_never_older_than_its_lifetime() -> None:
    counted = Counted(cost_s=0.2)

    for _ in range(10_000):
        counted.now_s += 0.001
        answer = counted.snapshot.value()
        assert counted.now_s - counted.built_at_s[answer] < LIFETIME_S

    per_s = max(CPU_SHARE / counted.cost_s, 1 / LIFETIME_S)
    assert len(counted.built_at_s) <= 1 + BURST_S / counted.cost_s + counted.now_s * per_s


def test_a_change_is_visible_at_the_next_request_at_any_rate() -> None:
    counted = Counted(cost_s=0.01)
    for _ in range(100):
        counted.snapshot.value()
    num_built = len(counted.built_at_s)

    counted.snapshot.invalidate()

    assert counted.snapshot.value() == num_built
    assert counted.snapshot.value() == num_built


def test_encoded_text_is_as_fresh_as_its_snapshot_and_its_cost_counts() -> None:
    counted = Counted(cost_s=0.001)
    num_written = 0

    def write(answer: int) -> bytes:
        nonlocal num_written
        counted.spent_s += 0.003
        num_written += 1
        return str(answer).encode()

    text = SnapshotText(counted.snapshot, write)
    for _ in range(100_000):
        counted.now_s += 0.0001
        assert counted.now_s - counted.built_at_s[int(text.value())] < LIFETIME_S

    assert num_written == len(counted.built_at_s)
    assert counted.spent_s <= BURST_S + counted.now_s * max(CPU_SHARE, 0.004 / LIFETIME_S) + 0.004


def test_a_change_is_visible_in_the_encoded_text() -> None:
    counted = Counted(cost_s=1.0)
    text = SnapshotText(counted.snapshot, lambda answer: str(answer).encode())
    before = text.value()

    counted.snapshot.invalidate()

    assert text.value() != before
