"""This host's place among those of a run: its number, and its address and network interface as the others see them."""

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from megatron_sao.errors import ConfigError

PLACE_VALUES = {
    "nodes": "hosts that do the same (default 1)",
    "node-rank": "number of this host among them, from 0",
    "rendezvous": "HOST:PORT where the trainer's hosts meet: host 0 as the others reach it, and any free port there",
}


INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class HostPlace:
    """One host among those that do the same. The defaults are those of a run on one machine."""

    rendezvous: tuple[str, int] | None = None  # (address of trainer host 0, port); None = all is on this host
    number: int = 0  # of this host
    num_hosts: int = 1
    address: str = "127.0.0.1"  # of this host, as the others reach it
    interface: str = "lo"  # network interface of gloo and NCCL, unless the environment names another


def host_place(values: Mapping[str, str], interface: str) -> HostPlace:
    """This host's place.

    Args:
        values: what the command line says of PLACE_VALUES.
        interface: network interface of gloo and NCCL; empty = the one that reaches trainer host 0.
    Raises: ConfigError.
    """
    num_hosts, number = (_number(values, name, default) for name, default in (("nodes", 1), ("node-rank", 0)))
    if number >= num_hosts:
        raise ConfigError(f"--node-rank {number}: with --nodes {num_hosts} hosts are numbered 0 to {num_hosts - 1}")
    if "rendezvous" not in values:
        if num_hosts > 1:
            raise ConfigError(f"--rendezvous is missing: {PLACE_VALUES['rendezvous']}")
        return HostPlace(interface=interface or "lo")
    name, port = split_endpoint(values["rendezvous"], "--rendezvous")
    meeting = resolve(name)
    address = own_address(meeting)
    return HostPlace((meeting, port), number, num_hosts, address, interface or interface_of(address))


def take_interface(found: str, configured: str) -> None:
    """Effect: gloo and NCCL of this process, and of those that it starts, use this network interface.

    Args:
        found: the one to take where neither the configuration nor the environment names one.
        configured: parallel.interface; may be empty.
    """
    for name in INTERFACE_VARIABLES:
        if configured:
            os.environ[name] = configured
        else:
            os.environ.setdefault(name, found)


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
        raise ConfigError(f"the host name {host!r} cannot be resolved here: {error}; an address will do") from error


def own_address(towards: str) -> str:
    """This host's address on the way to the address `towards`, which may be its own. Sends nothing.

    Raises: ConfigError when there is no way.
    """
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError as error:
            raise ConfigError(f"host {socket.gethostname()} has no route to {towards}: {error.strerror}") from error
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The name of the network interface that has this address of this host. Raises: ConfigError."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    raise ConfigError(f"no network interface of this host has the address {address}; set parallel.interface")


def _number(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"--{name} {text} is no whole number")
    return int(text)
