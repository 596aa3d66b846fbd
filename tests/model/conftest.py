from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch")
    return module
