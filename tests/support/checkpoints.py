"""Writes a distributed checkpoint from all ranks at once, as a save of a run does."""

from megatron_sao.models.checkpoint import CheckpointWriter, weight_shards
from megatron_sao.parallel.exchange import ObjectGroup


def save_shards(shards, folder, **options):
    """Collective: every rank of the world."""
    world = ObjectGroup(60)
    writer = CheckpointWriter(shards, folder, world, **options)
    written = world.collect(writer.write())
    if written:
        writer.end(written)
    world.wait()


def save_weights(chunks, shape, folder):
    """Collective: every rank of the world."""
    save_shards({str(number): weight_shards(chunk, shape) for number, chunk in enumerate(chunks)}, folder)
