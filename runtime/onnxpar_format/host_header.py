"""For which names of hosts a server on the local machine answers."""

import re
from ipaddress import ip_address

_HEADER = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?")


def problem_of_host(named: str, bound: str, header: str | None) -> str | None:
    """Returns what is wrong with the Host header of a request; None if it may be answered.

    The owner of a web page can let its name mean 127.0.0.1 after a browser has loaded the page. The
    page may then read what the browser's own machine serves, but its requests have the page's name
    as host. So a server that only the local machine reaches answers for the names of that machine.
    One that listens on another address may be called by any name.

    Args:
        named: The host that the user named to listen on.
        bound: The address on which the server listens.
        header: The header; None without one, which no browser leaves out.
    """
    if header is None or not _is_local(bound):
        return None
    parts = _HEADER.fullmatch(header)
    host = "" if parts is None else (parts[1] or parts[2]).lower()
    if host == named.lower() or _is_local(host):
        return None
    return (
        f"Host: expected localhost, 127.0.0.1 or [::1], got {header!r}; with another --host the "
        "server answers for every name"
    )


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
