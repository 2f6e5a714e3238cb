from __future__ import annotations

import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError, ShardsError


def test_batches_and_samples_are_compared() -> None:
    data = tf.data.Dataset.range(10).batch(4)
    recover.check_shards(data)
    recover.check_shards(data, range(10), 10)
    with pytest.raises(ShardsError, match="missing: 5 of 10 "):
        recover.check_shards(data, range(5), 10)


def test_an_endless_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^dataset: .*assert_cardinality"):
        recover.check_shards(tf.data.Dataset.range(10).repeat())
