"""The attention of a prompt's tokens in one parallel region, from the residual stream to the FFN's input.

As ``attention`` does for single tokens, with the products of ``prompt``. Arguments are not checked here.
"""

from __future__ import annotations

from numba import prange

from kairox_jax.host import crew, tiles
from kairox_jax.host.attention_loops import merge, mix_share, norm_rows
from kairox_jax.host.compile import kernel
from kairox_jax.host.prompt import group_tokens, product_share

_TOKENS = tiles.TOKENS


@kernel(inner=True)
def _share(
    x, norm, norm_bias, ffn_norm, ffn_norm_bias, eps, parallel_block, wqkv, wqkv_mark, bqkv, wo, wo_mark, bo, cos, sin,
    keys, values, cache_rows, positions, window, tokens, h, qkv, mixed, attended, counters, helpers,
):  # fmt: skip
    """One thread's share of a block. Tokens are taken by groups of TOKENS where they are not multiplied."""
    count, num = x.shape
    heads_size = mixed.shape[1]
    groups = (count + _TOKENS - 1) // _TOKENS
    group = crew.take(counters, 0)
    while group < groups:
        first, last = group * _TOKENS, min((group + 1) * _TOKENS, count)
        norm_rows(x[first:last], norm, norm_bias, eps, h[first:last])
        group_tokens(h, num, group, tokens)
        crew.finish(counters, 0)
        group = crew.take(counters, 0)
    crew.wait(counters, 0, groups)
    product_share(tokens, num, wqkv, wqkv_mark, qkv, counters, 1)
    mix_share(qkv, bqkv, cos, sin, keys, values, cache_rows, positions, window, mixed, counters, 2, helpers)
    group = crew.take(counters, 4)
    while group < groups:
        group_tokens(mixed, heads_size, group, tokens)
        crew.finish(counters, 4)
        group = crew.take(counters, 4)
    crew.wait(counters, 4, groups)
    product_share(tokens, heads_size, wo, wo_mark, attended, counters, 5)
    group = crew.take(counters, 6)
    while group < groups:
        first, last = group * _TOKENS, min((group + 1) * _TOKENS, count)
        merge(
            x[first:last], attended[first:last], bo, ffn_norm, ffn_norm_bias, eps, parallel_block, h[first:last]
        )  # fmt: skip
        group = crew.take(counters, 6)


@kernel(parallel=True)
def block(
    x, norm, norm_bias, ffn_norm, ffn_norm_bias, eps, parallel_block, wqkv, wqkv_mark, bqkv, wo, wo_mark, bo, cos, sin,
    keys, values, cache_rows, positions, window, tokens, h, qkv, mixed, attended, counters, helpers,
):  # fmt: skip
    crew.clear(counters)
    for _ in prange(helpers):
        _share(
            x, norm, norm_bias, ffn_norm, ffn_norm_bias, eps, parallel_block, wqkv, wqkv_mark, bqkv, wo, wo_mark, bo,
            cos, sin, keys, values, cache_rows, positions, window, tokens, h, qkv, mixed, attended, counters, helpers,
        )  # fmt: skip
