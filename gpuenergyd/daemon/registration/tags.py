"""What clients may tag their jobs with: bounded, for it is kept for as long as the history."""

from collections.abc import Sequence

from gpuenergyd.errors import ProtocolError

MAX_TAGS = 32
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 256


def checked_tags(tags: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return tags sorted by name.

    Raises:
        ProtocolError: too many, one without a name, twice the same, too long or not printable.
    """
    if len(tags) > MAX_TAGS:
        raise ProtocolError(f"{len(tags)} tags; at most {MAX_TAGS} are accepted")
    for name, value in tags:
        if not name or len(name) > MAX_NAME_CHARS or len(value) > MAX_VALUE_CHARS:
            raise ProtocolError(
                f"tag {name[:MAX_NAME_CHARS]!r}: a name of 1 to {MAX_NAME_CHARS} and a value of at most"
                f" {MAX_VALUE_CHARS} characters are accepted"
            )
        if not (name.isprintable() and value.isprintable()):
            raise ProtocolError(f"tag {name!r}: only printable characters are accepted")
    if len(dict(tags)) < len(tags):
        raise ProtocolError("two tags of one name")
    return tuple(sorted(tags))
