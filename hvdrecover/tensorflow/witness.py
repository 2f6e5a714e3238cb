"""TensorFlow's reports to the witness of a drill: what elastic data sets have dealt."""

from __future__ import annotations

import math

from hvdrecover.data.order import SampleOrder
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.interfaces import StepObserver
from hvdrecover.tensorflow.dataset import datasets


def watch(contents: Contents, witness: StepObserver) -> None:
    """Have data sets tell what they dealt when it is recorded as done.

    Args:
        contents: the state's attributes.
        witness: is told.
    """

    def recorded(order: SampleOrder, count: int) -> None:
        data = next((each for each in datasets(contents.values) if each.order is order), None)
        dealt = (
            data.dealt.take(math.ceil(count / data.batch_size))
            if data is not None and data.dealt is not None
            else None
        )
        witness.recorded(order, count, dealt)

    contents.on_record[:] = [recorded]
