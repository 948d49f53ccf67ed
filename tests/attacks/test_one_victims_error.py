"""An error that one victim's numbers end in fails that victim, and leaves the others as they are."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fl_privacy.attacks import AutoAttack, Dager
from fl_privacy.attacks.attack import ReconstructionAttack
from fl_privacy.attacks.gradient_inversion.grouping import Group, Groups, failed
from fl_privacy.attacks.text import BagOfWords, bag_of_words as bag
from fl_privacy.types import Observation, Reconstruction, VictimId
from tests.attacks.text.test_dager import decoder, encoder, observed, texts


def victims(number: int = 3) -> list[Observation]:
    seen = [observed(encoder, texts([6], seed)) for seed in range(number)]
    model, sent = seen[0].model, seen[0].sent
    return [replace(o, id=VictimId(0, k, 0), model=model, sent=sent) for k, o in enumerate(seen)]


def broken_at(client: int, error: Exception) -> Callable[..., object]:
    whole = bag.BagReader._bag

    def read(self: bag.BagReader, observation: Observation, *rest: object) -> object:
        if observation.id.client == client:
            raise error
        return whole(self, observation, *rest)  # type: ignore[arg-type]

    return read


@pytest.mark.parametrize("error", [RuntimeError("singular"), ValueError("empty"), IndexError("out of range")])
def test_the_others_words_are_those_read_without_it(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = BagOfWords()(victims(), seed=0)
    monkeypatch.setattr(bag.BagReader, "_bag", broken_at(1, error))
    found = BagOfWords()(victims(), seed=0)
    assert found[1].batch is None and str(error) in str(found[1].failure)
    for k in (0, 2):
        assert torch.equal(_words(found[k]), _words(expected[k]))


def test_auto_goes_on_without_the_words_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bag.BagReader, "_bag", broken_at(1, RuntimeError("singular")))
    found = AutoAttack(evaluations=4)(victims(), seed=0)
    assert all(one.batch is not None and one.failure is None for one in found)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "not a number": lambda g: torch.full_like(g, float("nan")),
    "infinite": lambda g: torch.full_like(g, float("inf")),
    "large": lambda g: 1e30 * g,
    "small": lambda g: 1e-30 * g,
    "constant": torch.ones_like,
    "noise": lambda g: torch.randn(g.shape, generator=torch.Generator().manual_seed(0)),
    "sparse": lambda g: g * (torch.rand(g.shape, generator=torch.Generator().manual_seed(1)) < 0.01),
    "signs": torch.sign,
    "as it is": lambda g: g,
}


def changed(clean: Observation, *names: str) -> list[Observation]:
    return [
        replace(
            clean,
            id=VictimId(0, k, 0),
            upload=replace(clean.upload, tensors={n: CHANGES[name](g) for n, g in clean.upload.tensors.items()}),
        )
        for k, name in enumerate(names)
    ]


@pytest.mark.parametrize("attack", [Dager(rounds=1), BagOfWords()])
def test_what_nobody_expects_of_an_upload_ends_no_call(attack: ReconstructionAttack) -> None:
    for tokens, make in ((texts([2, 3, 2]), encoder), (texts([4, 3]), decoder)):
        _expect_all_answered(attack(changed(observed(make, tokens), *CHANGES), seed=0))


def test_nor_does_auto_count_the_labels_of_an_upload_that_is_far_too_large() -> None:
    _expect_all_answered(
        AutoAttack(evaluations=2)(changed(observed(encoder, texts([2, 3])), "large", "as it is"), seed=0)
    )


def _expect_all_answered(found: Sequence[Reconstruction]) -> None:
    assert [one.id.client for one in found] == list(range(len(found)))
    assert found[-1].batch is not None
    assert not [one.failure for one in found if "broke off" in str(one.failure)]


def attacked(attack: Callable[[Group], dict[int, Reconstruction]]) -> list[Reconstruction]:
    groups = Groups(victims(), progress=lambda done, total: None)
    for group in groups:
        with groups.attempt(group):
            groups.results |= attack(group)
    return groups.reconstructions()


def test_memory_that_runs_out_is_no_victims_fault() -> None:
    def attack(group: Group) -> dict[int, Reconstruction]:
        raise RuntimeError("can't allocate memory: you tried to allocate 8 bytes")

    with pytest.raises(RuntimeError, match="allocate"):
        attacked(attack)


def test_each_victim_of_a_group_is_attacked_alone_where_the_group_failed() -> None:
    sizes: list[int] = []

    def attack(group: Group) -> dict[int, Reconstruction]:
        sizes.append(len(group.observations))
        if 1 in group.observations:
            raise ZeroDivisionError("division by zero")
        return {k: failed(o, "read") for k, o in group.observations.items()}

    found = attacked(attack)
    assert sizes == [3, 1, 1, 1]
    assert [one.failure == "read" for one in found] == [True, False, True]
    assert "ZeroDivisionError: division by zero" in str(found[1].failure)


def _words(found: Reconstruction) -> Tensor:
    assert found.words is not None
    return found.words
