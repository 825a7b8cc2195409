"""Attention and norms of the CPU path against plain torch."""

import math

import pytest
import torch
from torch.nn import functional as F

import megatron_sao.parallel  # noqa: F401  first: makes megatron.core importable without CUDA
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sao.models.cpu_modules import PackedAttention, RMSNorm

HEADS, HEAD_DIM = 4, 8


def config_of(**options):
    return TransformerConfig(num_layers=1, hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, **options)


def packed(*lengths):
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def attend(query, key, value, lengths):
    attention = PackedAttention(config_of(), 1, None, "self")
    return attention(query, key, value, packed_seq_params=packed(*lengths))


def one_by_one(query, key, value, lengths):
    """softmax(q k^T / sqrt(d)) v with an explicit causal mask, segment by segment."""
    group = query.shape[1] // key.shape[1]
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(HEAD_DIM)
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hij,jhd->ihd", weights, v).reshape(len(q), -1))
    return torch.cat(parts)


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[5], [1, 7, 3], [1, 1], [4, 4]], ids=str)
def test_packed_attention_stays_inside_each_segment(lengths, num_groups):
    torch.manual_seed(0)
    total = sum(lengths)
    inputs = [torch.randn(total, heads, HEAD_DIM, requires_grad=True) for heads in (HEADS, num_groups, num_groups)]
    weight = torch.randn(total, HEADS * HEAD_DIM)
    found, expected = attend(*inputs, lengths), one_by_one(*inputs, lengths)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    gradients = torch.autograd.grad((found * weight).sum(), inputs)
    for a, b in zip(gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_token_sees_no_later_one_and_no_other_segment():
    torch.manual_seed(0)
    query, key, value = (torch.randn(6, HEADS, HEAD_DIM) for _ in range(3))
    before = attend(query, key, value, [3, 3])
    key[2:], value[2:] = 1e3, 1e3
    after = attend(query, key, value, [3, 3])
    assert torch.equal(before[:2], after[:2]) and not torch.equal(before[2], after[2])


def test_other_layouts_than_packed_are_refused():
    attention = PackedAttention(config_of(), 1, None, "self")
    x = torch.zeros(2, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="packed"):
        attention(x, x, x)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_norms_carry_the_mark_of_sequence_parallelism(sequence_parallel):
    config = config_of(
        sequence_parallel=sequence_parallel, tensor_model_parallel_size=2 if sequence_parallel else 1
    )
    norm = RMSNorm(config, 8, eps=1e-6)
    assert norm.weight.sequence_parallel == sequence_parallel and norm.weight.dtype == torch.float32
    x = torch.randn(3, 8)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), expected)
    assert F.rms_norm(x, (8,), norm.weight, 1e-6).equal(norm(x))
