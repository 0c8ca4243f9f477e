"""The taps pass the suite of the conformance kit."""

from __future__ import annotations

import pytest
import torch
from acme_taps import Probe, Residuals, Steer
from hypothesis import strategies as st
from safetensors.torch import save_file

from hardpoint.testing import ActivationTapSuite

_SIZE = 512


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of two directions."""
    path = tmp_path_factory.mktemp("directions") / "directions.safetensors"
    save_file({"up": torch.linspace(-1, 1, _SIZE), "down": torch.ones(_SIZE)}, path)
    return str(path)


class Directed(ActivationTapSuite):
    hidden_size = _SIZE
    arguments = st.builds(dict, direction=st.sampled_from(["up", "down"]), layer=st.integers(0, 3))

    @pytest.fixture(autouse=True)
    def _file(self, path):
        self.options = {"path": path}


class TestProbe(Directed):
    tap = Probe


class TestSteer(Directed):
    tap = Steer
    arguments = st.builds(
        dict,
        direction=st.sampled_from(["up", "down"]),
        layer=st.integers(0, 3),
        strength=st.sampled_from([-2.0, 0.5]),
    )


class TestResiduals(ActivationTapSuite):
    tap = Residuals
    arguments = st.builds(dict, layers=st.lists(st.integers(0, 3), min_size=1))
