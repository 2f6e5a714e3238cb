"""The pages of docs/api name what is public, and each name has an example or a reason for having none."""

from __future__ import annotations

import doctest
import re

import pytest

from tests.unit import api

REASONS = {
    "BroadcastGlobalVariablesHook": "it always raises",
    "ElasticDataset": "elastic_dataset makes it",
    "HvdrecoverError": "never raised itself; an except clause names it for all of them",
    "Loaded": "load returns it",
    "__version__": "a text",
    "callbacks": "an old name, and a module of Horovod's",
    "elastic": "a module of Horovod's",
}
# Errors are raised, not made; their page says what to do.
EXPLAINED = {
    *re.findall(r"^\| `(\w+Error)` \|", (api.ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
}
NEITHER = [
    (module, name)  # those of packages for a framework are run by its tests
    for module in ("hvdrecover.discovery", "hvdrecover.errors")
    for name in api.names(module)
    if api.examples(module, name)
]


@pytest.mark.parametrize("package", api.PAGES)
def test_a_page_has_an_entry_for_each_public_name(package: str) -> None:
    assert sorted(api.listed(package)) == sorted(api.names(package))


def test_keras_has_the_names_of_its_page() -> None:
    assert api.names("hvdrecover.keras") == api.names("hvdrecover.tensorflow.keras")


@pytest.mark.parametrize("package", api.PAGES)
def test_a_public_name_and_its_methods_have_docstrings(package: str) -> None:
    assert [lack for name in api.names(package) for lack in api.undocumented(package, name)] == []


@pytest.mark.parametrize("package", api.PAGES)
def test_a_public_name_has_an_example_or_a_reason(package: str) -> None:
    bare = {name for name in api.names(package) if not api.examples(package, name)}
    assert bare - EXPLAINED - REASONS.keys() == set()


@pytest.mark.parametrize("name", NEITHER)
def test_an_example_without_a_framework_does_what_it_says(name: tuple[str, str]) -> None:
    found = doctest.DocTest(api.examples(*name), {}, name[1], None, None, None)
    assert doctest.DocTestRunner().run(found).failed == 0
