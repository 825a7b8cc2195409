"""How long a push will take, from its plan: the same object that a real push follows, and the speed of the links.

Owns: `Link`, `PushForecast`, `forecast`. No torch: a laptop predicts a push between hundreds of GPUs.
The buckets are gone through in their one order, as sender and receiver do. A rank sends one bucket after the other. A
worker takes one after the other: what it got from a rank it passes on to its peers, what a peer passes on it takes, and
if the next one comes from a rank it lets that arrive meanwhile. Passing on is a broadcast through the chain of peers,
in which each takes the bucket in and gives it out at the same time. A bucket that has begun is not slowed by others.
A worker loads a bucket while it takes the next one, and has two buffers: it takes none before the last but one is
loaded. What is taken as free: filling a buffer while another one is sent, and copying within a GPU.
"""

from dataclasses import dataclass

from megatron_sao.transport.plan import PushPlan


@dataclass(frozen=True)
class Link:
    """What connects every rank and every worker with the others, in each direction."""

    bytes_per_s: float
    message_s: float = 0.0  # what a message costs besides its bytes

    def seconds(self, num_bytes: int, num_messages: int = 1) -> float:
        """Of so many bytes, one message after the other."""
        return num_messages * self.message_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class PushForecast:
    """What one push moves, and when it is over. Lists: by trainer rank, or by kind of worker (engines are alike)."""

    sent_bytes: list[int]
    num_sent: list[int]  # messages
    sending_s: float  # the busiest rank, if it never waited
    received_bytes: list[int]
    num_received: list[int]
    receiving_s: float  # the busiest worker, if it never waited
    num_loaded: list[int]  # pieces
    loading_s: float  # the busiest worker, if it never waited
    filling_s: float  # before the first byte is out
    transfer_s: float  # from then until the last byte has arrived everywhere
    total_s: float  # from the first filled buffer to weights that can serve

    @property
    def balance(self) -> float:
        """Bytes of the most loaded sender / mean."""
        return max(self.sent_bytes) * len(self.sent_bytes) / sum(self.sent_bytes)


@dataclass(eq=False)
class _Worker:
    taken: float = 0.0  # when it has taken, and passed on, all so far
    can_open: float = 0.0  # when it can let the next one arrive from a rank: while it is busy with the last of them
    loaded: float = 0.0  # when the last of them is loaded
    loaded_before: float = 0.0  # and the last but one: then its buffer is free

    @property
    def is_free(self) -> float:
        """When it can take part in the next one."""
        return max(self.taken, self.loaded_before)


def forecast(plan: PushPlan, *, num_engines: int, link: Link, piece_s: float = 0.0) -> PushForecast:
    """Follow the plan, bucket by bucket.

    Args:
        piece_s: what loading a piece costs a worker.
    """
    kinds, ranks = plan.engine.num_workers, plan.num_trainer_ranks
    sent_bytes, num_sent = [0] * ranks, [0] * ranks
    received_bytes, num_received, num_loaded = [0] * kinds, [0] * kinds, [0] * kinds
    rank_free = [0.0] * ranks
    workers = [_Worker() for _ in range(num_engines * kinds)]
    for bucket, first in zip(plan.buckets, plan.first_workers(num_engines), strict=True):
        size, rank, root = bucket.num_bytes, bucket.src_rank, workers[first]
        seconds = link.seconds(size)
        arrived = rank_free[rank] = max(rank_free[rank], root.can_open, root.loaded_before) + seconds
        takers = [workers[number] for number in plan.workers_of(bucket.kinds, num_engines)]
        over = arrived
        if len(takers) > 1:
            over = max(arrived, *(worker.is_free for worker in takers)) + seconds
        for worker in takers:
            worker.can_open = max(worker.is_free, arrived) if worker is root else worker.is_free
            worker.taken = over
            worker.loaded_before = worker.loaded
            worker.loaded = max(worker.loaded, over) + len(bucket.items) * piece_s
        sent_bytes[rank] += size
        num_sent[rank] += 1
        for kind in bucket.kinds or range(kinds):
            received_bytes[kind] += size
            num_received[kind] += 1
            num_loaded[kind] += len(bucket.items)
    filling_s = link.seconds(plan.buckets[0].num_bytes)
    return PushForecast(
        sent_bytes,
        num_sent,
        max(map(link.seconds, sent_bytes, num_sent)),
        received_bytes,
        num_received,
        max(map(link.seconds, received_bytes, num_received)),
        num_loaded,
        max(num_loaded) * piece_s,
        filling_s,
        max(worker.taken for worker in workers),
        filling_s + max(worker.loaded for worker in workers),
    )
