"""Messages to JSON and back in the training process; standard library only."""

import json
from typing import Any

from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.messages import (
    IterationReply,
    IterationReport,
    JobFigures,
    PlanSlice,
    RankRegistered,
    RankRegistration,
    RankRelease,
    ReleaseReply,
)

# Created once: `json.dumps` with options creates an encoder per call.
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(message: RankRegistration | RankRelease) -> bytes:
    """Return the JSON body of a message."""
    body = {name: getattr(message, name) for name in message.__dataclass_fields__}
    return _to_json(body).encode()


def encode_iteration(report: IterationReport) -> bytes:
    """Return the JSON body of a report.

    The training may be waiting for the interpreter, so the text is formatted directly, without a JSON encoder.
    """
    rows = ",".join([f'["{kind}",{m},{chunk},{begin},{end}]' for kind, m, chunk, begin, end in report.instructions])
    cost = "null" if report.client_cost_s is None else f"{report.client_cost_s:.9f}"
    in_order = "" if report.is_in_order is None else f',"is_in_order":{str(report.is_in_order).lower()}'
    together = f',"num_together":{report.num_together}' if report.num_together > 1 else ""
    clocks = f',"true_clocks":{_to_json(report.true_clocks)}' if report.true_clocks else ""
    tokens = "" if report.num_tokens is None else f',"num_tokens":{report.num_tokens}'
    return (
        f'{{"rank_token":"{report.rank_token}","iteration_index":{report.iteration_index},'
        f'"plan_epoch":{report.plan_epoch},"begin_mono_ns":{report.begin_mono_ns},"end_mono_ns":{report.end_mono_ns},'
        f'"next_begin_mono_ns":{report.next_begin_mono_ns},"instructions":[{rows}],'
        f'"num_records_dropped":{report.num_records_dropped},"num_client_errors":{report.num_client_errors},'
        f'"launched_iteration_index":{report.launched_iteration_index},"captured":{_text(report.captured)},'
        f'"memory_bytes":[{",".join(map(str, report.memory_bytes))}],'
        f'"reorder_refusal":{_text(report.reorder_refusal)},"client_cost_s":{cost}{in_order}{clocks}{tokens}{together}}}'
    ).encode()


def _text(value: str) -> str:
    return _to_json(value) if value else '""'


def decode_registered(body: bytes) -> RankRegistered:
    """Return the daemon's reply to a registration, or raise ProtocolError if it is invalid."""
    try:
        return RankRegistered(**_json_object(body))
    except TypeError as error:
        raise ProtocolError(f"reply to a registration: {error}") from None


def decode_released(body: bytes) -> ReleaseReply:
    """Return the daemon's reply to a release, or raise ProtocolError if it is invalid."""
    return ReleaseReply(str(_json_object(body).get("message", "")))


def decode_iteration_reply(body: bytes) -> IterationReply:
    """Return the daemon's reply to an iteration report, or raise ProtocolError if it is invalid."""
    try:
        reply = _json_object(body)
        return IterationReply(
            tuple(
                PlanSlice(
                    plan_id=plan["plan_id"],
                    plan_epoch=plan["plan_epoch"],
                    apply_at_iteration=plan["apply_at_iteration"],
                    changes=tuple((str(k), int(m), int(c), int(d), int(f)) for k, m, c, d, f in plan["changes"]),
                    full_speed_sm_clock_mhz=int(plan.get("full_speed_sm_clock_mhz", 0)),
                    order=tuple((str(k), int(m), int(c)) for k, m, c in plan.get("order", ())),
                )
                for plan in reply.get("plans", [])
            ),
            energy_per_gpu_j=_number(reply.get("energy_per_gpu_j")),
            power_per_gpu_w=_number(reply.get("power_per_gpu_w")),
            takes_several=bool(reply.get("takes_several")),
            takes_untimed=bool(reply.get("takes_untimed")),
            figures=_figures(reply.get("figures")),
            takes_together=bool(reply.get("takes_together")),
            takes_spans=bool(reply.get("takes_spans")),
        )
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"reply to an iteration report: {error!r}") from None


def _figures(value: Any) -> JobFigures | None:
    """Return the figures that this version knows."""
    return value and JobFigures(**{name: value[name] for name in JobFigures.__dataclass_fields__ if name in value})


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"reply is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"expected a JSON object, got {type(value).__name__}")
    return value
