"""A trainer's world of one process, for scripts."""

import os
import socket

from megatron_sao.config import Config
from megatron_sao.parallel.init import World, start_world


def start_alone(config: Config) -> World:
    """Effect: sets torchrun's variables and starts the world on 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return start_world(config)
