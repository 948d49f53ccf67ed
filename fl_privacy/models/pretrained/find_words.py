"""Choice of the evaluation network for the words of a model: a given one, or one trained on public texts."""

import copy
import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from fl_privacy.errors import UserError
from fl_privacy.files import user_cache_folder
from fl_privacy.files.foreign import expanded
from fl_privacy.models.pretrained.evaluator import EvaluatorPlan
from fl_privacy.models.pretrained.evaluator_files import keep_evaluator, load_evaluator, read_about
from fl_privacy.models.pretrained.word_evaluator import WordEvaluator, train_word_evaluator

logger = logging.getLogger(__name__)

SMALL_OF_TEXTS = EvaluatorPlan(widths=(64, 64), epochs=3, batch_size=32, lr=3e-3)
"""Training plan of a default network."""

_REMEDY = "make one by `fl-privacy train-evaluator data=NAME model=NAME seed=SEED out=FILE`"


def name_of_words(table: Tensor) -> str:
    """Name the token embeddings (n, d), since a network judges only those of its training."""
    content = hashlib.sha256(table.detach().float().cpu().contiguous().numpy().tobytes())
    return f"{len(table)}x{table.shape[1]}-{content.hexdigest()[:16]}"


def find_word_evaluator(
    path: str | Path | None, table: Tensor, public: Tensor | None, device: torch.device | str = "cpu"
) -> WordEvaluator:
    """Return the network in the file ``path``, or a small one, trained on ``public`` texts in seconds and cached.

    Args:
        path: file of ``fl-privacy train-evaluator`` for such data and model, or ``None``.
        table: (n, d) embeddings of the model's tokens.
        public: (N, L) tokens of public texts, padded with -1, if any.

    Raises:
        UserError: the file is none, or is for other embeddings; there is neither a file nor a public text.
    """
    words = name_of_words(table)
    if path is not None:
        file = expanded(path)
        network = load_evaluator(file, device)
        if not isinstance(network, WordEvaluator) or read_about(file).get("words") != words:
            raise UserError(
                f"An evaluation network for the words of this model is expected, but {file} is for another;"
                f" {_REMEDY} with the data, the model and the seed of the run."
            )
        return network
    if public is None or not len(public):
        raise UserError(f"Refiner expects an evaluation network for the words of this model, but got none; {_REMEDY}.")
    content = hashlib.sha256(public.int().contiguous().numpy().tobytes())
    content.update(json.dumps([words, list(public.shape), asdict(SMALL_OF_TEXTS)]).encode())
    file = user_cache_folder() / f"evaluator-words-{content.hexdigest()[:16]}.safetensors"
    if file.is_file():
        network = load_evaluator(file, device)
        assert isinstance(network, WordEvaluator)
        return network
    logger.warning(
        "Training a small evaluation network on %d public texts once; it is kept in %s.",
        len(public),
        file.parent,
    )
    network = train_word_evaluator(public, table.detach().float().cpu(), SMALL_OF_TEXTS, seed=0)
    keep_evaluator(network, file, {"words": words})
    return copy.deepcopy(network).to(device)
