import pytest
import torch

from fl_privacy.defenses import pruning, quantization, selective_sharing

from ..harness import clean_gradient, flat, local_step, run

COMPRESSIONS = {
    "pruning": lambda on: pruning(rate=0.9, error_feedback=on),
    "pruning by product": lambda on: pruning(rate=0.9, by="product", error_feedback=on),
    "quantization": lambda on: quantization(bits=2, rounding="nearest", error_feedback=on),
    "selective_sharing": lambda on: selective_sharing(share=0.1, error_feedback=on),
}


@pytest.mark.parametrize("build", COMPRESSIONS.values(), ids=COMPRESSIONS.keys())
def test_what_was_dropped_comes_later(build):
    step, plain_step = local_step(), local_step()
    clean = clean_gradient(step)
    sent = sum(flat(run(build(True), clean, step)) for _ in range(50))
    residual = flat({n: step.state.tensors[k] for n in clean for k in step.state.tensors if k.endswith(f"/{n}")})
    torch.testing.assert_close(sent + residual, 50 * flat(clean), rtol=1e-4, atol=1e-4)
    without = sum(flat(run(build(False), clean, plain_step)) for _ in range(50))
    assert (sent / 50 - flat(clean)).norm() < 0.5 * (without / 50 - flat(clean)).norm()
    assert plain_step.state.tensors == {}


def test_noise_is_not_fed_back():
    step = local_step()
    clean = clean_gradient(step)
    noisy = selective_sharing(share=1.0, noise_scale=0.5, error_feedback=True)
    run(noisy, clean, step)
    assert all(not t.any() for t in step.state.tensors.values())
