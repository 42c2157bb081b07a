"""Codec of the link: messages as JSON datagrams, checked field by field; needs only the standard library.

A datagram is `[LINK_VERSION, message type, request id or null, [field values in the order of the dataclass]]`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProtocolError
from gpuenergyd.gpu.link.messages import Command, Message

LINK_VERSION = 11
MAX_DATAGRAM_BYTES = 131_072
MAX_PIDFDS = 128
"""Limit per datagram; the kernel accepts 253."""

_FRAME_PARTS = 4
_REQUEST_ID_TYPES = frozenset({int, NoneType})
_JSON_TYPES: Mapping[Any, frozenset[type]] = {
    int: frozenset({int}),
    float: frozenset({float, int}),
    str: frozenset({str}),
    bool: frozenset({bool}),
}


class _RecordCodec:
    """Encodes and decodes one dataclass."""

    def __init__(
        self, record: type[Any], fields_json: Sequence[tuple[frozenset[type], Callable[[Any], Any] | None]]
    ) -> None:
        """Store, for each field, the JSON types that it may have, and its conversion if it needs one."""
        names = [field.name for field in fields(record)]
        self.values = attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]
        self._record = record
        self._allowed = [allowed for allowed, _ in fields_json]
        self._conversions = [(i, convert) for i, (_, convert) in enumerate(fields_json) if convert is not None]
        self._valid_types: set[tuple[type, ...]] = set()

    def decode(self, values: list[Any]) -> Any:
        """Return the dataclass with these field values.

        Raises:
            ProtocolError: a value is missing, superfluous or of the wrong type.
            ValueError: a value is not in its enumeration.
        """
        types = tuple(map(type, values))
        if types not in self._valid_types:
            self._check(values, types)
            self._valid_types.add(types)
        for index, convert in self._conversions:
            values[index] = convert(values[index])
        return self._record(*values)

    def _check(self, values: list[Any], types: tuple[type, ...]) -> None:
        name = self._record.__name__
        if len(types) != len(self._allowed):
            raise ProtocolError(
                f"{name}: expected {count_text(len(self._allowed), 'field value')}, got {values!r:.100}"
            )
        for value, found, allowed in zip(values, types, self._allowed, strict=True):
            if found not in allowed:
                raise ProtocolError(f"{name}: expected {_names_of(allowed)}, got {value!r:.100}")


def encode(message: Message | Command[Any], request_id: int | None = None) -> bytes:
    return _to_json([LINK_VERSION, type(message).__name__, request_id, message]).encode()


def decode(datagram: bytes) -> tuple[int | None, Message]:
    """Return the request id and the message in a datagram.

    Raises:
        ProtocolError: it is not a message of this version with valid values.
    """
    try:
        frame = _from_json(datagram.decode())
        if not isinstance(frame, list) or len(frame) != _FRAME_PARTS:
            raise ProtocolError(f"expected a JSON list of {_FRAME_PARTS} values, got {datagram!r:.100}")
        version, name, request_id, values = frame
        if version != LINK_VERSION:
            raise ProtocolError(f"link version is {version!r:.100}; expected {LINK_VERSION}")
        if type(request_id) not in _REQUEST_ID_TYPES:
            raise ProtocolError(f"request id must be an integer or null, got {request_id!r:.100}")
        if name not in _MESSAGE_CODECS or type(values) is not list:
            raise ProtocolError(f"unknown message type {name!r:.100} or no list of field values")
        message: Message = _MESSAGE_CODECS[name].decode(values)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from None
    return request_id, message


def _values(record: Any) -> Any:
    """Return a JSON-serializable form of a dataclass or mapping."""
    codec = _CODECS.get(type(record))
    return dict(record) if codec is None else codec.values(record)


def _reject_constant(name: str) -> float:
    raise ProtocolError(f"{name} is not a valid number")


_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_values).encode
_from_json = json.JSONDecoder(parse_constant=_reject_constant).decode
_CODECS: dict[type, _RecordCodec] = {}


def _codec_of(record: type[Any]) -> _RecordCodec:
    """Return the codec of a dataclass, and prepare those of the dataclasses in its fields."""
    if record not in _CODECS:
        hints = get_type_hints(record)
        _CODECS[record] = _RecordCodec(record, [_json_form(hints[field.name]) for field in fields(record)])
    return _CODECS[record]


def _json_form(hint: Any) -> tuple[frozenset[type], Callable[[Any], Any] | None]:
    """Return the JSON types that encode a field's type, and the conversion back if one is needed."""
    if hint in _JSON_TYPES:
        return _JSON_TYPES[hint], None
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        allowed, convert = _json_form(inner)
        if convert is not None:
            raise TypeError(f"no codec for {hint}")
        return allowed | {NoneType}, None
    if origin is tuple:
        return frozenset({list}), _tuple_of(*_json_form(arguments[0]))
    if origin is Mapping:
        return frozenset({dict}), _plain_mapping(_JSON_TYPES[arguments[1]])
    if issubclass(hint, StrEnum):
        return frozenset({str}), hint
    return frozenset({list}), _codec_of(hint).decode


def _names_of(types: frozenset[type]) -> str:
    return " or ".join(sorted(t.__name__ for t in types))


def _require(values: Iterable[Any], allowed: frozenset[type]) -> None:
    for value in values:
        if type(value) not in allowed:
            raise ProtocolError(f"expected {_names_of(allowed)}, got {value!r:.100}")


def _tuple_of(allowed: frozenset[type], convert: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def decode_items(values: list[Any]) -> tuple[Any, ...]:
        _require(values, allowed)
        return tuple(values) if convert is None else tuple(map(convert, values))

    return decode_items


def _plain_mapping(allowed: frozenset[type]) -> Callable[[Any], Any]:
    def decode_values(values: dict[str, Any]) -> dict[str, Any]:
        _require(values.values(), allowed)
        return values

    return decode_values


_MESSAGE_CODECS = {message.__name__: _codec_of(message) for message in get_args(Message)}
