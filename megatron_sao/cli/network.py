"""Addresses and network interfaces of this host, as seen from another host of the run."""

import ipaddress
import socket

import psutil

from megatron_sao.errors import ConfigError


def split_endpoint(endpoint: str, option: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"; an IPv6 host stands in brackets. Raises: ConfigError that names `option`."""
    host, colon, port = endpoint.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"{option} {endpoint!r} is not HOST:PORT, for example node-a:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def resolve(host: str) -> str:
    """The numeric address of a host. Raises: ConfigError when nothing knows its name."""
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"the host name {host!r} cannot be resolved here: {error}; an address works as well") from error


def own_address(towards: str) -> str:
    """This host's address on the way to the address `towards`, which may be its own. Sends nothing.

    Raises: ConfigError when there is no way.
    """
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError as error:
            raise ConfigError(f"this host ({socket.gethostname()}) has no route to {towards}: {error.strerror}") from error
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The name of the network interface that has this address of this host. Raises: ConfigError."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise ConfigError(f"no network interface of this host has the address {address}; set parallel.interface")
