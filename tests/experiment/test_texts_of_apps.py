"""Which texts entered an app's network: the tokens, not their positions, masks or targets; however it trains."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from fl_privacy.auditing.instrument.watch import TrainingWatch, Watched
from fl_privacy.auditing.scenario_words import template_of, texts_seen

SIZE, PADDING = 300, 2


class Configuration:
    pad_token_id = PADDING


class Blocks(nn.Module):
    """Takes the arguments of transformers' networks; its blocks may be computed twice, as checkpoints are."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config, self.checkpoints = Configuration(), checkpoints
        self.embeddings, self.positions = nn.Embedding(SIZE, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, SIZE, bias=False)
        self.head.weight = self.embeddings.weight

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Tensor) -> Tensor:
        places = others.get("position_ids", torch.arange(input_ids.shape[1]).expand_as(input_ids))
        states = self.embeddings(input_ids) + self.positions(places)
        for block in self.blocks:
            states = checkpoint(block, states, use_reentrant=False) if self.checkpoints else block(states)
        logits = self.head(states)[:, :-1].mT
        return nn.functional.cross_entropy(logits, labels[:, 1:], ignore_index=-100)


def batch(*rows: list[int], prompt: int = 0, packed: bool = False) -> dict[str, Tensor]:
    """Pad ``rows`` on the right; targets leave padding and the first ``prompt`` tokens out."""
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[PADDING] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = tokens.masked_fill((mask == 0) | (torch.arange(width) < prompt), -100)
    made = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    if packed:
        half = width // 2
        del made["attention_mask"]
        made["position_ids"] = torch.cat([torch.arange(half), torch.arange(width - half)]).expand(len(rows), -1)
    return made


def trained(batches: list[dict[str, Tensor]], *, every: int = 1, **how: Any) -> Watched:
    """Train on ``batches``, with a step after ``every`` of them."""
    network = Blocks(**how)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    class Given(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return iter(batches)

    with TrainingWatch().looking() as seen:
        for number, one in enumerate(DataLoader(Given(), batch_size=None), start=1):
            (network(**one) / every).backward()
            if number % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return seen


ROWS = [9, 30, 41, 55, 9, 30], [9, 30, 77, 120]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("prompt", [0, 3])
def test_tokens_are_found_among_masks_targets_and_positions(packed: bool, prompt: int) -> None:
    rows = ROWS[:1] if packed else ROWS
    found = texts_seen(trained([batch(*rows, prompt=prompt, packed=packed)]))
    assert found is not None and found.kinds() == {t for row in rows for t in row}


def test_padding_by_a_token_of_its_own_is_no_word_without_a_mask() -> None:
    one = batch(*ROWS)
    del one["attention_mask"]
    found = texts_seen(trained([one]))
    assert found is not None and PADDING not in found.kinds()


def test_accumulated_batches_are_one_step_of_all_their_texts() -> None:
    seen = trained([batch(ROWS[0]), batch(ROWS[1])], every=2)
    found = texts_seen(seen)
    assert found is not None and found.kinds() == {t for row in ROWS for t in row}
    assert seen.steps == 1 and seen.loaded == 2


def test_what_a_checkpoint_computes_again_is_no_network_of_its_own() -> None:
    plain, again = trained([batch(*ROWS)]), trained([batch(*ROWS)], checkpoints=True)
    assert len(again.modules) == 1 and again.before.keys() == plain.before.keys()
    assert again.entered == plain.entered
    found = texts_seen(again)
    assert found is not None and found.kinds() == {t for row in ROWS for t in row}
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(again.gradients[name], gradient)


def test_a_tied_head_is_one_parameter() -> None:
    seen = trained([batch(*ROWS)])
    assert sum(value.shape == (SIZE, 16) for value in seen.gradients.values()) == 1
    there = {int(t) for row in ROWS for t in row}
    rows = next(g for g in seen.gradients.values() if g.shape == (SIZE, 16)).norm(dim=1)
    assert set(rows.topk(len(there)).indices.tolist()) == there


def test_tokens_that_all_texts_have_are_of_the_template() -> None:
    clients = [trained([batch(row)]) for row in ([9, 30, 41], [9, 30, 77], [9, 30, 120])]
    assert template_of(clients) == {9, 30, -1}
    assert template_of(clients[:2]) == {-1}
