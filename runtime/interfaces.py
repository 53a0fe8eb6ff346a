"""The network interface through which other hosts reach this one.

gloo listens where this host's own name leads, which on many hosts is the loopback interface: then ranks on several
hosts find each other's addresses and cannot connect.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

ADDRESS_OF_INTERFACE = 0x8915
"""SIOCGIFADDR of Linux."""

INTERFACE_REQUEST_BYTES = 256


def interface_towards(host: str) -> str | None:
    """Name of the interface whose own address is used towards ``host``, for this host itself the one with its address.

    None where that is the loopback interface, or where it cannot be told (no Linux, IPv6 alone, no route).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None
    if ipaddress.ip_address(own).is_loopback:
        return None
    return next((name for _, name in socket.if_nameindex() if _address(name) == own), None)


def _address(interface: str) -> str | None:
    """The interface's first IPv4 address."""
    import fcntl  # not on every platform

    request = struct.pack(f"{INTERFACE_REQUEST_BYTES}s", interface.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, ADDRESS_OF_INTERFACE, request)
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])
