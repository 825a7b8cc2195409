"""The push plan: which trainer rank sends which slice of which HF tensor to which workers, in which order and bucket.

Owns: `WireItem`, `Bucket`, `PushPlan`, `make_plan`. Invariants:
- made once, identical on every trainer rank and in every engine; only its hash travels with a push;
- every element of every tensor belongs to exactly one rank, which sends it once, and reaches each kind of worker that
  loads it exactly once;
- buckets run layer by layer (embeddings, layer 0, 1, ..., head; the stages of an engine take turns), so that a worker
  never holds many half-filled layers;
- within a layer each rank goes on to those workers that are free first, so that neighbours in the order can travel at
  the same time;
- the number of engines is no part of it: engines may come and go between pushes.
No torch: a laptop, the scheduler and the planner of a large run import this.
"""

import hashlib
import math
import zlib
from bisect import bisect_right
from heapq import heapify, heappop, heappush
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from megatron_sao.errors import ProtocolError
from megatron_sao.transport.engine_layout import WHOLE, EngineLayout, Parts, parts_of

EVERY_KIND = ()  # Bucket.kinds of what all workers of an engine load
PIECE_BYTES = 16 * 2**20  # no item is larger, unless a single row is
ALIGNMENT_BYTES = 16  # an item starts at a multiple of this, so that its bytes can be viewed as any dtype

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class WireItem(msgspec.Struct, frozen=True, array_like=True):
    """Rows [start, start + length) of dimension `dim` of one HF tensor, or the whole tensor (dim = -1)."""

    name: str  # HF name: "model.layers.3.mlp.experts.5.gate_proj.weight"
    dtype: str  # dtype on the wire, torch's name: "float32", "bfloat16"
    full_shape: tuple[int, ...]  # of the whole HF tensor
    dim: int = WHOLE
    start: int = 0
    length: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice itself."""
        if self.dim == WHOLE:
            return self.full_shape
        return (*self.full_shape[: self.dim], self.length, *self.full_shape[self.dim + 1 :])

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def interval(self) -> tuple[int, int]:
        """Covered rows as [start, end); a whole tensor counts as one row."""
        return (0, 1) if self.dim == WHOLE else (self.start, self.start + self.length)


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """What one rank sends at once: items one after the other, each at an aligned offset."""

    src_rank: int
    items: tuple[WireItem, ...]
    kinds: tuple[int, ...] = EVERY_KIND  # of the workers that load it, in ascending order

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each item in the buffer."""
        offsets, end = [], 0
        for item in self.items:
            offsets.append(end)
            end += _aligned(item.num_bytes)
        return tuple(offsets)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer, gaps included."""
        return sum(_aligned(item.num_bytes) for item in self.items)

    def is_for(self, kind: int) -> bool:
        """Whether workers of this kind load it."""
        return not self.kinds or kind in self.kinds


class PushPlan(msgspec.Struct, frozen=True, array_like=True):
    """The whole push. Build it with `make_plan`, which checks it."""

    buckets: tuple[Bucket, ...]  # in the one order that everybody follows
    num_trainer_ranks: int
    excluded: tuple[str, ...] = ()  # HF names of the model folder that are knowingly not pushed
    engine: EngineLayout = EngineLayout()
    folder: str = ""  # buckets travel through files there (transport/disk.py); "" = over the network

    @property
    def expected(self) -> dict[str, tuple[int, ...]]:
        """HF name -> full shape of every tensor that one push delivers."""
        return {item.name: item.full_shape for bucket in self.buckets for item in bucket.items}

    @property
    def num_bytes(self) -> int:
        """What all trainer ranks send in one push."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def sent_bytes(self, rank: int) -> int:
        """What one trainer rank sends in one push."""
        return sum(bucket.num_bytes for bucket in self.buckets if bucket.src_rank == rank)

    def received_bytes(self, kind: int) -> int:
        """What one worker of that kind takes in one push."""
        return sum(bucket.num_bytes for bucket in self.buckets if bucket.is_for(kind))

    def needed_rows(self, kind: int) -> dict[str, int]:
        """HF name -> number of rows (1 for a whole tensor) that reach a worker of that kind."""
        rows: dict[str, int] = {}
        for bucket in self.buckets:
            if bucket.is_for(kind):
                for item in bucket.items:
                    start, end = item.interval
                    rows[item.name] = rows.get(item.name, 0) + end - start
        return rows

    def first_workers(self, num_engines: int) -> list[int]:
        """For each bucket, the worker that its rank sends it to; that worker passes it on to its peers.

        Workers count over all engines: worker = engine * num_workers + kind. Engines take turns, then the kinds that
        load it do, so that each passes on the same share.
        """
        workers = self.engine.num_workers
        counts: dict[tuple[int, ...], int] = {}
        found = []
        for bucket in self.buckets:
            turn = counts[bucket.kinds] = counts.get(bucket.kinds, -1) + 1
            kinds = bucket.kinds or range(workers)
            found.append(turn % num_engines * workers + kinds[turn // num_engines % len(kinds)])
        return found

    def workers_of(self, kinds: tuple[int, ...], num_engines: int) -> list[int]:
        """The workers of all engines that load a bucket for `kinds`, counted as in `first_workers`."""
        workers = self.engine.num_workers
        return [engine * workers + kind for engine in range(num_engines) for kind in kinds or range(workers)]

    @property
    def max_bucket_bytes(self) -> int:
        """Size of a buffer that takes any bucket."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    @property
    def hash(self) -> str:
        """60 bits as 15 hex digits (they fit a signed 64-bit integer); equal plans have equal hashes."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()[:15]


def encode_plan(plan: PushPlan) -> bytes:
    """The plan as compressed msgpack: names repeat, so that the plan of a 744B model takes 2 MB instead of 35."""
    return zlib.compress(msgspec.msgpack.encode(plan), 1)


def decode_plan(raw: bytes) -> PushPlan:
    """Inverse of `encode_plan`. Raises ProtocolError when the bytes are no plan."""
    try:
        return msgspec.msgpack.decode(zlib.decompress(raw), type=PushPlan)
    except (zlib.error, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"these {len(raw)} bytes are no push plan: {error}; trainer and engine must run the "
                            "same version of megatron_sao") from error


def make_plan(
    slices_by_rank: Sequence[Iterable[WireItem]],
    *,
    bucket_bytes: int,
    engine: EngineLayout = EngineLayout(),
    expected_shapes: Mapping[str, Sequence[int]] | None = None,
    excluded: Iterable[str] = (),
) -> PushPlan:
    """Cut the slices of all ranks for the workers that load them, order them layer by layer and fill buckets.

    Args:
        slices_by_rank: for each trainer rank, the items it owns, in any order. No item belongs to two ranks.
        bucket_bytes: upper limit of a bucket; a single row that is larger gets a bucket of its own.
        engine: the layout of every engine.
        expected_shapes: HF name -> shape of what the model folder holds; None skips this comparison.
        excluded: names of the model folder that are knowingly not pushed.
    Returns: the checked plan; equal on every rank that is given equal arguments.
    Raises: ProtocolError naming every tensor that is missing, unknown, overlapping or has a gap.
    """
    if bucket_bytes < 1:
        raise ProtocolError(f"push.bucket_bytes = {bucket_bytes} must be at least 1")
    slices_by_rank = [list(items) for items in slices_by_rank]
    excluded = tuple(sorted(excluded))
    faults = _coverage_faults(slices_by_rank)
    if expected_shapes is not None:
        sent = {item.name: item.full_shape for items in slices_by_rank for item in items}
        faults += name_faults(sent, expected_shapes, excluded)
    if faults:
        raise ProtocolError("the push plan does not cover the model exactly once:\n" + first_lines(faults))
    layers: dict[tuple[int, int], _Layer] = {}
    for rank, items in enumerate(slices_by_rank):
        for item in items:
            of_rank = layers.setdefault(layer_key(item.name), {}).setdefault(rank, {})
            for kinds, piece in _cut(item, engine, min(PIECE_BYTES, bucket_bytes)):
                of_rank.setdefault(kinds, []).append(piece)
    buckets: list[Bucket] = []
    in_turns = [layers[key] for key in sorted(layers, key=lambda key: _turn_of_stages(key, engine))]
    order = _Order(len(slices_by_rank), engine.num_workers)
    for round_layers in _rounds(in_turns, bucket_bytes):
        ranks = range(len(slices_by_rank))
        buckets += order.of([_buckets_of_rank(rank, round_layers, bucket_bytes) for rank in ranks])
    return PushPlan(tuple(buckets), len(slices_by_rank), excluded, engine)


def layer_key(name: str) -> tuple[int, int]:
    """Where a tensor comes in a push: (0, 0) embeddings, (1, layer) the layers, (2, 0) final norm and head.

    The layer is the outermost number in the name, so experts stay with their layer.
    """
    for part in name.split("."):
        if part.isdigit():
            return (1, int(part))
    return (0, 0) if "embed" in name else (2, 0)


def name_faults(
    sent: Mapping[str, Sequence[int]], held: Mapping[str, Sequence[int]], excluded: Iterable[str] = ()
) -> list[str]:
    """Compare names and shapes of a plan with those of a model folder; one sentence per difference."""
    excluded = set(excluded)
    faults = [f"{name} is in the model folder but no rank sends it" for name in held.keys() - sent.keys() - excluded]
    faults += [f"{name} is sent but not in the model folder" for name in sent.keys() - held.keys()]
    faults += [f"{name} is both sent and excluded" for name in sent.keys() & excluded]
    faults += [
        f"{name} has shape {tuple(sent[name])} in the plan and {tuple(held[name])} in the model folder"
        for name in sent.keys() & held.keys()
        if tuple(sent[name]) != tuple(held[name])
    ]
    return sorted(faults)


def first_lines(lines: Sequence[str], limit: int = 8) -> str:
    """At most `limit` lines, then how many were left out."""
    shown = [f"  {line}" for line in lines[:limit]]
    if len(lines) > limit:
        shown.append(f"  ... and {len(lines) - limit} more")
    return "\n".join(shown)


def _turn_of_stages(key: tuple[int, int], engine: EngineLayout) -> tuple[int, int, int]:
    """Sorts layers so that each stage of an engine gets its first one, then its second one, and so on."""
    group, layer = key
    starts = engine.stage_starts
    stage = bisect_right(starts, layer, hi=len(starts) - 1) - 1
    return (group, layer - starts[stage], stage)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _wire_order(item: WireItem) -> tuple:
    return (*layer_key(item.name), item.name, item.start)


def _item_fault(item: WireItem, rank: int) -> str | None:
    """What is wrong with one item by itself, or None."""
    where = f"{item.name} of rank {rank}"
    if item.dtype not in DTYPE_BYTES:
        return f"{where}: unknown dtype {item.dtype!r}, known are {', '.join(DTYPE_BYTES)}"
    if any(size < 1 for size in item.full_shape):
        return f"{where}: shape {item.full_shape} is empty"
    if item.dim == WHOLE:
        return None
    if not 0 <= item.dim < len(item.full_shape):
        return f"{where}: dim {item.dim} does not exist in shape {item.full_shape}"
    if item.length < 1 or item.start < 0 or item.start + item.length > item.full_shape[item.dim]:
        return f"{where}: rows [{item.start}, {item.start + item.length}) do not fit shape {item.full_shape}"
    return None


def _coverage_faults(slices_by_rank: Sequence[Sequence[WireItem]]) -> list[str]:
    """Every tensor must be tiled by its slices: no gap, no overlap, one dtype, one shape, one dim."""
    faults: list[str] = []
    pieces: dict[str, list[tuple[WireItem, int]]] = {}
    for rank, items in enumerate(slices_by_rank):
        for item in items:
            fault = _item_fault(item, rank)
            if fault:
                faults.append(fault)
            else:
                pieces.setdefault(item.name, []).append((item, rank))
    for name, owned in pieces.items():
        first = owned[0][0]
        if len({(item.dtype, item.full_shape, item.dim) for item, _ in owned}) > 1:
            faults.append(f"{name}: its slices disagree about dtype, full shape or split dim")
            continue
        owned.sort(key=lambda piece: piece[0].interval)
        covered, last_rank = 0, None
        for item, rank in owned:
            start, end = item.interval
            if start < covered:
                faults.append(f"{name}: rows [{start}, {min(covered, end)}) come from rank {last_rank} and rank {rank}")
            elif start > covered:
                faults.append(f"{name}: rows [{covered}, {start}) come from no rank")
            covered, last_rank = max(covered, end), rank
        total = 1 if first.dim == WHOLE else first.full_shape[first.dim]
        if covered < total:
            faults.append(f"{name}: rows [{covered}, {total}) come from no rank")
    return sorted(faults)


def _cut(item: WireItem, engine: EngineLayout, piece_bytes: int) -> Iterator[tuple[tuple[int, ...], WireItem]]:
    """The pieces of an owned item, each with the kinds of worker that it goes to."""
    for interval, kinds in _intervals(item, parts_of(item.name, item.full_shape, engine)):
        # Rows that no kind is said to load go to all: the table is then no argument for leaving something out.
        is_for_all = len(kinds) in (0, engine.num_workers)
        for piece in _pieces(interval, piece_bytes):
            yield EVERY_KIND if is_for_all else kinds, piece


def _intervals(item: WireItem, parts: Parts | None) -> Iterator[tuple[WireItem, tuple[int, ...]]]:
    """The item cut where the parts of the kinds begin and end, each cut with its kinds."""
    if parts is None:
        yield item, EVERY_KIND
        return
    if parts.dim == WHOLE or item.dim not in (WHOLE, parts.dim):
        # Where it is owned in rows and loaded in columns, a worker gets the rows and takes its columns.
        yield item, tuple(kind for kind, (first, last) in enumerate(parts.rows) if first < last)
        return
    low, high = (0, item.full_shape[parts.dim]) if item.dim == WHOLE else item.interval
    bounds = sorted({low, high, *(row for rows in parts.rows for row in rows if low < row < high)})
    for start, end in zip(bounds, bounds[1:]):
        kinds = tuple(kind for kind, (first, last) in enumerate(parts.rows) if first <= start and end <= last)
        is_item = (start, end) == (low, high)
        cut = item if is_item else WireItem(item.name, item.dtype, item.full_shape, parts.dim, start, end - start)
        yield cut, kinds


def _pieces(item: WireItem, piece_bytes: int) -> Iterator[WireItem]:
    """The item in pieces of at most `piece_bytes`, or of one row."""
    if item.num_bytes <= piece_bytes or not item.full_shape:
        yield item
        return
    dim = max(item.dim, 0)
    start, end = (0, item.full_shape[0]) if item.dim == WHOLE else item.interval
    step = max(1, piece_bytes // (item.num_bytes // (end - start)))
    for low in range(start, end, step):
        yield WireItem(item.name, item.dtype, item.full_shape, dim, low, min(step, end - low))


# What is sent of a layer: by rank, and then by the kinds that load it.
_Layer = dict[int, dict[tuple[int, ...], list[WireItem]]]


def _rounds(layers: Sequence[_Layer], bucket_bytes: int) -> list[list[_Layer]]:
    """Runs of neighbouring layers, each of at most `bucket_bytes` over all ranks (one layer at least)."""
    rounds: list[list[_Layer]] = []
    filled = 0
    for layer in layers:
        size = sum(_aligned(i.num_bytes) for kinds in layer.values() for items in kinds.values() for i in items)
        if not rounds or filled + size > bucket_bytes:
            rounds.append([])
            filled = 0
        rounds[-1].append(layer)
        filled += size
    return rounds


class _Order:
    """Brings the buckets of round after round into the order in which they would travel fastest.

    A bucket keeps its rank and its workers busy for as long as it has bytes. What many workers load comes first, since
    it needs all of them free at once. Then each rank that is free sends to the workers that are free earliest; without
    this, those that wait for a rank with something small for everybody would wait for its longest message to others.
    """

    def __init__(self, num_ranks: int, num_kinds: int):
        self._rank_free, self._kind_free = [0] * num_ranks, [0] * num_kinds

    def of(self, by_rank: Sequence[Sequence[Bucket]]) -> list[Bucket]:
        """The next round's buckets. Args: by_rank: what each rank sends of it."""
        begun: list[tuple[int, int, Bucket]] = []
        sizes = {self._num_kinds(bucket) for buckets in by_rank for bucket in buckets}
        for size in sorted(sizes, reverse=True):
            waiting = [[bucket for bucket in buckets if self._num_kinds(bucket) == size] for buckets in by_rank]
            free = [(self._rank_free[rank], rank) for rank, buckets in enumerate(waiting) if buckets]
            heapify(free)
            while free:
                _, rank = heappop(free)
                starts = [self._start(bucket) for bucket in waiting[rank]]
                bucket = waiting[rank].pop(starts.index(min(starts)))
                start = self._start(bucket)
                begun.append((start, rank, bucket))
                self._rank_free[rank] = start + bucket.num_bytes
                for kind in bucket.kinds or range(len(self._kind_free)):
                    self._kind_free[kind] = self._rank_free[rank]
                if waiting[rank]:
                    heappush(free, (self._rank_free[rank], rank))
        return [bucket for _, _, bucket in sorted(begun, key=lambda one: one[:2])]

    def _num_kinds(self, bucket: Bucket) -> int:
        return len(bucket.kinds) or len(self._kind_free)

    def _start(self, bucket: Bucket) -> int:
        kinds = bucket.kinds or range(len(self._kind_free))
        return max(self._rank_free[bucket.src_rank], *(self._kind_free[kind] for kind in kinds))


def _buckets_of_rank(rank: int, layers: Sequence[_Layer], bucket_bytes: int) -> list[Bucket]:
    """What one rank sends of a round."""
    some = sorted({kinds for layer in layers for kinds in layer.get(rank, ())})
    found = []
    for kinds in some:
        items = sorted((i for layer in layers for i in layer.get(rank, {}).get(kinds, ())), key=_wire_order)
        found += [Bucket(rank, tuple(chunk), kinds) for chunk in _chunks(items, bucket_bytes)]
    return found


def _chunks(items: Sequence[WireItem], bucket_bytes: int) -> list[list[WireItem]]:
    """Cut a list of items so that no chunk exceeds `bucket_bytes` unless it is a single item."""
    chunks: list[list[WireItem]] = []
    filled = 0
    for item in items:
        size = _aligned(item.num_bytes)
        if not chunks or filled + size > bucket_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(item)
        filled += size
    return chunks
