"""How victims are cut into parts, and what a part tells."""

import warnings
from collections.abc import Sequence

import torch

from fl_privacy.attacks import Progress, no_progress
from fl_privacy.federation.cores import Tally
from fl_privacy.federation.parallel import attack_part, cut
from fl_privacy.types import Observation, Reconstruction
from tests.attacks.victims import observations, smooth_net


def test_parts_are_of_about_the_same_size_and_in_order() -> None:
    victims = observations(smooth_net(), 7)
    assert cut(victims, 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert cut(victims[:2], 3) == [[0], [1]]
    assert cut([], 3) == []


def test_updates_of_the_same_examples_stay_together() -> None:
    names = ["a", "b", None, "a", "b"]
    victims = [v.given(same_data=name) for v, name in zip(observations(smooth_net(), 5), names, strict=True)]
    assert cut(victims, 3) == [[0, 3], [1, 4], [2]]
    assert cut(victims, 2) == [[0, 3], [1, 4, 2]]


def chatty(observations: Sequence[Observation], *, seed: int, progress: Progress = no_progress) -> list[Reconstruction]:
    for step in range(4):
        warnings.warn("slow model", stacklevel=2)
        progress(step + 1, 4)
    return [Reconstruction(id=o.id, batch=None, loss=float(torch.get_num_threads())) for o in observations]


def test_a_part_tells_how_far_it_is_and_what_it_was_warned_of() -> None:
    told: list[float] = []
    threads = torch.get_num_threads()
    try:
        found, warned = attack_part(chatty, observations(smooth_net(), 8), seed=0, threads=1, tell=told.append)
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 8 and found[0].loss == 1
    assert warned == ["slow model"]
    assert told[0] == 2


def test_the_tally_keeps_the_last_word_of_each_part() -> None:
    tally = Tally()
    for part, done in ((0, 1.0), (1, 2.0), (0, 1.5)):
        tally.tell(part, done)
    assert tally.total() == 3.5
