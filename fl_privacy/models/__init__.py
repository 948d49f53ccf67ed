"""The models, by import path; any ``torch.nn.Module`` of the user's own does as well."""

from typing import TYPE_CHECKING

from fl_privacy.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.models.alexnet_vgg import VGG16 as VGG16
    from fl_privacy.models.alexnet_vgg import AlexNet as AlexNet
    from fl_privacy.models.build import (
        build_fitting as build_fitting,
    )
    from fl_privacy.models.build import (
        build_model as build_model,
    )
    from fl_privacy.models.build import (
        check_model as check_model,
    )
    from fl_privacy.models.build import (
        check_table_model as check_table_model,
    )
    from fl_privacy.models.build import (
        check_text_model as check_text_model,
    )
    from fl_privacy.models.build import (
        normalization_of as normalization_of,
    )
    from fl_privacy.models.build import (
        normalized as normalized,
    )
    from fl_privacy.models.cut import (
        Front as Front,
    )
    from fl_privacy.models.cut import (
        Rest as Rest,
    )
    from fl_privacy.models.cut import (
        behind_activation as behind_activation,
    )
    from fl_privacy.models.cut import (
        cut_layer as cut_layer,
    )
    from fl_privacy.models.huggingface import (
        ADAPTED as ADAPTED,
    )
    from fl_privacy.models.huggingface import (
        Adapted as Adapted,
    )
    from fl_privacy.models.huggingface import (
        HuggingFaceText as HuggingFaceText,
    )
    from fl_privacy.models.huggingface import (
        adapter_of as adapter_of,
    )
    from fl_privacy.models.huggingface import (
        down_projection as down_projection,
    )
    from fl_privacy.models.huggingface import (
        hugging_face as hugging_face,
    )
    from fl_privacy.models.huggingface import (
        with_adapters as with_adapters,
    )
    from fl_privacy.models.layers import (
        ACTIVATIONS as ACTIVATIONS,
    )
    from fl_privacy.models.layers import (
        INITIALIZERS as INITIALIZERS,
    )
    from fl_privacy.models.layers import (
        InputNormalization as InputNormalization,
    )
    from fl_privacy.models.layers import (
        has_batch_norm as has_batch_norm,
    )
    from fl_privacy.models.layers import (
        initialize as initialize,
    )
    from fl_privacy.models.resnet import (
        ResNet10 as ResNet10,
    )
    from fl_privacy.models.resnet import (
        ResNet18 as ResNet18,
    )
    from fl_privacy.models.resnet import (
        ResNet20 as ResNet20,
    )
    from fl_privacy.models.resnet import (
        ResNet34 as ResNet34,
    )
    from fl_privacy.models.small_networks import (
        MLP as MLP,
    )
    from fl_privacy.models.small_networks import (
        ConvNet as ConvNet,
    )
    from fl_privacy.models.small_networks import (
        DLNet as DLNet,
    )
    from fl_privacy.models.small_networks import (
        LeNet as LeNet,
    )
    from fl_privacy.models.small_networks import (
        LeNet5 as LeNet5,
    )
    from fl_privacy.models.table_models import (
        FlTabular as FlTabular,
    )
    from fl_privacy.models.table_models import (
        TableLogistic as TableLogistic,
    )
    from fl_privacy.models.table_models import (
        TableMLP as TableMLP,
    )
    from fl_privacy.models.table_models import (
        TableModel as TableModel,
    )
    from fl_privacy.models.table_models import (
        TableResNet as TableResNet,
    )
    from fl_privacy.models.text_model import TextModel as TextModel
    from fl_privacy.models.torchvision_models import MobileNetV2 as MobileNetV2
    from fl_privacy.models.torchvision_models import ResNet50 as ResNet50
    from fl_privacy.models.torchvision_models import ViT as ViT
    from fl_privacy.models.transformers import (
        Bert as Bert,
    )
    from fl_privacy.models.transformers import (
        Gpt as Gpt,
    )
    from fl_privacy.models.transformers import (
        TransformerLM as TransformerLM,
    )
    from fl_privacy.models.transformers import (
        bert_mini as bert_mini,
    )
    from fl_privacy.models.transformers import (
        bert_tiny as bert_tiny,
    )
    from fl_privacy.models.transformers import (
        gpt_tiny as gpt_tiny,
    )
    from fl_privacy.models.transformers import (
        minilm as minilm,
    )
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
