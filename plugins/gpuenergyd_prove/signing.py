"""Ed25519 signatures of a proof; the only module that imports cryptography.

The private key is created for one proof and never stored, so that after the proof nobody, not even its author, can sign
again with it. An author who publishes the public key, which is in the first line of output, before the first block can
show later that the registration came before the data.
"""

from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key that exists only while the proof runs."""

    _key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate, repr=False)

    @property
    def public_key(self) -> str:
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, content: bytes) -> str:
        """Return the signature in hexadecimal."""
        return self._key.sign(content).hex()


def is_signed(content: bytes, signature: str, public_key: str) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), content)
    except (InvalidSignature, ValueError):
        return False
    return True
