"""Writes the HTML page of a proof from only its registration and verdict, so that a check can recreate it."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd_prove.proof.registration import Registration

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .3rem .8rem; text-align: left; }
th { border-bottom: 2px solid #888; } td { border-bottom: 1px solid #ccc; } td:first-child { white-space: nowrap; }
.verdict { padding: 1rem; border-left: .4rem solid #2a7; background: #f4f8f5; font-size: 1.15rem; }
.none { border-color: #c60; background: #fbf5ee; } .simulated { color: #b00; font-weight: bold; }
code { overflow-wrap: anywhere; }
"""


def proof_page(registration: Registration, verdict: Mapping[str, Any]) -> str:
    """Return the page; `verdict` holds the values of verdict.json."""
    is_open = verdict["conclusion"] == "no verdict"
    mark = '<p class="simulated">SIMULATED GPUs: this shows that the method works, not what real GPUs save.</p>'
    design, rules = registration.design, registration.rules
    level = verdict["measurement_level"]
    parts = [
        f"<h1>{'SIMULATED: proof' if registration.is_simulated else 'Proof'} of a saving</h1>",
        mark if registration.is_simulated else "",
        f'<p class="verdict{" none" if is_open else ""}">{escape(verdict["sentence"])}</p>',
        _table(
            ("arm", "policy", "rounds", "GPU energy saved", "slowdown", "host energy saved", "losses"),
            [
                (result["arm"], arm.policy, result["rounds"], _span(result["saving"]), _span(result["slowdown"]),
                 _span(result["host_saving"]), result["losses"])
                for result, arm in zip(verdict["arms"], registration.arms[1:], strict=True)
            ],
        ),
        (f"<p>Against arm <em>{escape(registration.arms[0].name)}</em> (policy {escape(registration.arms[0].policy)});"
        f" intervals of {_percent(verdict['confidence'], 1)}. {count_text(verdict['rounds'], 'round')} counted,"
        f" {verdict['void_rounds']} void, {verdict['iterations']:,} iterations.</p>"),
        "<h2>Registered before the first block that counts</h2>",
        _table(
            ("what", "value"),
            [
                ("hypothesis", registration.hypothesis),
                ("command", " ".join(registration.command)),
                ("rounds", (f"{design.num_rounds}, from a pilot of {design.pilot_rounds}: spread at most"
                 f" {_percent(design.round_sigma_ratio, 3)} between rounds (80 %)")),
                ("smallest saving to show", f"{_percent(design.smallest_saving_ratio)}, with 90 % probability"),
                ("iterations of a block", f"{design.block_iterations}, after {rules.settling_iterations} left out"),
                ("left out", (f"iterations {_percent(rules.outlier_ratio, 0)} longer than their block's median; a block"
                 f" with more than {_percent(rules.max_excluded_ratio, 0)} of them, or with a measured energy of fewer"
                 f" than {_percent(rules.min_measured_ratio, 0)} of the others, is void, and with it its round")),
                ("order of blocks", _order(registration)),
                ("pilot, SHA-256", registration.pilot_sha256),
                ("public key (Ed25519)", registration.public_key),
            ],
        ),
        "<h2>Measured</h2>",
        (f"<p>GPU energy: energy counters of the GPU boards. Level of the EE HPC WG method: <strong>{level['level']}"
        f"</strong> ({escape(level['missing'])}).</p>"),
        _meter(registration, verdict["meter_alignment"]),
        "<h2>Versions</h2>",
        _table(("what", "version"), registration.versions),
    ]  # fmt: skip
    body = "\n".join(part for part in parts if part)
    title = f"{'SIMULATED: ' if registration.is_simulated else ''}proof of a saving"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _order(registration: Registration) -> str:
    """Return the registered order of blocks, with the blocks that only replace void rounds listed separately."""
    order, num_blocks = registration.order(), registration.design.num_rounds * len(registration.arms)
    spare = f"; in place of void rounds: {', '.join(order[num_blocks:])}" if len(order) > num_blocks else ""
    return ", ".join(order[:num_blocks]) + spare


def _meter(registration: Registration, aligned: Mapping[str, Any] | None) -> str:
    if not registration.meters:
        return "<p>No outside meter.</p>"
    named = escape(", ".join(f"{meter.kind} (covers {meter.covers})" for meter in registration.meters))
    if aligned is None:
        return f"<p>Outside meter: {named}. Too few readings to align.</p>"
    verb = "follows" if aligned["is_aligned"] else "does not follow"
    return (
        f"<p>Outside meter: {named}. It {verb} the GPUs (correlation {aligned['correlation']:.3f}), with a lag of"
        f" {aligned['lag_s']:.2f} s (±{aligned['lag_error_s']:.2f}), a gain of {aligned['gain']:.3f}"
        f" (±{aligned['gain_error']:.3f}) and {aligned['offset_w']:.0f} W beside them.</p>"
    )


def _span(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return "not measured"
    estimate, low, high = (f"{100 * interval[name]:+.2f}" for name in ("estimate", "low", "high"))
    return f"{estimate} % ({low} to {high})"


def _percent(ratio: float, digits: int = 2) -> str:
    return f"{100 * ratio:.{digits}f} %"


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>\n" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
