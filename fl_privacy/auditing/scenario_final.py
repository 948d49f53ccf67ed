"""Attack the model that everybody gets: infer members of the training, and let it continue their texts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fl_privacy.attacks.inference.final_model import SHORTEST, continued
from fl_privacy.auditing.instrument.watch import Watched
from fl_privacy.auditing.scenario_members import LEAST, MOST, after_upload, answered, losses_from, separated, singles_of
from fl_privacy.auditing.scenario_problem import NotAttackedError, WatchedReply, cleaned
from fl_privacy.auditing.scenario_words import network_in, texts_seen
from fl_privacy.auditing.server_step import PLAIN_MEAN
from fl_privacy.federation import ServerPlan
from fl_privacy.measure.answer import Answer, Scenario
from fl_privacy.measure.roc import answer_success

DRAWS, LIKELY, MOST_TEXTS = 100, 0.5, 400
"""Number of sampled continuations, probability above which one counts as the text, and largest number of texts."""


def of_final_model(
    clients: Sequence[WatchedReply],
    latest: Sequence[WatchedReply],
    single: Watched | None,
    evaluated: Sequence[Any],
    seconds: float,
    *,
    server: ServerPlan | str = PLAIN_MEAN,
) -> Iterator[Answer]:
    """Yield answers on what an outsider infers about ``clients``' examples from the mean of their ``latest`` models.

    Args:
        clients, latest: first and last observed reply of each client.
        single: observed training step on one example, from which the app's loss is rebuilt.
        evaluated: batches that clients loaded but did not train on.
        seconds: time limit for computing losses.
        server: how the server combines updates, or the reason why the global model can't be computed.
    """
    if not isinstance(server, str) and server != PLAIN_MEAN:
        server = "the server's own optimizer moves the model from their mean, which is not computed here"
    asked: Mapping[Any, Callable[[], Answer]] = {
        "participants": lambda: _participants(clients, final_values(latest), single, evaluated, seconds),
        "continued": lambda: _continued(clients, final_values(latest)),
    }
    uploads = f"the mean of {len(latest)} clients' last models"
    scenario = Scenario(name="final", title="From the model that everybody gets", uploads=uploads)
    for question, ask in asked.items():
        answer = Answer(reason=server) if isinstance(server, str) else answered(ask)
        known = replace(scenario, uploads=f"{uploads}{answer.scenario.uploads}")
        yield replace(answer, question=question, observer="outsider", scenario=known)


def final_values(latest: Sequence[WatchedReply]) -> dict[str, Tensor]:
    """Return the mean of the clients' models after training, by observed parameter name.

    Values that were not uploaded stay as sent. ``NotAttackedError`` unless all are finite and share a parameter.
    """
    after = [after_upload(client) for client in latest]
    shared = set.intersection(*map(set, after)) if after else set[str]()
    if not shared:
        raise NotAttackedError("parameters are expected in uploads, but none was found; upload them unencoded")
    if not all(value.isfinite().all() for values in after for value in values.values()):
        raise NotAttackedError("finite uploads are expected, but one is not; lower the learning rate")
    means = {name: torch.stack([values[name].float() for values in after]).mean(0) for name in shared}
    return {**latest[0].watched.before, **means}


def _participants(
    clients: Sequence[WatchedReply],
    final: Mapping[str, Tensor],
    single: Watched | None,
    evaluated: Sequence[Any],
    seconds: float,
) -> Answer:
    losses, sent = losses_from(single), clients[0].watched.before
    pools = [list(islice(singles_of(client.watched), MOST)) for client in clients]
    members = [pool[k] for k in range(MOST) for pool in pools if k < len(pool)]

    def key(example: Sequence[Tensor]) -> tuple[bytes, ...]:
        return tuple(tensor.numpy().tobytes() for tensor in example)

    def shapes(example: Sequence[Tensor]) -> tuple[torch.Size, ...]:
        return tuple(tensor.shape for tensor in example)

    every = (replace(client.watched, passes={}) for client in clients)  # all epochs
    trained = {key(one) for watched in every for one in singles_of(watched)}
    loaded = {key(one): one for one in islice(singles_of(Watched(batches=list(evaluated))), 4 * MOST)}
    unseen = [one for own, one in loaded.items() if own not in trained]
    alike = {shape: [one for one in unseen if shapes(one) == shape] for shape in set(map(shapes, unseen))}
    # in pairs, since the loss of a long text may fall by more than a short one's
    pairs = [(one, others.pop()) for one in members if (others := alike.get(shapes(one)))][:MOST]
    if len(pairs) < LEAST:
        raise NotAttackedError(
            f"at least {LEAST} evaluated examples that no client trained on are expected, but got {len(pairs)};"
            " evaluate more"
        )
    number = max(LEAST, min(len(pairs), int(seconds / (4 * losses.each_takes([one for one, _ in pairs], sent)))))
    found = []
    for examples in zip(*pairs[:number], strict=True):
        before = losses.of(examples, sent)
        found.append((before - losses.of(examples, final), -before))
    (inside, known), (outside, unknown) = found
    said = f", {number} examples that clients trained on and as many that they only evaluate"
    answer = separated(inside, outside, known, unknown, said)
    note = (
        "Score of an example: the fall of its loss from the first to the final model; control: minus the first"
        " loss. The figure is too high if evaluated examples differ in kind, and too low if training augments its"
        " examples at random or also evaluates them."
    )
    return replace(answer, notes=(note, *answer.notes[1:]))


def _continued(clients: Sequence[WatchedReply], final: Mapping[str, Tensor]) -> Answer:
    found = [seen for client in clients if (seen := texts_seen(client.watched))]
    if not found:
        raise NotAttackedError("a transformer on texts is expected, but none was seen; audit an app that trains one")
    every = [_unpadded(row[row >= 0]) for seen in found for tokens in seen.words for row in tokens]
    texts, number = list({tuple(row.tolist()): row for row in every}.values())[:MOST_TEXTS], found[0].number
    shares = []
    for values in (final, clients[0].watched.before):
        part = cleaned(clients[0].watched.modules[number]).eval()
        with torch.no_grad():
            for name, own in (*part.named_parameters(), *part.named_buffers()):
                value = values.get(f"parts.{number}.{name}")
                if value is not None and value.shape == own.shape:
                    own.copy_(value)
        network = network_in(part)

        def logits(tokens: Tensor, network: Any = network) -> Tensor:
            outputs: Tensor = network(input_ids=tokens)[0].float()
            return outputs

        shape = logits(texts[0][None]).shape
        if len(shape) != 3 or shape[-1] < network.get_input_embeddings().num_embeddings:
            raise NotAttackedError("next-token logits are expected, but the network has none; audit a language model")
        shares.append(continued(logits, texts))
    (greedy, sampled), (usual, _) = shares
    if not len(greedy):
        raise NotAttackedError(f"{SHORTEST} tokens are expected, but no text is long enough; train on longer texts")
    drawn = int((1 - (1 - sampled.exp()) ** DRAWS > LIKELY).sum())
    note = (
        f"A text counts if the most likely continuation of its beginning is its end, word for word. {drawn} of"
        f" {len(greedy)} would more likely than not be among {DRAWS} sampled continuations. The control is the first"
        " model sent, which never saw them."
    )
    made = Scenario(uploads=f", {len(greedy)} of the clients' texts")
    share, control = (answer_success(int(right.sum()), len(right), majority=0.0) for right in (greedy, usual))
    return Answer(scenario=made, estimate=share, control=control, notes=(note,))


def _unpadded(text: Tensor) -> Tensor:
    others = (text != text[-1:]).nonzero().flatten()
    return text[: int(others[-1]) + 2] if len(others) else text[:1]
