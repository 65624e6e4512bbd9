"""HTTP for a hub: credentials are sent to its host only, and responses are limited in size and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urljoin, urlsplit

PATIENCE = 60.0  # seconds per response, plus the time of its bytes
SLOWEST = 2**18  # least bytes per second
STALL = 30.0  # seconds without a byte
HOPS = 10  # largest number of redirects
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Get:
    """A request: `secret` are headers that only the host of `owner` is sent."""

    url: str
    owner: str
    plain: Mapping[str, str]
    secret: Mapping[str, str]
    status: int  # with which a body is read
    most: int  # bytes of it


@dataclass(frozen=True)
class Response:
    """A response and its final URL."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    trusted: bool  # whether only the owner's host was contacted


def fetch(client: Any, get: Get) -> Response:
    """Send a request by an httpx client and follow redirects, within a time limit that depends on its size.

    It runs in its own thread: headers that arrive byte by byte could not be interrupted otherwise.
    """
    seconds = PATIENCE + get.most / SLOWEST
    done: SimpleQueue[Response | Exception] = SimpleQueue()

    def work() -> None:
        try:
            done.put(_follow(client, get, time.monotonic() + seconds))
        except Exception as error:
            done.put(error)

    Thread(target=work, daemon=True).start()
    try:
        found = done.get(timeout=seconds + 1)
    except Empty:
        raise _late(seconds) from None
    if isinstance(found, Exception):
        raise found
    return found


def _follow(client: Any, get: Get, until: float) -> Response:
    url, start = get.url, time.monotonic()
    trusted = origin(url) == origin(get.owner)
    for _ in range(HOPS):
        headers = {**get.plain, **(get.secret if trusted else {})}
        with client.stream("GET", url, headers=headers, follow_redirects=False, timeout=STALL) as answer:
            if answer.status_code not in REDIRECTS or "location" not in answer.headers:
                body = bytearray()
                for chunk in answer.iter_raw() if answer.status_code == get.status else ():
                    body += chunk
                    if len(body) > get.most:
                        raise ValueError(f"more than {get.most} bytes came, which is refused")
                    if time.monotonic() > until:
                        raise _late(until - start)
                return Response(answer.status_code, dict(answer.headers), bytes(body), url, trusted)
            target = urljoin(url, answer.headers["location"])
        if origin(target)[0] not in PORTS or (origin(url)[0] == "https" and origin(target)[0] != "https"):
            raise ValueError(f"a redirect from {origin(url)[0]} to {target[:100]!r} is refused")
        trusted = trusted and origin(target) == origin(get.owner)  # who was left once is not trusted again
        url = target
    raise ValueError(f"more than {HOPS} redirects are refused")


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or PORTS.get(parts.scheme, 0)


def _late(seconds: float) -> TimeoutError:
    return TimeoutError(f"no whole response within {seconds:.0f} seconds")
