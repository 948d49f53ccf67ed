"""Low-rank adapters: a pretrained layer stays as it is, and a product of two small ones is learned beside it."""

import copy
import math

from torch import Tensor, nn

from fl_privacy.checks import number, whole
from fl_privacy.errors import UserError
from fl_privacy.models.text.base import TextModel

ADAPTED = ("*.lora_a.weight", "*.lora_b.weight", "classifier.*", "head.*", "decoder.*")
"""Patterns of the parameters that are trained, and uploaded, where a model has adapters: these and its head."""

_TARGETS = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "c_attn", "query_key_value", "qkv_proj", "Wqkv")
_PARTS = ("SelfAttention.q", "SelfAttention.v")


class Adapted(nn.Module):
    """A layer with an adapter (LoRA, Hu et al. 2022): ``base(x) + alpha / r * B A x``.

    A is drawn uniformly as PyTorch does for linear layers, B is zero, so that nothing changes at first.

    Args:
        base: of which nothing is learned.
        inputs, outputs: widths of it.
        rank: r.
        alpha: of the scale.
    """

    def __init__(self, base: nn.Module, *, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)
        self.scale = alpha / rank

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        adapted: Tensor = self.base(inputs) + self.scale * self.lora_b(self.lora_a(inputs))
        return adapted


def with_adapters(model: nn.Module, *, rank: int, alpha: float | None = None) -> TextModel:
    """A copy of ``model`` with adapters beside the queries and values of its attention, as ``peft`` places them.

    Where one layer makes queries, keys and values, it gets one adapter.

    Args:
        model: of text.
        rank: r, at least 1 and below the width.
        alpha: of the scale alpha / r; ``None``: 2 r.

    Raises:
        UserError: the model is none of text, or has no such layer.
    """
    if not isinstance(model, TextModel):
        raise UserError("model.lora_rank is expected with a model of text, but this is of images; leave it out.")
    whole("model.lora_rank", rank, at_least=1, at_most=model.words.embedding_dim - 1, example=8)
    alpha = 2.0 * rank if alpha is None else alpha
    number("model.lora_alpha", alpha, above=0, example=16.0)
    adapted = copy.deepcopy(model)
    owners = [name.removesuffix(".weight") for block in model.attention_weights for name in block]
    chosen = [name for name in owners if name.endswith(_PARTS) or name.rpartition(".")[2] in _TARGETS]
    if not chosen:
        raise UserError("model.lora_rank is expected with a model that has queries and values, but none is known here.")
    for name in chosen:
        parent, _, child = name.rpartition(".")
        base = adapted.get_submodule(name)
        weight = base.get_parameter("weight")
        inputs, outputs = weight.shape if model.transposed else weight.shape[::-1]
        made = Adapted(base, inputs=inputs, outputs=outputs, rank=rank, alpha=alpha)
        setattr(adapted.get_submodule(parent), child, made)
    return adapted


def adapter_of(model: nn.Module, weight: str) -> tuple[str, str] | None:
    """Names of A and B beside the layer that ``weight`` is of; ``None`` where it has no adapter."""
    owner = weight.removesuffix(".weight")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    return (f"{owner}.lora_a.weight", f"{owner}.lora_b.weight") if isinstance(module, Adapted) else None


def down_projection(model: nn.Module, name: str) -> Tensor:
    """(r, d) the values of an adapter's A by the name of its B."""
    return model.get_parameter(name.removesuffix("lora_b.weight") + "lora_a.weight").detach()
