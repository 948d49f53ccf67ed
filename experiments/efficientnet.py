"""EfficientNet-Lite0 (Tan and Le 2019; Liu 2020) with the names of the published weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STAGES = (
    # kernel, blocks, stride, channels
    (3, 1, 1, 16),
    (3, 2, 2, 24),
    (5, 2, 2, 40),
    (3, 3, 2, 80),
    (5, 3, 1, 112),
    (5, 4, 2, 192),
    (3, 1, 1, 320),
)
WIDER = 6
"""Times the channels within a block, of all stages but the first."""


class Same(nn.Conv2d):
    """A convolution whose zeros around the image are TensorFlow's: as many as outputs need, the odd one behind."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, C, H, W) -> (B, O, ceil(H / stride), ceil(W / stride))."""
        step, size = self.stride[0], self.kernel_size[0]
        down, right = (max((-(-side // step) - 1) * step + size - side, 0) for side in input.shape[-2:])
        padded = F.pad(input, (right // 2, right - right // 2, down // 2, down - down // 2))
        return F.conv2d(padded, self.weight, None, self.stride, 0, 1, self.groups)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Narrow(nn.Module):
    """Depthwise, then pointwise convolution; the first stage."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv_dw, self.bn1 = Same(inner, inner, kernel, stride, groups=inner, bias=False), _norm(inner)
        self.conv_pw, self.bn2 = nn.Conv2d(inner, outer, 1, bias=False), _norm(outer)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, inner, H, W) -> (B, outer, H / stride, W / stride)."""
        outputs: Tensor = self.bn2(self.conv_pw(F.relu6(self.bn1(self.conv_dw(inputs)))))
        return outputs


class Wide(nn.Module):
    """Pointwise to more channels, depthwise, pointwise to few; with a shortcut where shapes stay."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide = WIDER * inner
        self.conv_pw, self.bn1 = nn.Conv2d(inner, wide, 1, bias=False), _norm(wide)
        self.conv_dw, self.bn2 = Same(wide, wide, kernel, stride, groups=wide, bias=False), _norm(wide)
        self.conv_pwl, self.bn3 = nn.Conv2d(wide, outer, 1, bias=False), _norm(outer)
        self.short = stride == 1 and inner == outer

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (B, inner, H, W) -> (B, outer, H / stride, W / stride)."""
        outputs: Tensor = F.relu6(self.bn2(self.conv_dw(F.relu6(self.bn1(self.conv_pw(inputs))))))
        outputs = self.bn3(self.conv_pwl(outputs))
        return outputs + inputs if self.short else outputs


class EfficientNetLite0(nn.Module):
    """4.7 million parameters, 1,000 classes of ImageNet; images in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = Same(3, 32, 3, 2, bias=False), _norm(32)
        stages, inner = list[nn.Module](), 32
        for number, (kernel, blocks, stride, outer) in enumerate(STAGES):
            kind = Wide if number else Narrow
            first = kind(inner, outer, kernel, stride)
            stages.append(nn.Sequential(first, *(kind(outer, outer, kernel, 1) for _ in range(blocks - 1))))
            inner = outer
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = nn.Conv2d(inner, 1280, 1, bias=False), _norm(1280)
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, 3, H, W) in [0, 1] to logits (B, 1000)."""
        features = self.blocks(F.relu6(self.bn1(self.conv_stem(2 * images - 1))))
        features = F.relu6(self.bn2(self.conv_head(features)))
        logits: Tensor = self.classifier(torch.mean(features, (2, 3)))
        return logits
