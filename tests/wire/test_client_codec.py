"""Reports of iterations as the client encodes them, which uses no encoder: the daemon decodes the same values."""

import subprocess
import sys
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.client.reporter import joined
from gpuenergyd.wire import MAX_ITERATION_REPORT_BYTES
from gpuenergyd.wire.client_codec import encode_iteration
from gpuenergyd.wire.daemon_codec import decode, decode_one_or_several
from gpuenergyd.wire.messages import IterationReport

counts = st.integers(0, 2**62)
rows = st.tuples(st.sampled_from("FBIWCOD"), st.integers(0, 4096), st.integers(0, 8), counts, counts)
reports = st.builds(
    IterationReport,
    rank_token=st.binary(min_size=16, max_size=16).map(bytes.hex),
    iteration_index=counts,
    plan_epoch=counts,
    begin_mono_ns=counts,
    end_mono_ns=counts,
    next_begin_mono_ns=counts,
    instructions=st.lists(rows, max_size=20).map(tuple),
    num_records_dropped=counts,
    num_client_errors=counts,
    launched_iteration_index=st.integers(-1, 2**62),
    captured=st.text(max_size=12),
    memory_bytes=st.lists(counts, max_size=3).map(tuple),
    reorder_refusal=st.text(max_size=60),
    client_cost_s=st.none() | st.integers(0, 10**9).map(lambda ns: ns / 1e9),
    is_in_order=st.none() | st.booleans(),
)
PROGRAM = """
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from threading import Barrier

from gpuenergyd.wire.daemon_codec import decode

NUM_PARTS = 20
sys.setswitchinterval(1e-6)
body = '{"shared": {' + ", ".join(f'"part{k}": {{"value": {k}}}' for k in reversed(range(NUM_PARTS))) + "}}"
for _ in range(40):
    parts = [(f"part{k}", make_dataclass(f"Part{k}", [("value", int)])) for k in range(NUM_PARTS)]
    shared = make_dataclass("Shared", parts)
    messages = [make_dataclass(name, [("shared", shared)]) for name in ("One", "Other")]
    barrier = Barrier(2)

    def decoded(message_type):
        barrier.wait()
        return decode(body.encode(), message_type, max_bytes=1 << 20)

    with ThreadPoolExecutor(2) as pool:
        for message in pool.map(decoded, messages):
            assert message.shared.part7.value == 7
"""


@given(reports)
def test_a_report_is_decoded_as_it_was(report: IterationReport) -> None:
    assert decode(encode_iteration(report), IterationReport, max_bytes=1 << 20) == report


def test_a_cost_that_was_not_measured_is_missing() -> None:
    report = IterationReport("00" * 16, 0, 0, 1, 2, 3, ())

    assert decode(encode_iteration(report), IterationReport, max_bytes=1 << 20).client_cost_s is None


@given(st.lists(reports, min_size=1, max_size=5))
def test_several_reports_in_one_message_are_decoded_as_they_were(sent: list[IterationReport]) -> None:
    (body,) = joined([encode_iteration(one) for one in sent])

    assert decode_one_or_several(body, IterationReport, max_bytes=1 << 20) == tuple(sent)
    assert decode_one_or_several(encode_iteration(sent[0]), IterationReport, max_bytes=1 << 20) == (sent[0],)


@given(st.lists(st.integers(1, MAX_ITERATION_REPORT_BYTES - 2), min_size=1, max_size=8))
def test_reports_share_a_message_as_long_as_they_fit_into_it(sizes: list[int]) -> None:
    sent = [b"1" * size for size in sizes]
    bodies = joined(sent)

    assert b",".join(body[1:-1] for body in bodies) == b",".join(sent)
    assert all(len(body) <= MAX_ITERATION_REPORT_BYTES for body in bodies)
    for body, after in pairwise(bodies):
        assert len(body) + len(after.split(b",")[0]) > MAX_ITERATION_REPORT_BYTES


def test_threads_that_decode_types_with_the_same_part_at_once_do_not_crash() -> None:
    """In a process of its own: a decoder built from half of what msgspec knows reads from address 0."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
