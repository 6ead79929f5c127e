"""Broker URLs: every form kombu hands over becomes one :class:`Target`.

kombu gives the whole URL in ``hostname`` (``can_parse_url``), except after a
failover from one URL of ``a;b`` to the next: then host, port, user, password and
virtual host come apart.  Both end up here.
"""

from __future__ import annotations

import difflib
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from psycopg import pq

from .errors import ConfigurationError

#: libpq settings that the transport needs for itself.
_OURS = {
    "client_encoding": "the transport speaks UTF-8",
    "replication": "a broker is not a replication client",
    "sslpassword": "it would be shown by monitoring; put it into a service file (service=…)",
}

#: ``broker_use_ssl`` keys, in Redis' style, in AMQP's style and libpq's own.
_SSL_KEYS = {
    "ca_certs": "sslrootcert",
    "certfile": "sslcert",
    "keyfile": "sslkey",
    "sslmode": "sslmode",
    "sslrootcert": "sslrootcert",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
}

#: What Python's ``cert_reqs`` asks for, in libpq's words.
_CERT_REQS = {
    ssl.CERT_NONE: "require",
    ssl.CERT_OPTIONAL: "verify-ca",
    ssl.CERT_REQUIRED: "verify-full",
    "none": "require",
    "optional": "verify-ca",
    "required": "verify-full",
    "CERT_NONE": "require",
    "CERT_OPTIONAL": "verify-ca",
    "CERT_REQUIRED": "verify-full",
}

#: The remedy for a URL that falls apart at the wrong place.
_ENCODE = (
    "in user, password and database write '@' as %40, ':' as %3A, '/' as %2F, '?' as %3F "
    "and '%' as %25"
)


@dataclass(frozen=True)
class Target:
    """Where the database is and how to get in.

    Attributes:
        conninfo: libpq keywords and values, without the password; sorted pairs, hashable.
        options: options of ours found in the URL's query.
        password: kept apart so that nothing prints it.
    """

    conninfo: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    password: str | None = field(default=None, repr=False)

    @property
    def params(self) -> dict[str, str]:
        """libpq keywords and values, without the password."""
        return dict(self.conninfo)

    def describe(self) -> str:
        """Name the server, database and user for an error message; never the password."""
        known = self.params
        if "service" in known and "host" not in known:
            return f"service {known['service']!r}"
        hosts = known.get("host", "").split(",")
        ports = known.get("port", "").split(",")
        if len(ports) == 1:
            ports *= len(hosts)
        places = [
            (host or "local socket") + (f":{port}" if port else "")
            for host, port in zip(hosts, ports, strict=False)
        ]
        where = ",".join(places)
        for key, word in (("dbname", "database"), ("user", "user")):
            if key in known:
                where += f", {word} {known[key]!r}"
        return where

    def completed_by(self, other: Target) -> Target:
        """Fill in what is missing here from `other`; a URL wins over separate fields."""
        # The host of the fields is the URL itself.
        extra = {k: v for k, v in other.params.items() if k != "host"}
        if "host" not in self.params or "port" in self.params:
            extra.pop("port", None)
        password = other.password if self.password is None else self.password
        return Target(_pairs({**extra, **self.params}), self.options, password)

    def standing_for(self, other: Target) -> Target:
        """Return the way to the same database by another server: ours, else as `other` says."""
        place = ("host", "hostaddr", "port", "service")
        rest = {key: value for key, value in other.params.items() if key not in place}
        return Target(_pairs({**rest, **self.params}), (), other.password)

    def with_ssl(self, given: Any) -> Target:
        """Add ``broker_use_ssl`` (True, or a dictionary in Redis', AMQP's or libpq's words).

        Settings of the URL win.

        Raises:
            ConfigurationError: an unknown key or ``cert_reqs``.
        """
        if not given:
            return self
        extra = _ssl_params(given if isinstance(given, Mapping) else {})
        extra.setdefault("sslmode", "require")
        return Target(_pairs({**extra, **self.params}), self.options, self.password)


def parse(url: str, option_names: tuple[str, ...]) -> Target:
    """Parse a whole broker URL.

    Arguments:
        url: ``pgnotify://user:password@host:port,host2/database?key=value``; the host may be
            a percent-encoded socket folder or empty, keys are libpq's or option names.
        option_names: names of our own options that the query may hold.

    Raises:
        ConfigurationError: an unknown key (naming the nearest known one) or a bad port.
    """
    authority, path, query = split(url)
    userinfo, _, hostlist = authority.rpartition("@")
    user, colon, password = userinfo.partition(":")
    params = _hosts(hostlist)
    if "@" in path:
        raise ConfigurationError(f"the broker URL cannot be read; {_ENCODE}")
    if path:
        params["dbname"] = unquote(path)
    if user:
        params["user"] = unquote(user)
    secret = unquote(password) if colon else None
    options: dict[str, str] = {}
    for key, value in _query(query).items():
        if key == "password":
            secret = value
        elif key == "host":
            params.update(_hosts(value, decode=False))
        elif key == "user":
            params["user"] = value
        elif key in _OURS:
            raise ConfigurationError(f"{key!r} cannot be set in a pgnotify URL: {_OURS[key]}")
        elif key in option_names:
            options[key] = value
        elif key in libpq_keywords():
            params[key] = value
        else:
            raise ConfigurationError(_unknown_key(key, option_names))
    return Target(_pairs(params), _pairs(options), secret)


def from_fields(
    host: str | None,
    port: int | None,
    user: str | None,
    password: str | None,
    virtual_host: str | None,
) -> Target:
    """Build the target from kombu's separate fields, as after a failover."""
    params = {}
    if host:
        params["host"] = host
    if port:
        params["port"] = str(port)
    if user:
        params["user"] = user
    if virtual_host and virtual_host != "/":
        params["dbname"] = virtual_host.removeprefix("/")
    return Target(_pairs(params), (), password)


def split(url: str) -> tuple[str, str, str]:
    """Split a URL into authority, path (without its slash) and query.

    By hand, since urllib refuses several hosts with ports, and since a password may
    hold ``#``, ``/`` or ``@`` that somebody forgot to encode.
    """
    base, _, query = url.partition("://")[2].partition("?")
    slash = base.find("/", base.find("@") + 1)
    if slash < 0:
        return base, "", query
    return base[:slash], base[slash + 1 :], query


def without_password(url: str) -> tuple[str, str | None, str | None]:
    """Take user and password out of a URL: ``(url, user, password)``.

    The URL that is left may be shown to anybody.
    """
    scheme = url.partition("://")[0]
    authority, path, query = split(url)
    if "@" in path or "@" in query.partition("=")[0]:
        # Part of the password may be anywhere. What is left shows nothing, and parse() refuses it.
        return f"{scheme}://**:**/", None, None
    userinfo, _, hostlist = authority.rpartition("@")
    user, colon, password = userinfo.partition(":")
    secret: str | None = unquote(password) if colon else None
    kept = []
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key == "password":
            secret = value
        else:
            kept.append(f"{quote(key, safe='')}={quote(value, safe='/:,')}")
    shown = f"{scheme}://{hostlist}/{path}" + ("?" + "&".join(kept) if kept else "")
    return shown, unquote(user) or None, secret


def with_credentials(url: str, user: str | None, password: str | None) -> str:
    """Put user and password (or a mask for it) into a URL of :func:`without_password`."""
    if not user and password is None:
        return url
    scheme, _, rest = url.partition("://")
    secret = "" if password is None else ":" + quote(str(password), safe="*")
    return f"{scheme}://{quote(user or '', safe='')}{secret}@{rest}"


@cache
def libpq_keywords() -> frozenset[str]:
    """Return the connection keywords of the libpq psycopg is linked with."""
    return frozenset(entry.keyword.decode() for entry in pq.Conninfo.get_defaults())


def _hosts(text: str, *, decode: bool = True) -> dict[str, str]:
    """Split ``h1:5433,[::1]:5434,/socket`` into libpq's host and port lists."""
    if not text:
        return {}
    hosts, ports = [], []
    for place in text.split(","):
        host, port = place, ""
        if place.startswith("["):
            host, _, rest = place[1:].partition("]")
            port = rest.removeprefix(":")
        elif not place.startswith("/") and place.count(":") == 1:
            host, _, port = place.partition(":")
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            # What stands here may be a piece of the password: do not repeat it.
            raise ConfigurationError(f"the broker URL holds no valid port; {_ENCODE}")
        hosts.append(unquote(host) if decode else host)
        ports.append(port)
    params = {"host": ",".join(hosts)} if any(hosts) else {}
    if any(ports):
        params["port"] = ",".join(ports)
    return params


def _query(query: str) -> dict[str, str]:
    """Parse the query; several ``host`` entries (SQLAlchemy's way) become one list."""
    found: dict[str, str] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        found[key] = f"{found[key]},{value}" if key == "host" and key in found else value
    return found


def _ssl_params(given: Mapping[str, Any]) -> dict[str, str]:
    """Translate a ``broker_use_ssl`` dictionary into libpq's words."""
    params: dict[str, str] = {}
    names = {str(key).removeprefix("ssl_"): value for key, value in given.items()}
    reqs = names.pop("cert_reqs", None)
    if reqs is not None:
        if reqs not in _CERT_REQS:
            raise ConfigurationError(f"broker_use_ssl: cert_reqs {reqs!r} is not known")
        params["sslmode"] = _CERT_REQS[reqs]
    if names.pop("check_hostname", True) is False and params.get("sslmode") == "verify-full":
        params["sslmode"] = "verify-ca"
    for key, value in names.items():
        if key not in _SSL_KEYS:
            close = difflib.get_close_matches(key, _SSL_KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(_SSL_KEYS)}"
            raise ConfigurationError(f"unknown broker_use_ssl key {key!r}: {hint}")
        params[_SSL_KEYS[key]] = str(value)
    return params


def _unknown_key(key: str, option_names: tuple[str, ...]) -> str:
    """Say which key is unknown; never repeat what may be the rest of a password."""
    if "@" in key:
        raise ConfigurationError(f"the broker URL cannot be read; {_ENCODE}")
    known = sorted((libpq_keywords() - set(_OURS)) | set(option_names))
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "it is neither libpq's nor an option"
    return f"unknown parameter {key!r} in the broker URL: {hint}"


def _pairs(params: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(params.items()))
