"""Networks for the rows of a table."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fl_privacy.errors import UserError
from fl_privacy.models.layers import hidden_layers, initialize, require_positive
from fl_privacy.types.schema import Schema


class TableModel(nn.Module):
    """Base class of networks from encoded rows (B, F) to logits (B, K); ``init``: one of ``layers.INITIALIZERS``."""

    def __init__(self, schema: Schema, num_classes: int) -> None:
        super().__init__()
        require_positive(num_classes=num_classes)
        self.schema = schema


class TableMLP(TableModel):
    """Multilayer perceptron with hidden layers of ``widths``; the defaults are TabLeak's (Vero et al. 2023)."""

    def __init__(
        self,
        *,
        schema: Schema,
        num_classes: int,
        widths: Sequence[int] = (100, 100),
        activation: str = "relu",
        init: str = "default",
    ) -> None:
        super().__init__(schema, num_classes)
        self.features = hidden_layers(schema.width, widths, activation, example="[100, 100]")
        self.classifier = nn.Linear([schema.width, *widths][-1], num_classes)
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.features(inputs)))


class TableLogistic(TableModel):
    """Logistic regression: one linear layer, whose gradient is ``(p - y)' x / B`` for probabilities p and labels y."""

    def __init__(self, *, schema: Schema, num_classes: int, init: str = "default") -> None:
        super().__init__(schema, num_classes)
        self.classifier = nn.Linear(schema.width, num_classes)
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(inputs))


class FlTabular(TableModel):
    """Network of Flower's example fl-tabular: linear layers of 128 and 64 with ReLU, then one output.

    It returns the logits (0, z), whose cross entropy equals the example's binary cross entropy.
    """

    def __init__(self, *, schema: Schema, num_classes: int, init: str = "default") -> None:
        super().__init__(schema, num_classes)
        if num_classes != 2:
            raise UserError(
                f"Model fl_tabular is expected with 2 classes, but the data have {num_classes}; take model=table_mlp."
            )
        self.layer1, self.layer2 = nn.Linear(schema.width, 128), nn.Linear(128, 64)
        self.output = nn.Linear(64, 1)
        self.relu = nn.ReLU()
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        logit = self.output(self.relu(self.layer2(self.relu(self.layer1(inputs)))))
        return torch.cat([torch.zeros_like(logit), logit], -1)


class ResidualBlock(nn.Module):
    """Residual block of two linear layers and a ReLU (Gorishniy et al. 2021, without norm or dropout)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, inputs + self.second(self.relu(self.first(inputs))))


class TableResNet(TableModel):
    """ResNet for tables (Gorishniy et al. 2021) without batch norm: a linear layer, residual blocks and a head.

    ``width`` is that of the blocks, ``hidden`` that of the hidden layer in each block.
    """

    def __init__(
        self,
        *,
        schema: Schema,
        num_classes: int,
        width: int = 100,
        hidden: int = 100,
        blocks: int = 2,
        init: str = "default",
    ) -> None:
        super().__init__(schema, num_classes)
        require_positive(width=width, hidden=hidden, blocks=blocks)
        self.entry = nn.Linear(schema.width, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width, hidden) for _ in range(blocks)))
        self.relu = nn.ReLU()
        self.classifier = nn.Linear(width, num_classes)
        initialize(self, init)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.classifier(self.relu(self.blocks(self.entry(inputs)))))
