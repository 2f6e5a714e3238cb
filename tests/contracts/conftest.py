from __future__ import annotations

import pytest

from tests.contracts.adapters import Adapter


def _fake() -> Adapter:
    from tests.contracts.fake_adapter import FakeAdapter

    return FakeAdapter()


def _torch() -> Adapter:
    from tests.contracts.torch_adapter import TorchAdapter

    return TorchAdapter()


@pytest.fixture(params=[_fake, _torch], ids=["fake", "torch"])
def adapter(request: pytest.FixtureRequest) -> Adapter:
    """Each adapter in turn; its framework is imported only when it is tested."""
    made: Adapter = request.param()
    return made
