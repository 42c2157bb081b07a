"""HTTP client with limits on time, size, redirects and retries; the only module that imports requests.

The limits protect against slow, broken and hostile providers. Error messages show no header and no query of a URL,
since these contain keys.
"""

import html
import json
import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from textwrap import shorten
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from urllib3.exceptions import HTTPError, ReadTimeoutError

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import CarbonSourceError
from gpuenergyd.printable import printable_line
from gpuenergyd_carbon.fetched_file import SANDBOX_PROBLEM

_CHUNK_BYTES = 64 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RETRIED = frozenset({429, 500, 502, 503, 504})
_REASON_KEYS = ("message", "detail", "description", "error", "errors", "reason", "title")
_MAX_DEPTH = 3
_XML_REASON = re.compile(r"<(?:\w+:)?Reason>.*?<(?:\w+:)?text>([^<]*)</", re.DOTALL)
_MAX_SENTENCE_BYTES = 4096
_MAX_SENTENCE_CHARS = 160
_LEAST_SECRET_CHARS = 4
_SECRET_WORDS = ("key", "token", "auth", "secret", "password")


class SourceProblem(StrEnum):
    """Kind of failure of a source, as shown by `status`."""

    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    RATE_LIMITED = "rate-limited"
    SERVER_ERROR = "server-error"
    BAD_STATUS = "bad-status"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    REDIRECT = "redirect"
    TOO_LARGE = "too-large"
    NOT_PARSED = "not-parsed"
    EMPTY = "empty"
    BAD_VALUE = "bad-value"
    WRONG_ZONE = "wrong-zone"
    WRONG_UNIT = "wrong-unit"
    CLOCK = "clock"
    SANDBOX = SANDBOX_PROBLEM


class SourceError(CarbonSourceError):
    """Failure of a source, with its kind and the Retry-After that the provider sent."""

    def __init__(self, problem: SourceProblem, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.problem = problem
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class WebLimits:
    """Limits of one request."""

    connect_s: float = 5.0
    read_s: float = 10.0
    total_s: float = 30.0
    """Limit for all tries together, including reading, so that a slow sender cannot exceed it."""
    size_bytes: int = 4 * 2**20
    max_retries: int = 2
    max_redirects: int = 3
    max_pause_s: float = 8.0
    """Longest Retry-After that is waited for; after a longer one the request fails, and the caller learns the time."""


@dataclass(frozen=True, slots=True)
class Web:
    """HTTP client for small GET requests."""

    limits: WebLimits = field(default_factory=WebLimits)
    pause: Callable[[float], None] = time.sleep
    clock_s: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random

    def get_json(self, name: str, url: str, **request: Any) -> Any:
        """Return the JSON of a reply.

        Raises:
            SourceError: as for `get`, or if the body is not JSON.
        """
        body = self.get(name, url, **request)
        try:
            return _json(body)
        except (ValueError, RecursionError):
            raise SourceError(SourceProblem.NOT_PARSED, f"{name}: reply is not JSON: {_shown(body)}") from None

    def get(
        self,
        name: str,
        url: str,
        *,
        parameters: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        basic_auth: tuple[str, str] | None = None,
    ) -> bytes:
        """Return the body of a reply with status 200.

        Raises:
            SourceError: any other outcome, after retries if the failure is temporary.
        """
        deadline_s = self.clock_s() + self.limits.total_s
        for attempt in range(self.limits.max_retries + 1):
            try:
                return self._get_once(name, url, parameters, headers, basic_auth, deadline_s)
            except SourceError as failure:
                pause_s = self._pause_before_retry(failure, attempt)
                if pause_s is None or self.clock_s() + pause_s >= deadline_s:
                    raise
                self.pause(pause_s)
        raise AssertionError("the last try returns or raises")

    def _pause_before_retry(self, failure: SourceError, attempt: int) -> float | None:
        """Return the pause before a retry; None if a retry cannot help."""
        if attempt >= self.limits.max_retries:
            return None
        if failure.problem not in {
            SourceProblem.RATE_LIMITED,
            SourceProblem.SERVER_ERROR,
            SourceProblem.TIMEOUT,
            SourceProblem.UNREACHABLE,
        }:
            return None
        pause_s = (2.0**attempt) * (0.5 + self.jitter())
        if failure.retry_after_s is not None:
            pause_s = max(pause_s, failure.retry_after_s)
        return pause_s if pause_s <= self.limits.max_pause_s else None

    def _get_once(
        self,
        name: str,
        url: str,
        parameters: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        basic_auth: tuple[str, str] | None,
        deadline_s: float,
    ) -> bytes:
        home = urlsplit(url)
        limits = self.limits
        with requests.Session() as session:
            session.trust_env = False  # a .netrc must not add credentials; proxies are set below
            bypasses = requests.utils.should_bypass_proxies(url, no_proxy=None)
            session.proxies = {} if bypasses else urllib.request.getproxies()
            for _ in range(limits.max_redirects + 1):
                left_s = deadline_s - self.clock_s()
                if left_s <= 0:
                    raise SourceError(SourceProblem.TIMEOUT, f"{name}: no reply within {limits.total_s:g} s")
                try:
                    with session.get(
                        url,
                        params=parameters,
                        headers={"User-Agent": "gpuenergyd", "Accept": "*/*", **(headers or {})},
                        auth=basic_auth,
                        timeout=(min(limits.connect_s, left_s), min(limits.read_s, left_s)),
                        allow_redirects=False,
                        stream=True,
                    ) as reply:
                        if reply.status_code not in _REDIRECTS:
                            if reply.status_code == 200:
                                return self._body(name, reply, deadline_s)
                            sent = {**(parameters or {}), **(headers or {})}
                            raise self._refusal(name, reply, (*_secrets_in(sent), *(basic_auth or ())), deadline_s)
                        url, parameters = urljoin(url, reply.headers.get("Location", "")), None
                except requests.Timeout:
                    raise SourceError(SourceProblem.TIMEOUT, f"{name}: no reply in time") from None
                except (ReadTimeoutError, TimeoutError):
                    raise SourceError(SourceProblem.TIMEOUT, f"{name}: reply incomplete") from None
                except (requests.RequestException, HTTPError) as error:
                    # The exception's text contains the URL, and with it the key.
                    raise SourceError(
                        SourceProblem.UNREACHABLE, f"{name}: cannot be reached ({type(error).__name__})"
                    ) from None
                there = urlsplit(url)
                if (there.scheme, there.netloc) != (home.scheme, home.netloc):
                    raise SourceError(SourceProblem.REDIRECT, f"{name}: redirects to another host; not followed")
        raise SourceError(
            SourceProblem.REDIRECT, f"{name}: redirects more than {count_text(limits.max_redirects, 'time')}"
        )

    def _refusal(self, name: str, reply: requests.Response, secrets: Iterable[str], deadline_s: float) -> SourceError:
        """Return the error for a reply with another status, with the reason that the provider gives, if any."""
        try:
            body = self._body(name, reply, deadline_s)
        except (SourceError, HTTPError):
            body = b""
        known = {
            401: (SourceProblem.UNAUTHORIZED, "not authorized, without a reason"),
            403: (SourceProblem.FORBIDDEN, "not permitted, without a reason"),
            404: (SourceProblem.NOT_FOUND, "unknown zone or address"),
            429: (SourceProblem.RATE_LIMITED, "too many requests"),
        }
        status = reply.status_code
        is_temporary = status in _RETRIED or status >= 500
        unknown = SourceProblem.SERVER_ERROR if is_temporary else SourceProblem.BAD_STATUS, ""
        problem, words = known.get(status, unknown)
        words = refusal_sentence(body, secrets) or words
        text = f"{name}: HTTP {status}" + (f": {words}" if words else "")
        return SourceError(problem, text, retry_after_s=_retry_after_s(reply.headers.get("Retry-After")))

    def _body(self, name: str, reply: requests.Response, deadline_s: float) -> bytes:
        parts, size_bytes = [], 0
        # One receive at a time: reading a whole chunk from a slow sender would block until the chunk is full.
        while part := reply.raw.read1(_CHUNK_BYTES, decode_content=True):
            size_bytes += len(part)
            if size_bytes > self.limits.size_bytes:
                raise SourceError(
                    SourceProblem.TOO_LARGE,
                    f"{name}: reply is larger than {count_text(self.limits.size_bytes, 'byte')}",
                )
            if self.clock_s() > deadline_s:
                raise SourceError(SourceProblem.TIMEOUT, f"{name}: reply not complete within {self.limits.total_s:g} s")
            parts.append(part)
        return b"".join(parts)


def _json(body: bytes) -> Any:
    """Return parsed JSON; rejects NaN and Infinity, which Python accepts."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    return json.loads(body, parse_constant=refuse)


def _secrets_in(sent: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of parameters and headers whose names suggest secrets."""
    for name, value in sent.items():
        if any(word in name.lower() for word in _SECRET_WORDS):
            yield from (value, value.split()[-1] if value.split() else value)


def refusal_sentence(body: bytes, secrets: Iterable[str] = ()) -> str:
    """Return the reason in the body of a refusal as one printable line without secrets; empty if there is none.

    The reason is a text under one of the usual keys in JSON, the `Reason/text` in XML, or a whole body of plain text.
    """
    text = ""
    try:
        text = _reason_in(_json(body), _MAX_DEPTH)
    except (ValueError, RecursionError):
        plain = body[:_MAX_SENTENCE_BYTES].decode("utf-8", "replace").strip()
        reason = _XML_REASON.search(plain)
        if reason is not None:
            text = html.unescape(reason[1])
        elif not plain.startswith(("<", "{", "[")):
            text = plain
    for secret in secrets:
        if len(secret) >= _LEAST_SECRET_CHARS:
            text = text.replace(secret, "***")
    return shorten(printable_line(" ".join(text.split())), _MAX_SENTENCE_CHARS, placeholder=" ...")


def _reason_in(value: Any, depth: int) -> str:
    """Return the first reason in a JSON value, trying more specific keys first: `message` before `error`."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and depth:
        return _reason_in(value[0], depth - 1)
    if isinstance(value, dict) and depth:
        found = (_reason_in(value[key], depth - 1) for key in _REASON_KEYS if key in value)
        return next((reason for reason in found if reason), "")
    return ""


def _retry_after_s(header: str | None) -> float | None:
    """Return a Retry-After in seconds; if it is a date, one minute is returned."""
    if header is None:
        return None
    text = header.strip()
    return min(float(text), 86_400.0) if text.isdigit() else 60.0


def _shown(body: bytes) -> str:
    return repr(body[:40].decode("utf-8", "replace"))
