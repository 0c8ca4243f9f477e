"""Where a server is: an HTTP or HTTPS URL, or the path of a Unix socket."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from hardpoint.plugins import ConfigError
from hardpoint.typed import shown

EXPECTED = "http://HOST:PORT, https://HOST:PORT or http+unix:///PATH"


@dataclass(frozen=True)
class Target:
    """The address of a server.

    Attributes:
        host, port: TCP address; the host is also what the `Host` header has.
        prefix: prefix of the paths of all routes: "" or "/gateway".
        uds: path of a Unix socket, instead of TCP.
        secure: whether TLS is used.
        verify: whether the server's certificate is checked.
    """

    host: str
    port: int
    prefix: str = ""
    uds: str = ""
    secure: bool = False
    verify: bool = True

    @classmethod
    def parse(cls, url: str, *, uds: str = "", verify: bool = True) -> Target:
        """Read a URL; a final `/v1` is left out, since routes have it.

        Args:
            url: `http://HOST:PORT`, `https://...` or `http+unix:///PATH`.
            uds: path of a Unix socket that the URL's host is reached by.
            verify: whether a certificate is checked.

        Raises:
            ConfigError: the URL cannot be read.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # an IPv6 address without its end, a port that is no number
            raise ConfigError(f"url: expected {EXPECTED}, got {shown(url)}") from None
        if parts.scheme == "http+unix":
            path = unquote(parts.netloc) or parts.path
            if not path:
                raise ConfigError(f"url: expected {EXPECTED}, got {shown(url)}")
            return cls("localhost", 80, uds=path)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: expected {EXPECTED}, got {shown(url)}")
        secure = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        port = port or (443 if secure else 80)
        return cls(parts.hostname, port, prefix, uds, secure, verify)

    @property
    def address(self) -> str:
        """The address for messages."""
        return self.uds or f"{self.host}:{self.port}"

    @property
    def host_header(self) -> str:
        """The value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port in (80, 443) else f"{host}:{self.port}"

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context, or None."""
        if not self.secure:
            return None
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
