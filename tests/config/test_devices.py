"""Which GPU a process takes (case LCH-03): on nodes of several GPUs, with one GPU shown to each process, with UUIDs."""

import pytest

from megatron_sao.config.devices import device_index, engine_devices, visible_devices
from megatron_sao.errors import ConfigError


@pytest.mark.parametrize(
    "text, expected",
    [
        ("6", ["6"]),
        ("4,5", ["4", "5"]),
        (" 4, 5 ", ["4", "5"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
    ],
)
def test_visible_devices(text, expected):
    assert visible_devices(text) == expected


@pytest.mark.parametrize(
    "local_rank, visible, expected",
    [
        (1, "0,1,2,3", 1),  # rank 5 of the world
        (0, "0,1,2,3", 0),  # rank 4 of the world
        (3, "6", 0),  # one GPU shown to each process
        (0, "6", 0),
        (1, "GPU-a,GPU-b", 1),
    ],
)
def test_a_rank_takes_the_device_of_its_number_on_the_node(local_rank, visible, expected):
    assert device_index(local_rank, len(visible_devices(visible))) == expected


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(ConfigError, match="LOCAL_RANK = 3, but this process sees 2 GPUs"):
        device_index(3, len(visible_devices("4,5")))


def test_engines_share_the_devices_of_their_node():
    assert [engine_devices(["4", "5", "6", "7"], number, 2) for number in range(2)] == ["4,5", "6,7"]
    assert [engine_devices(["GPU-a", "GPU-b"], number, 1) for number in range(2)] == ["GPU-a", "GPU-b"]
    with pytest.raises(ConfigError, match=r"engine 1 of this node needs the GPUs 2 to 3 .* these are 3 \(4,5,6\)"):
        engine_devices(["4", "5", "6"], 1, 2)
