"""The models, by import path; any ``torch.nn.Module`` of the user's own does as well."""

from typing import TYPE_CHECKING

from fl_privacy.lazy import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.block_networks import VGG16, AlexNet
    from fl_privacy.models.build import (
        build_fitting,
        build_model,
        check_model,
        check_text_model,
        normalization_of,
        normalized,
    )
    from fl_privacy.models.convnet import ConvNet
    from fl_privacy.models.cut import Front, Rest, behind_activation, cut_layer
    from fl_privacy.models.initialization import INITIALIZERS, initialize
    from fl_privacy.models.layers import ACTIVATIONS, InputNormalization, has_batch_norm
    from fl_privacy.models.lenet import DLNet, LeNet, LeNet5
    from fl_privacy.models.mlp import MLP
    from fl_privacy.models.resnet import ResNet10, ResNet18, ResNet20
    from fl_privacy.models.text.adapters import ADAPTED, Adapted, adapter_of, down_projection, with_adapters
    from fl_privacy.models.text.base import TextModel
    from fl_privacy.models.text.bert import Bert, bert_mini, bert_tiny, minilm
    from fl_privacy.models.text.decoders import Gpt, TransformerLM, gpt_tiny
    from fl_privacy.models.text.huggingface import HuggingFaceText, hugging_face
    from fl_privacy.models.torchvision_models import MobileNetV2, ViT

_HOMES = {
    "fl_privacy.models.block_networks": ("VGG16", "AlexNet"),
    "fl_privacy.models.build": (
        "build_fitting",
        "build_model",
        "check_model",
        "check_text_model",
        "normalization_of",
        "normalized",
    ),
    "fl_privacy.models.convnet": ("ConvNet",),
    "fl_privacy.models.cut": ("Front", "Rest", "behind_activation", "cut_layer"),
    "fl_privacy.models.initialization": ("INITIALIZERS", "initialize"),
    "fl_privacy.models.layers": ("ACTIVATIONS", "InputNormalization", "has_batch_norm"),
    "fl_privacy.models.lenet": ("DLNet", "LeNet", "LeNet5"),
    "fl_privacy.models.mlp": ("MLP",),
    "fl_privacy.models.resnet": ("ResNet10", "ResNet18", "ResNet20"),
    "fl_privacy.models.text.adapters": ("ADAPTED", "Adapted", "adapter_of", "down_projection", "with_adapters"),
    "fl_privacy.models.text.base": ("TextModel",),
    "fl_privacy.models.text.bert": ("Bert", "bert_mini", "bert_tiny", "minilm"),
    "fl_privacy.models.text.decoders": ("Gpt", "TransformerLM", "gpt_tiny"),
    "fl_privacy.models.text.huggingface": ("HuggingFaceText", "hugging_face"),
    "fl_privacy.models.torchvision_models": ("MobileNetV2", "ViT"),
}

__all__ = [
    "ACTIVATIONS",
    "ADAPTED",
    "INITIALIZERS",
    "MLP",
    "VGG16",
    "Adapted",
    "AlexNet",
    "Bert",
    "ConvNet",
    "DLNet",
    "Front",
    "Gpt",
    "HuggingFaceText",
    "InputNormalization",
    "LeNet",
    "LeNet5",
    "MobileNetV2",
    "ResNet10",
    "ResNet18",
    "ResNet20",
    "Rest",
    "TextModel",
    "TransformerLM",
    "ViT",
    "adapter_of",
    "behind_activation",
    "bert_mini",
    "bert_tiny",
    "build_fitting",
    "build_model",
    "check_model",
    "check_text_model",
    "cut_layer",
    "down_projection",
    "gpt_tiny",
    "has_batch_norm",
    "hugging_face",
    "initialize",
    "minilm",
    "normalization_of",
    "normalized",
    "with_adapters",
]

__getattr__ = on_demand(__name__, _HOMES)
