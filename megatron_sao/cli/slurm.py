"""What SLURM says about a job, read without SLURM's own programs.

    python -m megatron_sao.cli.slurm hostnames LIST     as `scontrol show hostnames LIST`, where that is not installed
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from megatron_sao.cli.options import run_command
from megatron_sao.errors import ConfigError

_FIRST_PORT, _NUM_PORTS = 15000, 15000  # below those that systems hand out
MAX_HOSTS = 2**16  # of one list: a mistyped range must not fill the memory


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2 or argv[0] != "hostnames":
        raise ConfigError("usage: python -m megatron_sao.cli.slurm hostnames LIST, for example 'node[01-04,09]'")
    print("\n".join(expand_hostlist(argv[1])))


def expand_hostlist(text: str) -> list[str]:
    """The hosts of a SLURM host list, in SLURM's order: "n[08-10],gpu7" is n08, n09, n10, gpu7.

    Raises: ConfigError for an empty list and for one that is malformed.
    """
    hosts: list[str] = []
    for item in filter(None, re.split(r"[,\s]+(?![^\[\]]*\])", text)):  # commas within brackets belong to a range
        hosts += _expand_item(item, text)
    if not hosts:
        raise ConfigError(f"the host list {text!r} names no host")
    return hosts


def gpus_on_node(env: Mapping[str, str]) -> int:
    """The GPUs that SLURM gave this job on this node.

    SLURM_GPUS_PER_NODE is only what was asked for, and may name a type ("a100:4"), so SLURM_GPUS_ON_NODE counts first.
    Raises: ConfigError when neither says a number.
    """
    given = {name: env[name] for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE") if env.get(name)}
    for value in given.values():
        if found := re.fullmatch(r"(?:[^:]+:)*(\d+)", value):
            return int(found[1])
    said = ", ".join(f"{name} = {value!r}" for name, value in given.items()) or "neither is set"
    raise ConfigError(
        f"SLURM_GPUS_ON_NODE and SLURM_GPUS_PER_NODE say no number of GPUs ({said}); ask for some with"
        " --gpus-per-node=N or --gpus-per-node=TYPE:N"
    )


def srun_world(env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would tell this task of a step that srun started: RANK and so on; {} for a step of one task.

    MASTER_ADDR is the name of the first node; MASTER_PORT follows from the numbers of job and step, for nobody hands
    one out to all tasks.
    Raises: ConfigError for a node list that is malformed.
    """
    if int(env.get("SLURM_NTASKS", 1)) == 1 or "SLURM_PROCID" not in env:
        return {}
    step = 101 * int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_NTASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "MASTER_ADDR": expand_hostlist(env["SLURM_STEP_NODELIST"])[0],
        "MASTER_PORT": str(_FIRST_PORT + step % _NUM_PORTS),
    }


def _expand_item(item: str, text: str) -> list[str]:
    """The hosts of one item, "r[1-2]n[01-02]"."""
    words = re.split(r"\[([^\[\]]*)\]", item)  # text and ranges in turns
    if any(bracket in word for word in words[::2] for bracket in "[]"):
        raise ConfigError(f"the host list {text!r} has a bracket without its partner in {item!r}")
    if len(words) > 1 and words[-1]:
        raise ConfigError(f"the host list {text!r} has a name that goes on after its last bracket, which SLURM refuses")
    ranges = [_numbers(word, text) for word in words[1::2]]
    if math.prod(map(len, ranges)) > MAX_HOSTS:
        raise ConfigError(f"the host list {text!r} names more than {MAX_HOSTS} hosts in {item!r}")
    # The last range varies first, then the first one, then the second one: so SLURM, which expands what stands before
    # the last range from behind.
    *outer, last = ranges or [[""]]
    chosen = [(*before[::-1], number) for before in itertools.product(*outer[::-1]) for number in last]
    return ["".join(itertools.chain(*zip(words[::2], numbers))) for numbers in chosen]


def _numbers(ranges: str, text: str) -> list[str]:
    """ "08-10,12" is 08, 09, 10, 12: as wide as the first number of its range."""
    numbers: list[str] = []
    for word in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", word)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ConfigError(f"the host list {text!r} has {word!r} where a number or a range such as 1-4 must stand")
        if last - first >= MAX_HOSTS:
            raise ConfigError(f"the host list {text!r} has the range {word}; {MAX_HOSTS} hosts are allowed")
        numbers += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    return numbers


if __name__ == "__main__":
    run_command(main)
