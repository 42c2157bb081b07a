"""Mutates messages: a few corrupted bytes or values."""

import random

from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES

TOKENS = (
    b"null", b"true", b"-1", b"0", b"1e308", b"-1e400", b"NaN", b"9223372036854775808", b"340282366920938463463",
    b'""', b'"\\ud800"', b'"\\u0000"', b"[]", b"{}", b"[[[[[[[[[[]]]]]]]]]]", b'"F"', b"0.5", b",", b":", b"}", b"]",
    b'"',
)  # fmt: skip


def mutated(message: bytes, rng: random.Random) -> bytes:
    """Return a message with a few corrupted bytes or values."""
    body = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, until = sorted((rng.randrange(len(body) + 1), rng.randrange(len(body) + 1)))
        match rng.randrange(6):
            case 0:
                del body[at : at + rng.randrange(1, 9)]
            case 1:
                body[at:at] = rng.choice(TOKENS)
            case 2:
                body[at : at + rng.randrange(1, 6)] = rng.choice(TOKENS)
            case 3:
                body[at:at] = body[at : min(until, at + 200)]
            case 4 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case _:
                spoil_number(body, rng)
        if not body:
            return b""
    return bytes(body[: MAX_CONTROL_MESSAGE_BYTES + 10])


def spoil_number(body: bytearray, rng: random.Random) -> None:
    """Replace one integer of a message with another token."""
    digits = [i for i, byte in enumerate(body) if 48 <= byte <= 57]
    if not digits:
        return
    begin = end = rng.choice(digits)
    while begin > 0 and 48 <= body[begin - 1] <= 57:
        begin -= 1
    while end < len(body) and 48 <= body[end] <= 57:
        end += 1
    body[begin:end] = rng.choice(TOKENS)
