"""Messages to JSON and back in the daemon: strict types, size limits, one-line errors."""

from threading import Lock
from typing import Any, TypeVar, Union

import msgspec

from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire import MAX_STRING_CHARS

T = TypeVar("T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_building = Lock()
"""Held while a decoder is built.

msgspec 0.22 shares incomplete information about a dataclass among decoders: if another thread meanwhile builds a
decoder for a type that contains the same dataclass, using that decoder crashes the process.
"""


def _plain(value: object) -> object:
    """Return the Python number of a numpy scalar, which policies may return."""
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


_encoder = msgspec.json.Encoder(enc_hook=_plain)


def encode(value: object) -> bytes:
    """Return dataclasses, tuples and scalars as JSON."""
    return _encoder.encode(value)


def plain(value: object) -> Any:
    """Convert dataclasses recursively to dictionaries, lists and scalars, many times faster than `asdict`."""
    return msgspec.to_builtins(value, enc_hook=_plain)


def decode(body: bytes, message_type: type[T], *, max_bytes: int) -> T:
    """Return a message of the given type.

    Raises:
        ProtocolError: the body is too large, not JSON, or has a missing, wrongly typed or too long field.
    """
    message: T = _decoded(body, message_type, message_type.__name__, max_bytes)
    _check_strings(message)
    return message


def decode_one_or_several(body: bytes, message_type: type[T], *, max_bytes: int) -> tuple[T, ...]:
    """Return the messages in a JSON array, or a single message as a tuple; see `decode` for errors."""
    form = Union[message_type, tuple[message_type, ...]]  # type: ignore[valid-type]  # noqa: UP007  made at run time
    found: T | tuple[T, ...] = _decoded(body, form, message_type.__name__, max_bytes)
    messages = found if isinstance(found, tuple) else (found,)
    for message in messages:
        _check_strings(message)
    return messages


def _decoded(body: bytes, form: Any, name: str, max_bytes: int) -> Any:
    if len(body) > max_bytes:
        raise ProtocolError(f"message of {len(body)} bytes; at most {max_bytes} are accepted")
    decoder = _decoders.get(form)
    if decoder is None:
        with _building:
            decoder = _decoders[form] = msgspec.json.Decoder(form)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed {name}: {error}") from None
    except UnicodeDecodeError:
        raise ProtocolError(f"malformed {name}: not UTF-8") from None


def _check_strings(message: object) -> None:
    for name in getattr(message, "__dataclass_fields__", ()):
        value = getattr(message, name)
        if isinstance(value, str) and len(value) > MAX_STRING_CHARS:
            raise ProtocolError(f"{name}: {len(value)} characters; at most {MAX_STRING_CHARS} are accepted")


def json_schemas(*message_types: Any) -> dict[str, Any]:
    """Return the JSON schemas of messages by name, in OpenAPI form."""
    _, schemas = msgspec.json.schema_components(message_types, ref_template="#/components/schemas/{name}")
    return schemas
