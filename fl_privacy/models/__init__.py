"""The models, by import path; any ``torch.nn.Module`` of the user's own does as well."""

from typing import TYPE_CHECKING

from fl_privacy.lazy import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.block_networks import VGG16, AlexNet
    from fl_privacy.models.build import build_model, check_model
    from fl_privacy.models.convnet import ConvNet
    from fl_privacy.models.cut import Front, Rest, cut_layer
    from fl_privacy.models.initialization import INITIALIZERS, initialize
    from fl_privacy.models.layers import ACTIVATIONS, InputNormalization, has_batch_norm
    from fl_privacy.models.lenet import DLNet, LeNet, LeNet5
    from fl_privacy.models.mlp import MLP
    from fl_privacy.models.resnet import ResNet10, ResNet18, ResNet20
    from fl_privacy.models.torchvision_models import MobileNetV2, ViT
    from fl_privacy.models.wrapping import normalization_of, normalized

_HOMES = {
    "fl_privacy.models.block_networks": ("VGG16", "AlexNet"),
    "fl_privacy.models.build": ("build_model", "check_model"),
    "fl_privacy.models.convnet": ("ConvNet",),
    "fl_privacy.models.cut": ("Front", "Rest", "cut_layer"),
    "fl_privacy.models.initialization": ("INITIALIZERS", "initialize"),
    "fl_privacy.models.layers": ("ACTIVATIONS", "InputNormalization", "has_batch_norm"),
    "fl_privacy.models.lenet": ("DLNet", "LeNet", "LeNet5"),
    "fl_privacy.models.mlp": ("MLP",),
    "fl_privacy.models.resnet": ("ResNet10", "ResNet18", "ResNet20"),
    "fl_privacy.models.torchvision_models": ("MobileNetV2", "ViT"),
    "fl_privacy.models.wrapping": ("normalization_of", "normalized"),
}

__all__ = [
    "ACTIVATIONS",
    "INITIALIZERS",
    "MLP",
    "VGG16",
    "AlexNet",
    "ConvNet",
    "DLNet",
    "Front",
    "InputNormalization",
    "LeNet",
    "LeNet5",
    "MobileNetV2",
    "ResNet10",
    "ResNet18",
    "ResNet20",
    "Rest",
    "ViT",
    "build_model",
    "check_model",
    "cut_layer",
    "has_batch_norm",
    "initialize",
    "normalization_of",
    "normalized",
]

__getattr__ = on_demand(__name__, _HOMES)
