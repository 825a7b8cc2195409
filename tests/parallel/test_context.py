"""Attention and rotary embedding of a context rank's pieces, with real ranks, against the whole sequence."""

import math

import pytest
import torch

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.experimental_attention_variant.dsa_layout import (
    build_packed_allgather_cp_local_positions,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.config import load_config
from megatron_sao.data.context import context_index
from megatron_sao.models import cpu_modules
from megatron_sao.models.cpu_modules import PackedAttention
from megatron_sao.parallel.context import gather_over_context, held_here
from megatron_sao.parallel.init import start_world
from tests.support.ranks import run_ranks

SEGMENTS = {2: [8, 12, 4], 3: [6, 18]}  # tokens, by size of the context axis
# heads, key and value heads, width of keys, width of values: plain, grouped, and MLA's kind
SHAPES = [(4, 4, 8, 8), (4, 2, 8, 8), (2, 2, 12, 6)]


def starts_of(size: int) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(SEGMENTS[size]).cumsum(0).tolist()], dtype=torch.int32)


def packed(size: int) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts_of(size), cu_seqlens_kv=starts_of(size))


@pytest.mark.parametrize("size", SEGMENTS)
def test_the_cut_is_the_one_that_megatron_uses_for_packed_sequences(size):
    for rank, held in enumerate(context_index(starts_of(size), size)):
        expected = build_packed_allgather_cp_local_positions(starts_of(size), size, rank, torch.device("cpu"))
        assert held.tolist() == expected.tolist()


def made_up(shape, total):
    """Query, key, value and a weight for the output, equal on every rank."""
    generator = torch.Generator().manual_seed(7)
    heads, groups, width, value_width = shape
    sizes = [(total, heads, width), (total, groups, width), (total, groups, value_width), (total, heads * value_width)]
    return [torch.randn(size, generator=generator) for size in sizes]


def whole_attention(shape, lengths):
    """Softmax with an explicit causal mask, segment by segment: (output, gradients of query, key and value)."""
    query, key, value, weight = made_up(shape, sum(lengths))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in inputs), strict=True):
        k, v = (x.repeat_interleave(shape[0] // shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(shape[2])
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hij,jhd->ihd", weights, v).reshape(len(q), -1))
    out = torch.cat(parts)
    return out.detach(), torch.autograd.grad((out * weight).sum(), inputs)


def cut_attention(size, contiguous=False):
    """For each shape: (tokens held, output, gradients of query, key and value) of this rank's pieces."""
    world = start_world(load_config(None, [f"parallel.cp={size}"]))
    held = held_here(starts_of(size))
    if contiguous:  # a rank that believes in another cut than its peers feed it
        cpu_modules.held_here = lambda starts: torch.arange(int(starts[-1])).chunk(size)[world.cp]
    results = []
    for shape in SHAPES:
        config = TransformerConfig(num_layers=1, hidden_size=shape[0] * shape[2], num_attention_heads=shape[0])
        attention = PackedAttention(config, 1, None, "self", softmax_scale=1 / math.sqrt(shape[2]))
        query, key, value, weight = (x[held] for x in made_up(shape, sum(SEGMENTS[size])))
        inputs = [x.requires_grad_() for x in (query, key, value)]
        out = attention(*inputs, packed_seq_params=packed(size))
        gradients = torch.autograd.grad((out * weight).sum(), inputs)
        results.append((held, out.detach(), gradients))
    return results


@pytest.mark.parametrize("size", SEGMENTS)
def test_attention_over_context_ranks_is_that_of_the_whole_sequence(size):
    for results in run_ranks(size, cut_attention, size):
        for shape, (held, out, gradients) in zip(SHAPES, results, strict=True):
            expected, expected_gradients = whole_attention(shape, SEGMENTS[size])
            torch.testing.assert_close(out, expected[held], atol=1e-6, rtol=1e-5)
            for found, wanted in zip(gradients, expected_gradients, strict=True):
                torch.testing.assert_close(found, wanted[held], atol=1e-6, rtol=1e-5)


def test_queries_in_other_places_would_be_noticed():
    for results in run_ranks(2, cut_attention, 2, True):
        held, out, _ = results[0]
        assert float((out - whole_attention(SHAPES[0], SEGMENTS[2])[0][held]).abs().max()) > 0.1


def gathered():
    start_world(load_config(None, ["parallel.cp=2"]))
    starts = starts_of(2)
    here = held_here(starts).double()[:, None].expand(-1, 2).clone().requires_grad_()
    whole = gather_over_context(here, starts)
    (whole * torch.arange(float(len(whole)), dtype=torch.float64)[:, None]).sum().backward()
    return whole.detach()[:, 0].tolist(), here.grad[:, 0].tolist(), held_here(starts).tolist()


def test_gathered_rows_stand_in_order_and_get_what_all_ranks_say_about_them():
    for whole, gradient, held in run_ranks(2, gathered):
        assert whole == list(range(24))
        assert gradient == [2 * place for place in held], "both ranks weigh a row by its place"


def rotated():
    start_world(load_config(None, ["parallel.cp=2"]))
    starts, group = starts_of(2), parallel_state.get_context_parallel_group()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 2, 8, generator=generator)[held_here(starts)]
    angles = torch.randn(12, 1, 1, 8, generator=generator)
    lengths = [length // 2 for length in SEGMENTS[2]]
    # Megatron's own choice of angles for one segment of a context rank
    expected = [
        rope_utils._apply_rotary_pos_emb_bshd(
            part[:, None], rope_utils._get_thd_freqs_on_this_cp_rank(group.rank(), 2, part, angles)
        )[:, 0]
        for part in x.split(lengths)
    ]
    return rope_utils._apply_rotary_pos_emb_thd(x, starts, angles, cp_group=group), torch.cat(expected)


def test_rotary_angles_are_those_of_the_positions_in_the_whole_segment():
    for found, expected in run_ranks(2, rotated):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
