"""Small networks and drawn tokenizers in place of those of Hugging Face's hub, and the shapes that networks take."""

import importlib
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import torch

from fl_privacy.auditing.app.odd_files import RATE
from fl_privacy.auditing.app.stand_in import WORDS, Drawing
from fl_privacy.federation.replies import Failure, attempt

_NOT_HERE = re.compile(
    r"connect|offline|resolv|cached|not a (valid|local)|Can't load|not found|hub|gated|incorrect path|No such file"
    r"|does not appear to have|'NoneType' object has no attribute 'endswith'|instantiate the backend tokenizer",
    re.IGNORECASE,
)
"""Words in errors on files that are not on this machine."""

SMALL: Mapping[str, int] = {
    **{"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
    **{"num_layers": 2, "num_decoder_layers": 2, "d_ff": 256, "d_kv": 64, "num_key_value_heads": 2, "head_dim": 64},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "ffn_dim": 256},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "word_embed_proj_dim": 128, "embedding_size": 128},
}
"""Sizes of a small network in place of another one of its kind."""

_OF_HUB = re.compile(
    r"^_|dir$|download|only$|token$|revision|kwargs$|remote_code|folder|proxies|user_agent|gguf|name_or"
)
"""Options of a download, which do not belong in a config."""

_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_ROOM, _LONGEST, _FEW = 512, 512, 100
"""Size of the vocabulary, tokens of the longest text, and smallest vocabulary of a tokenizer that was found."""

_SIDES = (28, 32, 48, 64, 96, 100, 112, 128, 144, 150, 160, 180, 200, 208, 224, 227, 240, 256, 299, 300, 320, 384, 512)
_SPANS = (64, 100, 128, 140, 178, 187, 200, 250, 256, 300, 360, 500, 512, 640, 750, 1000, 1024, 1250, 1280, 2000, 2048)
_LONGEST_FIT = 20.0
"""Usual sides of pictures in pixels and lengths of recordings, and seconds after which no further one is tried."""


def hooks(drawing: Drawing) -> Iterator[tuple[str, str, Any]]:
    """Yield (module, function name, replacement): if loading from the hub fails, make a small random network."""
    auto = "transformers.models.auto"
    for place, owner, made in (
        ("transformers.modeling_utils", "PreTrainedModel", _network),
        (f"{auto}.configuration_auto", "AutoConfig", _config),
        ("transformers.configuration_utils", "PreTrainedConfig", _config),
        (f"{auto}.tokenization_auto", "AutoTokenizer", _tokenizer),
        ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", _tokenizer),
    ):
        yield place, f"{owner}.from_pretrained", partial(_or_drawn, partial(made, drawing))


def _or_drawn(made: Callable[..., Any], original: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
    found = attempt(lambda: original(kind, *args, **kwargs))
    name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
    if not isinstance(found, Failure):  # a tokenizer without a vocabulary stands where none was found
        empty = hasattr(found, "encode") and getattr(found, "vocab_size", _FEW) < _FEW and not Path(str(name)).is_dir()
        return made(kind, name, **kwargs) if empty else found
    if name is None or not _NOT_HERE.search(found.reason):
        return original(kind, *args, **kwargs)  # raises its error
    return made(kind, name, **kwargs)


def _config(drawing: Drawing, kind: Any, name: object, **kwargs: Any) -> Any:
    kinds: Any = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    if not getattr(kind, "model_type", ""):
        plain = {key: re.sub(r"\W|_", "", key) for key in kinds.keys()}  # noqa: SIM118  (it has no usual iteration)
        asked = re.sub(r"\W|_", "", str(name).lower())
        kind = kinds[max((key for key in plain if plain[key] in asked), key=len, default="bert")]
    made = kind()
    if str(name) not in drawing.asked:
        drawing.note(str(name), f"a small {kind.__name__}, without trained weights,", pretrained=True)
    for key, size in SMALL.items():
        if isinstance(getattr(made, key, None), int):
            setattr(made, key, size)
    if isinstance(getattr(made, "layer_types", None), list):
        made.layer_types = made.layer_types[: SMALL["num_layers"]]
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 0}
    for key, value in {"vocab_size": _ROOM, **ids}.items() if hasattr(made, "vocab_size") else ():
        setattr(made, key, value)
    settings = {key: value for key, value in kwargs.items() if not _OF_HUB.search(key)}
    unused = {key: value for key, value in settings.items() if not hasattr(made, key)}
    for key in settings.keys() - unused.keys():
        setattr(made, key, settings[key])
    return (made, unused) if kwargs.get("return_unused_kwargs") else made


def _network(drawing: Drawing, kind: Any, name: object, *, config: Any = None, **kwargs: Any) -> Any:
    if config is None or isinstance(config, str):
        config, _ = _config(drawing, kind.config_class, name, **{**kwargs, "return_unused_kwargs": True})
    small = "small " * (str(name) in drawing.asked)  # its config was drawn
    drawing.note(str(name), f"a {small}{kind.__name__} as it begins, without trained weights,", pretrained=True)
    return kind(config).eval()


def _tokenizer(drawing: Drawing, kind: Any, name: object, **kwargs: Any) -> Any:
    parts, letters = importlib.import_module("tokenizers"), string.ascii_lowercase + string.digits + string.punctuation
    pieces = dict.fromkeys([*_SPECIAL.values(), *letters, *(f"##{each}" for each in letters), *WORDS])
    made = parts.Tokenizer(parts.models.WordPiece({each: n for n, each in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = parts.normalizers.Lowercase(), parts.pre_tokenizers.BertPreTokenizer()
    made.post_processor = parts.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.decoder = parts.decoders.WordPiece()
    drawing.note(f"the tokenizer of {name}", "one of common words", pretrained=True)
    settings = {f"{key}_token": text for key, text in {**_SPECIAL, "bos": "[CLS]", "eos": "[SEP]"}.items()}
    settings |= {key: kwargs[key] for key in ("padding_side", "truncation_side") if key in kwargs}
    fast = importlib.import_module("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=made, model_max_length=kwargs.get("model_max_length", _LONGEST), **settings)


def called(drawing: Drawing, original: Callable[..., Any], network: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``network``; if its input does not fit, set ``drawing.unfit`` to the network and the input's shape."""
    entered = args[0] if args and isinstance(args[0], torch.Tensor) else None
    try:
        made = original(network, *args, **kwargs)
    except (RuntimeError, ValueError):
        if drawing.asked and entered is not None and any(True for _ in getattr(network, "parameters", tuple)()):
            drawing.unfit = network, tuple(entered.shape)
        raise
    drawing.outputs = made.shape[1] if isinstance(made, torch.Tensor) and made.dim() == 2 else drawing.outputs
    if isinstance(made, torch.Tensor) and entered is not None and not drawing.unfit:
        folded = made.dim() == 2 and entered.dim() == 4 and len(made) != len(entered)  # by a view of another size
        drawing.unfit = (network, tuple(entered.shape)) if folded and drawing.asked else ()
    return made


def fit(drawing: Drawing, why: str = "") -> dict[str, int]:
    """Return sizes that made-up examples need to fit the app's network (name -> number); empty if none are found.

    Names are ``channels`` and ``side`` of pictures, ``columns`` to add to rows, or ``rate`` of recordings (values a
    second). If the app's error ``why`` is about labels, the name is ``classes``; if about a missing column, ``tables``,
    the number of tables to make up.
    """
    if re.search(r"Target \d+ is out of bounds|Class values must be|t < n_classes", why) and drawing.outputs:
        return {"classes": drawing.outputs}
    if "KeyError" in why and drawing.others and any(f"'{name}'" in why for name in drawing.names):
        return {"tables": len({*drawing.others})}
    network, shape = drawing.unfit or (None, ())
    tried: Sequence[tuple[int, ...]]
    first, until = tuple(shape[1:]), time.monotonic() + _LONGEST_FIT
    stated = getattr(network, "input_shape", None)  # of Keras
    if isinstance(stated, tuple) and len(stated) == len(shape) in (2, 4) and None not in stated[1:]:
        wanted = tuple(stated[1:])
        fitting = {"columns": wanted[0] - first[0]} if len(first) == 1 else {"channels": wanted[-1], "side": wanted[0]}
        return {} if wanted == first else fitting
    if len(first) == 1:  # rows
        tried = [(each.in_features,) for each in network.modules() if hasattr(each, "in_features")][:1]
    elif len(first) == 2:  # recordings
        tried = [(first[0], length) for length in _SPANS]
    else:
        pairs = product(dict.fromkeys([*first[:1], 1, 3]), dict.fromkeys([*first[1:2], *_SIDES]))
        tried = [(channels, side, side) for channels, side in pairs if len(first) == 3]
    left = takewhile(lambda _: time.monotonic() < until, [first, *tried] if first else [])
    found = next((each for each in left if _takes(network, each)), first)
    if found == first:
        return {}
    if len(first) == 1:
        return {"columns": found[0] - first[0]}
    return {"rate": RATE * found[1] // first[1]} if len(first) == 2 else {"channels": found[0], "side": found[1]}


def _takes(network: Any, shape: tuple[int, ...]) -> bool:
    before = [(each, each.training) for each in network.modules()]
    network.eval()
    with torch.no_grad():
        made = attempt(lambda: network(torch.zeros(2, *shape)))
    for each, training in before:
        each.training = training
    return not isinstance(made, Failure) and (not isinstance(made, torch.Tensor) or len(made) == 2)
