"""Gradients with respect to a model's parameters: of a batch, of many attacked updates at once, of single examples."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.gradients.choose_method import (
        BatchGradient as BatchGradient,
        Unrolled as Unrolled,
        gradient_by_inputs as gradient_by_inputs,
        number_of_steps as number_of_steps,
        step_slices as step_slices,
        victim_gradients as victim_gradients,
    )
    from fl_privacy.models.gradients.layered import (
        LayerCall as LayerCall,
        Layered as Layered,
        register_layer_rule as register_layer_rule,
    )
    from fl_privacy.models.gradients.many_models import (
        ManyModels as ManyModels,
        local_orders as local_orders,
        models_at_once as models_at_once,
    )
    from fl_privacy.models.gradients.per_example import (
        GradientClassifier as GradientClassifier,
        GradientSketch as GradientSketch,
        clipped_sum as clipped_sum,
        example_gradients as example_gradients,
        gradient_products as gradient_products,
        sketched_examples as sketched_examples,
    )
    from fl_privacy.models.gradients.victims import (
        GradientResult as GradientResult,
        LossChange as LossChange,
        LossFunction as LossFunction,
        OneByOne as OneByOne,
        Vectorized as Vectorized,
        VictimGradients as VictimGradients,
        VictimLoss as VictimLoss,
        VictimModel as VictimModel,
        batch_loss as batch_loss,
        differentiable_twice as differentiable_twice,
        frozen_copy as frozen_copy,
        loss_gradients as loss_gradients,
        plain_attention as plain_attention,
        set_mode as set_mode,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
