"""What the server is told at its start; frozen and validated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from kairox_jax.config import GenerationConfig

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the server listens, whom it serves, and its limits.

    Attributes:
        model_name: what clients call the model.
        host, port: where to listen; port 0 takes a free one.
        api_key: what clients must send as a bearer token, or None for no check.
        cors_origins: web origins that may call the server; none by default.
        allow_hosts: names under which the server may be called where it listens on this machine only.
        max_body_bytes: the largest request.
        max_waiting: the most requests in the queue.
        timeout_s: the longest that a request may take, waiting included; 0 for no limit.
        grace_s: how long running requests may go on at shutdown.
        log_prompts: write prompts and answers to the log.
        defaults: sampling settings for what a request leaves out.
        seed: of requests that name none; None draws one for each.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 2**20
    max_waiting: int = 64
    timeout_s: float = 600.0
    grace_s: float = 10.0
    log_prompts: bool = False
    defaults: GenerationConfig = field(default_factory=GenerationConfig)
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"--port {self.port} must be from 0 to {MAX_PORT}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii()):
            raise ValueError("--api-key must be ASCII characters, at least one; leave it out for no check")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if origin != "*" and (parts.scheme not in ("http", "https") or not parts.netloc or parts.path):
                raise ValueError(
                    f"--cors-origin {origin!r}: expected an origin such as https://example.org, or *"
                )
        for name, value in (("--max-waiting", self.max_waiting), ("--max-body", self.max_body_bytes)):
            if value < 1:
                raise ValueError(f"{name} {value} must be 1 or more")
        for name, value in (("--timeout", self.timeout_s), ("--grace", self.grace_s)):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} {value:g} must be 0 or more seconds")

    @property
    def is_local(self) -> bool:
        """Whether the server listens on this machine only."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def host_names(self) -> frozenset[str] | None:
        """Names that a request's Host header may have, or None where any will do.

        A server on the loopback address must not answer a web page that made its own name point here.
        """
        if not self.is_local:
            return None
        return frozenset(name.lower() for name in (*LOCAL_NAMES, self.host, *self.allow_hosts))
