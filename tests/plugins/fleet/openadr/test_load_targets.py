"""Load targets of OpenADR events: what each signal asks for, and that nothing malformed passes."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.errors import UsageError
from gpuenergyd_fleet.decisions.grid_event import GridEvent, LoadUnit, event_problem
from gpuenergyd_fleet.openadr.load_targets import SiteTerms, event_id_of, load_targets
from tests.support.examples import examples

BEGIN = datetime(2027, 1, 1, 18, tzinfo=UTC)
NOW_S = BEGIN.timestamp() - 60
TERMS = SiteTerms(capacity_w=200_000.0, level_percents=(90.0, 75.0, 50.0))
KILOWATTS = {"unit": "W", "scale": "k", "name": "powerReal"}


def event_with(name: str, kind: str, *payloads: float, measurement: Any = None, **descriptor: Any) -> dict[str, Any]:
    """Return an event as openleadr parses it, with intervals of ten minutes one after the other."""
    length = timedelta(minutes=10)
    intervals = [
        {"dtstart": BEGIN + k * length, "duration": length, "signal_payload": payload, "uid": k}
        for k, payload in enumerate(payloads)
    ]
    signal = {"signal_name": name, "signal_type": kind, "signal_id": "s", "intervals": intervals}
    return {
        "event_descriptor": {"event_id": "event-17", "modification_number": 0, "event_status": "far"} | descriptor,
        "active_period": {"dtstart": BEGIN, "duration": len(payloads) * length},
        "event_signals": [signal | ({} if measurement is None else {"measurement": measurement})],
        "response_required": "always",
    }


@pytest.mark.parametrize(
    ("name", "kind", "payload", "measurement", "value", "unit"),
    [
        ("LOAD_DISPATCH", "setpoint", 70.0, KILOWATTS, 70_000.0, LoadUnit.W),
        ("LOAD_DISPATCH", "setpoint", 70.0, KILOWATTS | {"scale": "none"}, 70.0, LoadUnit.W),
        ("LOAD_DISPATCH", "multiplier", 0.7, None, 70.0, LoadUnit.PERCENT),
        ("LOAD_CONTROL", "x-loadControlCapacity", 0.7, None, 140_000.0, LoadUnit.W),
        ("SIMPLE", "level", 2.0, None, 75.0, LoadUnit.PERCENT),
        ("simple", "level", 3.0, None, 50.0, LoadUnit.PERCENT),
    ],
)
def test_each_signal_is_a_load_target(
    name: str, kind: str, payload: float, measurement: Any, value: float, unit: LoadUnit
) -> None:
    event = event_with(name, kind, payload, measurement=measurement, vtn_comment="evening\npeak")

    (target,) = load_targets(event, TERMS, NOW_S)

    begin_s = BEGIN.timestamp()
    assert (target.event_id, target.start_s, target.end_s) == ("event-17", begin_s, begin_s + 600)
    assert (target.unit, target.reason) == (unit, "evening peak")
    assert target.value == pytest.approx(value)


def test_intervals_are_targets_of_their_own_and_usual_ones_are_none() -> None:
    event = event_with("SIMPLE", "level", 1.0, 0.0, 3.0)
    for interval in event["event_signals"][0]["intervals"]:
        del interval["dtstart"]  # then they follow each other from the begin of the active period

    found = load_targets(event, TERMS, NOW_S)

    begin_s = BEGIN.timestamp()
    assert [(own.event_id, own.start_s - begin_s, own.value) for own in found] == [
        ("event-17.1", 0, 90),
        ("event-17.3", 1200, 50),
    ]


def test_cancelled_and_past_events_ask_for_nothing() -> None:
    assert load_targets(event_with("SIMPLE", "level", 1.0, event_status="cancelled"), TERMS, NOW_S) == ()
    assert load_targets(event_with("SIMPLE", "level", 1.0), TERMS, BEGIN.timestamp() + 600) == ()


def test_the_first_signal_that_is_understood_counts() -> None:
    event = event_with("ELECTRICITY_PRICE", "price", 0.3)
    event["event_signals"] += event_with("SIMPLE", "level", 1.0)["event_signals"]

    assert [own.value for own in load_targets(event, TERMS, NOW_S)] == [90]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (event_with("ELECTRICITY_PRICE", "price", 0.3), "signal 'ELECTRICITY_PRICE' of type 'price'"),
        (event_with("LOAD_DISPATCH", "setpoint", 70.0), "without a power in W"),
        (event_with("LOAD_DISPATCH", "setpoint", 70.0, measurement={"unit": "W", "scale": "n"}), "scale 'n'"),
        (event_with("LOAD_DISPATCH", "setpoint", -70.0, measurement=KILOWATTS), "value = -70000 W"),
        (event_with("LOAD_DISPATCH", "multiplier", float("nan")), "value = nan percent"),
        (event_with("LOAD_DISPATCH", "multiplier", 1.5), "value = 150 percent"),
        (event_with("SIMPLE", "level", 4.0), "level 4 of SIMPLE"),
        (event_with("SIMPLE", "level", 1.0, test_event=True), "a test event"),
        (event_with("SIMPLE", "level", 1.0, event_id="a b"), "event_id 'a b'"),
        (event_with("SIMPLE", "level"), "0 intervals"),
        (event_with("SIMPLE", "level", *[1.0] * 51), "51 intervals"),
        ({}, "malformed event: KeyError"),
        ("event", "malformed event: TypeError"),
        (None, "malformed event: TypeError"),
    ],
)
def test_what_is_not_understood_is_refused_with_one_line(event: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        load_targets(event, TERMS, NOW_S)

    assert "\n" not in str(refused.value)


def test_an_event_without_an_end_is_refused() -> None:
    event = event_with("SIMPLE", "level", 1.0)
    event["event_signals"][0]["intervals"][0]["duration"] = timedelta(0)

    with pytest.raises(UsageError, match="without an end"):
        load_targets(event, TERMS, NOW_S)


def test_what_the_site_has_not_agreed_on_is_refused() -> None:
    for event, option in (
        (event_with("LOAD_CONTROL", "x-loadControlCapacity", 0.7), "--capacity-w"),
        (event_with("SIMPLE", "level", 1.0), "--simple-levels"),
    ):
        with pytest.raises(UsageError, match=option):
            load_targets(event, SiteTerms(), NOW_S)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.datetimes() | st.timedeltas(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=examples(200))
@given(st.data())
def test_no_part_of_an_event_can_be_anything_that_breaks_or_passes(data: st.DataObject) -> None:
    event = event_with("LOAD_DISPATCH", "setpoint", 70.0, 60.0, measurement=dict(KILOWATTS))
    place: Any = event
    for _ in range(data.draw(st.integers(0, 4))):  # go down to some part of the event
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        inner = [key for key in keys if isinstance(place[key], dict | list) and place[key]]
        if not inner:
            break
        place = place[data.draw(st.sampled_from(inner))]
    key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
    place[key] = data.draw(ANYTHING)

    found: tuple[GridEvent, ...] = ()
    refusal = ""
    try:
        found = load_targets(event, TERMS, NOW_S)
    except UsageError as error:
        refusal = str(error)

    assert all(event_problem(own, NOW_S) is None for own in found)
    assert (refusal + event_id_of(event)).isprintable()
