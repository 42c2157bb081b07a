"""Messages that several threads decode for the first time at once."""

import subprocess
import sys

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


def test_threads_that_decode_types_with_the_same_part_at_once_do_not_crash() -> None:
    """In a process of its own: a decoder built from half of what msgspec knows reads from address 0."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
