"""Words of a text without uploaded embeddings, from layers that see single tokens, such as adapters."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_privacy.attacks.exact.first_layer import agreed_ratios, find_first_layer
from fl_privacy.attacks.gradient_inversion.targets import as_gradient
from fl_privacy.attacks.text.bag_of_words import Placed, tokens_of_first_block
from fl_privacy.auditing.instrument.program import ReplayModel, tensors_in
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.auditing.scenario_problem import OPTIMIZERS, NotAttackedError, cleaned, uploaded_tensors
from fl_privacy.federation.replies import Failure, attempt
from fl_privacy.models import TextModel
from fl_privacy.types import LocalPlan, ModelState, Observation, Tensors, Upload, VictimId

MOST_TEXTS = 2000
"""Largest number of the clients' other texts used as distractors."""

KNOWN = 0.01
"""Largest relative distance of an input from a known one."""

_LONGEST = 512
"""Largest number of tokens of a text."""

NOTE = (
    "Words are read from layers that see a token and nothing else, such as the first block's adapters; words that all"
    " texts have, as those of a template, count for nothing."
)


class SeenNetwork(TextModel):
    """A transformer observed in an app, up to its first block, with the values that it had."""

    causal = False

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    @property
    def words(self) -> nn.Embedding:  # type: ignore[override]
        found: nn.Embedding = self.network.get_input_embeddings()
        return found

    @property
    def attention_weights(self) -> Sequence[tuple[str, ...]]:
        return ()

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        made: Tensor = self.network(inputs_embeds=embeddings.to(self.words.weight.dtype), attention_mask=there.long())[
            0
        ]
        return made


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenTexts:
    """The texts that a client trained on, with its network.

    Attributes:
        words: token ids (N, L) of each batch, -1 for none.
    """

    number: int
    words: Sequence[Tensor]

    def kinds(self) -> set[int]:
        return {int(t) for tokens in self.words for t in tokens.unique() if t >= 0}


def texts_seen(seen: Watched) -> SeenTexts | None:
    """Find the transformer and the tokens that entered it; ``None`` without either."""
    for number, part in enumerate(seen.modules):
        network = _network(part)
        if network is None:
            continue
        size = network.get_input_embeddings().num_embeddings
        padding = getattr(getattr(network, "config", None), "pad_token_id", None)
        found = [t for batch in seen.batches if (t := _tokens(batch, size, padding)) is not None]
        if found:
            return SeenTexts(number=number, words=found)
    return None


def _network(part: nn.Module) -> Any:
    for module in (part, *part.children()):
        embeddings_of: Any = getattr(module, "get_input_embeddings", None)
        if embeddings_of is not None and hasattr(module, "config"):
            embeddings = embeddings_of()
            return module if isinstance(embeddings, nn.Embedding) else None
    return None


def _tokens(batch: Any, size: int, padding: int | None) -> Tensor | None:
    """Return the tokens (N, L) of a batch, -1 for padding."""
    whole = [t for t in tensors_in(batch) if t.dtype in (torch.int64, torch.int32) and t.dim() == 2]
    numbers = [t for t in whole if int(t.min()) >= 0 and 1 < int(t.max()) < size and not _counts_up(t)]
    if not numbers:
        return None
    tokens = max(numbers, key=lambda t: int(t.unique().numel())).long()
    masks = [t for t in whole if t is not tokens and t.shape == tokens.shape and set(t.unique().tolist()) <= {0, 1}]
    if masks:
        return tokens.masked_fill(masks[0] == 0, -1)
    return tokens if padding is None else tokens.masked_fill(tokens == padding, -1)


def _counts_up(numbers: Tensor) -> bool:
    """Return ``True`` for positions (N, L), which restart at 0 for each text."""
    steps = numbers.diff(dim=1)
    return bool((numbers[:, 0] == 0).all()) and bool(((steps == 1) | (numbers[:, 1:] == 0)).all())


def template_of(clients: Sequence[Watched]) -> set[int]:
    """Return the tokens that every text has, which are public like a template's; only -1 for few texts."""
    rows = [set(row.tolist()) for seen in clients if (own := texts_seen(seen)) for t in own.words for row in t]
    return (set.intersection(*rows) if len(rows) > 2 else set()) | {-1}


@dataclass(frozen=True, kw_only=True, eq=False)
class FirstBlock:
    """Tokens reconstructed from one upload's first block.

    Attributes:
        said: method, or reason for failure.
    """

    truth: set[int]
    guess: set[int]
    said: str
    texts: Sequence[set[int]] = ()


def read_first_block(again: Any, tensors: Mapping[str, Tensor], shares: str, *, examples: int) -> FirstBlock | None:
    """Reconstruct the words behind ``tensors``; ``None`` without a transformer on texts.

    Args:
        again: answer with the client's observations ``watched``.
        tensors: upload or gradient, by observed names.
        shares: kind of ``tensors``: ``weights``, ``delta`` or ``gradient``.
    """
    seen: Watched = again.watched
    texts = texts_seen(seen)
    if texts is None:
        return None
    network = _network(cleaned(seen.modules[texts.number]).eval())
    if network is None:
        return None
    inside = _prefix(seen.modules[texts.number], f"parts.{texts.number}.")
    model = SeenNetwork(network.float())
    sent = {f"network.{n.removeprefix(inside)}": v.float() for n, v in seen.before.items() if n.startswith(inside)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in sent and parameter.shape == sent[name].shape:
                parameter.copy_(sent[name])
            sent[name] = parameter.detach().float()
    own = {f"network.{n.removeprefix(inside)}": v.float() for n, v in tensors.items() if n.startswith(inside)}
    own = {name: value for name, value in own.items() if name in sent and value.shape == sent[name].shape}
    longest = min(_LONGEST, max(t.shape[1] for t in texts.words))
    observation = Observation(
        id=VictimId(1, 0, 0),
        model=model,
        sent=ModelState(sent),
        upload=Upload(tensors=own, num_examples=max(1, examples)),
        plan=_plan(seen, shares, examples),
        input_shape=(longest,),
        num_classes=1,
    )
    (found,) = tokens_of_first_block(model, [observation], seed=0)
    if isinstance(found, Placed):
        return FirstBlock(truth=texts.kinds(), guess=set(found.tokens.tolist()), said=found.note)
    return FirstBlock(truth=texts.kinds(), guess=set(), said=found)


def _prefix(part: nn.Module, name: str) -> str:
    if hasattr(part, "get_input_embeddings"):
        return name
    return name + next(f"{path}." for path, child in part.named_children() if hasattr(child, "get_input_embeddings"))


def _plan(seen: Watched, shares: str, examples: int) -> LocalPlan:
    """Infer the plan; parameter groups that differ only in weight decay count as one."""
    if shares == "gradient":
        return LocalPlan(shares="gradient")
    kinds = {name for name, _ in seen.optimizers}
    if len(kinds) != 1 or (kind := next(iter(kinds))) not in OPTIMIZERS:
        raise NotAttackedError(f"steps of {', '.join(sorted(kinds)) or 'no optimizer'} are not undone")
    settings: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for (_, own), times in seen.optimizers.items():
        settings[own] += times
    told = dict(settings.most_common(1)[0][0])
    return LocalPlan(
        shares=shares,  # type: ignore[arg-type]
        lr=float(told["lr"]),
        steps=max(1, seen.steps),
        batch_size=max(1, examples // max(1, seen.steps)),
        optimizer=OPTIMIZERS[kind],  # type: ignore[arg-type]
        momentum=float(told.get("momentum", 0.0) or 0.0),
        weight_decay=float(told.get("weight_decay", 0.0) or 0.0),
    )


def words_of_training(client: Any) -> tuple[set[int], set[int]] | None:
    """Return the words that a client loaded, and those reconstructed from its upload, or ``None``."""
    if texts_seen(client.watched) is None or {name for name, _ in client.watched.optimizers} - set(OPTIMIZERS):
        return None
    tensors = uploaded_tensors(dict(client.reply), client.matched)
    examples = max(1, client.watched.loaded)
    found = read_first_block(client, tensors, client.matched.shares, examples=examples)
    return None if found is None else (found.truth, found.guess)


def words_of_uploads(found: Sequence[tuple[Watched, Any]], *, uploaded: bool) -> list[FirstBlock] | None:
    """Reconstruct the words of each client's answer on one text; ``None`` without a transformer on texts.

    Args:
        found: observations of training, and of one text.
        uploaded: ``True`` to attack the upload, else the gradient.
    """
    read: list[FirstBlock] = []
    template = template_of([watched for watched, _ in found])
    for _, again in found:
        tensors: Tensors = uploaded_tensors(again.reply, again.matched) if uploaded else again.watched.gradients
        shares = again.matched.shares if uploaded else "gradient"
        one = read_first_block(again, tensors, shares, examples=max(1, again.watched.loaded))
        if one is None:
            return None
        texts = [text - template for text in _each_text(again.watched)]
        own = FirstBlock(truth=one.truth - template, guess=one.guess - template, said=one.said, texts=texts)
        read.append(own)
    return read


def other_texts(clients: Sequence[Watched]) -> list[set[int]]:
    """Return the tokens of each text that clients loaded, without the template's."""
    template = template_of(clients)
    seen = {id(one): one for one in clients}
    return [text - template for one in seen.values() for text in _each_text(one)][:MOST_TEXTS]


def _each_text(seen: Watched) -> list[set[int]]:
    texts = texts_seen(seen)
    return [set(row) - {-1} for tokens in (texts.words if texts else ()) for row in tokens.tolist()]


def entered_apart(observation: Observation) -> Tensor:
    """Return the inputs (N, ...) that entered first-layer neurons alone, without given ones."""
    model = observation.model
    assert isinstance(model, ReplayModel)
    known = [value for n in model.beside if (value := model.program.constants[n]).shape[1:] == model.shapes[0]]
    if observation.plan.optimizer != "sgd":
        return torch.empty(0, *observation.input_shape)
    layer = attempt(lambda: find_first_layer(model, observation.sent, observation.input_shape))
    gradient = attempt(lambda: as_gradient(observation))
    if isinstance(layer, Failure) or isinstance(gradient, Failure) or not {layer.weight, layer.bias} <= gradient.keys():
        return torch.empty(0, *observation.input_shape)
    ratios = agreed_ratios(gradient[layer.weight], gradient[layer.bias])
    found = layer.pixels(ratios).reshape(-1, *observation.input_shape).float()
    given = model.looked_for(torch.cat(known)).flatten(1) if known else found.flatten(1)[:0]
    return found[(torch.cdist(found.flatten(1), given) > KNOWN * given.norm(dim=1)).all(1)]
