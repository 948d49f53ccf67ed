"""The models, by import path; any ``torch.nn.Module`` of the user's own does as well."""

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
