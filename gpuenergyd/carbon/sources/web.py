"""HTTP client with limits on time, size, redirects and retries; the only module that imports requests.

The limits hold for slow, broken and hostile providers. No error message contains a URL's query or a header, because
they contain keys.
"""

import json
import random
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from urllib3.exceptions import HTTPError, ReadTimeoutError

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import CarbonSourceError

_CHUNK_BYTES = 64 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RETRIED = frozenset({429, 500, 502, 503, 504})


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


_TEMPORARY = frozenset(
    {
        SourceProblem.RATE_LIMITED,
        SourceProblem.SERVER_ERROR,
        SourceProblem.TIMEOUT,
        SourceProblem.UNREACHABLE,
    }
)


class SourceError(CarbonSourceError):
    """Failure of a source, with its kind and the provider's Retry-After."""

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
    """For all tries together, including reading, so that a slow sender cannot exceed it."""
    size_bytes: int = 4 * 2**20
    max_retries: int = 2
    max_redirects: int = 3
    max_pause_s: float = 8.0
    """A longer Retry-After ends the request and is passed on."""


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
            SourceError: as `get`, or the body is not JSON.
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
            SourceError: every other outcome, after retries if the failure is temporary.
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
                            _check_status(name, reply)
                            return self._body(name, reply, deadline_s)
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


def _check_status(name: str, reply: requests.Response) -> None:
    status = reply.status_code
    if status == 200:
        return
    retry_after_s = _retry_after_s(reply.headers.get("Retry-After"))
    known = {
        401: (SourceProblem.UNAUTHORIZED, "the key was rejected"),
        403: (SourceProblem.FORBIDDEN, "the key's plan does not include this"),
        404: (SourceProblem.NOT_FOUND, "unknown zone or address"),
        429: (SourceProblem.RATE_LIMITED, "too many requests"),
    }
    if status in known:
        problem, words = known[status]
        raise SourceError(problem, f"{name}: HTTP {status}, {words}", retry_after_s=retry_after_s)
    problem = SourceProblem.SERVER_ERROR if status in _RETRIED or status >= 500 else SourceProblem.BAD_STATUS
    raise SourceError(problem, f"{name}: HTTP {status}", retry_after_s=retry_after_s)


def _retry_after_s(header: str | None) -> float | None:
    """Return a Retry-After in seconds; a date counts as one minute."""
    if header is None:
        return None
    text = header.strip()
    return min(float(text), 86_400.0) if text.isdigit() else 60.0


def _shown(body: bytes) -> str:
    return repr(body[:40].decode("utf-8", "replace"))
