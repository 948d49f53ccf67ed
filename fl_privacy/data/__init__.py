"""Load images, texts or rows into memory, and partition them among clients."""

from typing import TYPE_CHECKING

from fl_privacy.checks.packages import on_demand

if TYPE_CHECKING:
    from fl_privacy.data.datasets import (
        Dataset as Dataset,
        load_data as load_data,
        load_with_attribute as load_with_attribute,
    )
    from fl_privacy.data.examples import (
        Examples as Examples,
        LabelledExamples as LabelledExamples,
        TableExamples as TableExamples,
        TextExamples as TextExamples,
        Vocabulary as Vocabulary,
        expect_images as expect_images,
        images_of as images_of,
        texts_of as texts_of,
    )
    from fl_privacy.data.partition import (
        ClassShares as ClassShares,
        Dirichlet as Dirichlet,
        EvenClasses as EvenClasses,
        Iid as Iid,
        Natural as Natural,
        Partition as Partition,
        Pathological as Pathological,
        partition_table as partition_table,
    )
    from fl_privacy.data.tables import load_table as load_table, table_of as table_of
    from fl_privacy.data.texts import load_text as load_text
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
