"""Costly answers under a flood: fresh for those who ask seldom, shared within a moment by those who do not stop."""

from gpuenergyd.daemon.snapshots import BUILDS_PER_S, BURST, LIFETIME_S, Snapshot


def counted(now: list[float]) -> tuple[Snapshot[int], list[int]]:
    built: list[int] = []

    def build() -> int:
        built.append(len(built))
        return built[-1]

    return Snapshot(build, monotonic_s=lambda: now[0]), built


def test_who_asks_now_and_then_gets_a_fresh_answer_each_time() -> None:
    now = [0.0]
    snapshot, built = counted(now)

    for _ in range(100):
        now[0] += 1.1 / BUILDS_PER_S
        snapshot.value()

    assert len(built) == 100


def test_a_flood_shares_answers_no_older_than_a_moment() -> None:
    now = [0.0]
    snapshot, built = counted(now)
    made_at: dict[int, float] = {}

    for _ in range(10_000):
        now[0] += 0.0001
        answer = snapshot.value()
        made_at.setdefault(answer, now[0])
        assert now[0] - made_at[answer] < LIFETIME_S

    assert len(built) <= BURST + BUILDS_PER_S * now[0] + 1


def test_what_was_changed_is_read_back_at_any_rate() -> None:
    now = [0.0]
    snapshot, built = counted(now)
    for _ in range(100):
        snapshot.value()
    num_built = len(built)

    snapshot.forget()

    assert snapshot.value() == num_built
    assert snapshot.value() == num_built
