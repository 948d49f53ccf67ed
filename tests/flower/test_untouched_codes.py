"""Which array is which parameter, where an app multiplies, negates, shortens or codes what it uploads."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_privacy.auditing.instrument.matching import matched
from tests.flower.untouched_apps import OWN_SERVER, PLAIN, audited, rung


def _values(seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"1.weight": (32, 64), "1.bias": (32,), "3.weight": (4, 32), "3.bias": (4,)}
    return {f"parts.0.{name}": torch.randn(shape, generator=g) / 8 for name, shape in shapes.items()}


BEFORE = _values(0)
AFTER = {name: value + _values(1)[name] / 10 for name, value in BEFORE.items()}
CHANGE = {name: AFTER[name] - value for name, value in BEFORE.items()}


def _bfloat16(value: Tensor) -> np.ndarray:
    return value.bfloat16().view(torch.uint16).numpy()


def _int8(value: Tensor) -> np.ndarray:
    return (value / value.abs().max() * 127).round().to(torch.int8).numpy()


def _rows_of_int8(value: Tensor) -> np.ndarray:
    most = value.flatten(1).abs().amax(1).view(-1, *[1] * (value.dim() - 1)) if value.dim() > 1 else value.abs().max()
    return (value / most * 127).round().to(torch.int8).numpy()


def _uint8(value: Tensor) -> np.ndarray:
    low, high = value.min(), value.max()
    return ((value - low) / (high - low) * 255).round().to(torch.uint8).numpy()


@pytest.mark.parametrize(
    ("values", "shares", "coded", "close"),
    [
        (AFTER, "weights", _bfloat16, 0.01),
        (AFTER, "weights", _int8, 0.02),
        (CHANGE, "delta", _int8, 0.02),
        (CHANGE, "delta", _rows_of_int8, 0.02),
        (AFTER, "weights", lambda value: 40 * value.numpy(), 1e-5),
        (CHANGE, "delta", lambda value: -value.numpy(), 1e-5),
    ],
    ids=["bfloat16", "int8", "int8_change", "int8_of_rows", "weighted", "negated"],
)
def test_codes_are_the_parameters_that_they_stand_for(
    values: dict[str, Tensor], shares: str, coded: Callable[[Tensor], np.ndarray], close: float
) -> None:
    """Names have prefixes, and scales go beside: values tell."""
    uploaded = {f"arrays/{name.removeprefix('parts.0.')}.q": coded(value) for name, value in values.items()}
    uploaded["arrays/scales"] = np.ones(4, np.float32)
    found = matched(uploaded, {}, BEFORE, AFTER, {})
    assert found.shares == shares and found.by == "scale" and not found.withheld
    assert found.unknown == ("arrays/scales",)
    for key, name in found.parameters.items():
        assert name == f"parts.0.{key.removeprefix('arrays/').removesuffix('.q')}"
        wanted = values[name].numpy()
        assert np.linalg.norm(found.decoded[key] - wanted) <= close * np.linalg.norm(wanted)


def test_codes_with_a_zero_of_their_own() -> None:
    weight = "parts.0.1.weight"
    found = matched({"arrays/q": _uint8(AFTER[weight])}, {}, BEFORE, AFTER, {})
    assert found.parameters == {"arrays/q": weight} and found.shares == "weights"
    assert np.abs(found.decoded["arrays/q"] - AFTER[weight].numpy()).max() < 0.01


def test_whole_numbers_that_nobody_reads_are_no_parameters() -> None:
    """A mask has the names, shapes and number of what was sent."""
    rng = np.random.default_rng(0)
    sent = {f"arrays/{name.removeprefix('parts.0.')}": value.numpy() for name, value in BEFORE.items()}
    masked = {key: rng.integers(0, 2**22, value.shape) for key, value in sent.items()}
    found = matched(masked, sent, BEFORE, AFTER, CHANGE)
    assert not found.parameters and set(found.unknown) == set(masked)


def test_a_little_noise_is_no_factor() -> None:
    sent = {f"arrays/{name.removeprefix('parts.0.')}": value.numpy() for name, value in BEFORE.items()}
    noisy = {f"arrays/{n.removeprefix('parts.0.')}": v.numpy() + np.float32(1e-6) for n, v in AFTER.items()}
    found = matched(noisy, sent, BEFORE, AFTER, {})
    assert found.by == "place" and not found.decoded and len(found.parameters) == len(AFTER)


CODES = {
    "bfloat16": "Array(v.bfloat16().view(torch.uint16).numpy())",
    "int8": "Array((v / v.abs().max() * 127).round().to(torch.int8).numpy())",
}


@pytest.mark.long
@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("name", list(CODES))
def test_uploads_in_codes_are_attacked(tmp_path: Path, name: str) -> None:
    sent = "ArrayRecord(net.state_dict()), **"
    client = PLAIN.replace(sent, f"ArrayRecord({{k + '.q': {CODES[name]} for k, v in net.state_dict().items()}}), **")
    record = audited(tmp_path, f"app_{name}", client, OWN_SERVER, only=("one",))
    assert record["facts"]["What is uploaded"] == "weights of 4 parameters and buffers"
    assert rung(record, "one")["counts"]["judged"] == 2 and not rung(record, "one")["reason"]
    assert name != "bfloat16" or rung(record, "one")["counts"]["read"] == 2


def test_an_array_of_one_number_is_no_multiple_of_a_parameter_of_one() -> None:
    ones = {"parts.0.norm.weight": torch.ones(6), "parts.0.1.weight": AFTER["parts.0.1.weight"]}
    uploaded = {"arrays/counts": np.full(6, 5.0, np.float32), "arrays/1.weight": ones["parts.0.1.weight"].numpy()}
    found = matched(uploaded, {}, ones, ones, {})
    assert found.unknown == ("arrays/counts",) and found.by == "value"
