"""The push plan: which trainer rank sends which slice of which HF tensor, in which order and in which bucket.

Owns: `WireItem`, `Bucket`, `PushPlan`, `make_plan`. Invariants:
- made once, identical on every trainer rank and in every engine; only its hash travels with a push;
- every element of every tensor is sent exactly once, by exactly one rank;
- buckets run layer by layer (embeddings, layer 0, 1, ..., head), so that an engine never holds many half-filled layers;
- a bucket belongs to one rank: it is one broadcast with that rank as its root.
No torch: a laptop, the scheduler and the planner of a large run import this.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from megatron_sao.errors import ProtocolError

WHOLE = -1  # WireItem.dim of an item that is the whole tensor
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
    """What one rank broadcasts at once: items one after the other, each at an aligned offset."""

    src_rank: int
    items: tuple[WireItem, ...]

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


class PushPlan(msgspec.Struct, frozen=True, array_like=True):
    """The whole push. Build it with `make_plan`, which checks it."""

    buckets: tuple[Bucket, ...]
    num_trainer_ranks: int
    excluded: tuple[str, ...] = ()  # HF names of the model folder that are knowingly not pushed

    @property
    def expected(self) -> dict[str, tuple[int, ...]]:
        """HF name -> full shape of every tensor that one push delivers."""
        return {item.name: item.full_shape for bucket in self.buckets for item in bucket.items}

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def max_bucket_bytes(self) -> int:
        """Size of the one buffer that a rank needs."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    @property
    def hash(self) -> str:
        """60 bits as 15 hex digits (they fit a signed 64-bit integer); equal plans have equal hashes."""
        return hashlib.sha256(encode_plan(self)).hexdigest()[:15]


def encode_plan(plan: PushPlan) -> bytes:
    """The plan as msgpack."""
    return msgspec.msgpack.encode(plan)


def decode_plan(raw: bytes) -> PushPlan:
    """Inverse of `encode_plan`. Raises ProtocolError when the bytes are no plan."""
    try:
        return msgspec.msgpack.decode(raw, type=PushPlan)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"these {len(raw)} bytes are no push plan: {error}; trainer and engine must run the "
                            "same version of megatron_sao") from error


def make_plan(
    slices_by_rank: Sequence[Iterable[WireItem]],
    *,
    bucket_bytes: int,
    expected_shapes: Mapping[str, Sequence[int]] | None = None,
    excluded: Iterable[str] = (),
) -> PushPlan:
    """Order the slices of all ranks layer by layer and cut them into buckets.

    Args:
        slices_by_rank: for each trainer rank, the items it owns, in any order. No item belongs to two ranks.
        bucket_bytes: upper limit of a bucket; an item larger than that gets a bucket of its own.
        expected_shapes: HF name -> shape of what the model folder holds; None skips this comparison.
        excluded: names of the model folder that are knowingly not pushed.
    Returns: the checked plan; equal on every rank that is given equal arguments.
    Raises: ProtocolError naming every tensor that is missing, unknown, overlapping or has a gap.
    """
    slices_by_rank = [list(items) for items in slices_by_rank]
    excluded = tuple(sorted(excluded))
    faults = _coverage_faults(slices_by_rank)
    if expected_shapes is not None:
        sent = {item.name: item.full_shape for items in slices_by_rank for item in items}
        faults += name_faults(sent, expected_shapes, excluded)
    if faults:
        raise ProtocolError("the push plan does not cover the model exactly once:\n" + first_lines(faults))
    buckets: list[Bucket] = []
    for round_layers in _rounds(slices_by_rank, bucket_bytes):
        for rank, items in enumerate(slices_by_rank):
            mine = sorted((i for i in items if layer_key(i.name) in round_layers), key=_wire_order)
            buckets += [Bucket(rank, tuple(chunk)) for chunk in _chunks(mine, bucket_bytes)]
    return PushPlan(tuple(buckets), len(slices_by_rank), excluded)


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


def _rounds(slices_by_rank: Sequence[Sequence[WireItem]], bucket_bytes: int) -> list[set[tuple[int, int]]]:
    """Runs of neighbouring layers, each of at most `bucket_bytes` over all ranks (one layer at least)."""
    if bucket_bytes < 1:
        raise ProtocolError(f"push.bucket_bytes = {bucket_bytes} must be at least 1")
    layer_bytes: dict[tuple[int, int], int] = {}
    for items in slices_by_rank:
        for item in items:
            key = layer_key(item.name)
            layer_bytes[key] = layer_bytes.get(key, 0) + _aligned(item.num_bytes)
    rounds: list[set[tuple[int, int]]] = []
    filled = 0
    for key in sorted(layer_bytes):
        if not rounds or filled + layer_bytes[key] > bucket_bytes:
            rounds.append(set())
            filled = 0
        rounds[-1].add(key)
        filled += layer_bytes[key]
    return rounds


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
