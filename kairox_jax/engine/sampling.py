"""Choose the next token from logits: top-k, top-p, min-p, temperature, and the seeded draw.

Pure NumPy. The order is llama.cpp's: the filters look at the model's own distribution, and temperature
only reshapes what they kept, so a high temperature cannot let the unlikely tail back in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kairox_jax.config import GenerationConfig

_FIRST_GUESS = 1024  # tokens sorted at first for top-p or min-p without top-k; grows until they suffice
_GROWTH = 8


def make_rng(seed: int) -> np.random.Generator:
    """Make the sampler's source of randomness.

    Args:
        seed: 0 or more.

    Returns:
        A PCG64 generator. ``sample`` takes one raw 64-bit word a token from it: the stream of words is
        fixed for a seed, whereas ``Generator.choice`` may change with NumPy's version.
    """
    return np.random.Generator(np.random.PCG64(seed))


def sample(logits: np.ndarray, config: GenerationConfig, rng: np.random.Generator) -> int:
    """Choose one token.

    Args:
        logits: [V], floating point, finite.
        config: temperature, top_k, top_p and min_p; temperature 0 takes the largest logit and draws nothing.
        rng: from ``make_rng``; advanced by one word where temperature is not 0.

    Returns:
        The token's id. Equal logits count in the order of their ids, the lowest first.

    Raises:
        ValueError: ``logits`` is not one row of floating-point numbers.
        FloatingPointError: a logit is NaN or infinite.
    """
    _check(logits)
    if config.temperature == 0:
        return int(np.argmax(logits))
    if config.top_k == 0 and config.top_p == 1 and config.min_p == 0:
        ids = np.arange(logits.size)  # nothing to cut, so the vocabulary needs no sorting
    else:
        ids = candidates(logits, config)
    kept = logits[ids].astype(np.float64)
    # A tiny temperature may send the quotient to -inf, whose weight is rightly 0.
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((kept - kept.max()) / config.temperature)
    mass = np.cumsum(weights)
    # 53 random bits in [0, 1). The best token weighs 1, so uniform * mass[-1] stays below mass[-1].
    uniform = (int(rng.bit_generator.random_raw()) >> 11) * 2.0**-53
    return int(ids[np.searchsorted(mass, uniform * mass[-1], side="right")])


def adjust(logits: np.ndarray, config: GenerationConfig, counts: Mapping[int, int]) -> np.ndarray:
    """Apply the penalties and the bias.

    Args:
        logits: [V], floating point.
        config: presence_penalty, frequency_penalty and logit_bias.
        counts: how often each token was generated before; the prompt does not count.

    Returns:
        The logits themselves where nothing applies, else a new array of their type, [V].

    Source: OpenAI's API reference: logit[j] - count[j] * frequency - (count[j] > 0) * presence.
    """
    penalised = counts if config.presence_penalty or config.frequency_penalty else {}
    if not penalised and not config.logit_bias:
        return logits
    adjusted = logits.copy()
    for token_id, count in penalised.items():
        adjusted[token_id] -= count * config.frequency_penalty + config.presence_penalty
    for token_id, bias in config.logit_bias.items():
        adjusted[token_id] += bias
    return adjusted


def candidates(logits: np.ndarray, config: GenerationConfig) -> np.ndarray:
    """List the tokens that top-k, top-p and min-p keep, in this order.

    top-p is taken of the distribution that top-k left (renormalised, as in llama.cpp); min-p compares with
    the best token, so renormalising does not change it.

    Args:
        logits: [V], finite.
        config: top_k, top_p, min_p.

    Returns:
        Ids, int64 [n], n >= 1, by falling logit and then by rising id.
    """
    num_tokens = logits.size
    limit = min(config.top_k, num_tokens) if config.top_k else num_tokens
    if config.top_p == 1 and config.min_p == 0:
        return _largest(logits, limit)
    total = None
    count = limit
    if limit == num_tokens and num_tokens > _FIRST_GUESS:
        # Sorting the vocabulary is the slow part: sort a head of it and look whether the cut lies inside.
        total = float(np.sum(_weights(logits, float(logits.max()))))
        count = _FIRST_GUESS
    while True:
        ids = _largest(logits, count)
        weights = _weights(logits[ids], float(logits[ids[0]]))
        keep = _cut(weights, float(np.sum(weights)) if total is None else total, config)
        if keep < count or count == limit:
            return ids[:keep]
        count = min(count * _GROWTH, limit)


def token_logprobs(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the k most probable tokens under the model's own distribution (no filter, temperature 1).

    Args:
        logits: [V], finite.
        k: how many, in [1, V].

    Returns:
        Ids, int64 [k], by falling probability and then by rising id; log-probabilities in nats, float64 [k].

    Raises:
        ValueError: k is out of range, or ``logits`` is not one row of floating-point numbers.
        FloatingPointError: a logit is NaN or infinite.
    """
    _check(logits)
    if not 1 <= k <= logits.size:
        raise ValueError(f"k {k} must be from 1 to the vocabulary's {logits.size} tokens")
    ids = _largest(logits, k)
    best = float(logits[ids[0]])
    log_total = np.log(np.sum(_weights(logits, best)))
    return ids, logits[ids].astype(np.float64) - best - log_total


def token_logprob(logits: np.ndarray, token_id: int) -> float:
    """Give one token's log-probability under the model's own distribution; see ``token_logprobs``.

    Raises:
        ValueError: ``logits`` is not one row of floating-point numbers.
        FloatingPointError: a logit is NaN or infinite.
    """
    _check(logits)
    best = float(logits.max())
    return float(logits[token_id]) - best - float(np.log(np.sum(_weights(logits, best))))


def _check(logits: np.ndarray) -> None:
    """Refuse anything but one row of finite floating-point numbers."""
    if logits.ndim != 1 or not logits.size or not np.issubdtype(logits.dtype, np.floating):
        raise ValueError(
            f"logits have shape {logits.shape} and type {logits.dtype}: "
            "pass one row [V] of floating-point numbers"
        )
    finite = np.isfinite(logits)
    if not finite.all():
        first = int(np.argmin(finite))
        raise FloatingPointError(
            f"{int((~finite).sum())} of {logits.size} logits are not finite (the first is {logits[first]} "
            f"at token {first}): the weights are broken or overflow, so fetch or convert the checkpoint again"
        )


def _weights(logits: np.ndarray, best: float) -> np.ndarray:
    """Unnormalised probabilities, float64, the best one 1."""
    with np.errstate(under="ignore"):
        return np.exp(logits.astype(np.float64) - best)


def _largest(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` largest logits, int64, by falling logit and then by rising id."""
    if count == logits.size:
        ids = np.arange(logits.size)
    else:
        # argpartition breaks ties at the border as it likes, so take the border's lowest ids by hand.
        border = np.partition(logits, logits.size - count)[logits.size - count]
        above = np.flatnonzero(logits > border)
        ids = np.concatenate([above, np.flatnonzero(logits == border)[: count - above.size]])
    return ids[np.argsort(-logits[ids], kind="stable")]  # equal logits already stand by rising id


def _cut(weights: np.ndarray, total: float, config: GenerationConfig) -> int:
    """How many of the falling ``weights`` [n] top-p (of ``total``) and min-p keep; n where all of them."""
    keep = weights.size
    if config.top_p < 1:
        keep = min(keep, int(np.searchsorted(np.cumsum(weights), config.top_p * total)) + 1)
    if config.min_p > 0:
        keep = min(keep, int(np.count_nonzero(weights >= config.min_p)))
    return keep
