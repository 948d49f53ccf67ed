"""The plain loop: who is asked, what is captured, what a failure costs."""

from typing import Any

import pytest
import torch

from fl_privacy.data import TextExamples, Vocabulary
from fl_privacy.defenses import ClientState
from fl_privacy.errors import UserError
from fl_privacy.federation import Audit, Server, ServerPlan, evaluate_model, plain_rounds, run_all
from fl_privacy.progress import Stage, listening
from fl_privacy.types import LocalPlan, ModelState, VictimId
from tests.federation import harness


def run(
    rounds: int = 3, audit: Audit | None = None, rules: ServerPlan | None = None, **clients: Any
) -> tuple[Server, harness.Recording, dict[int, ClientState]]:
    server, recording = harness.server(rules=rules), harness.Recording()
    kept = recording.follow(
        plain_rounds(
            server,
            harness.clients(**clients),
            rounds=rounds,
            audit=audit or Audit(),
            interceptor=recording.interceptor(),
        )
    )
    return server, recording, kept


def test_observations_hold_what_was_sent_and_what_came_back() -> None:
    server, recording, _ = run(rounds=1, audit=harness.updates(1))

    assert [o.id for o in recording.observations] == [VictimId(1, c) for c in range(harness.CLIENTS)]
    sent = harness.server().state
    mean = torch.stack([o.upload.tensors["out.bias"] for o in recording.observations]).mean(0)
    torch.testing.assert_close(server.state.parameters["out.bias"], sent.parameters["out.bias"] + mean)
    for observation in recording.observations:
        harness.assert_same_state(observation.sent, sent)


def test_probes_train_nothing() -> None:
    probed, recording, _ = run(audit=harness.probes(1, 3), defense=harness.HEAD)
    alone, _, _ = run(defense=harness.HEAD)

    harness.assert_same_state(probed.state, alone.state)
    assert len(recording.observations) == 2 * 4


def test_training_learns() -> None:
    plan = LocalPlan(shares="delta", lr=0.1, epochs=2, batch_size=6)
    server, recording = harness.server(plan), harness.Recording()
    recording.follow(
        plain_rounds(
            server,
            harness.clients(plan, harness.Defense()),
            rounds=12,
            audit=Audit(),
            interceptor=recording.interceptor(),
        )
    )

    assert recording.reports[-1].train_loss < 0.3 * recording.reports[0].train_loss
    assert evaluate_model(harness.small_net(), server.state, harness.examples()).accuracy > 0.9


def test_a_language_models_answers_are_its_next_tokens() -> None:
    """Each counts once: no more answers are right than were asked for."""
    vocabulary = Vocabulary(tuple("abcdefgh"), frozenset())
    tokens = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, -1, -1]], dtype=torch.int32)
    texts = TextExamples(
        tokens=tokens, labels=torch.zeros(2).long(), class_names=("a",), vocabulary=vocabulary, next_token=True
    )

    class Next(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot((inputs.clamp_min(0) + 1) % 8, 8).float().mT

    found = evaluate_model(Next(), ModelState.of(Next()), texts)
    assert found.accuracy == 1 and found.num_examples == 2
    expected = -torch.tensor([0.0] * 7 + [1.0]).log_softmax(0)[-1]
    assert abs(found.loss - float(expected)) < 1e-5


def test_evaluation_agrees_with_a_forward_pass() -> None:
    model, data = harness.small_net(), harness.examples()
    result = evaluate_model(harness.small_net(seed=8), ModelState.of(model), data, batch_size=5)

    model.eval()
    batch = data.batch(torch.arange(len(data)))
    logits = model(batch.inputs)
    assert result.num_examples == len(data)
    assert result.accuracy == pytest.approx((logits.argmax(1) == batch.labels).float().mean().item())
    assert result.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, batch.labels).item(), rel=1e-5)


def test_failures_are_logged_excluded_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    _, recording, kept = run(faults=((0, "raises"), (2, "shape")))

    assert [r.clients for r in recording.reports] == [(1,)] * 3
    assert "Client 0 is excluded from round 1: RuntimeError: the disk of this client" in caplog.text
    assert "Client 2 is excluded from round 3: conv.weight: expected shape (3, 1, 3, 3), got (27,)" in caplog.text
    assert kept[0].tensors == {}, "what a client kept before it failed is not half written"


def test_a_failing_probe_or_interception_is_logged_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def observe(self, victim: VictimId, **seen: Any) -> None:
            raise OSError("no space left")

    server = harness.server()
    run_all(
        plain_rounds(
            server, harness.clients(faults=((1, "raises"),)), rounds=1, audit=harness.probes(1), interceptor=Broken()
        )
    )

    harness.assert_same_state(server.state, run(rounds=1, faults=((1, "raises"),))[0].state)
    assert "The probe round-1/client-1/victim-0 failed: RuntimeError: the disk of this client" in caplog.text
    assert "could not be intercepted: OSError: no space left" in caplog.text


def test_all_clients_failing_stops_with_one_line() -> None:
    with pytest.raises(UserError, match="all 3 clients failed") as error:
        run(faults=((0, "raises"), (1, "nan"), (2, "shape")))

    assert len(str(error.value).splitlines()) == 1


def test_a_report_sums_the_round_up() -> None:
    _, recording, _ = run(rounds=1, rules=ServerPlan(fraction=0.5))

    (report,) = recording.reports
    model = harness.small_net()
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert report.upload_bytes == 2 * size
    assert len(report.clients) == 2
    assert report.seconds > report.defense_seconds > 0


def test_a_long_evaluation_says_how_far_it_is() -> None:
    heard: list[tuple[Stage, ...]] = []
    model = harness.small_net()
    with listening(heard.append):
        evaluate_model(model, ModelState.of(model), harness.examples(1000))
    assert [stages[0].total for stages in heard if stages] == [5] * 5


def test_a_round_is_run_as_its_caller_asks_for_it() -> None:
    server, recording = harness.server(), harness.Recording()
    before = server.state
    rounds = plain_rounds(
        server, harness.clients(), rounds=2, audit=harness.updates(1, 2), interceptor=recording.interceptor()
    )

    first = next(rounds)
    observation = next(first)
    assert observation.id == VictimId(1, 0)
    assert server.state is before, "observed before the server's step"
    assert first.report.round == 1
    after_one = server.state
    assert after_one is not before
    assert [o.id.round for o in next(rounds)] == [2] * harness.CLIENTS
    assert first.report.round == 1, "a round that has ended keeps its report"
    harness.assert_same_state(run(rounds=1)[0].state, after_one)


def test_observations_that_nobody_takes_change_nothing() -> None:
    server, recording = harness.server(), harness.Recording()
    reports, kept = run_all(
        plain_rounds(
            server, harness.clients(), rounds=2, audit=harness.probes(1, 2), interceptor=recording.interceptor()
        )
    )

    watched, seen, expected = run(rounds=2, audit=harness.probes(1, 2))
    harness.assert_same_state(server.state, watched.state)
    assert [r.train_loss for r in reports] == [r.train_loss for r in seen.reports]
    assert kept.keys() == expected.keys()
