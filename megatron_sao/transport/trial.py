"""A short trial of what connects the processes of a run: a sum over all of them, then pushes of dummy buckets.

    python -m megatron_sao.transport.trial HOST PORT RANK WORLD_SIZE BACKEND TIMEOUT_S      one rank of a trial

All but the last rank stand for trainer ranks, the last one for an engine's worker; the push goes from rank 0 to it, by
the sender and receiver of a real push, checksums and agreements included. Rank 0 prints what was measured, as JSON.
"""

import sys
import time
from collections.abc import Sequence

import msgspec
import torch

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.group import WeightGroup, weight_group
from megatron_sao.transport.plan import PIECE_BYTES, WireItem, make_plan
from megatron_sao.transport.receiver import WeightReceiver
from megatron_sao.transport.sender import WeightSender

MIB = 2**20
BUCKET_BYTES = 64 * MIB
SUM_BYTES = {"cpu": 64 * MIB, "cuda": 1024 * MIB}
PUSH_BYTES = {"cpu": 256 * MIB, "cuda": 2048 * MIB}


class Trial(msgspec.Struct, frozen=True):
    """What rank 0 measured."""

    backend: str
    num_ranks: int
    sum_bytes: int
    sum_s: float
    push_bytes: int
    push_s: float

    @property
    def sum_bytes_per_s(self) -> float:
        """Of each rank's link, each way: a ring moves 2 (n - 1) / n of the tensor."""
        return 2 * (self.num_ranks - 1) / self.num_ranks * self.sum_bytes / self.sum_s

    @property
    def push_bytes_per_s(self) -> float:
        """From the sender's buffers to whole tensors at the receiver."""
        return self.push_bytes / self.push_s


def run_trial(group: WeightGroup, backend: str) -> Trial:
    """Collective: every rank of a fresh group of two or more.

    Raises: ProtocolError when a sum or a push does not arrive as it was sent.
    """
    sum_bytes = SUM_BYTES[group.device.type]
    sum_s = _time_sum(group, sum_bytes)
    push_bytes, push_s = _time_push(group, PUSH_BYTES[group.device.type])
    return Trial(backend, group.world_size, sum_bytes, sum_s, push_bytes, push_s)


def _time_sum(group: WeightGroup, num_bytes: int) -> float:
    """Seconds of the second one: the first one connects."""
    for _ in range(2):
        tensor = torch.ones(num_bytes // 4, device=group.device)
        group.gather([0])
        started = time.monotonic()
        group.all_reduce(tensor)
        seconds = time.monotonic() - started
    if not bool((tensor == group.world_size).all()):
        raise ProtocolError(f"a sum of ones over {group.world_size} ranks is not {group.world_size} everywhere")
    return seconds


def _time_push(group: WeightGroup, num_bytes: int) -> tuple[int, float]:
    """Bytes and seconds of the second one, as rank 0 saw it."""
    row_bytes = 4096 * 2
    items = [
        WireItem(f"layers.{number}.weight", "bfloat16", (PIECE_BYTES // row_bytes, row_bytes // 2))
        for number in range(num_bytes // PIECE_BYTES)
    ]
    plan = make_plan([items, *([] for _ in range(group.world_size - 2))], bucket_bytes=BUCKET_BYTES)
    if group.rank == group.world_size - 1:
        receiver = WeightReceiver(group, plan)
        for version in (1, 2):
            receiver.receive(version, load=lambda tensors: None)
        return plan.num_bytes, receiver.statistics.total_s
    sender = WeightSender(group, plan)
    weight = torch.ones(items[0].shape, dtype=torch.bfloat16, device=group.device)
    statistics = [sender.send(lambda item: weight, version) for version in (1, 2)]
    return plan.num_bytes, statistics[-1].seconds


def gather_texts(group: WeightGroup, text: str) -> list[str]:
    """One text from every rank, in rank order. Collective: every rank of the group."""
    mine = text.encode()
    texts = []
    for rank, (length,) in enumerate(group.gather([len(mine)])):
        buffer = torch.zeros(max(length, 1), dtype=torch.uint8, device=group.device)
        if rank == group.rank and mine:
            buffer.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        group.broadcast(buffer, rank)
        texts.append(bytes(buffer[:length].tolist()).decode())
    return texts


def main(argv: Sequence[str]) -> None:
    host, port, rank, world_size, backend, timeout_s = argv
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    group = weight_group(host, int(port), int(rank), int(world_size), backend=backend, timeout_s=float(timeout_s))
    result = run_trial(group, backend)
    if int(rank) == 0:
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
