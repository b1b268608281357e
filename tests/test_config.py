"""Settings: sizes are parsed or refused, and no field takes a value that means nothing."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kairox_jax.config import GenerationConfig, ModelConfig, PlacementConfig, RopeScaling, parse_bytes

SIZES = {
    "6 GB": 6 * 10**9,
    "6GiB": 6 * 2**30,
    "6e9": 6 * 10**9,
    "6g": 6 * 10**9,
    " 512m ": 512 * 10**6,
    "512MiB": 512 * 2**20,
    "1.5 GB": 1_500_000_000,
    "1.5e3kb": 1_500_000,
    "7": 7,
    "7 B": 7,
    "2TiB": 2 * 2**40,
    "0.5k": 500,
}
MODEL: dict[str, Any] = {
    "family": "llama",
    "num_layers": 2,
    "d_model": 64,
    "num_neurons": 160,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "context_length": 256,
    "activation": "relu",
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_parsed(text: str) -> None:
    assert parse_bytes(text) == SIZES[text]


@pytest.mark.parametrize("number", [1, 6 * 10**9, 6e9, 1024.0])
def test_numbers_are_sizes(number: float) -> None:
    assert parse_bytes(number) == number


@pytest.mark.parametrize("text", ["0", "0 GB", "0.0", "-0", "-1", "-6GB", "- 6 GB", -1, 0, 0.0, -6e9])
def test_zero_and_negative_sizes_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="positive number"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "GB", "six GB", "6 XB", "6 GB GB", "6,5 GB", "0x10", "nan", "inf", "1e", "6 G iB", "6 bits"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="6GB") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("text", ["1e400", "9e9999 GB"])
def test_a_size_beyond_all_numbers_is_refused_as_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@given(st.integers(1, 2**50), st.sampled_from(["", "k", "M", "G", "Ki", "Mi", "Gi"]), st.booleans())
def test_whole_numbers_with_any_unit(number: int, unit: str, with_b: bool) -> None:
    factor = {"": 1, "k": 1000, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[unit]
    text = f"{number} {unit}{'B' if with_b else ''}"
    assert math.isclose(parse_bytes(text), number * factor, rel_tol=1e-15)
    assert parse_bytes(text.lower()) == parse_bytes(text.upper()) == parse_bytes(text.replace(" ", ""))


REFUSED_PLACEMENTS = [
    ("vram_budget_bytes", 0),
    ("vram_budget_bytes", -5),
    ("gpu_cache_neurons", -1),
    ("tam_beta", 1.0),
    ("tam_beta", -0.1),
    ("tam_beta", math.nan),
    ("tam_threshold", 0.0),
    ("tam_threshold", 1.1),
    ("tam_threshold", math.nan),
    ("tam_evict", -0.1),
    ("tam_evict", 0.36),
    ("tam_evict", math.nan),
    ("max_moves", 0),
    ("host_callback", "thread"),
    ("host_activations", "int4"),
]
REFUSED_GENERATIONS = [
    ("max_tokens", -1),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", math.nan),
    ("logit_bias", {3: 101.0}),
    ("logit_bias", {3: math.nan}),
    ("logprobs", -1),
    ("logprobs", 21),
    ("seed", -1),
    ("stop", "a text"),
    ("stop", ("a", "")),
]


@pytest.mark.parametrize(("field", "value"), REFUSED_PLACEMENTS)
def test_placement_is_checked(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field.split("_")[0].replace("gpu", "--gpu")) as error:
        PlacementConfig(**{field: value})
    assert str(value) in str(error.value)


@pytest.mark.parametrize(("field", "value"), REFUSED_GENERATIONS)
def test_generation_is_checked(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        GenerationConfig(**{field: value})


def test_the_guides_defaults() -> None:
    placement = PlacementConfig()
    assert (placement.tam_beta, placement.tam_threshold, placement.tam_evict) == (0.90, 0.35, 0.08)
    assert placement.anb_enable


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "split"),
        ({"tam_evict": 0.1}, "guide"),
        ({"anb_enable": False}, "guide"),
        ({"policy": "lru"}, "lru"),
        ({"policy": "split", "tam_beta": 0.5}, "split"),  # refused where it is made
    ],
)
def test_a_setting_of_guide_chooses_it(settings: dict[str, Any], name: str) -> None:
    assert PlacementConfig(**settings).policy_name == name


REFUSED_MODELS = [
    ("num_layers", 0),
    ("d_model", -64),
    ("num_neurons", 1.5),
    ("vocab_size", 0),
    ("num_kv_heads", 3),
    ("head_dim", 15),
    ("activation", "gelu"),
    ("norm", "batchnorm"),
    ("positions", "alibi"),
    ("activation_threshold", math.nan),
    ("activation_threshold", -0.1),
    ("norm_eps", 0.0),
    ("rope_theta", math.nan),
    ("sliding_window", 0),
    ("ffn_bias", True),
]


@pytest.mark.parametrize(("field", "value"), REFUSED_MODELS)
def test_model_facts_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        ModelConfig(**{**MODEL, field: value})


def test_unknown_rope_scaling_is_refused() -> None:
    with pytest.raises(ValueError, match="'yarn' is not one of linear, llama3"):
        RopeScaling(kind="yarn", factor=2.0)


def test_settings_are_frozen() -> None:
    for settings, field in ((PlacementConfig(), "policy"), (GenerationConfig(), "seed")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, field, 1)
        with pytest.raises(TypeError, match="unexpected keyword"):
            type(settings)(no_such_field=1)  # type: ignore[call-arg]


def test_rope_factors() -> None:
    factors = RopeScaling(kind="factors", factor=2.0, factors=(1.0, 4.0))
    np.testing.assert_array_equal(factors.scale(np.array([1.0, 0.5])), [0.5, 0.0625])
    with pytest.raises(ValueError, match="2 factors for 3 frequencies: give one each"):
        factors.scale(np.ones(3))
    for wrong in ({"kind": "factors"}, {"kind": "linear", "factors": (1.0,)}):
        with pytest.raises(ValueError, match="'factors' needs them, no other"):
            RopeScaling(factor=1.0, **wrong)
    with pytest.raises(ValueError, match="every one of factors must be finite and positive"):
        RopeScaling(kind="factors", factor=1.0, factors=(1.0, 0.0))
