"""Certificates between receiver and OpenADR server: both sides prove who they are, and messages are signed."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

pytest.importorskip("openleadr", reason="needs openleadr: pip install 'gpuenergyd[openadr]'", exc_type=ImportError)

from openleadr.utils import certificate_fingerprint

from gpuenergyd.errors import UsageError
from gpuenergyd_fleet.openadr.session import VtnAccess, VtnError, VtnSession
from tests.support.openadr_server import PATH, OpenLeadrServer

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use web.AppKey")  # in openleadr's server


def _certificate(name: str, key: rsa.RSAPrivateKey, issuer_key: rsa.RSAPrivateKey, *, is_issuer: bool) -> bytes:
    subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, own)]) for own in (name, "authority"))
    now, address = datetime.now(tz=UTC), x509.IPAddress(ip_address("127.0.0.1"))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_issuer, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificates of an authority, the server and the site."""
    found = tmp_path_factory.mktemp("certificates")
    keys = {name: rsa.generate_private_key(65537, 2048) for name in ("authority", "vtn", "site")}
    for name, key in keys.items():
        own = _certificate(name, key, keys["authority"], is_issuer=name == "authority")
        (found / f"{name}.pem").write_bytes(own)
        text = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (found / f"{name}.key").write_bytes(text)
        (found / f"{name}.key").chmod(0o600)
    return found


def _fingerprint(folder: Path, name: str) -> str:
    return str(certificate_fingerprint((folder / f"{name}.pem").read_bytes()))


@pytest.fixture
def vtn(folder: Path) -> Iterator[OpenLeadrServer]:
    """A server that demands the site's certificate, and signs."""

    async def site(ven_id: str) -> dict[str, Any]:
        own = _fingerprint(folder, "site")
        return {"ven_id": ven_id, "ven_name": "site", "fingerprint": own, "registration_id": "registration-1"}

    cert, key = str(folder / "vtn.pem"), str(folder / "vtn.key")
    server = OpenLeadrServer(
        cert=cert, key=key, http_cert=cert, http_key=key, http_ca_file=str(folder / "authority.pem"), ven_lookup=site
    )
    server.start()
    yield server
    server.stop()


def _listed(access: VtnAccess) -> list[str]:
    async def run() -> list[str]:
        async with aclosing(VtnSession(access)) as session:
            events = list(await session.exchange())
            for event in events:
                await session.answer(event, opts_in=True)
            return [event["event_descriptor"]["event_id"] for event in events]

    return asyncio.run(run())


def _access(vtn: OpenLeadrServer, folder: Path, **changed: Any) -> VtnAccess:
    files = {"cert_path": folder / "site.pem", "key_path": folder / "site.key", "ca_path": folder / "authority.pem"}
    options: dict[str, Any] = files | {"fingerprint": _fingerprint(folder, "vtn")} | changed
    return VtnAccess(f"https://127.0.0.1:{vtn.port}{PATH}", "site", **options)


def test_signed_events_arrive_over_tls_and_are_answered(vtn: OpenLeadrServer, folder: Path) -> None:
    vtn.add("event-1", "LOAD_DISPATCH", "multiplier", 0.7)

    assert _listed(_access(vtn, folder)) == ["event-1"]
    assert vtn.answers == [("event-1", "optIn")]


@pytest.mark.parametrize(
    "changed",
    [{"fingerprint": "00:11"}, {"cert_path": None, "key_path": None}, {"ca_path": None}],
    ids=["another signer", "no certificate of the site", "an unknown authority"],
)
def test_without_proof_of_both_sides_nothing_is_taken(
    vtn: OpenLeadrServer, folder: Path, changed: dict[str, Any]
) -> None:
    vtn.add("event-1", "LOAD_DISPATCH", "multiplier", 0.7)

    with pytest.raises(VtnError):
        _listed(_access(vtn, folder, **changed))

    assert vtn.answers == []


@pytest.mark.fault(62)
def test_a_key_that_others_can_read_is_refused_with_its_mode(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "site.key"
    key.write_bytes((folder / "site.key").read_bytes())
    key.chmod(0o640)

    with pytest.raises(UsageError) as refused:
        VtnSession(VtnAccess("https://127.0.0.1:1/x", "site", folder / "site.pem", key))

    assert str(refused.value) == f"key file {key} has mode 0640 and is open to others; valid: 0600 or 0400"


def test_the_fingerprint_that_the_operator_needs_is_known(folder: Path) -> None:
    access = VtnAccess("https://127.0.0.1:1/x", "site", folder / "site.pem", folder / "site.key")

    assert VtnSession(access).own_fingerprint == _fingerprint(folder, "site")
