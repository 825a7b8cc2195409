"""Two hosts on one machine: network namespaces with a cable between them, each with a host name of its own.

They share the file system, as hosts of a cluster share the run folder. Needs root and iproute2.
"""

import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.support.local_run import MarkedCommand

_NOBODY = "02:00:00:00:00:01"  # a network card that does not exist


def can_be_made() -> bool:
    """Whether this machine lets this user make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("unshare") is not None


class TwoHosts:
    """The hosts "a" and "b". Use as a context manager: afterwards nothing is left of them."""

    addresses = {"a": "10.203.77.1", "b": "10.203.77.2"}  # exist inside the namespaces only
    names = {"a": "node-a", "b": "node-b"}

    def __init__(self):
        mark = uuid.uuid4().hex[:8]
        self._spaces = {host: f"sao-{mark}-{host}" for host in "ab"}
        self.interfaces = {host: f"v{mark}{host}" for host in "ab"}

    def __enter__(self):
        try:
            for space in self._spaces.values():
                _ip("netns", "add", space)
            a, b = self.interfaces.values()
            _ip("link", "add", a, "netns", self._spaces["a"], "type", "veth", "peer", "name", b,
                "netns", self._spaces["b"])  # fmt: skip
            for host, space in self._spaces.items():
                _ip("-n", space, "address", "add", f"{self.addresses[host]}/24", "dev", self.interfaces[host])
                _ip("-n", space, "link", "set", "lo", "up")
                _ip("-n", space, "link", "set", self.interfaces[host], "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in self._spaces.values():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)  # takes its end of the cable along

    def start(self, host: str, command: Sequence[str], terminal: Path) -> MarkedCommand:
        """Start a command on a host."""
        # The tests' own interface of gloo is none by which hosts reach each other.
        script = f'unset GLOO_SOCKET_IFNAME; hostname {self.names[host]} && exec "$@"'
        inside = ["ip", "netns", "exec", self._spaces[host], "unshare", "--uts", "sh", "-c", script, "sh"]
        return MarkedCommand([*inside, *command], terminal)

    def pull_cable(self) -> None:
        """Effect: both ends of the cable lose their carrier."""
        _ip("-n", self._spaces["b"], "link", "set", self.interfaces["b"], "down")

    def drop_packets(self) -> None:
        """Effect: each host goes on sending, and nothing arrives."""
        for host, other in ("ab", "ba"):
            _ip("-n", self._spaces[host], "neighbour", "replace", self.addresses[other], "lladdr", _NOBODY,
                "dev", self.interfaces[host])  # fmt: skip

    def mend(self) -> None:
        """Effect: the hosts reach each other again."""
        for host, other in ("ab", "ba"):
            _ip("-n", self._spaces[host], "link", "set", self.interfaces[host], "up")
            subprocess.run(["ip", "-n", self._spaces[host], "neighbour", "delete", self.addresses[other], "dev",
                            self.interfaces[host]], capture_output=True)  # fmt: skip


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
