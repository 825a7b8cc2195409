"""How long a push will take, from its plan: the same object that a real push follows, and the speed of the links.

Owns: `Link`, `PushForecast`, `forecast`. No torch: a laptop predicts a push between hundreds of GPUs.
The buckets are gone through in their one order, as sender and receiver do. A rank sends one bucket after the other. A
worker takes one after the other: what it got from a rank it passes on to its peers, what a peer passes on it takes, and if
the next one comes from a rank it lets that arrive meanwhile. Passing on is a broadcast through the chain of peers, in
which each takes the bucket in and gives it out at the same time. A bucket that has begun is not slowed down by others.
What a rank or worker does besides is taken as no slower than the link: filling a buffer while another one is sent, loading
one while the next arrives. It leaves the first bucket's filling and the last one's loading.
"""

from dataclasses import dataclass

from megatron_sao.transport.plan import EVERY_KIND, PushPlan


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
    """What one push moves, and when it is over."""

    sent_bytes: list[int]  # by each trainer rank
    received_bytes: list[int]  # by the worker of each kind; engines do not differ
    num_sent: list[int]  # messages of each trainer rank
    num_received: list[int]  # and of the worker of each kind
    sending_s: float  # the busiest rank, if it never waited
    receiving_s: float  # the busiest worker, if it never waited
    filling_s: float  # before the first byte is out
    transfer_s: float  # until the last byte has arrived everywhere
    loading_s: float  # after that

    @property
    def balance(self) -> float:
        """Bytes of the most loaded sender / mean."""
        return max(self.sent_bytes) * len(self.sent_bytes) / sum(self.sent_bytes)

    @property
    def total_s(self) -> float:
        """From the first filled buffer to weights that can serve."""
        return self.filling_s + self.transfer_s + self.loading_s


def forecast(plan: PushPlan, *, num_engines: int, link: Link) -> PushForecast:
    """Follow the plan, bucket by bucket."""
    kinds, ranks = plan.engine.num_workers, plan.num_trainer_ranks
    sent_bytes, num_sent, received_bytes, num_received = [0] * ranks, [0] * ranks, [0] * kinds, [0] * kinds
    rank_free = [0.0] * ranks
    workers = [_Worker() for _ in range(num_engines * kinds)]
    for bucket, first in zip(plan.buckets, plan.first_workers(num_engines), strict=True):
        size = bucket.num_bytes
        seconds = link.seconds(size)
        rank = bucket.src_rank
        root = workers[first]
        arrived = max(rank_free[rank], root.can_open) + seconds
        rank_free[rank] = arrived
        takers = workers if bucket.kind == EVERY_KIND else workers[bucket.kind :: kinds]
        over = arrived
        if len(takers) > 1:
            over = max(arrived, *(worker.is_free for worker in takers)) + seconds
        for worker in takers:
            worker.can_open = max(worker.is_free, arrived) if worker is root else worker.is_free
            worker.is_free = over
        sent_bytes[rank] += size
        num_sent[rank] += 1
        for kind in range(kinds) if bucket.kind == EVERY_KIND else [bucket.kind]:
            received_bytes[kind] += size
            num_received[kind] += 1
    return PushForecast(
        sent_bytes,
        received_bytes,
        num_sent,
        num_received,
        sending_s=max(map(link.seconds, sent_bytes, num_sent)),
        receiving_s=max(map(link.seconds, received_bytes, num_received)),
        filling_s=link.seconds(plan.buckets[0].num_bytes),
        transfer_s=max(worker.is_free for worker in workers),
        loading_s=link.seconds(plan.buckets[-1].num_bytes),
    )


@dataclass
class _Worker:
    is_free: float = 0.0  # when it has taken, and passed on, all so far
    can_open: float = 0.0  # when it can let the next one arrive from a rank: while it is busy with the last of them
