"""Text models of Hugging Face's transformers, and low-rank adapters."""

import copy
import importlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fl_privacy.checks import number, whole
from fl_privacy.checks.packages import expect_package
from fl_privacy.errors import UserError, reason_of
from fl_privacy.files.foreign import expanded
from fl_privacy.models.text_model import TextModel, last_state

_ENTERED = re.compile(
    r"(query|key|value|[qkv]_proj|[qkv]_lin|c_attn|query_key_value|qkv_proj|Wqkv|in_proj|SelfAttention\.[qkv])$"
)
"""Names of the linear layers of queries, keys and values."""


class HuggingFaceText(TextModel):
    """A text network of the package transformers as a :class:`TextModel`.

    ``network`` is of ``AutoModel``, or of ``AutoModelForCausalLM`` to predict next tokens. The classifier for
    ``num_classes`` classes takes the state of the first token, or of the last token in a decoder.
    """

    def __init__(self, network: Any, *, num_classes: int, next_token: bool) -> None:
        super().__init__()
        self.network, self.next_token = network, next_token
        self.classifier = None if next_token else nn.Linear(network.config.hidden_size, num_classes)
        entered = [name for name, m in network.named_modules() if _ENTERED.search(name) and hasattr(m, "weight")]
        blocks: dict[str, list[str]] = {}
        for name in entered:
            blocks.setdefault(name.rpartition(".")[0], []).append(f"network.{name}.weight")
        self._entered = [tuple(names) for names in blocks.values()]
        self.transposed = any(type(network.get_submodule(name)).__name__ == "Conv1D" for name in entered)
        self.causal = _is_causal(network)
        self.heads = getattr(network.config, "num_attention_heads", 1)
        names = [f"network.{name}" for name, _ in network.named_parameters()]
        positions = [name for name in names if re.search(r"(position_embeddings|wpe|embed_positions)\.weight$", name)]
        self.position_weight = next(iter(positions), None)
        if self.position_weight is not None:
            self.first_position = _first_position(network, self.get_parameter(self.position_weight))

    @property
    def words(self) -> nn.Embedding:  # type: ignore[override]
        return cast(nn.Embedding, self.network.get_input_embeddings())

    @property
    def attention_weights(self) -> Sequence[tuple[str, ...]]:
        return self._entered

    @property
    def entry_norm(self) -> nn.LayerNorm | None:
        found = getattr(getattr(self.network, "embeddings", None), "LayerNorm", None)
        return found if isinstance(found, nn.LayerNorm) else None

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        embeddings = embeddings.to(self.words.weight.dtype)  # single-precision inputs enter in the model's precision
        made = self.network(inputs_embeds=embeddings, attention_mask=there.to(embeddings.dtype))
        length = embeddings.shape[1]
        if self.classifier is None:
            predicted: Tensor = made.logits[:, -length:].mT  # learned prompts come first
            return predicted
        states = made.last_hidden_state[:, -length:]
        return cast(Tensor, self.classifier(last_state(states, there) if self.causal else states[:, 0]))


class HuggingFaceClassifier(HuggingFaceText):
    """Text classifier of transformers (``AutoModelForSequenceClassification``) with its own head."""

    def __init__(self, network: Any) -> None:
        super().__init__(network, num_classes=network.config.num_labels, next_token=True)
        self.next_token = False

    def logits(self, embeddings: Tensor, there: Tensor) -> Tensor:
        return cast(Tensor, self.network(inputs_embeds=embeddings, attention_mask=there.to(embeddings.dtype)).logits)


def hugging_face(
    *,
    vocabulary_size: int,
    num_classes: int,
    next_token: bool = False,
    name: str = "prajjwal1/bert-tiny",
    pretrained: bool = True,
    peft: Mapping[str, Any] | None = None,
) -> HuggingFaceText:
    """Return a model of the Hugging Face hub or of a local folder.

    ``UserError`` if a package is missing or refuses its settings, or the model or its tokenizer does not fit.

    Args:
        vocabulary_size: number of tokens of the data, which must use the model's tokenizer (``data.tokenizer``).
        next_token: ``True`` if each next token is predicted.
        name: name of the model on the hub, or a folder with ``config.json``.
        pretrained: ``True`` loads the weights, ``False`` draws new ones.
        peft: settings of adapters for ``peft.get_peft_config``, or ``None``: ``peft_type`` (LORA by default), ``r``,
            ``lora_alpha``, ``target_modules`` ...
    """
    library = _library("transformers", "model=hf")
    kind = library.AutoModelForCausalLM if next_token else library.AutoModel
    place = str(expanded(name)) if expanded(name).is_dir() else name
    try:
        if pretrained:
            network = kind.from_pretrained(place, attn_implementation="eager", trust_remote_code=False)
        else:
            settings = library.AutoConfig.from_pretrained(place, trust_remote_code=False)
            network = kind.from_config(settings, attn_implementation="eager", trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(
            f"model.name={name} is expected at Hugging Face, but can't be loaded: {reason_of(error)}; check the name."
        ) from error
    tokens = network.get_input_embeddings().num_embeddings
    if vocabulary_size > tokens:
        raise UserError(f"{name} expects up to {tokens} tokens, but got {vocabulary_size}; set data.tokenizer={name}.")
    if peft is not None:
        adapters = _library("peft", "model.peft")
        given = {"peft_type": "LORA", "task_type": "CAUSAL_LM" if next_token else "FEATURE_EXTRACTION"} | dict(peft)
        try:
            network = adapters.get_peft_model(network, adapters.get_peft_config(given))
        except (KeyError, TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"model.peft={dict(peft)} is expected to be settings of peft for this model, but {reason_of(error)};"
                " for example model.peft={r: 8, target_modules: [query, value]}."
            ) from error
    return HuggingFaceText(network, num_classes=num_classes, next_token=next_token)


def _library(name: str, what: str) -> Any:
    expect_package(name, what)
    return importlib.import_module(name)


def _first_position(network: nn.Module, positions: nn.Parameter) -> int:
    inner, training, trained = _inner(network), network.training, positions.requires_grad
    network.eval()
    positions.requires_grad_()
    try:
        with torch.enable_grad():
            state = inner(input_ids=torch.tensor([[5, 6]])).last_hidden_state[0, -1, 0]
            rows = torch.autograd.grad(state, positions, allow_unused=True)[0] if state.requires_grad else None
    finally:
        positions.requires_grad_(trained)
        network.train(training)
    used = [] if rows is None else rows.abs().amax(1).nonzero().flatten().tolist()
    return int(used[0]) if used else 0


def _inner(network: nn.Module) -> Any:
    unwrap = getattr(network, "get_base_model", None)
    own: Any = network if unwrap is None else unwrap()
    return getattr(own, "base_model", own)


@torch.no_grad()
def _is_causal(network: nn.Module) -> bool:
    training = network.training
    network.eval()
    inner = _inner(network)
    states = [inner(input_ids=torch.tensor([[5, 6, last]])).last_hidden_state[0, 0] for last in (7, 8)]
    network.train(training)
    return bool(torch.allclose(states[0], states[1], atol=1e-6))


_PARTS_OF_ADAPTERS = (
    *("lora_a.weight", "lora_b.weight", "lora_A.*", "lora_B.*", "lora_embedding_*", "lora_magnitude_vector.*"),
    *("ia3_*", "vera_lambda_*", "prompt_encoder.*", "modules_to_save.*"),
)
ADAPTED = (*(f"*.{part}" for part in _PARTS_OF_ADAPTERS), "classifier.*", "head.*", "decoder.*")
"""Name patterns of the trained and uploaded parameters of a model with adapters: adapters and head."""

_TARGETS = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "c_attn", "query_key_value", "qkv_proj", "Wqkv")
_PARTS = ("SelfAttention.q", "SelfAttention.v")


class Adapted(nn.Module):
    """Layer with a LoRA adapter (Hu et al. 2022): ``base(x) + alpha / rank * B A x``.

    A is initialized like PyTorch's linear layers, B as zero, so that outputs are unchanged at first.
    """

    def __init__(self, base: nn.Module, *, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)
        self.scale = alpha / rank

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.base(inputs) + self.scale * self.lora_b(self.lora_a(inputs)))


def with_adapters(model: nn.Module, *, rank: int, alpha: float | None = None) -> TextModel:
    """Return a copy of ``model`` with adapters on the attention layers' queries and values, like ``peft``.

    A joint layer of queries, keys and values gets one adapter. ``rank`` r is at least 1 and below the width; ``alpha``
    is the numerator of the scale alpha / r, by default 2 r. ``UserError`` if the model has no such layer.
    """
    if not isinstance(model, TextModel):
        raise UserError(f"model.lora_rank is expected with a text model, but got {type(model).__name__}; leave it out.")
    whole("model.lora_rank", rank, at_least=1, at_most=model.words.embedding_dim - 1, example=8)
    alpha = 2.0 * rank if alpha is None else alpha
    number("model.lora_alpha", alpha, above=0, example=16.0)
    adapted = copy.deepcopy(model)
    owners = [name.removesuffix(".weight") for block in model.attention_weights for name in block]
    chosen = [name for name in owners if name.endswith(_PARTS) or name.rpartition(".")[2] in _TARGETS]
    if not chosen:
        raise UserError(
            "model.lora_rank is expected with layers of queries and values whose names are known, but"
            f" {type(model).__name__} has none; leave it out."
        )
    for name in chosen:
        parent, _, child = name.rpartition(".")
        base = adapted.get_submodule(name)
        weight = base.get_parameter("weight")
        inputs, outputs = weight.shape if model.transposed else weight.shape[::-1]
        made = Adapted(base, inputs=inputs, outputs=outputs, rank=rank, alpha=alpha)
        setattr(adapted.get_submodule(parent), child, made)
    return adapted


def adapter_of(model: nn.Module, weight: str) -> tuple[str, str] | None:
    """Return the names of the adapter's matrices A and B at the layer of ``weight``; ``None`` if it has none."""
    owner = weight.removesuffix(".weight")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    if isinstance(module, Adapted):
        return f"{owner}.lora_a.weight", f"{owner}.lora_b.weight"
    first = next(iter(getattr(module, "lora_A", None) or ()), None)  # peft's, the first of its adapters
    return None if first is None else (f"{owner}.lora_A.{first}.weight", f"{owner}.lora_B.{first}.weight")


def down_projection(model: nn.Module, name: str) -> Tensor:
    """Return the matrix A (r, d) of the adapter whose matrix B is the parameter ``name``."""
    return model.get_parameter(name.replace(".lora_b.", ".lora_a.").replace(".lora_B.", ".lora_A.")).detach()
