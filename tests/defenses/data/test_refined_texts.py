"""Refiner on texts: robust data are embeddings of words, and what embeds them is not uploaded."""

import pytest
import torch

from fl_privacy.defenses import ClientState, LocalStep, refiner
from fl_privacy.defenses._refiner import fingerprints
from fl_privacy.defenses.defense import Defense
from fl_privacy.errors import UserError
from fl_privacy.federation.training import local_update
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.pretrained.evaluator import WordBox
from fl_privacy.models.transformers import Bert
from fl_privacy.types import Batch, LocalPlan, ModelState, Tensors

VOCABULARY, LONGEST = 60, 8


def model() -> Bert:
    torch.manual_seed(0)
    return Bert(
        vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=2, width=16, layers=2, heads=2, hidden=16, std=0.2
    )


def batch(width: int = 6) -> Batch:
    tokens = torch.randint(12, (3, width), generator=torch.Generator().manual_seed(1))
    tokens[0, 4:] = -1
    return Batch(tokens, torch.tensor([0, 1, 1]))


def step_of(net: Bert, texts: Batch, state: ClientState | None = None) -> LocalStep:
    return LocalStep(
        model=net,
        sent=ModelState.of(net),
        batch=texts,
        plan=LocalPlan(),
        state=state or ClientState(),
        rng=torch.Generator().manual_seed(3),
    )


def prepared(net: Bert, **settings: object) -> Defense:
    made = refiner(**settings)  # type: ignore[arg-type]
    for prepare in made.texts:
        prepare(net, torch.randint(12, (30, LONGEST), generator=torch.Generator().manual_seed(2)))
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_PRIVACY_CACHE", str(tmp_path_factory.getbasetemp() / "words"))


def defended(made: Defense, step: LocalStep) -> tuple[Tensors, Tensors]:
    clean = loss_gradients(step.model, step.sent, step.batch).gradients
    (hook,) = made.gradient
    return clean, hook(clean, step)


@pytest.mark.parametrize("settings", [{}, {"match": "example"}, {"privacy": "mse"}, {"utility": "absolute"}])
def test_the_gradient_moves_within_epsilon_and_without_that_of_the_embeddings(settings: dict[str, str]) -> None:
    net = model()
    clean, found = defended(prepared(net, epsilon=0.02, iterations=3, **settings), step_of(net, batch()))
    assert set(found) == set(clean) - {"words.weight"}
    apart = torch.stack([(found[n] - clean[n]).double().square().sum() for n in found]).sum().sqrt()
    assert 0 < float(apart) <= 0.02 * (1 + 1e-6)


def test_federations_that_share_the_defense_are_judged_by_their_own_words() -> None:
    torch.manual_seed(7)
    one, other = (
        model(),
        Bert(vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=2, width=8, layers=1, heads=2),
    )
    alone, shared = prepared(one, iterations=3), prepared(one, iterations=3)
    for prepare in shared.texts:
        prepare(other, torch.randint(12, (30, LONGEST), generator=torch.Generator().manual_seed(4)))
    defended(shared, step_of(other, batch()))
    (_, expected), (_, found) = (defended(made, step_of(one, batch())) for made in (alone, shared))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_robust_data_are_judged_more_random_than_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    net, seen = model(), []
    made = prepared(net, epsilon=10.0)
    monkeypatch.setattr("fl_privacy.defenses.defense.loss_gradients", lambda m, s, b, **k: _spy(seen, m, s, b, k))
    step = step_of(net, batch())
    defended(made, step)
    box, there = WordBox(net.words.weight.detach()), batch().inputs >= 0
    judge = made.texts[0].__self__.judges[0].judging(net.words.weight)  # type: ignore[attr-defined]
    robust = judge(box.coordinates(seen[-1].inputs[..., :-1]), there)
    assert (robust > judge(box.words(batch().inputs), there) + 0.2).all()
    assert ((seen[-1].inputs[..., -1] > 0.5) == there).all()


def _spy(seen: list[Batch], net: torch.nn.Module, state: ModelState, texts: Batch, more: dict[str, object]) -> object:
    seen.append(texts)
    return loss_gradients(net, state, texts, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", ["gradient", "delta"])
def test_embeddings_are_neither_trained_nor_uploaded(shares: str) -> None:
    net = model()
    plan = LocalPlan(shares=shares, lr=0.1)  # type: ignore[arg-type]
    done = local_update(
        net,
        ModelState.of(net),
        [batch()],
        num_examples=3,
        plan=plan,
        defense=prepared(net, iterations=2),
        state=ClientState(),
        rng=torch.Generator().manual_seed(0),
        private_rng=torch.Generator().manual_seed(0),
    )
    assert "words.weight" not in done.upload.tensors and "classifier.weight" in done.upload.tensors


def test_a_warm_start_finds_texts_again_however_wide_their_batch_is() -> None:
    narrow, wide = batch().inputs[:1, :4], batch().inputs[:1]
    assert torch.equal(fingerprints(narrow), fingerprints(wide))
    net, state = model(), ClientState()
    made = prepared(net, iterations=4, warm_start=True)
    for texts in (Batch(narrow, torch.tensor([0])), batch()):
        defended(made, step_of(net, texts, state))
    assert state.tensors["refiner/images"].shape == (3, 6, 16)


def test_without_public_texts_and_file_the_command_is_named() -> None:
    net = model()
    with pytest.raises(UserError, match="train-evaluator"):
        defended(refiner(), step_of(net, batch()))
