"""Which GPUs a process takes: pure functions of numbers and of CUDA_VISIBLE_DEVICES."""

from megatron_sao.errors import ConfigError


def visible_devices(text: str) -> list[str]:
    """The GPUs that a value of CUDA_VISIBLE_DEVICES shows, as it names them: numbers or UUIDs.

    As CUDA reads it: -1 hides itself and all that follow, and nothing at all hides every GPU.
    """
    found: list[str] = []
    for name in filter(None, (word.strip() for word in text.split(","))):
        if name == "-1":
            break
        found.append(name)
    return found


def device_index(local_rank: int, num_visible: int) -> int:
    """The GPU of a trainer rank among those that its process sees.

    A launcher shows a rank either all GPUs of the trainer on its node, and the rank takes the one of its number there,
    or its own alone. The rank's number in the world says nothing about either.

    Args:
        local_rank: LOCAL_RANK, the number among the ranks of this node.
        num_visible: GPUs that the process sees, at least 1.
    Raises: ConfigError.
    """
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        raise ConfigError(
            f"LOCAL_RANK = {local_rank}, but this process sees {num_visible} GPUs (CUDA_VISIBLE_DEVICES): show it those"
            " of all trainer ranks on this node, or start fewer ranks here"
        )
    return local_rank


def engine_devices(visible: list[str], number: int, num_workers: int) -> str:
    """CUDA_VISIBLE_DEVICES of the engine `number` of this node: the engines share its GPUs in order, one a worker.

    Args:
        visible: the GPUs of all engines of this node.
        number: from 0, on this node.
        num_workers: of one engine.
    Raises: ConfigError.
    """
    first, end = number * num_workers, (number + 1) * num_workers
    if end > len(visible):
        raise ConfigError(
            f"engine {number} of this node needs the GPUs {first} to {end - 1} of those that it may use, but these are"
            f" {len(visible)} ({','.join(visible)}); change engine.count, engine.tensor_parallel or the number of nodes"
        )
    return ",".join(visible[first:end])
