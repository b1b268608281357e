"""A decoder in plain NumPy float64, written from the families' definitions: the proof for other code.

Reads a ``Checkpoint``; one sequence at a time, no cache, loops where they are clearer.
"""

from collections.abc import Callable

import numpy as np

from kairox_jax.config import ModelConfig, RopeScaling
from kairox_jax.io import Checkpoint

# From a layer and what a predictor may read of it, [T, D] by name, to which neurons count, bool [T, F], and
# perhaps what is added for the others, [T, D].
Keep = Callable[[int, dict[str, np.ndarray]], np.ndarray | tuple[np.ndarray, np.ndarray]]


def forward(checkpoint: Checkpoint, token_ids: np.ndarray, keep: Keep | None = None) -> np.ndarray:
    """Give logits [B, T, V] for token ids [B, T]; only the neurons that ``keep`` names count."""
    weights = {name: checkpoint.tensor(name).astype(np.float64) for name in checkpoint.names()}
    return np.stack([_sequence(checkpoint.config, weights, ids, keep) for ids in token_ids])


def _sequence(
    config: ModelConfig, w: dict[str, np.ndarray], ids: np.ndarray, keep: Keep | None
) -> np.ndarray:
    x = w["embed"][ids]
    if config.positions == "learned":
        x = x + w["pos_embed"][: len(ids)]
    before = None
    for i in range(config.num_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): v for name, v in w.items() if name.startswith(f"layers.{i}.")
        }
        attended = _attention(config, layer, _norm(config, layer, "attn_norm", x))
        own = x + attended
        streams = {"layer_input": x, "own": own, "adjacent": own if before is None else before}
        found = np.ones(()) if keep is None else keep(i, streams)
        kept, rest = found if isinstance(found, tuple) else (found, 0.0)
        before = own
        h = _norm(config, layer, "ffn_norm", x if config.parallel_block else own)
        x = own + _ffn(config, layer, h, kept) + rest
    return _norm(config, w, "out_norm", x) @ w["embed" if config.tie_embeddings else "output"].T


def _norm(config: ModelConfig, w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    if config.norm == "rmsnorm":
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w[name]
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt(x.var(-1, keepdims=True) + config.norm_eps)
    return centred / scale * w[name] + w[f"{name}_bias"]


def _attention(config: ModelConfig, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    steps, heads, head = len(x), config.num_heads, config.head_dim
    zero = np.zeros(())
    q = (x @ w["wq"].T + w.get("bq", zero)).reshape(steps, heads, head)
    k = (x @ w["wk"].T + w.get("bk", zero)).reshape(steps, config.num_kv_heads, head)
    v = (x @ w["wv"].T + w.get("bv", zero)).reshape(steps, config.num_kv_heads, head)
    assert config.qkv_bias == ("bq" in w) and config.out_bias == ("bo" in w)
    if config.positions == "rotary":
        angles = np.arange(steps)[:, None] * frequencies(config)
        q, k = _rotate(q, angles), _rotate(k, angles)
    out = np.zeros((steps, heads, head))
    for n in range(heads):
        group = n // (heads // config.num_kv_heads)
        for t in range(steps):
            first = 0 if config.sliding_window is None else max(0, t + 1 - config.sliding_window)
            scores = k[first : t + 1, group] @ q[t, n] / np.sqrt(head)
            shares = np.exp(scores - scores.max())
            out[t, n] = shares / shares.sum() @ v[first : t + 1, group]
    return out.reshape(steps, heads * head) @ w["wo"].T + w.get("bo", zero)


def frequencies(config: ModelConfig) -> np.ndarray:
    """Give the rotary frequency of each pair, by the definition of each scaling."""
    half = config.head_dim // 2
    plain = [config.rope_theta ** (-i / half) for i in range(half)]
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        return np.array([f / scaling.factor / scaling.factors[i] for i, f in enumerate(plain)])
    return np.array([_scaled(freq, scaling) for freq in plain])


def _scaled(freq: float, scaling: RopeScaling | None) -> float:
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    wavelength = 2 * np.pi / freq
    if wavelength < scaling.original_context / scaling.high_freq_factor:
        return freq
    if wavelength > scaling.original_context / scaling.low_freq_factor:
        return freq / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * freq / scaling.factor + smooth * freq


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _ffn(config: ModelConfig, w: dict[str, np.ndarray], x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    zero = np.zeros(())
    assert config.gated == ("w_gate" in w) and config.ffn_bias == ("b_up" in w) == ("b_down" in w)
    up = x @ w["w_up"].T + w.get("b_up", zero)
    act = {
        "silu": lambda z: z / (1 + np.exp(-z)),
        "relu": lambda z: np.where(z > 0, z, 0),
        "relu2": lambda z: np.where(z > 0, z * z, 0),
        "fatrelu": lambda z: np.where(z > config.activation_threshold, z, 0),
        "drelu": lambda z: np.where(z > 0, z, 0),
    }[config.activation]
    if not config.gated:
        hidden = act(up)
    elif config.activation == "drelu":
        hidden = act(x @ w["w_gate"].T) * act(up)
    else:
        hidden = act(x @ w["w_gate"].T) * up
    return hidden * kept @ w["w_down"] + w.get("b_down", zero)
