"""Rounds under CKKS: the plain mean within the scheme's precision, and a server that can't read."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_privacy.defenses import Defense, none, split_fed
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, plain_rounds, private_names, public_state, run_all
from fl_privacy.types import LocalPlan
from tests.federation import harness

tenseal = pytest.importorskip("tenseal", reason="the extra crypto is not installed")

from fl_privacy.federation.ckks import (  # noqa: E402
    Adder,
    KeyHolder,
    encrypted_rounds,
)

PLAN = LocalPlan(shares="delta", lr=0.1, epochs=1, batch_size=5)
ROUNDS = 2


def plain(plan: LocalPlan = PLAN, **clients: Any) -> tuple[Any, harness.Recording]:
    server, seen = harness.server(plan), harness.Recording()
    seen.follow(
        plain_rounds(
            server,
            harness.clients(plan, **clients),
            rounds=ROUNDS,
            audit=Audit(),
            interceptor=seen.interceptor(plan),
        )
    )
    return server.state, seen


def encrypted(plan: LocalPlan = PLAN, *, bits: int = 20, **clients: Any) -> tuple[Any, harness.Recording]:
    server, seen = harness.server(plan), harness.Recording()
    seen.follow(encrypted_rounds(server, harness.clients(plan, **clients), rounds=ROUNDS, bits=bits))
    return server.state, seen


@pytest.mark.parametrize("plan", [PLAN, harness.FEDSGD, replace(PLAN, shares="weights")], ids=lambda p: p.shares)
def test_the_model_is_that_of_the_plain_mean(plan: LocalPlan) -> None:
    expected, seen = plain(plan, defense=none())
    found, reports = encrypted(plan, defense=none())

    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-4, atol=2e-5)
    for name, value in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], value, rtol=1e-4, atol=2e-5)
    assert [r.clients for r in reports.reports] == [r.clients for r in seen.reports]
    assert reports.reports[0].train_loss == pytest.approx(seen.reports[0].train_loss)
    assert reports.reports[0].upload_bytes > seen.reports[0].upload_bytes


def test_fewer_bits_are_less_precise() -> None:
    expected, _ = plain(defense=none())

    def error(bits: int) -> float:
        found, _ = encrypted(bits=bits, defense=none())
        return float((found.parameters["out.weight"] - expected.parameters["out.weight"]).abs().max())

    assert error(4) > 10 * error(16)


def test_clients_that_fail_do_not_count() -> None:
    _, reports = encrypted(defense=none(), faults=((0, "raises"), (2, "nan")))

    assert reports.reports[0].clients == (1,)
    assert reports.reports[0].excluded == {
        0: "RuntimeError: the disk of this client",
        2: "conv.weight: not finite",
    }
    with pytest.raises(UserError, match="all clients failed"):
        encrypted(defense=none(), faults=((0, "raises"), (1, "nan"), (2, "nan")))


def test_private_layers_stay_out_of_the_ciphertexts_too() -> None:
    defense, model = split_fed(private=["conv"]), harness.small_net()
    server = replace(
        harness.server(PLAN),
        state=public_state(model, defense),
        personal=bool(private_names(model, defense)),
        tested=frozenset({ROUNDS}),
    )
    seen = harness.Recording()

    seen.follow(encrypted_rounds(server, harness.clients(PLAN, defense), rounds=ROUNDS))

    assert "conv.weight" not in server.state.parameters
    assert seen.reports[-1].evaluation is not None


def test_the_server_adds_what_it_can_t_decrypt() -> None:
    keys = KeyHolder()
    values = [torch.arange(5000).double() * k for k in (1, 2, 3)]
    adder = Adder(keys.public_context())

    total = adder.add([keys.encrypt(v) for v in values])

    torch.testing.assert_close(keys.decrypt(total), sum(values), rtol=0, atol=1e-3)
    assert not adder.context.is_private()
    with pytest.raises(ValueError, match="secret"):
        tenseal.ckks_vector_from(adder.context, total[0]).decrypt()
    with pytest.raises((ValueError, RuntimeError)):
        KeyHolder().decrypt([b"no ciphertext"])


def test_a_client_with_other_tensors_or_shapes_does_not_sink_the_round() -> None:
    _, alone = encrypted(defense=none(), faults=((1, "shape"),))
    assert alone.reports[0].clients == (0, 2)
    assert "expected shape" in alone.reports[0].excluded[1]

    clients = harness.clients(PLAN, none())
    clients[2] = replace(clients[2], defense=Defense(upload=(harness.withholding,)))
    reports, _ = run_all(encrypted_rounds(harness.server(PLAN), clients, rounds=1))

    assert reports[0].excluded == {2: "its update has other tensors than most"}


def test_zeros_stay_zero_and_counts_whole() -> None:
    def still(update: Any, state: Any, rng: Any) -> Any:
        return {name: t * (name != "conv.weight") for name, t in update.items()}

    found, _ = encrypted(bits=8, defense=Defense(upload=(still,)))

    assert torch.equal(found.parameters["conv.weight"], harness.small_net().conv.weight)
    assert found.buffers["norm.num_batches_tracked"] == 3 * ROUNDS
