"""Reports of iterations as the client encodes them, which uses no encoder: the daemon decodes the same values."""

from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.wire.client_codec import encode_iteration
from gpuenergyd.wire.daemon_codec import decode
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
)


@given(reports)
def test_a_report_is_decoded_as_it_was(report: IterationReport) -> None:
    assert decode(encode_iteration(report), IterationReport, max_bytes=1 << 20) == report


def test_a_cost_that_was_not_measured_is_missing() -> None:
    report = IterationReport("00" * 16, 0, 0, 1, 2, 3, ())

    assert decode(encode_iteration(report), IterationReport, max_bytes=1 << 20).client_cost_s is None
