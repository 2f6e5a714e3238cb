"""The pages of docs/api name what is public, and each name has an example or a reason for having none."""

from __future__ import annotations

import pytest

from tests.unit import api

REASONS = {
    "BroadcastGlobalVariablesHook": "it always raises",
    "ElasticDataset": "elastic_dataset makes it",
    "Fingerprint": "fingerprint makes it",
    "Loaded": "load returns it",
    "Slots": "slots gives it",
    "__version__": "a text",
    "callbacks": "an old name, and a module of Horovod's",
    "elastic": "a module of Horovod's",
}


@pytest.mark.parametrize("package", api.PAGES)
def test_a_page_has_an_entry_for_each_public_name(package: str) -> None:
    assert sorted(api.listed(package)) == sorted(api.names(package))


def test_keras_has_the_names_of_its_page() -> None:
    assert api.names("hvdrecover.keras") == api.names("hvdrecover.tensorflow.keras")


@pytest.mark.parametrize("package", api.PAGES)
def test_a_public_name_has_an_example_or_a_reason(package: str) -> None:
    without = {name for name in api.names(package) if not api.examples(package, name)}
    assert {name for name in without if not name.endswith("Error")} <= set(REASONS)
