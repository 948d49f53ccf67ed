"""What fine-tuning does beside the plain loss changes how much is read, never what is said of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_privacy.attacks.text import BagOfWords
from fl_privacy.measure import evaluate_all
from fl_privacy.models import ADAPTED, Adapted, TextModel, with_adapters
from fl_privacy.models.gradients import loss_gradients
from fl_privacy.models.transformers import Gpt
from fl_privacy.types import Batch, Knowledge, LocalPlan, ModelState, Observation, Tensors, Upload, VictimId

VOCABULARY, LONGEST, END = 2000, 24, 2


def causal(*, adapters: bool = True) -> TextModel:
    """Predict next tokens, with adapters that have begun to learn."""
    torch.manual_seed(1)
    sizes = {"width": 64, "layers": 2, "heads": 2, "hidden": 64}
    model: TextModel = Gpt(
        vocabulary_size=VOCABULARY, max_length=LONGEST, num_classes=VOCABULARY, next_token=True, **sizes
    )
    if adapters:
        model = with_adapters(model, rank=16)
        for module in model.modules():
            if isinstance(module, Adapted):
                torch.nn.init.normal_(module.lora_b.weight, std=0.02)
    return model.eval()


def words(number: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, number), generator=torch.Generator().manual_seed(seed))


def follows(tokens: Tensor, *, prompt: int = 0) -> Tensor:
    """Return the next tokens, -100 where none follows or it is of the prompt."""
    found = F.pad(tokens[:, 1:], (0, 1), value=-100)
    found[:, : max(0, prompt - 1)] = -100
    return found


def gradients(model: TextModel, tokens: Tensor, labels: Tensor) -> Tensors:
    found = loss_gradients(model, ModelState.of(model), Batch(tokens, labels)).gradients
    held = LocalPlan(trained=list(ADAPTED)).held(found) if any(map(_is_adapted, model.modules())) else []
    return {name: g for name, g in found.items() if name not in held}


def _is_adapted(module: torch.nn.Module) -> bool:
    return isinstance(module, Adapted)


def seen(model: TextModel, tensors: Tensors, lengths: Sequence[int], number: int = 1) -> Observation:
    trained = list(ADAPTED) if any(map(_is_adapted, model.modules())) else []
    return Observation(
        id=VictimId(0, 0, 0),
        model=model,
        sent=ModelState.of(model),
        upload=Upload(tensors=dict(tensors), num_examples=number),
        plan=LocalPlan(trained=trained),
        input_shape=(LONGEST,),
        num_classes=VOCABULARY,
        knowledge=Knowledge(lengths=torch.tensor(lengths)),
    )


def named(observation: Observation) -> set[int]:
    (found,) = BagOfWords()([observation], seed=0)
    return set() if found.words is None else set(found.words.tolist())


both = pytest.mark.parametrize("adapters", [True, False])


@both
def test_a_prompt_that_the_loss_leaves_out_is_read_all_the_same(adapters: bool) -> None:
    """Answers look at it: only what is behind the last answered token has no part in the gradient."""
    model, tokens = causal(adapters=adapters), words(10)
    found = named(seen(model, gradients(model, tokens, follows(tokens, prompt=6)), [10]))
    assert found <= set(tokens[0].tolist())
    assert len(found & set(tokens[0, :6].tolist())) >= 5


@both
def test_two_texts_packed_into_one_row_are_read(adapters: bool) -> None:
    model, first, second = causal(adapters=adapters), words(6), words(5, seed=4)
    end = torch.tensor([[END]])
    tokens = torch.cat([first, end, second, end], 1)
    found = named(seen(model, gradients(model, tokens, follows(tokens)), [tokens.shape[1]]))
    assert found - {END} <= set(tokens[0].tolist())
    assert len(found & set(first[0].tolist())) >= 5 and len(found & set(second[0].tolist())) >= 4


@both
def test_batches_that_are_accumulated_are_read_as_one(adapters: bool) -> None:
    model, parts = causal(adapters=adapters), [words(6), words(6, seed=5)]
    each = [gradients(model, tokens, follows(tokens)) for tokens in parts]
    mean = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
    found = named(seen(model, mean, [6, 6], number=2))
    there = set(torch.cat(parts, 1)[0].tolist())
    assert found <= there and len(found) >= 8


def rounded(dtype: torch.dtype) -> Callable[[TextModel], TextModel]:
    return lambda model: model.to(dtype)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_client_that_computes_in_half_precision_is_read(adapters: bool, dtype: torch.dtype) -> None:
    model, tokens = causal(adapters=adapters), words(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).float())
    half = causal(adapters=adapters)
    half.load_state_dict(model.state_dict())
    half.to(dtype)
    logits = half(tokens)
    F.cross_entropy(logits.float(), follows(tokens)).backward()  # type: ignore[no-untyped-call]
    own = gradients(model, tokens, follows(tokens))
    tensors = {name: p.grad.float() for name, p in half.named_parameters() if name in own and p.grad is not None}
    found = named(seen(model, tensors, [7]))
    assert len(found & set(tokens[0].tolist())) >= 5 and len(found - set(tokens[0].tolist())) <= 1


def test_tokens_of_a_template_count_for_nothing() -> None:
    """A guess of nothing but the template has read no word of the text."""

    class Template:
        special = frozenset({7, 8, 9})

        def word_numbers(self, tokens: Tensor) -> Tensor:
            return tokens

    model = causal(adapters=False)
    tokens = torch.cat([torch.tensor([[7, 8, 9]]), words(5)], 1)
    observation = seen(model, gradients(model, tokens, follows(tokens)), [8])
    (read,) = BagOfWords()([observation], seed=0)
    only = replace(read, words=torch.tensor([7, 8, 9]), batch=Batch(torch.tensor([[7, 8, 9]]), torch.tensor([-1])))
    truth = Batch(tokens, follows(tokens))
    (score,) = evaluate_all([only], [truth], language=Template())
    assert score.images[0].values["word_f1"] == 0 and score.images[0].values["token_f1"] == 0
    (score,) = evaluate_all([read], [truth], language=Template())
    assert score.images[0].values["word_f1"] > 0.7
