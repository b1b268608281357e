"""A profile as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kairox_jax.io.profile import Profile

SHOWN_DISTANCES = (1, 2, 4, 8, 16, 32, 64)


def summary(profile: Profile) -> Iterator[str]:
    """Yield what a reader wants to know first, then a line a layer."""
    meta = profile.meta
    sizes = f"{profile.num_layers} layers of {profile.num_neurons} neurons"
    yield f"model        {meta.get('model', 'not named')} ({sizes})"
    if "tokens" in meta:
        names = ", ".join(file["name"] for file in meta.get("files", ()))
        yield f"text         {meta['tokens']} tokens of {names}"
    if meta.get("relative"):
        yield "frequency    only relative: the source holds counts without the number of tokens"
    yield f"active       {profile.frequency.mean():.1%} of the neurons per token"
    always, never = (profile.frequency > 0.9).mean(), (profile.frequency < 0.01).mean()
    yield f"neurons      {always:.1%} active at over 90 % of the tokens, {never:.1%} at under 1 %"
    if profile.reactivation is not None:
        chance = np.square(profile.frequency).sum() / max(profile.frequency.sum(), 1e-30)
        again = profile.reactivation.mean(axis=0)  # NaN for distances that no window has
        known = [d for d in SHOWN_DISTANCES if d <= len(again) and np.isfinite(again[d - 1])]
        parts = [f"{d}: {again[d - 1]:.2f}" for d in known]
        yield f"again after  {', '.join(parts)} (by chance {chance:.2f})"
    if profile.together is not None and profile.sample is not None:
        error = 0.5 / np.sqrt(len(profile.sample))
        yield (
            f"partners     {profile.together.shape[2]} a neuron from {len(profile.sample)} tokens, each share "
            f"within {error:.3f} (one standard error)"
        )
    yield from _layers(profile)


def _layers(profile: Profile) -> Iterator[str]:
    yield "layer  active  spread  cosine to l+1, l+2   again after 1, 8"
    for layer in range(profile.num_layers):
        mean, spread = profile.frequency[layer].mean(), None
        if profile.active_frac is not None:
            mean, spread = profile.active_frac[layer]
        cells = [f"{layer:5}", f"{mean:7.1%}", "      -" if spread is None else f"{spread:7.1%}"]
        cells.append("  " + "  ".join(_number(profile.cosine, layer, at) for at in (0, 1)))
        cells.append("         " + "  ".join(_number(profile.reactivation, layer, at) for at in (0, 7)))
        yield " ".join(cells).rstrip()


def _number(table: np.ndarray | None, layer: int, at: int) -> str:
    if table is None or at >= table.shape[1] or not np.isfinite(table[layer, at]):
        return "    -"
    return f"{table[layer, at]:5.3f}"
