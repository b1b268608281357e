"""A whole step in one parallel region as in ``step_loops``, of those neurons that are forecast."""

from __future__ import annotations

from numba import prange
from numba.np.numpy_support import carray

from kairox_jax.host import calls, forecast
from kairox_jax.host.compile import kernel
from kairox_jax.host.crew import clear, finish, take, wait
from kairox_jax.host.forecast import forecast_share
from kairox_jax.host.loops import prepare
from kairox_jax.host.step_loops import ATTENTION_STAGES, attention_share, floats, neurons_share, now_ns, raw

# Columns of the table of predictors: addresses, then numbers.
FC1, FC1_BIAS, FC2, BIAS, REST, REST_BIAS, RANK, FC2_BYTES, REST_BYTES = range(9)
NUM_COLUMNS = 9
# Of a layer: its attention, its own forecast, that of the next one, and for each token listing, neurons, sums, the end.
_OWN = ATTENTION_STAGES
_NEXT = _OWN + forecast.STAGES
_TOKEN = _NEXT + forecast.STAGES
TOKEN_STAGES = 4
STAGES = _TOKEN + calls.MAX_BATCH * TOKEN_STAGES

_chunk_of = kernel(inner=True)(calls.chunk_of)


@kernel(inner=True)
def _forecast(
    at, threshold, x, normalise, norm_eps, normed, fc1_bytes, fc1_mark, fc2_mark, rest_mark, biased, width, inputs,
    hidden, scores, rest, chosen, counters, stage,
):  # fmt: skip
    """One thread's share of the forecast of a layer, whose row of the table is ``at``."""
    rank, neurons, num = at[RANK], chosen.shape[1], rest.shape[1]
    forecast_share(
        x, normalise, norm_eps, normed, carray(raw(at[FC1]), (rank, fc1_bytes)), fc1_mark,
        carray(floats(at[FC1_BIAS]), (rank * biased[0],)), carray(raw(at[FC2]), (neurons, at[FC2_BYTES])), fc2_mark,
        carray(floats(at[BIAS]), (neurons * biased[1],)), carray(raw(at[REST]), (num, at[REST_BYTES])), rest_mark,
        carray(floats(at[REST_BIAS]), (num,)), threshold, width, inputs,
        hidden[: len(x) * rank].reshape((len(x), rank)), scores, rest, chosen, counters, stage,
    )  # fmt: skip


@kernel(inner=True)
def _list(chosen, ids):
    """Write the numbers of the chosen neurons; returns how many they are."""
    count = 0
    for neuron in range(chosen.shape[0]):
        ids[count] = neuron
        count += chosen[neuron]
    return count


@kernel(inner=True)
def _end_token(ids, active, rest, y, fired):
    """Add what stands in for the neurons that were not chosen, and say which of the others were active."""
    for d in range(rest.shape[0]):
        y[d] += rest[d]
    fired[:] = 0
    for k in range(ids.shape[0]):
        fired[ids[k]] = active[k]


@kernel(inner=True)
def _share(
    table, sizes, eps, parallel_block, wqkv_mark, wo_mark, gated, mark, width, lone, down_mark, row_bytes, rule,
    thresholds, cos, sin, cache_rows, positions, window, x, y, h, qkv, mixed, attended, inputs, partials, slots, fired,
    stamps, predictors, limits, first, ahead, normalise, norm_eps, normed, fc1_bytes, fc1_mark, fc2_mark, rest_mark,
    biased, hidden, scores, rest, chosen, ids, counts, active, counters, helpers,
):  # fmt: skip
    """One thread's share of all layers; ``chosen`` and ``rest`` are of even layers, then of odd ones."""
    number, n, num = take(counters, table.shape[0] * STAGES), x.shape[0], x.shape[1]
    for place in range(table.shape[0]):
        at, stage, layer = table[place], place * STAGES, first + place
        attention_share(
            at, sizes, eps, parallel_block, wqkv_mark, wo_mark, mark, width, cos, sin, cache_rows, positions, window, x,
            y, h, qkv, mixed, attended, inputs, stamps[place], counters, stage, helpers,
        )  # fmt: skip
        for turn in range(2):
            of, wanted = layer + turn, (layer == 0 or not ahead) if turn == 0 else ahead
            if wanted and of < predictors.shape[0]:
                _forecast(
                    predictors[of], limits[of], x, normalise, norm_eps, normed, fc1_bytes, fc1_mark, fc2_mark,
                    rest_mark, biased, width, inputs, hidden, scores, rest[of % 2], chosen[of % 2], counters,
                    stage + _OWN + turn * forecast.STAGES,
                )  # fmt: skip
        for b in range(n):
            begin = stage + _TOKEN + b * TOKEN_STAGES
            if take(counters, begin) == 0:
                counts[place, b] = _list(chosen[layer % 2, b], ids)
                prepare(h[b : b + 1], mark, lone, inputs)
                if b == 0:
                    stamps[place, 1] = now_ns()
                finish(counters, begin)
            wait(counters, begin, 1)
            count = counts[place, b]
            chunk = _chunk_of(count)
            neurons_share(
                at, sizes, inputs, 1, num, gated, mark, lone, down_mark, row_bytes, ids[:count], chunk, rule,
                thresholds[place], partials, slots[: (count + chunk - 1) // chunk], y[b : b + 1], active, counters,
                begin + 1, number,
            )  # fmt: skip
            if take(counters, begin + 3) == 0:
                _end_token(ids[:count], active[0], rest[layer % 2, b], y[b], fired[place, b])
                finish(counters, begin + 3)
            wait(counters, begin + 3, 1)


@kernel(parallel=True)
def layers(
    table, sizes, eps, parallel_block, wqkv_mark, wo_mark, gated, mark, width, lone, down_mark, row_bytes, rule,
    thresholds, cos, sin, cache_rows, positions, window, x, y, h, qkv, mixed, attended, inputs, partials, slots, fired,
    stamps, predictors, limits, first, ahead, normalise, norm_eps, normed, fc1_bytes, fc1_mark, fc2_mark, rest_mark,
    biased, hidden, scores, rest, chosen, ids, counts, active, counters, helpers,
):  # fmt: skip
    clear(counters)
    for _ in prange(helpers):
        _share(
            table, sizes, eps, parallel_block, wqkv_mark, wo_mark, gated, mark, width, lone, down_mark, row_bytes, rule,
            thresholds, cos, sin, cache_rows, positions, window, x, y, h, qkv, mixed, attended, inputs, partials, slots,
            fired, stamps, predictors, limits, first, ahead, normalise, norm_eps, normed, fc1_bytes, fc1_mark, fc2_mark,
            rest_mark, biased, hidden, scores, rest, chosen, ids, counts, active, counters, helpers,
        )  # fmt: skip
    stamps[table.shape[0], 0] = now_ns()
