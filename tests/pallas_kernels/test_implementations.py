"""resolve_implementation: one answer for each platform, and errors that name the remedy."""

import pytest

from pallas_kernels import resolve_implementation


@pytest.mark.parametrize(
    ("implementation", "platform", "interpret", "resolved"),
    [
        ("auto", "cuda", False, "pallas"),
        ("auto", "gpu", False, "pallas"),
        ("auto", "cpu", False, "xla"),
        ("auto", "tpu", False, "xla"),
        ("xla", "cuda", False, "xla"),
        ("pallas", "cuda", False, "pallas"),
        ("pallas", "cpu", True, "pallas"),
        ("triton", "gpu", False, "triton"),
    ],
)
def test_choice(implementation: str, platform: str, interpret: bool, resolved: str):
    assert resolve_implementation(implementation, platform, interpret=interpret) == resolved


@pytest.mark.parametrize(
    ("implementation", "platform", "interpret", "message"),
    [
        ("mosaic", "cuda", False, "'mosaic' is unknown: use one of auto, xla, pallas, triton"),
        ("pallas", "cpu", False, "needs a CUDA device, not 'cpu': use 'auto' or 'xla', or interpret=True"),
        ("triton", "cpu", False, "needs a CUDA device, not 'cpu': use 'auto' or 'xla'"),
        ("auto", "cpu", True, "interpret=True applies to implementation='pallas', not to 'auto'"),
    ],
)
def test_mistakes_are_named(implementation: str, platform: str, interpret: bool, message: str):
    with pytest.raises(ValueError, match=message):
        resolve_implementation(implementation, platform, interpret=interpret)
