"""The models, by import path; any ``torch.nn.Module`` of the user's own does as well."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.alexnet_vgg import VGG16, AlexNet
    from fl_privacy.models.build import (
        build_fitting,
        build_model,
        check_model,
        check_table_model,
        check_text_model,
        normalization_of,
        normalized,
    )
    from fl_privacy.models.cut import Front, Rest, behind_activation, cut_layer
    from fl_privacy.models.huggingface import (
        ADAPTED,
        Adapted,
        HuggingFaceText,
        adapter_of,
        down_projection,
        hugging_face,
        with_adapters,
    )
    from fl_privacy.models.layers import ACTIVATIONS, INITIALIZERS, InputNormalization, has_batch_norm, initialize
    from fl_privacy.models.resnet import ResNet10, ResNet18, ResNet20, ResNet34
    from fl_privacy.models.small_networks import MLP, ConvNet, DLNet, LeNet, LeNet5
    from fl_privacy.models.table_models import FlTabular, TableLogistic, TableMLP, TableModel, TableResNet
    from fl_privacy.models.text_model import TextModel
    from fl_privacy.models.torchvision_models import MobileNetV2, ResNet50, ViT
    from fl_privacy.models.transformers import Bert, Gpt, TransformerLM, bert_mini, bert_tiny, gpt_tiny, minilm

_HOMES = {
    "fl_privacy.models.alexnet_vgg": (
        "AlexNet",
        "VGG16",
    ),
    "fl_privacy.models.build": (
        "build_fitting",
        "build_model",
        "check_model",
        "check_table_model",
        "check_text_model",
        "normalization_of",
        "normalized",
    ),
    "fl_privacy.models.cut": (
        "behind_activation",
        "cut_layer",
        "Front",
        "Rest",
    ),
    "fl_privacy.models.huggingface": (
        "ADAPTED",
        "Adapted",
        "adapter_of",
        "down_projection",
        "hugging_face",
        "HuggingFaceText",
        "with_adapters",
    ),
    "fl_privacy.models.layers": (
        "ACTIVATIONS",
        "has_batch_norm",
        "initialize",
        "INITIALIZERS",
        "InputNormalization",
    ),
    "fl_privacy.models.resnet": (
        "ResNet10",
        "ResNet18",
        "ResNet20",
        "ResNet34",
    ),
    "fl_privacy.models.small_networks": (
        "ConvNet",
        "DLNet",
        "LeNet",
        "LeNet5",
        "MLP",
    ),
    "fl_privacy.models.table_models": (
        "FlTabular",
        "TableLogistic",
        "TableMLP",
        "TableModel",
        "TableResNet",
    ),
    "fl_privacy.models.text_model": ("TextModel",),
    "fl_privacy.models.torchvision_models": (
        "MobileNetV2",
        "ResNet50",
        "ViT",
    ),
    "fl_privacy.models.transformers": (
        "Bert",
        "bert_mini",
        "bert_tiny",
        "Gpt",
        "gpt_tiny",
        "minilm",
        "TransformerLM",
    ),
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
    "FlTabular",
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
    "ResNet34",
    "ResNet50",
    "Rest",
    "TableLogistic",
    "TableMLP",
    "TableModel",
    "TableResNet",
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
    "check_table_model",
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
