"""A session with an OpenADR 2.0b server (VTN): registers, polls, and returns the events that it lists.

openleadr builds, signs, checks and parses the messages. Around it, this module limits what a server can do: replies are
at most a megabyte of UTF-8 without a document type, there are no redirects, each exchange has a time limit, and TLS is
required unless the server is on this host. Document types are refused before the parser sees them, because with lxml
6.1.3 nested entities together with a schema crash the process.
"""

import re
import ssl
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from openleadr import OpenADRClient
from openleadr.utils import certificate_fingerprint

from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.key_files import require_private_key_file

MAX_REPLY_BYTES = 2**20
_EXCHANGE_LIMIT_S = 20.0
_LEAST_PERIOD_S, _MOST_PERIOD_S = 1.0, 60.0
_OK = 200
_ENCODING = re.compile(r"""<\?xml[^>]*?encoding\s*=\s*["']([^"']*)""")


class VtnError(GpuEnergyError):
    """The server refused or gave no valid reply; the exchange is repeated later."""


@dataclass(frozen=True, slots=True)
class VtnAccess:
    """Address of the server, and how both sides authenticate."""

    url: str
    ven_name: str
    cert_path: Path | None = None
    key_path: Path | None = None
    ca_path: Path | None = None
    fingerprint: str | None = None
    """Fingerprint of the certificate with which the server signs messages; without it, signatures are not checked."""


def check_access(access: VtnAccess) -> None:
    """Raise UsageError for another host's address without TLS, and for a certificate without key or vice versa."""
    parts = urlsplit(access.url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(
            f"--vtn-url {access.url!r:.80}: must be a URL with https, e.g. https://vtn.example/OpenADR2/Simple/2.0b"
        )
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise UsageError(f"--vtn-url {access.url!r:.80}: http is only valid for a loopback address; use https")
    if not access.ven_name or len(access.ven_name) > 128 or not access.ven_name.isprintable():
        raise UsageError("--ven-name must be one printable line of 1 to 128 characters")
    if (access.cert_path is None) != (access.key_path is None):
        raise UsageError("--cert and --key belong together: set both or neither")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class VtnSession:
    """One registration at a server, renewed when the server asks for it."""

    def __init__(self, access: VtnAccess) -> None:
        """Read the certificates.

        Raises:
            UsageError: a file cannot be read or is not a certificate, or others can read the key.
        """
        check_access(access)
        if access.key_path is not None:
            require_private_key_file(access.key_path)
        self._access = access
        self._tls = _tls_context(access)
        cert, key = (None if path is None else str(path) for path in (access.cert_path, access.key_path))
        try:
            self._client: Any = OpenADRClient(
                access.ven_name,
                access.url,
                cert=cert,
                key=key,
                vtn_fingerprint=access.fingerprint,
                show_fingerprint=False,
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"--cert {access.cert_path}: {error}") from None

    @property
    def own_fingerprint(self) -> str | None:
        """Fingerprint of this side's certificate, which the server's operator needs."""
        path = self._access.cert_path
        return None if path is None else str(certificate_fingerprint(path.read_bytes()))

    @property
    def period_s(self) -> float:
        """Time between two exchanges: what the server asks for, within limits."""
        asked = self._client.poll_frequency
        asked_s = asked.total_seconds() if isinstance(asked, timedelta) else 10.0
        return float(min(max(asked_s, _LEAST_PERIOD_S), _MOST_PERIOD_S))

    async def exchange(self) -> Sequence[Any]:
        """Return all events that the server lists for this site now.

        Raises:
            VtnError: the server could not be reached, refused, or sent an invalid reply.
        """
        if self._client.client_session is None:
            self._client.client_session = _http_session(self._tls)
        if self._client.registration_id is None:
            await self._register()
        kind, _ = await _reply(self._client.poll())
        if kind in {"oadrRequestReregistration", "oadrCancelPartyRegistration"}:
            self._client.registration_id = None
            raise VtnError(f"the VTN sent {kind}: registering again")
        kind, payload = await _reply(self._client.request_event())
        response = payload.get("response")
        if isinstance(response, Mapping) and response.get("response_code") not in {None, _OK}:
            self._client.registration_id = None
            raise VtnError(f"the VTN refused: {str(response.get('response_description'))[:80]!r}")
        if kind not in {"oadrDistributeEvent", "oadrResponse"}:
            raise VtnError(f"the VTN answered {kind} when asked for events")
        events = payload.get("events") or []
        return events if isinstance(events, list) else [events]

    async def answer(self, event: Any, *, opts_in: bool) -> None:
        """Tell the server whether an event is followed, if it requires an answer.

        Raises:
            VtnError: as for `exchange`.
        """
        if event.get("response_required") != "always":
            return
        descriptor = event["event_descriptor"]
        try:
            await self._client.created_event(
                "0", descriptor["event_id"], "optIn" if opts_in else "optOut", descriptor["modification_number"]
            )
        except Exception as error:  # noqa: BLE001  openleadr raises many kinds
            raise VtnError(f"the answer to an event was not sent: {type(error).__name__}") from None

    async def aclose(self) -> None:
        """Close the connection; the registration stays."""
        if self._client.client_session is not None:
            await self._client.client_session.close()

    async def _register(self) -> None:
        try:
            await self._client.create_party_registration(ven_id=self._client.ven_id)
        except Exception as error:  # noqa: BLE001  openleadr raises many kinds
            raise VtnError(f"registering at the VTN failed: {type(error).__name__}") from None
        if self._client.registration_id is None:
            raise VtnError("the VTN did not register this site")


async def _reply(request: Awaitable[Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the kind and payload of a reply; openleadr returns none if the request failed, and logs why."""
    try:
        reply = await request
    except Exception as error:  # noqa: BLE001  openleadr raises many kinds
        raise VtnError(f"no valid reply from the VTN: {type(error).__name__}") from None
    if reply is None or reply[0] is None or not isinstance(reply[1], Mapping):
        raise VtnError("no valid reply from the VTN")
    return reply[0], reply[1]


def _tls_context(access: VtnAccess) -> ssl.SSLContext | None:
    if urlsplit(access.url).scheme != "https":
        return None
    try:
        context = ssl.create_default_context(cafile=None if access.ca_path is None else str(access.ca_path))
        if access.cert_path is not None and access.key_path is not None:
            context.load_cert_chain(access.cert_path, access.key_path)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(f"--ca, --cert or --key cannot be used: {error.strerror or error}") from None
    return context


class _LimitedReply(aiohttp.ClientResponse):
    """A reply of limited size that is safe to pass to the XML parser."""

    async def read(self) -> bytes:
        """Return the body.

        Raises:
            aiohttp.ClientPayloadError: it is larger than the limit, or not plain XML in UTF-8.
        """
        if self._body is None:
            body = bytearray()
            async for piece in self.content.iter_chunked(65_536):
                body += piece
                if len(body) > MAX_REPLY_BYTES:
                    self.close()
                    raise aiohttp.ClientPayloadError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
            _check_is_plain(body)
            self._body = bytes(body)
        return self._body


def _check_is_plain(body: bytes | bytearray) -> None:
    """Raise ClientPayloadError for XML that is not in UTF-8, or has a document type."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise aiohttp.ClientPayloadError("a reply that is not in UTF-8") from None
    encoding = _ENCODING.search(text[:200])
    if "\0" in text or (encoding is not None and encoding[1].lower() not in {"utf-8", "us-ascii", "ascii"}):
        raise aiohttp.ClientPayloadError("a reply that is not in UTF-8")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise aiohttp.ClientPayloadError("a reply with a document type, which OpenADR does not use")


def _http_session(tls: ssl.SSLContext | None) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_refuse_redirect)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
        headers={"content-type": "application/xml"},
        timeout=aiohttp.ClientTimeout(total=_EXCHANGE_LIMIT_S),
        response_class=_LimitedReply,
        trace_configs=[trace],
    )


async def _refuse_redirect(_session: aiohttp.ClientSession, _context: SimpleNamespace, _params: Any) -> None:
    raise aiohttp.ClientPayloadError("the VTN redirects to another address")
