"""Gradients by a model's parameters: of a batch, of many victims, of single examples."""

from fl_privacy.models.gradients.batch import (
    GradientResult,
    LossChange,
    LossFunction,
    batch_loss,
    loss_gradients,
    set_mode,
)
from fl_privacy.models.gradients.choose_method import (
    BatchGradient,
    Unrolled,
    gradient_by_inputs,
    number_of_steps,
    step_slices,
    victim_gradients,
)
from fl_privacy.models.gradients.layer_rules import LayerCall, register_layer_rule
from fl_privacy.models.gradients.layered import Layered
from fl_privacy.models.gradients.many_models import ManyModels, local_orders, models_at_once
from fl_privacy.models.gradients.per_example import (
    clipped_sum,
    example_gradients,
    gradient_products,
    sketched_examples,
)
from fl_privacy.models.gradients.sketch import GradientClassifier, GradientSketch
from fl_privacy.models.gradients.victims import (
    OneByOne,
    Vectorized,
    VictimGradients,
    VictimLoss,
    VictimModel,
    differentiable_twice,
    frozen_copy,
    plain_attention,
)

__all__ = [
    "BatchGradient",
    "GradientClassifier",
    "GradientResult",
    "GradientSketch",
    "LayerCall",
    "Layered",
    "LossChange",
    "LossFunction",
    "ManyModels",
    "OneByOne",
    "Unrolled",
    "Vectorized",
    "VictimGradients",
    "VictimLoss",
    "VictimModel",
    "batch_loss",
    "clipped_sum",
    "differentiable_twice",
    "example_gradients",
    "frozen_copy",
    "gradient_by_inputs",
    "gradient_products",
    "local_orders",
    "loss_gradients",
    "models_at_once",
    "number_of_steps",
    "plain_attention",
    "register_layer_rule",
    "set_mode",
    "sketched_examples",
    "step_slices",
    "victim_gradients",
]
