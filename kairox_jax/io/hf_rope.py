"""Rotary settings of a ``config.json``: ``rope_theta`` and ``rope_scaling``, or the newer ``rope_parameters``."""

from __future__ import annotations

from kairox_jax.config import RopeScaling
from kairox_jax.io.errors import FormatError
from kairox_jax.io.json_file import JsonObject

_NOT_ROTARY = {
    "dynamic": "its frequencies change with the length of the text",
    "yarn": "it also rescales attention",
    "longrope": "it switches frequencies with the length of the text",
}


def hf_rope(json: JsonObject) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling of the rotary frequencies, from old or new keys.

    Raises:
        FormatError: a kind that is not supported, values that are wrong, or two settings that disagree.
    """
    keys = [key for key in ("rope_parameters", "rope_scaling") if json.get(key) is not None]
    read = [_rope_of(json, key) for key in keys or ["rope_parameters"]]
    if len(read) == 2 and read[0] != read[1]:
        raise json.error(
            "rope_scaling",
            f"{json.get('rope_scaling')!r} disagrees with rope_parameters {json.get('rope_parameters')!r}: "
            "keep one of them",
        )
    return read[0]


def _rope_of(json: JsonObject, key: str) -> tuple[float, RopeScaling | None]:
    """Read one of the two keys; both may say the same."""
    values = json.get(key, default={})
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise json.error(key, f"{values!r:.200}: expected one set of values for all layers")
    rope = JsonObject(json.path, values)
    rope.refuse("partial_rotary_factor", 1, 1.0)
    parameters = json.get("rope_parameters", default={})
    inner = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    theta = rope.number("rope_theta", default=json.number("rope_theta", default=10000.0))
    if inner is not None and "rope_theta" not in values:
        theta = JsonObject(json.path, parameters).number("rope_theta", default=theta)
    kind, other = rope.get("rope_type", "type", default="default"), rope.get("type")
    if other is not None and other != kind:
        raise json.error(key, f"rope_type {kind!r:.80} disagrees with type {other!r:.80}: keep one of them")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        reason = _NOT_ROTARY.get(str(kind), "unknown")
        raise json.error(
            key, f"rotary scaling {kind!r:.80} is not supported ({reason}); expected linear or llama3"
        )
    try:
        return theta, _scaling(rope, key, kind)
    except FormatError:
        raise
    except ValueError as error:
        raise json.error(key, str(error)) from None


def _scaling(rope: JsonObject, key: str, kind: str) -> RopeScaling:
    if kind == "linear":
        if rope.get("factor") is None:
            raise rope.error(f"{key}.factor", "missing: linear scaling needs it")
        return RopeScaling(kind="linear", factor=rope.number("factor", default=1.0))
    # What a file does not say is as in Llama 3.1, which introduced this scaling.
    return RopeScaling(
        kind="llama3",
        factor=rope.number("factor", default=8.0),
        low_freq_factor=rope.number("low_freq_factor", default=1.0),
        high_freq_factor=rope.number("high_freq_factor", default=4.0),
        original_context=rope.whole("original_max_position_embeddings", default=8192),
    )
