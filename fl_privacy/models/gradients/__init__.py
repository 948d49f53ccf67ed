"""Gradients by a model's parameters: of a batch, of many victims, of single examples."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.gradients.batch import (
        GradientResult as GradientResult,
        LossChange as LossChange,
        LossFunction as LossFunction,
        batch_loss as batch_loss,
        loss_gradients as loss_gradients,
        set_mode as set_mode,
    )
    from fl_privacy.models.gradients.choose_method import (
        BatchGradient as BatchGradient,
        Unrolled as Unrolled,
        gradient_by_inputs as gradient_by_inputs,
        number_of_steps as number_of_steps,
        step_slices as step_slices,
        victim_gradients as victim_gradients,
    )
    from fl_privacy.models.gradients.layer_rules import (
        LayerCall as LayerCall,
        register_layer_rule as register_layer_rule,
    )
    from fl_privacy.models.gradients.layered import Layered as Layered
    from fl_privacy.models.gradients.many_models import (
        ManyModels as ManyModels,
        local_orders as local_orders,
        models_at_once as models_at_once,
    )
    from fl_privacy.models.gradients.per_example import (
        clipped_sum as clipped_sum,
        example_gradients as example_gradients,
        gradient_products as gradient_products,
        sketched_examples as sketched_examples,
    )
    from fl_privacy.models.gradients.sketch import (
        GradientClassifier as GradientClassifier,
        GradientSketch as GradientSketch,
    )
    from fl_privacy.models.gradients.victims import (
        OneByOne as OneByOne,
        Vectorized as Vectorized,
        VictimGradients as VictimGradients,
        VictimLoss as VictimLoss,
        VictimModel as VictimModel,
        differentiable_twice as differentiable_twice,
        frozen_copy as frozen_copy,
        plain_attention as plain_attention,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
