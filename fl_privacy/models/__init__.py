"""Models of this package; any other ``torch.nn.Module`` also works."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.build import (
        build_fitting as build_fitting,
        build_model as build_model,
        check_model as check_model,
        check_table_model as check_table_model,
        check_text_model as check_text_model,
        normalization_of as normalization_of,
        normalized as normalized,
    )
    from fl_privacy.models.huggingface import (
        ADAPTED as ADAPTED,
        Adapted as Adapted,
        HuggingFaceText as HuggingFaceText,
        adapter_of as adapter_of,
        down_projection as down_projection,
        hugging_face as hugging_face,
        with_adapters as with_adapters,
    )
    from fl_privacy.models.layers import (
        ACTIVATIONS as ACTIVATIONS,
        INITIALIZERS as INITIALIZERS,
        Front as Front,
        InputNormalization as InputNormalization,
        Rest as Rest,
        behind_activation as behind_activation,
        cut_layer as cut_layer,
        has_batch_norm as has_batch_norm,
        initialize as initialize,
    )
    from fl_privacy.models.small_networks import (
        MLP as MLP,
        VGG16 as VGG16,
        AlexNet as AlexNet,
        ConvNet as ConvNet,
        DLNet as DLNet,
        LeNet as LeNet,
        LeNet5 as LeNet5,
        ResNet10 as ResNet10,
        ResNet18 as ResNet18,
        ResNet20 as ResNet20,
        ResNet34 as ResNet34,
    )
    from fl_privacy.models.table_models import (
        FlTabular as FlTabular,
        TableLogistic as TableLogistic,
        TableMLP as TableMLP,
        TableModel as TableModel,
        TableResNet as TableResNet,
    )
    from fl_privacy.models.text_model import TextModel as TextModel
    from fl_privacy.models.torchvision_models import MobileNetV2 as MobileNetV2, ResNet50 as ResNet50, ViT as ViT
    from fl_privacy.models.transformers import (
        Bert as Bert,
        Gpt as Gpt,
        TransformerLM as TransformerLM,
        bert_mini as bert_mini,
        bert_tiny as bert_tiny,
        gpt_tiny as gpt_tiny,
        minilm as minilm,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
